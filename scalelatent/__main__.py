"""Run the command line: ``python -m scalelatent``."""

from scalelatent.cli import main

if __name__ == "__main__":
    main()

"""Run ``python -m tests.faults``: inject every fault and print the results as a table."""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main([str(Path(__file__).parent), "-q", "-n", "0", "-m", "not gpu", *sys.argv[1:]]))

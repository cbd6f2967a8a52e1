"""The page of the command line, generated from the verbs themselves."""

from __future__ import annotations

from pathlib import Path

from typer.core import TyperGroup
from typer.main import get_command


def _verbs(command, name, parent=None):
    """Yield (full name, command, context) of each verb below `command`, in order."""
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    if not isinstance(command, TyperGroup):
        yield context.command_path, command, context
        return
    for verb in command.list_commands(context):
        child = command.get_command(context, verb)
        if not child.hidden:
            yield from _verbs(child, verb, context)


def write_page() -> str:
    """Return the page of all verbs as Markdown: usage, description, and a table of arguments and options."""
    from scalelatent.cli import app

    lines = [
        "# Command line",
        "",
        "This page is for everyone who runs `scalelatent` in a terminal. It lists all verbs with arguments.",
        "`scalelatent VERB --help` shows the same. [Fit out of core](../guide/train.md) shows their use.",
        "",
    ]
    for path, command, context in _verbs(get_command(app), "scalelatent"):
        usage = " ".join(command.collect_usage_pieces(context))
        text = (command.help or "").replace("\b", "").strip()
        lines += [f"## {path}", "", "```text", f"{path} {usage}", "```", "", text, ""]
        rows = [record for p in command.params if (record := p.get_help_record(context))]
        if rows:
            lines += ["| argument or option | meaning |", "| --- | --- |"]
            for option, meaning in rows:
                cells = [text.replace("|", "\\|") for text in (option, meaning)]
                lines.append(f"| `{cells[0]}` | {cells[1]} |")
            lines.append("")
    return "\n".join(lines)


def _write(app) -> None:
    path = Path(app.srcdir) / "reference" / "command_line.md"
    text = write_page()
    # An unchanged file keeps its time, so that Sphinx does not read it again.
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def setup(app) -> dict:
    app.connect("builder-inited", _write, priority=100)
    return {"parallel_read_safe": True}

"""Hook that prints a table of the injected faults after their tests."""

from __future__ import annotations

from typing import Any

COLUMNS = ("fault", "model", "where", "outcome")


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    """Print a line for each injected fault: the fault, the model, the place, and the outcome."""
    rows = []
    for status in ("passed", "failed"):
        for report in terminalreporter.stats.get(status, []):
            reported = dict(report.user_properties)
            if all(column in reported for column in COLUMNS[:3]):
                reported.setdefault("outcome", "FAILED")
                rows.append([str(reported[column]) for column in COLUMNS])
    # Print the table only if all collected tests belong to the table, or if pytest is verbose, because in the
    # output of the whole suite nobody would notice the table.
    if not rows or (len(rows) < terminalreporter._numcollected and config.option.verbose < 1):
        return
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    terminalreporter.section("faults")
    for row in (COLUMNS, *sorted(rows)):
        terminalreporter.write_line(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        )
    same = sum(row[3] == "same bits" for row in rows)
    terminalreporter.write_line(
        f"{len(rows)} faults: {same} ended with the same bits, the others as declared"
    )

"""How many inputs were tried, at the end of a run."""

from __future__ import annotations

from typing import Any

from tests.fuzz.damage import INPUTS


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if INPUTS:
        words = ", ".join(f"{name} {count:,}" for name, count in sorted(INPUTS.items()))
        terminalreporter.write_line(f"fuzz inputs: {sum(INPUTS.values()):,} ({words})")

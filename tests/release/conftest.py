"""The table of the contract suite, drivers × promises, at the end of a run that held it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

_TEST = re.compile(r"test_contract\.py::test_(\w+)\[(.+)\]$")
_WORDS = {"passed": "holds", "failed": "FAILS", "skipped": "–"}


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """The driver of many ranks makes one; tests of other files ask what happens without."""
    yield
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """From the reports alone, so that it is whole under several workers too."""
    from tests.release.contract import DRIVERS

    table: dict[str, dict[str, str]] = {}
    for outcome, word in _WORDS.items():
        for report in terminalreporter.stats.get(outcome, ()):
            found = _TEST.search(getattr(report, "nodeid", ""))
            driver = next((d for d in DRIVERS if found and d in found.group(2)), None)
            if found and driver and (report.when == "call" or outcome != "passed"):
                row = table.setdefault(driver, {})
                if word == "FAILS" or found.group(1) not in row:
                    row[found.group(1)] = word
    if not table:
        return
    promises = sorted({promise for row in table.values() for promise in row})
    terminalreporter.write_sep("=", "contract: drivers x promises")
    terminalreporter.write_line(f"{'':<22}" + "".join(f"{p[:16]:<18}" for p in promises))
    for driver in DRIVERS:
        if row := table.get(driver):
            cells = "".join(f"{row.get(p, ''):<18}" for p in promises)
            terminalreporter.write_line(f"{driver:<22}{cells}")
    for driver, make in DRIVERS.items():
        for promise, why in make().absent.items() if driver in table else ():
            terminalreporter.write_line(f"– {driver}, {promise}: {why}")

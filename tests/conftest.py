"""What holds for every test: where chance begins, and how hypothesis searches."""

from __future__ import annotations

import gc
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

#: Examples that take long on a busy machine are not wrong. Where nobody watches, the same examples
#: in every run, so that a change is judged by itself; everywhere else other ones every time.
settings.register_profile("here", deadline=None)
settings.register_profile("watched by nobody", deadline=None, derandomize=True, database=None)
settings.load_profile("watched by nobody" if os.environ.get("CI") else "here")


# Triton chooses its interpreter when it is imported, which may be long before a kernel is tested.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

#: What is imported stays; to look through all of it for garbage takes a tenth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The generators of numpy and torch begin alike for every test, whatever ran before it."""
    np.random.seed(0)  # noqa: NPY002 (the global one, which scikit-learn draws from)
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """No file leaves a process group to the next one of its process."""
    dist = sys.modules.get("torch.distributed")
    is_last = nextitem is None or nextitem.path != item.path
    if is_last and dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _entropy_by_name(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where nobody watches, keys too are the same in every run: those of the test's name.

    Only in the process of the test: its children take theirs from the operating system.
    """
    if not os.environ.get("CI"):
        yield
        return
    system, here, drawn = os.urandom, os.getpid(), 0

    def by_name(size: int, /) -> bytes:
        nonlocal drawn
        if os.getpid() != here:
            return system(size)
        drawn += 1
        return hashlib.shake_256(f"{request.node.nodeid} {drawn}".encode()).digest(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", by_name)
        yield


_TEST = re.compile(r"test_contract\.py::test_(\w+)\[(.+)\]$")
_WORDS = {"passed": "holds", "failed": "FAILS", "skipped": "–"}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The contract suite as a table, drivers × promises, from the reports of all workers."""
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

"""What holds for every test: where chance begins, and how hypothesis searches."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.doctest import DoctestModule
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

#: Examples that take long on a busy machine are not wrong, nor are those that are drawn slowly.
#: Where nobody watches, the same examples in every run, so that a change is judged by itself;
#: everywhere else other ones every time.
patient: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("here", **patient)
settings.register_profile("watched by nobody", derandomize=True, database=None, **patient)
settings.load_profile("watched by nobody" if os.environ.get("CI") else "here")
if os.environ.get("CI") and hasattr(providers, "_get_local_constants"):
    # Hypothesis 6.131 and later tries the numbers that stand in modules imported so far as well:
    # other ones in every order of the tests, and after every change of any file.
    providers._get_local_constants = lambda: providers._local_constants


def seed_host(seed: int) -> torch.Generator:
    """`torch.manual_seed` without CUDA, where the generator of the CPU is all there is.

    That of torch 2.13 formats the stack for every kind of device that is not in use, and keeps it:
    a millisecond in a test.
    """
    return torch.default_generator.manual_seed(int(seed))


# Triton chooses its interpreter when it is imported, which may be long before a kernel is tested.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.manual_seed = torch.random.manual_seed = seed_host

#: What is imported stays; to look through all of it for garbage takes a tenth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    ENTROPY.know(own for name, own in list(sys.modules.items()) if name.split(".")[0] == "tests")
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Iterator[list[pytest.Collector]]:
    """Doctests stand in src alone: to look for them in all objects of the tests finds none."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


class Entropy:
    """Where nobody watches, keys are the same in every run: those of what asks for them, by name.

    Only in the process of the tests: its children take theirs from the operating system, unless
    they go on by a name (`go_on`).
    """

    def __init__(self, system: Callable[[int], bytes]) -> None:
        self.system, self.process = system, os.getpid()
        self.name, self.drawn = "", 0
        #: Of every generator: how its state is read, how it is set, and where it begins.
        self.generators: list[tuple[Callable[[], Any], Callable[[Any], Any], Any]] = []
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 (the global one, which scikit-learn draws from)
        self._add(random.getstate, random.setstate)
        self._add(np.random.get_state, np.random.set_state)

    def _add(self, get: Callable[[], Any], put: Callable[[Any], Any]) -> None:
        self.generators.append((get, put, get()))

    def know(self, modules: Iterable[ModuleType]) -> None:
        """Generators that stand in these modules begin where importing them left off."""
        for value in (value for module in modules for value in vars(module).values()):
            if isinstance(value, torch.Generator):
                self._add(value.get_state, value.set_state)
            elif isinstance(value, np.random.Generator):
                bits = value.bit_generator
                self._add(partial(getattr, bits, "state"), partial(setattr, bits, "state"))
            elif isinstance(value, random.Random):
                self._add(value.getstate, value.setstate)

    def __call__(self, size: int, /) -> bytes:
        if os.getpid() != self.process or not self.name:
            return self.system(size)
        self.drawn += 1
        return hashlib.shake_256(f"{self.name} {self.drawn}".encode()).digest(size)

    def begin(self, name: str) -> None:
        """Keys of this name; every generator begins alike, whatever ran before."""
        self.name, self.drawn = name, 0
        torch.manual_seed(0)
        for _, put, first in self.generators:
            put(first)

    def go_on(self, name: str) -> None:
        """In a child: keys of this name from now on; generators go on where the fork left them."""
        self.process, self.name, self.drawn = os.getpid(), name, 0


ENTROPY = Entropy(os.urandom)
if os.environ.get("CI"):
    os.urandom = ENTROPY
    # What `secrets` and numpy's generators without a seed draw from, under a name of its own.
    random._urandom = ENTROPY  # type: ignore[attr-defined]


HAS_MKLDNN = torch._C._get_mkldnn_enabled()


class Alike:
    """Hooks of all tests: this file's own ones are not those of the doctests in src."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """No test begins in the last minute of a day: statements name the day of their release."""
        if (left := -time.time() % 86_400) < 60:
            time.sleep(left)
        # On some processors torch 2.13 leaves oneDNN for good when it fails at a bfloat16 product;
        # float32 products then have other last bits than those of a process of their own.
        torch._C._set_mkldnn_enabled(HAS_MKLDNN)
        ENTROPY.begin(item.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        """What many tests share is made alike, too, whichever of them comes first."""
        if fixturedef.scope == "function":
            return (yield)
        before, of_torch = (ENTROPY.name, ENTROPY.drawn), torch.get_rng_state()
        states = [(put, get()) for get, put, _ in ENTROPY.generators]
        number = getattr(request, "param_index", 0)
        ENTROPY.begin(f"{fixturedef.baseid}::{fixturedef.argname}[{number}]")
        try:
            return (yield)
        finally:
            ENTROPY.name, ENTROPY.drawn = before
            torch.set_rng_state(of_torch)
            for put, state in states:
                put(state)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Alike())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """No file leaves a process group to the next one of its process, and no test a torch function
    mode (a forward pass without `backward`, say), through which all calls of later ones would go.
    """
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    dist = sys.modules.get("torch.distributed")
    is_last = nextitem is None or nextitem.path != item.path
    if is_last and dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


_WORDS = {"passed": "holds", "failed": "FAILS", "skipped": "–"}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The contract suite as a table, drivers × promises, from the reports of all workers.

    By what tests say of themselves: the process that sums up would import torch for the drivers.
    """
    table: dict[str, dict[str, str]] = {}
    drivers: dict[int, tuple[str, dict[str, str]]] = {}
    for outcome, word in _WORDS.items():
        for report in terminalreporter.stats.get(outcome, ()):
            told = dict(getattr(report, "user_properties", ())).get("contract")
            if told and (report.when == "call" or outcome != "passed"):
                number, driver, promise, absent = told
                drivers[number] = driver, absent
                row = table.setdefault(driver, {})
                if word == "FAILS" or promise not in row:
                    row[promise] = word
    if not table:
        return
    promises = sorted({promise for row in table.values() for promise in row})
    terminalreporter.write_sep("=", "contract: drivers x promises")
    terminalreporter.write_line(f"{'':<22}" + "".join(f"{p[:16]:<18}" for p in promises))
    for _, (driver, _) in sorted(drivers.items()):
        cells = "".join(f"{table[driver].get(p, ''):<18}" for p in promises)
        terminalreporter.write_line(f"{driver:<22}{cells}")
    for _, (driver, absent) in sorted(drivers.items()):
        for promise, why in absent.items():
            terminalreporter.write_line(f"– {driver}, {promise}: {why}")

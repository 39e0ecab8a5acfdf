"""Solvers attacked from outside: bounds that are not zero, and a broken one is refuted."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from noshuffle.auditing.answers import HOLDS, REFUTED
from noshuffle.convex import solvers

with pytest.MonkeyPatch.context() as _path:  # the benchmark, and what it tries
    _path.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    halved_noise = importlib.import_module("audit_solvers").halved_noise
    attacks = importlib.import_module("solver_audit")
SOLVER_CASES, audit_solver = attacks.SOLVER_CASES, attacks.audit_solver

QUICK = {
    "dp_gd": 20_000,
    "frank_wolfe_noisy": 20_000,
    "phased_mirror_descent, nuclear norm": 20_000,
}


def test_every_solver_is_attacked() -> None:
    tried = {name.partition(",")[0] for name in SOLVER_CASES}
    assert set(solvers.__all__) - tried == {"Solution"}


@pytest.mark.parametrize("name", QUICK)
def test_a_solver_holds_and_half_its_noise_is_refuted(name: str) -> None:
    found = audit_solver(name, count=QUICK[name])
    assert found.answer == HOLDS
    assert found.shown > 0.2
    assert 0.8 < found.mu / 0.896 < 1.2  # the exact μ of (2, 0.01)
    with halved_noise():
        broken = audit_solver(name, count=QUICK[name])
    assert broken.answer == REFUTED
    assert name in broken.words()


def test_what_is_shown_of_a_mechanism_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits themselves: counts of 800 and 0 of 800 show what Clopper and Pearson allow."""
    case = SOLVER_CASES["dp_gd"]
    bare = type(case)(lambda m, draws: (np.arange(m)[None] % 4 // 2.0, np.arange(m) % 4 > 1), 2000)
    SOLVER_CASES["bare"] = bare
    without = SimpleNamespace(mu=math.inf)  # scores without spread have no finite one
    monkeypatch.setattr(attacks, "estimate", lambda *_: without)
    try:
        found = audit_solver("bare")
    finally:
        del SOLVER_CASES["bare"]
    low, high = 5e-7 ** (1 / 800), 1 - 5e-7 ** (1 / 800)
    assert found.shown == pytest.approx(math.log((low - attacks.DELTA) / high))
    assert found.answer == REFUTED
    assert attacks.SolverAudit("a", 2.0, 0.01, 0.0, 0.0, 0.0, 1).answer == HOLDS


@pytest.mark.slow
@pytest.mark.parametrize("name", SOLVER_CASES)
def test_every_solver_shows_something_and_half_its_noise_is_refuted(name: str) -> None:
    found = audit_solver(name)
    assert found.answer == HOLDS
    assert found.shown > 0
    with halved_noise():
        broken = audit_solver(name)
    assert broken.answer == REFUTED

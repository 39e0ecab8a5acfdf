"""The figures `noise` and `bounds` at toy sizes: cells, table, picture, verdicts both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from noshuffle.experiments import bounds, noise
from noshuffle.experiments.figure import DIFFERS, HOLDS, NOT_TESTED, Figure, Request, shipped
from noshuffle.participation import SinglePass
from noshuffle.strategies.lower_bound import rms_lower_bound


def results_of(
    figure: Figure, settings: dict[str, Any], *, skip: tuple[str, ...] = ()
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cell in figure.cells(Request(settings=settings)):
        if not cell.key.startswith(skip or ("-",)):
            found[cell.key] = cell.work(found)
    return found


@pytest.fixture(scope="module")
def noisy() -> dict[str, Any]:
    kinds = shipped("noise")["mechanisms"]
    small = {name: kinds[name] for name in noise.SHOWN}
    settings = {
        **shipped("noise", quick=True),
        "mechanisms": {**small, "BLT": {"mechanism": "blt", "buffers": 2}},
        "epochs": [4, 16],
        "one_pass": 64,
        "lengths": [100, 20_000],
        "epsilons": [0.5, 8.0],
        "memory": {"bsr": [1, 7]},
    }
    return results_of(noise.FIGURE, settings)


def test_noise_at_equal_privacy(noisy: dict[str, Any], tmp_path: Path) -> None:
    assert noisy["one pass/independent noise"]["max"] == pytest.approx(8 * 1.9938, rel=1e-3)
    at_once = noisy["one pass/BLT"]["rms"]
    assert at_once < noisy["one pass/tree, Honaker"]["rms"] < noisy["one pass/tree, plain"]["rms"]
    runs = noisy["one pass/BLT"]["runs"]
    assert len({tuple(run) for run in runs}) == len(runs) == 3
    assert "| 20,000 |" in noise.FIGURE.table(noisy)
    noise.FIGURE.draw(noisy, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 10_000
    words = [claim.verdict for claim in noise.FIGURE.checked(noisy)]
    assert words[:2] == [HOLDS, HOLDS]


def test_noise_claims_can_fail(noisy: dict[str, Any]) -> None:
    swapped = {**noisy, "one pass/tree, plain": noisy["one pass/tree, Honaker"]}
    swapped["one pass/tree, Honaker"] = noisy["one pass/tree, plain"]
    for n in (100, 20_000):
        swapped[f"length/tree, plain/{n}"] = noisy[f"length/independent noise/{n}"]
        swapped[f"length/BLT/{n}"] = noisy[f"length/tree, plain/{n}"]
    words = [claim.verdict for claim in noise.FIGURE.checked(swapped)]
    assert [words[0], words[1], words[-1]] == [DIFFERS] * 3
    assert {claim.verdict for claim in noise.FIGURE.checked({})} == {NOT_TESTED}


def test_the_nuclear_bound_is_below_the_certified_one() -> None:
    assert (
        noise.nuclear_bound(64) < rms_lower_bound(SinglePass(64)) < 1.05 * noise.nuclear_bound(64)
    )


SETTINGS = {**shipped("bounds", quick=True), "lengths": [256, 1024], "n": 256}


def made_up() -> dict[str, Any]:
    """Results that follow the theorems, at every key of the figure."""
    found: dict[str, Any] = {}
    for cell in bounds.FIGURE.cells(Request(settings=SETTINGS)):
        head, _, size = cell.key.rpartition("/")
        if cell.key == "statements":
            found[cell.key] = cell.work({})
            continue
        axis, _, name = head.partition("/")
        power = {"d": 0.25, "epsilon": -0.5, "squares": -1.0}.get(axis, -0.5)
        power = {"Frank–Wolfe, tree": -1.0, "DP-SGD, row by row": 2 * power}.get(name, power)
        mean = float(size) ** power
        record = {"mean": mean, "deviation": 0.1 * mean, "bound": 2 * mean, "private": 0.9}
        found[cell.key] = record
    return found


def test_bounds_are_told_drawn_and_decided(tmp_path: Path) -> None:
    results = made_up()
    told = {c.text: c.verdict for c in bounds.FIGURE.checked(results)}
    assert set(told.values()) == {HOLDS, DIFFERS}
    assert [text for text, word in told.items() if word == DIFFERS] == [
        "… and than unamplified DP-SGD with batches of z√d rows"
    ]
    text = bounds.FIGURE.table(results)
    assert "| Theorem 4.1 | regret | O(" in text
    assert "| DP-FTRL, constants | regret | ≤ " in text
    bounds.FIGURE.draw(results, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 10_000
    assert {c.verdict for c in bounds.FIGURE.checked({})} == {NOT_TESTED}
    for cell in list(results):
        if cell != "statements":
            results[cell] = {**results[cell], "mean": 2.02 * results[cell]["mean"]}
    broken = [c.verdict for c in bounds.FIGURE.checked(results) if "below its bound" in c.text]
    assert broken == [DIFFERS, DIFFERS]


@pytest.mark.parametrize("key", ["n/DP-FTRL, tree/256", "n/DP-SGD, batches/256", "risk/256"])
def test_solvers_stay_below_their_bounds(key: str) -> None:
    (cell,) = [c for c in bounds.FIGURE.cells(Request(settings=SETTINGS)) if c.key == key]
    found = cell.work({})
    assert 0.05 * found["bound"] < found["mean"] < found["bound"]
    assert len(found["all"]) == len(SETTINGS["seeds"])

"""Tree noise: golden sequences on all-ones nodes, no drift, and which step reads which draw."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from noshuffle.noise import NoiseStream, grid, test_source
from noshuffle.noise.layout import Chunk
from noshuffle.noise.step_plan import StepPlans
from noshuffle.strategies.recipe import Forest, Recipe, rows


class Ones:
    """A source whose every draw is one: forest outputs then count nodes."""

    kind, is_test, ring = "ones", True, ((0, "ones"),)

    def on(self, device: torch.device) -> Ones:
        return self

    def check_names(self, names: Iterable[str]) -> None:
        pass

    def drawer(self, chunks: Sequence[Chunk], *, device: torch.device) -> Ones:
        return self

    def draw_(self, out: Tensor, *, chunk: int, row: int, weight: float, accumulate: bool) -> None:
        out.add_(weight) if accumulate else out.fill_(weight)

    def jitters_(self, out: Tensor, *, step: float) -> None:
        out.zero_()


@pytest.fixture
def _no_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the nodes add up to is seen best where nothing is rounded."""
    monkeypatch.setattr(grid, "grid_step", lambda _: 0.0)


no_grid = pytest.mark.usefixtures("_no_grid")


def all_ones_prefix(recipe: Recipe, steps: int) -> list[float]:
    stream = NoiseStream(recipe, Ones(), {"w": (2,)}, scale=1.0, steps=steps)
    released = []
    for _ in range(steps):
        value = torch.zeros(2)
        stream.add_({"w": value})
        released.append(float(value[0]))
    prefix: list[float] = np.cumsum(released).tolist()
    return prefix


@no_grid
def test_all_ones_nodes_give_the_golden_sequences() -> None:
    plain = all_ones_prefix(Forest("plain", 64), 64)
    assert plain == [t.bit_count() for t in range(1, 65)]
    golden = ["1", "4/3", "7/3", "12/7", "19/7", "64/21", "85/21", "32/15"]
    honaker = all_ones_prefix(Forest("honaker", 1024), 1024)
    np.testing.assert_allclose(honaker[:8], [float(Fraction(g)) for g in golden], rtol=1e-6)
    assert honaker[1023] == pytest.approx(11 / (2 - 2**-10), rel=1e-5)


@no_grid
@pytest.mark.parametrize("completion", [False, True])
def test_all_ones_restarts_leave_the_finished_trees_behind(completion: bool) -> None:
    """After k blocks of 5: k·popcount(5) without completion, k roots with it."""
    prefix = all_ones_prefix(Forest("plain", 23, 5, completion), 23)
    left = 1 if completion else (5).bit_count()
    for t, value in enumerate(prefix):
        block, s = divmod(t, 5)
        is_closed = completion and s == 4 and t < 20
        assert value == block * left + (1 if is_closed else (s + 1).bit_count())


@no_grid
@pytest.mark.parametrize("steps", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_long_tree_does_not_drift(steps: int) -> None:
    """The float64 sum of what was released equals the tree's own prefix."""
    size = 4
    source = test_source(seed="drift")
    stream = NoiseStream(Forest("plain", steps), source, {"w": (size,)}, scale=1.0, steps=steps)
    total, value = np.zeros(size), torch.zeros(size)
    for _ in range(steps):
        value.zero_()
        stream.add_({"w": value})
        total += value.double().numpy()
    # popcount(steps) nodes are left on the stack; each is one draw, found again from its row.
    expected = np.zeros(size)
    end = 0
    for h in range(steps.bit_length() - 1, -1, -1):
        if steps >> h & 1:
            end += 1 << h
            out = torch.empty(size)
            leaf = end - 1
            source.normal_(out, row=2 * leaf - leaf.bit_count() + h, name="w")
            expected += out.double().numpy()
    np.testing.assert_allclose(total, expected, atol=6.4e-7 * steps**0.5)  # rounding of each
    assert stream.state_dict()["step"] == steps


def test_rows_are_read_in_the_documented_order() -> None:
    """Every draw of a forest is used by exactly the step that completes its node, and once."""
    for completion in (False, True):
        recipe = Forest("honaker", 50, 6, completion)
        plans = StepPlans.of(recipe)
        seen = [row for t in range(50) for row, _ in plans.at(t).draws]
        assert seen == list(range(rows(recipe, 50)))

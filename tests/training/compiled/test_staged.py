"""Users in the compiled step, without capture: as the eager step has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from noshuffle.clipping import conv_kernels
from noshuffle.clipping.forms import DenseGradient
from noshuffle.clipping.graph_memory import holding
from noshuffle.errors import Unsupported
from noshuffle.noise import test_source
from noshuffle.participation import MinSeparation
from noshuffle.plan import Plan
from noshuffle.strategies import identity
from noshuffle.training import privatize
from noshuffle.training.compiled import Compiled
from noshuffle.training.compiled.flat import Flattened
from noshuffle.training.compiled.staged import StagedUsers

LOSS = nn.CrossEntropyLoss()
SIZE, STEPS = 8, 4
IDS = np.array([3, 5, 3, 9, 5, 3, 1, 9])


@pytest.fixture(autouse=True)
def _off_grid(monkeypatch):
    """Twins are compared before the noise's grid, which would hide or enlarge what differs."""
    monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)


def make(*, compiled, rule=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    plan = Plan(
        participation=rule or MinSeparation(STEPS, 1, STEPS),
        strategy=identity(),
        noise_multiplier=0.5,
        unit="user",
    )
    options = {"source": test_source(seed=1), "batch_size": SIZE, **options}
    private = privatize(model, optimizer, plan, clip_norm=0.3, **options)
    if compiled:
        private.compiled = Compiled(private._parts, capacity=SIZE, captures=False)
    return private


def steps(private, *, ids, sizes=(8, 5, 8, 1), bad=None):
    """Outcomes of some steps, and the parameters after them."""
    g = torch.Generator().manual_seed(1)
    seen = []
    for size in sizes:
        x = 2 * torch.randn(size, 6, generator=g)
        y = torch.randint(3, (size,), generator=g)
        if bad is not None and size > 2:
            x[2] = bad
        private.step(LOSS, x, y, ids=ids[:size])
        seen.append(private.outcome)
    assert private.fallbacks == []
    return seen, [p.detach().clone() for p in private.model.parameters()]


def alike(one, other):
    for a, b in zip(one[0], other[0], strict=True):
        torch.testing.assert_close(a.norms.float(), b.norms.float(), equal_nan=True)
        assert torch.equal(a.bad, b.bad)
        torch.testing.assert_close(a.losses, b.losses, equal_nan=True)
        assert a.dropped == b.dropped
    torch.testing.assert_close(one[1], other[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_users_are_clipped_as_the_eager_step_clips_them(reduce, bad):
    runs = [steps(make(compiled=c, reduce=reduce), ids=IDS, bad=bad) for c in (False, True)]
    alike(*runs)
    assert len(runs[1][0][0].norms) == 4  # users, not rows
    assert runs[1][0][0].nonfinite == (bad is not None)


def test_users_that_may_not_take_part_again_are_left_out():
    once = MinSeparation(STEPS, 2, 2)
    options = {"rule": once, "on_violation": "drop"}
    runs = [steps(make(compiled=c, **options), ids=IDS, bad=np.nan) for c in (False, True)]
    alike(*runs)
    assert [own.dropped for own in runs[1][0]] == [0, 5, 0, 1]


def test_no_user_sees_what_another_holds():
    """Row u of the sums is the same, to the bit, whatever other users hold."""
    whose = StagedUsers(capacity=SIZE, device=torch.device("cpu"), is_mean=False)
    whose.stage(IDS, None)
    matrix, losses = torch.randn(SIZE, 7), torch.zeros(SIZE)
    before, _, present = whose.sums(matrix, losses)
    assert present.tolist() == [True] * 4 + [False] * 4
    matrix[IDS == 5] = torch.nan
    losses[1] = torch.inf
    after, own, _ = whose.sums(matrix, losses)
    assert torch.isnan(after[2]).all()
    assert torch.isnan(own[2])
    others = [0, 1, 3, 4, 5, 6, 7]
    assert torch.equal(after[others], before[others])
    assert (own[others] == 0).all()


def test_rows_that_do_not_count_belong_to_nobody():
    whose = StagedUsers(capacity=SIZE, device=torch.device("cpu"), is_mean=True)
    whose.stage(IDS[:6], np.array([True, False, True, False, False, True]))
    matrix = torch.full((SIZE, 2), torch.nan)
    matrix[[0, 2, 5]] = torch.tensor([[1.0, 2.0], [2.0, 4.0], [6.0, 0.0]])
    found, _, present = whose.sums(matrix, torch.zeros(SIZE))
    assert found[0].tolist() == [3.0, 2.0]
    assert present.tolist() == [True] + [False] * 7
    assert whose.units.tolist() == [0, 1, 0, 1, 1, 0, 1, 1]


def test_users_of_a_batch_that_was_interrupted_are_those_of_the_next_try(monkeypatch):
    """Rows of one user that are grouped as those of the batch before are clipped apart."""
    users = StagedUsers(capacity=4, device=torch.device("cpu"), is_mean=False)
    users.stage(np.array([1, 2, 3, 4]), None)

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "from_numpy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            users.stage(np.array([7, 7, 7, 7]), None)
    users.stage(np.array([7, 7, 7, 7]), None)
    sums, _, _ = users.sums(torch.ones(4, 1), torch.zeros(4))
    assert sums.flatten().tolist() == [4.0, 0.0, 0.0, 0.0]
    assert users.units.tolist() == [0] * 4


def test_what_kernels_sum_by_row_is_written_out_for_users():
    class ByKernels(DenseGradient):
        is_fused = True

    grads = torch.arange(6.0).reshape(3, 2)
    forms, like = {"w": [ByKernels(grads)]}, {"w": torch.zeros(2)}
    with pytest.raises(Unsupported, match="no parameter fits"):
        Flattened(forms, like, aim=1e6, rows=3)
    users = StagedUsers(capacity=3, device=torch.device("cpu"), is_mean=False)
    flat = Flattened(forms, like, aim=1e6, rows=3, users=users)
    users.stage(np.array([7, 8, 7]), None)
    found = flat(forms, torch.ones(3), torch.ones(3, dtype=torch.bool))
    assert found.values["w"].tolist() == [6.0, 9.0]
    assert sorted(found.norms[:2].tolist()) == pytest.approx(sorted([13**0.5, 52**0.5]))


def test_a_graph_holds_what_the_sum_lets_go_of():
    """A replay would add whatever lies there to the norms, and so clip otherwise."""
    like = {"w": torch.zeros(2)}

    def forms(size):
        return {"w": [DenseGradient(torch.ones(size, 2))]}

    flat = Flattened(forms(3), like, aim=1.0, rows=3)
    with holding() as held:
        flat(forms(3), torch.ones(3), torch.ones(3, dtype=torch.bool))
    flat(forms(5), torch.ones(5), torch.ones(5, dtype=torch.bool))  # eager, of another size
    assert [len(own) for own in held] == [3]
    assert flat._zeros is not held[0]
    assert held[0].tolist() == [0.0] * 3


def test_a_capture_holds_the_tables_of_convolutions():
    x = torch.randn(2, 3, 5, 5)
    how = ((1, 1), (1, 1), (1, 1))
    with holding() as held:
        first, second, _ = conv_kernels._tables_for(x, x, (3, 3), how, 1)
    assert [one is other for one, other in zip(held, (first, second))] == [True, True]

"""Users and moving clip norms in the compiled step, without capture: as the eager step has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from noshuffle.clipping import conv_kernels
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.clipping.forms import DenseGradient
from noshuffle.clipping.graph_memory import holding
from noshuffle.errors import Unsupported
from noshuffle.noise import test_source
from noshuffle.participation import MinSeparation
from noshuffle.plan import Plan
from noshuffle.strategies import identity, tree
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


def make(*, compiled, unit="example", clip=None, strategy=None, rule=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    plan = Plan(
        participation=rule or MinSeparation(STEPS, 1, STEPS),
        strategy=strategy or identity(),
        noise_multiplier=0.5,
        unit=unit,
    )
    options = {"source": test_source(seed=1), "batch_size": SIZE, **options}
    norm = 0.3 if clip is None else None
    private = privatize(model, optimizer, plan, clip_norm=norm, clip=clip, **options)
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
    runs = [
        steps(make(compiled=c, unit="user", reduce=reduce), ids=IDS, bad=bad) for c in (False, True)
    ]
    alike(*runs)
    assert len(runs[1][0][0].norms) == 4  # users, not rows
    assert runs[1][0][0].nonfinite == (bad is not None)


def test_users_that_may_not_take_part_again_are_left_out():
    once = MinSeparation(STEPS, 2, 2)
    options = {"unit": "user", "rule": once, "on_violation": "drop"}
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


@pytest.mark.parametrize("strategy", [identity(), tree(restart_every=2)])
@pytest.mark.parametrize("unit", ["example", "user"])
def test_a_clip_norm_that_moves_goes_the_eager_way(strategy, unit):
    clip = QuantileClip(initial=0.1, units=SIZE, bit_noise=4.0, rate=0.5)
    runs, norms = [], []
    for compiled in (False, True):
        private = make(compiled=compiled, unit=unit, clip=clip, strategy=strategy)
        runs.append(steps(private, ids=IDS if unit == "user" else np.arange(SIZE)))
        norms.append(private._parts.threshold.state_dict())
    alike(*runs)
    assert norms[0] == pytest.approx(norms[1])
    assert norms[0]["threshold"] != 0.1


def test_a_step_with_a_moving_norm_is_repeated_to_the_bit(tmp_path):
    """Replayed after a crash: the digest covers the norm and the count, and both come again."""
    clip = QuantileClip(initial=0.1, units=SIZE, bit_noise=4.0, rate=0.5)

    def begun():
        return make(compiled=True, clip=clip, run=tmp_path / "run")

    first = begun()
    x, y = torch.randn(SIZE, 6), torch.randint(3, (SIZE,))
    first.step(LOSS, x, y, ids=range(SIZE))
    first.save()
    first.step(LOSS, x, y, ids=range(SIZE))
    wanted, norm = [p.clone() for p in first.model.parameters()], first._parts.threshold.clip
    first.step(LOSS, x, y, ids=range(SIZE))  # the digest of a sum is written with the next row
    del first
    again = begun()
    assert again.resume() == 1
    again.step(LOSS, x, y, ids=range(SIZE))
    assert again.steps_released == 3
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), wanted))
    assert again._parts.threshold.clip == norm


def test_a_moving_norm_is_read_when_somebody_asks_and_is_one_for_all_programs():
    """Two losses (two programs), eager steps between them, and a state that is loaded."""
    clip = QuantileClip(initial=0.1, units=SIZE, bit_noise=4.0, rate=0.5)
    rule = MinSeparation(11, 1, 11)
    one, other = (make(compiled=c, clip=clip, rule=rule) for c in (True, False))
    graphs, second = one.compiled, nn.CrossEntropyLoss(label_smoothing=0.1)
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(SIZE, 6, generator=g), torch.randint(3, (SIZE,), generator=g)
    ours, theirs = one._parts.threshold, other._parts.threshold
    device, reads, saved = graphs._moving, [], []
    plain = device.read
    device.read = lambda: reads.append(1) or plain()
    for _ in range(3):
        for private in (one, other):
            private.step(LOSS, x, y, ids=range(SIZE))
    assert reads == []  # steady steps ask for nothing
    for how in "22e12l1e":
        one.compiled = None if how == "e" else graphs
        if how == "l":  # the norms of two steps before
            ours.load_state_dict(saved[-2][0])
            theirs.load_state_dict(saved[-2][1])
        for private in (one, other):
            private.step(second if how == "2" else LOSS, x, y, ids=range(SIZE))
        assert ours.on_device is (None if how == "e" else device)
        saved.append((ours.state_dict(), theirs.state_dict()))
        assert saved[-1][0] == pytest.approx(saved[-1][1])
    assert reads
    assert len(graphs._programs) == 2
    assert one.fallbacks == []
    for a, b in zip(one.model.parameters(), other.model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


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

"""The private step: arithmetic, guard, divisor, groups, schedulers, precision, users."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from noshuffle.clipping import ModelLoss, PerExample, PerLayer
from noshuffle.clipping.check import UNCOMPILED
from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    NoshuffleError,
    ParticipationViolation,
    Unsupported,
)
from noshuffle.noise import NoiseStream, test_source
from noshuffle.optim import FTRL
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    Epochs,
    FixedSize,
    MinSeparation,
    Poisson,
    SinglePass,
    TruncatedPoisson,
)
from noshuffle.plan import Plan
from noshuffle.release.units import name_to_id
from noshuffle.strategies import banded, identity, tree
from noshuffle.training import privatize

LOSS = nn.CrossEntropyLoss()


@pytest.fixture
def _off_grid(monkeypatch):
    """Sums that differ in their last bits may be rounded to neighbouring points of the grid."""
    monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def data(n=24, seed=1):
    g = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(n, 5, generator=g), torch.randint(3, (n,), generator=g)


def plan_of(rule=None, z=0.0, strategy=None, **options):
    rule = rule or SinglePass(steps=6)
    return Plan(participation=rule, strategy=strategy or identity(), noise_multiplier=z, **options)


def make(model, plan=None, *, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    settings = {"clip_norm": 0.5, "batch_size": 6, "source": test_source(seed=3), **options}
    return privatize(model, optimizer, plan or plan_of(), **settings)


def clipped_sum(model, x, y, clip):
    """One example at a time, by plain autograd."""
    params = list(model.parameters())
    total = [torch.zeros_like(p) for p in params]
    for i in range(len(x)):
        grads = torch.autograd.grad(LOSS(model(x[i : i + 1]), y[i : i + 1]), params)
        norm = torch.sqrt(sum(g.double().square().sum() for g in grads))
        factor = float(min(1.0, clip * (1 - 2**-20) / norm))
        total = [t + factor * g for t, g in zip(total, grads)]
    return total


@pytest.mark.parametrize("engine", [None, PerExample()], ids=["auto", "per example"])
def test_noiseless_step_equals_a_loop_of_clipped_sgd(engine):
    x, y = data()
    ours, theirs = network(), network()
    private = make(ours, engine=engine)
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.3, momentum=0.9)
    for t in range(4):
        rows = slice(6 * t, 6 * t + 6)
        loss = private.step(LOSS, x[rows], y[rows], ids=range(6 * t, 6 * t + 6))
        assert loss == pytest.approx(LOSS(theirs(x[rows]), y[rows]).item(), rel=1e-5)
        for p, g in zip(theirs.parameters(), clipped_sum(theirs, x[rows], y[rows], 0.5)):
            p.grad = g / 6
        sgd.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert private.epsilon == float("inf")
    assert any("no privacy" in s for s in private.statement().assumptions)


@pytest.mark.usefixtures("_off_grid")
def test_noise_is_row_t_of_the_stream_times_clip_over_batch():
    """The released gradient minus the clipped one is z·ζ·(C⁻¹Z)_t / batch size, exactly named."""
    x, y = data()
    strategy, z = tree(variant="honaker"), 1.7
    model = network()
    private = make(model, plan_of(z=z, strategy=strategy))
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    stream = NoiseStream(
        strategy.recipe(6), test_source(seed=3), shapes, scale=z * 0.5, steps=6, device="cpu"
    )
    for t in range(4):
        rows = slice(6 * t, 6 * t + 6)
        want = clipped_sum(model, x[rows], y[rows], 0.5)
        noisy = {n: g.clone() for n, g in zip(shapes, want)}
        stream.add_(noisy)
        private.step(LOSS, x[rows], y[rows])
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, noisy[name] / 6, rtol=1e-4, atol=1e-6)


def test_planned_divisor_for_ragged_and_empty_batches():
    x, y = data()
    model = network()
    private = make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    for rows in (slice(0, 2), slice(2, 13), slice(13, 13)):
        want = clipped_sum(model, x[rows], y[rows], 0.5)
        private.step(LOSS, x[rows], y[rows], ids=range(rows.start, rows.stop))
        for p, g in zip(model.parameters(), want):
            torch.testing.assert_close(p.grad, g / 6, rtol=1e-4, atol=1e-7)
    assert private.steps_released == 3


def test_empty_batch_still_receives_noise():
    model = network()
    private = make(model, plan_of(z=1.0))
    private.step(LOSS, torch.zeros(0, 5), torch.zeros(0, dtype=torch.long), ids=[])
    assert all(p.grad.abs().min() > 0 for p in model.parameters())


def test_non_finite_examples_contribute_zero_and_are_counted():
    x, y = data()
    model, clean = network(), network()
    x[2], x[4] = float("nan"), float("inf")
    private = make(model)
    private.step(LOSS, x[:6], y[:6])
    assert private.outcome.nonfinite == 2
    other = make(clean)
    good = torch.tensor([0, 1, 3, 5])
    other.step(LOSS, x[good], y[good])
    for a, b in zip(model.parameters(), clean.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
        assert torch.isfinite(a).all()


class Spy:
    """An engine that counts how often it is asked for gradients."""

    def __init__(self):
        self.calls = 0

    def clipped_sum(self, *args, **kwargs):
        self.calls += 1
        return PerExample().clipped_sum(*args, **kwargs)


def test_a_unit_too_soon_is_stopped_before_its_gradient_is_computed():
    x, y = data()
    spy, model = Spy(), network()
    rule = MinSeparation(steps=6, separation=3, max_participations=2)
    private = make(model, plan_of(rule), engine=spy)
    private.step(LOSS, x[:6], y[:6], ids=range(6))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ParticipationViolation, match="unit 3 may not take part in step 1"):
        private.step(LOSS, x[6:12], y[6:12], ids=[6, 7, 8, 3, 10, 11])
    assert spy.calls == 1
    assert private.steps_released == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    private.step(LOSS, x[6:12], y[6:12], ids=range(6, 12))  # the run goes on with a good batch
    assert private.steps_released == 2


def test_dropping_leaves_the_unit_out():
    x, y = data()
    ours, theirs = network(), network()
    private = make(ours, on_violation="drop")
    other = make(theirs)
    for p in (private, other):
        p.step(LOSS, x[:6], y[:6], ids=range(6))
    private.step(LOSS, x[6:12], y[6:12], ids=[6, 7, 2, 3, 10, 10])
    assert private.outcome.dropped == 3
    keep = torch.tensor([6, 7, 10])
    other.step(LOSS, x[keep], y[keep], ids=keep)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_one_step_past_the_plan_is_refused_and_a_short_run_costs_less():
    x, y = data(60)
    plan = plan_of(SinglePass(steps=6), z=2.0, strategy=tree())
    private = make(network(), plan)
    spent = [private.epsilon]
    for t in range(6):
        private.step(LOSS, x[6 * t : 6 * t + 6], y[6 * t : 6 * t + 6])
        spent.append(private.epsilon)
        assert private.statement().epsilon == pytest.approx(spent[-1], rel=1e-9)
    assert spent[0] == 0
    assert spent[1] < spent[4] <= spent[6] == plan.epsilon()
    with pytest.raises(HorizonExceeded):
        private.step(LOSS, x[36:42], y[36:42])
    assert "test seed" in private.statement().words()


def two_parts(private, x, y, first, second):
    with private.accumulate() as step:
        step.add(LOSS, (x[6:8], y[6:8]), ids=first)
        step.add(LOSS, (x[8:10], y[8:10]), ids=second)


@pytest.mark.usefixtures("_off_grid")
def test_accumulation_is_one_release():
    x, y = data()
    ours, theirs = network(), network()
    private, other = make(ours, plan_of(z=1.0)), make(theirs, plan_of(z=1.0))
    other.step(LOSS, x[:6], y[:6], ids=range(6))
    with private.accumulate() as step:
        for i in range(0, 6, 2):
            step.add(LOSS, (x[i : i + 2], y[i : i + 2]), ids=range(i, i + 2))
    assert private.steps_released == 1
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(InvalidInput, match="at least one batch"), private.accumulate():
        pass
    with pytest.raises(ParticipationViolation, match="unit 5"):
        two_parts(private, x, y, [6, 5], [7, 8])
    assert private.steps_released == 1
    for run, ids, words in ((private, [8, 5], "unit 5"), (other, [8, 7], "in another part")):
        with pytest.raises(ParticipationViolation, match=words):
            two_parts(run, x, y, [6, 7], ids)
        with pytest.raises(NoshuffleError, match="half-way"):  # its first part was summed
            run.step(LOSS, x[6:10], y[6:10], ids=range(10, 14))


def test_several_parameter_groups_receive_their_own_noise_and_rates():
    x, y = data()
    model, same = network(), network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01}]
    private = make(model, plan_of(z=1.0), optimizer=torch.optim.SGD(groups, lr=0.5))
    plain = make(same, plan_of(z=1.0), optimizer=torch.optim.SGD(same.parameters(), lr=0.5))
    private.step(LOSS, x[:6], y[:6])
    plain.step(LOSS, x[:6], y[:6])
    for (name, a), b in zip(model.named_parameters(), same.parameters()):
        assert torch.equal(a.grad, b.grad), name  # matched by name, whatever the groups
    noise = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    assert len(noise.unique()) > 0.9 * len(noise)  # on a grid a few may meet


def test_scheduler_and_any_optimizer():
    x, y = data()
    for build in (
        lambda ps: torch.optim.AdamW(ps, lr=0.01),
        lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
        lambda ps: torch.optim.RMSprop(ps, lr=0.01),
        lambda ps: torch.optim.Adafactor(ps, lr=0.01),
        lambda ps: FTRL(ps, 0.1, momentum=0.9, nesterov=True),
    ):
        model = network()
        optimizer = build(list(model.parameters()))
        rate = optimizer.param_groups[0]["lr"]
        private = make(model, plan_of(z=1.0), optimizer=optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        before = [p.detach().clone() for p in model.parameters()]
        for t in range(2):
            private.step(LOSS, x[6 * t : 6 * t + 6], y[6 * t : 6 * t + 6])
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate / 4)
        assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_frozen_parameters_stay():
    x, y = data()
    model = network()
    model[0].requires_grad_(False)
    private = make(model, plan_of(z=1.0), optimizer=torch.optim.SGD(model[2].parameters(), lr=0.1))
    before = model[0].weight.clone()
    private.step(LOSS, x[:6], y[:6])
    assert torch.equal(before, model[0].weight)
    model[0].requires_grad_(True)  # a surprise after privatize is an error, not a leak
    with pytest.raises(InvalidInput, match="became trainable after privatize"):
        private.step(LOSS, x[6:12], y[6:12])


def test_autocast_is_respected():
    x, y = data()
    model = network()
    private = make(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        private.step(LOSS, x[:6], y[:6])
    want = clipped_sum(network(), x[:6], y[:6], 0.5)
    for p, g in zip(model.parameters(), want):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, g / 6, rtol=0.1, atol=2e-3)


def test_compiled_model_is_trained_through_its_original():
    x, y = data()
    model = network()
    compiled = torch.compile(model, backend="eager")
    private = privatize(
        compiled,
        torch.optim.SGD(compiled.parameters(), lr=0.1),
        plan_of(),
        clip_norm=0.5,
        batch_size=6,
    )
    private.step(LOSS, x[:6], y[:6])
    want = clipped_sum(network(), x[:6], y[:6], 0.5)
    for p, g in zip(model.parameters(), want):
        torch.testing.assert_close(p.grad, g / 6, rtol=1e-4, atol=1e-6)


def test_users_are_one_contribution_each():
    x, y = data()
    model = network()
    private = make(model, plan_of(unit="user"), engine=PerExample())
    private.step(LOSS, x[:6], y[:6], ids=["ann", "bob", "ann", "ann", "cy", "bob"])
    total = [torch.zeros_like(p) for p in model.parameters()]
    fresh = network()
    for rows in ([0, 2, 3], [1, 5], [4]):
        grads = torch.autograd.grad(LOSS(fresh(x[rows]), y[rows]), list(fresh.parameters()))
        norm = torch.sqrt(sum(g.square().sum() for g in grads))
        total = [t + min(1.0, 0.5 / float(norm)) * g for t, g in zip(total, grads)]
    for p, g in zip(model.parameters(), total):
        torch.testing.assert_close(p.grad, g / 6, rtol=1e-4, atol=1e-6)
    with pytest.raises(ParticipationViolation):
        private.step(LOSS, x[6:8], y[6:8], ids=["bob", "dee"])
    with pytest.raises(InvalidInput, match="unit='user' needs"):
        private.step(LOSS, x[6:8], y[6:8])
    with pytest.raises(ParticipationViolation, match="in another part of this step"):
        two_parts(private, x, y, ["eve", "dee"], ["dee", "fay"])


def test_per_layer_clipping_and_model_loss():
    x, y = data()
    model = network()
    private = make(model, plan_of(z=1.0), clip_norm=None, clip=PerLayer(1.0))
    private.step(ModelLoss(lambda m, a, b: LOSS(m(a), b)), x[:6], y[:6])
    assert private.steps_released == 1


@pytest.mark.parametrize("kind", ["poisson", "fixed", "cyclic", "bins", "cut"])
def test_sampled_plans_take_their_batches_from_the_sampler(kind):
    x, y = data(40)
    rule = {
        "poisson": Poisson(steps=5, rate=0.2),
        "fixed": FixedSize(steps=5, batch=8, population=40),
        "bins": BallsInBins(epochs=1, steps_per_epoch=5),
        "cyclic": CyclicPoisson(steps=5, groups=2, rate=0.4),
        "cut": TruncatedPoisson(steps=5, rate=0.3, cap=9, population=40),
    }[kind]
    private = make(network(), plan_of(rule, z=1.0))
    with pytest.raises(ParticipationViolation, match="our sampler"):
        private.step(LOSS, x[:6], y[:6], ids=range(6))
    sampler = private.sampler(40)
    for ids in sampler:
        private.step(LOSS, x[ids], y[ids], ids=ids)
    assert private.steps_released == 5
    if kind == "cyclic":
        with pytest.raises(Unsupported, match="at most 2 bands"):
            plan_of(rule, strategy=banded((1.0, 0.5, 0.2)), z=1.0)
    other = make(network(), plan_of(rule, z=1.0))
    ids = other.sampler(40).draw(0)
    with pytest.raises(ParticipationViolation, match="not the one"):
        other.step(LOSS, x[:6], y[:6], ids=range(6) if len(ids) != 6 else range(1, 7))


def test_bad_input_is_one_line():
    model = network()
    for name, words in (
        ("model", "torch's Module, got int"),
        ("optimizer", "torch's Optimizer, got int"),
        ("plan", "noshuffle's Plan, got int"),
    ):
        given = {"model": model, "optimizer": None, "plan": plan_of(), name: 3}
        given["optimizer"] = given["optimizer"] or torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(InvalidInput, match=f"{name} must be {words}"):
            privatize(*given.values(), clip_norm=1.0, batch_size=6)
    with pytest.raises(InvalidInput, match="exactly one of clip_norm"):
        make(model, clip_norm=None)
    with pytest.raises(InvalidInput, match="batch_size"):
        make(model, batch_size=0)
    with pytest.raises(InvalidInput, match="on_violation"):
        make(model, on_violation="ignore")
    with pytest.raises(InvalidInput, match=r"'2\.weight' is trainable but not in the optimizer"):
        make(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))
    extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(InvalidInput, match="do not belong"):
        make(model, optimizer=torch.optim.SGD([*model.parameters(), extra], lr=0.1))
    with pytest.raises(Unsupported, match="GroupNorm"):
        make(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)))
    with pytest.raises(Unsupported, match="DataParallel"):
        make(nn.DataParallel(model))
    with pytest.raises(Unsupported, match="leave sparse out"):
        make(nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)))
    x, y = data()
    with pytest.raises(InvalidInput, match="each of the 6 examples, got 5"):
        make(model).step(LOSS, x[:6], y[:6], ids=range(5))
    with pytest.raises(InvalidInput, match="no run folder"):
        make(model).save()


@pytest.mark.parametrize(("ranks", "words"), [(2, "one device.* 2 ranks"), (1, "is sharded")])
def test_several_ranks_and_shards_are_refused(ranks, words):
    """Each rank would train a run of its own."""
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        model = network()
        if ranks == 1:
            fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        with pytest.raises(Unsupported, match=words):
            make(model)
    finally:
        dist.destroy_process_group()


def test_replacing_one_example_moves_the_sum_by_at_most_two_clip_norms():
    """Sensitivity of the whole step, with an outlier far beyond the clip norm."""
    x, y = data()
    released = []
    for scale in (1.0, 1000.0):
        model = network()
        private = make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        changed = x.clone()
        changed[3] *= scale
        private.step(LOSS, changed[:6], y[:6], ids=np.arange(6))
        released.append(torch.cat([p.grad.reshape(-1) * 6 for p in model.parameters()]))
    assert (released[0] - released[1]).norm() <= 2 * 0.5


class Faulty(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise RuntimeError("out of memory")
        return super().step(closure)


def test_a_step_that_fails_half_way_ends_the_run_object(tmp_path):
    """The optimizer raises after the noise: its step is given up, and stays charged."""
    x, y = data()

    def begun():
        model = network()
        optimizer = Faulty(model.parameters(), lr=0.1)
        private = make(model, plan_of(z=1.0), optimizer=optimizer, run=tmp_path / "run")
        return private, optimizer

    private, optimizer = begun()
    private.step(LOSS, x[:6], y[:6], ids=range(6))
    private.save()
    before = [p.detach().clone() for p in private.model.parameters()]
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        private.step(LOSS, x[6:12], y[6:12], ids=range(6, 12))
    optimizer.fails = False
    with pytest.raises(NoshuffleError, match=r"half-way.* open the run again"):
        private.step(LOSS, x[12:18], y[12:18], ids=range(12, 18))
    with pytest.raises(NoshuffleError, match="half-way"):
        private.save()
    again, _ = begun()
    with pytest.raises(InvalidInput, match="resume"):
        again.step(LOSS, x[12:18], y[12:18], ids=range(12, 18))
    assert again.resume() == again.steps_released == 2
    assert all(map(torch.equal, before, again.model.parameters()))
    again.step(LOSS, x[12:18], y[12:18], ids=range(12, 18))
    assert again.steps_released == 3


def test_a_run_whose_units_nobody_names_says_so_and_is_not_opened_again(tmp_path):
    x, y = data()
    private = make(network(), plan_of(z=1.0), run=tmp_path / "run")
    private.step(LOSS, x[:6], y[:6])
    private.step(LOSS, x[:6], y[:6])  # two new units each
    assert private.statement().participation_checked is False
    with pytest.raises(InvalidInput, match="named in every step"):
        private.step(LOSS, x[:6], y[:6], ids=range(6))
    private.close()
    with pytest.raises(InvalidInput, match="nobody named the units"):
        make(network(), plan_of(z=1.0), run=tmp_path / "run")


def test_names_of_units_are_not_in_the_log(tmp_path):
    x, y = data()
    private = make(network(), plan_of(unit="user"), run=tmp_path / "run")
    private.step(LOSS, x[:2], y[:2], ids=["ann", "bob"])
    private.close()
    plain = {name_to_id(name) for name in ("ann", "bob")}
    units = private._parts.release.guard.table.all()[0]
    assert len(units) == 2
    assert plain.isdisjoint(units.tolist())
    assert "ann" not in (tmp_path / "run/log.jsonl").read_text()


def test_steps_are_passed_over_one_by_one_or_to_the_next_epoch():
    x, y = data()
    runs = [make(network(), plan_of(Epochs(3, 4), 1.0, tree())) for _ in range(2)]
    for private in runs:
        private.step(LOSS, x[:6], y[:6], ids=range(6))
    before = [p.detach().clone() for p in runs[0].model.parameters()]
    assert runs[0].pass_over(to="epoch") == 3
    assert runs[0].pass_over() == 0
    assert [runs[1].skip() for _ in range(3)] == [1, 2, 3]
    for private in runs:
        assert all(map(torch.equal, before, private.model.parameters()))
        assert private.steps_released == 4
        assert private.epsilon == private.epsilon_after(4) > private.epsilon_after(3)
        private.step(LOSS, x[:6], y[:6], ids=range(6))
    assert all(map(torch.equal, *(run.model.parameters() for run in runs)))
    with pytest.raises(InvalidInput, match="no epochs"):
        make(network()).pass_over()


def test_sampled_users():
    x, y = data(40)
    rule = Poisson(steps=3, rate=0.5)
    private = make(network(), plan_of(rule, z=1.0, unit="user"))
    users = np.arange(40) // 4
    for drawn in private.sampler(10):
        rows = np.flatnonzero(np.isin(users, drawn))
        private.step(LOSS, x[rows], y[rows], ids=users[rows])
    assert private.steps_released == 3


def test_a_guess_of_the_data_cannot_be_checked_by_the_low_bits():
    """Released − guessed sum must not be a float32 for the right guess only."""

    def released(x, z):
        model = network().double()
        private = make(model, plan_of(z=z), batch_size=1)  # a divisor of one keeps the bits
        private.step(LOSS, x, y, ids=range(6))
        return torch.cat([p.grad.reshape(-1) for p in model.parameters()])

    def told(guess):
        rest = released(x, 1.0) - released(guess, 0.0)
        return float((rest.float().double() == rest).double().mean())

    x, y = data(6)
    x = x.double()
    wrong = x.clone()
    wrong[0] += 0.25
    assert told(x) < 0.2
    assert told(x) < told(wrong) + 0.1


def test_units_of_parts_outside_their_participation_are_left_out():
    x, y = data()
    private = make(network(), plan_of(z=1.0), on_violation="drop")
    for begins in ((0, 4), (6, 10), (0, 4), (12, 2)):
        with private.accumulate() as step:
            for begin in begins:
                rows = slice(begin, begin + 4)
                step.add(LOSS, (x[rows], y[rows]), ids=range(begin, begin + 4))
    assert private.outcome.dropped == 6
    units, seen = private._parts.release.guard.table.all()
    assert sorted(units) == [*range(16)]
    assert set(seen.count) == {1}


def test_fallbacks_tell_of_a_compiled_wrapper():
    model = network()
    assert make(model).fallbacks == []
    private = make(torch.compile(model, backend="eager"))
    x, y = data()
    private.step(LOSS, x[:6], y[:6])
    assert private.fallbacks == [UNCOMPILED]

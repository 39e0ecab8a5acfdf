"""Batches in parts by graphs, without capture: as eager steps in parts have them."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from tests.runs import weights
from torch import nn

from noshuffle.clipping import Ghost, ModelLoss, PerExample
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, ParticipationViolation, ReplayRefused
from noshuffle.noise import test_source
from noshuffle.participation import Epochs, MinSeparation, Poisson, SinglePass
from noshuffle.plan import Plan
from noshuffle.release import digest as device_print
from noshuffle.release import fingerprint
from noshuffle.strategies import identity, tree
from noshuffle.training import privatize, verify
from noshuffle.training.compiled import Compiled
from noshuffle.training.compiled.parts import MOST_SIZES, PartSums, StepInParts

LOSS = nn.CrossEntropyLoss()
SIZE = 8
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True)
def _off_grid(monkeypatch):
    """Twins are compared before the noise's grid, which would hide or enlarge what differs."""
    monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)


def network(drop=0.0):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Dropout(drop), nn.Linear(8, 3)]
    return nn.Sequential(*(layer for layer in layers if drop or not isinstance(layer, nn.Dropout)))


def data(n=32):
    g = torch.Generator().manual_seed(1)
    return 2 * torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def make(*, compiled, rule=None, strategy=None, optimizer=sgd, model=None, unit="example", **more):
    model = model or network()
    rule = rule or Epochs(epochs=3, steps_per_epoch=4)
    plan = Plan(participation=rule, strategy=strategy or tree(), noise_multiplier=0.5, unit=unit)
    settings = {"batch_size": SIZE, "source": test_source(seed=1), **more}
    if "clip" not in settings:
        settings["clip_norm"] = 0.7
    private = privatize(model, optimizer(model), plan, **settings)
    if compiled:
        private.compiled = Compiled(private._parts, capacity=SIZE, captures=False)
    return private


def twins(**options):
    return [make(compiled=compiled, **options) for compiled in (False, True)]


def in_parts(private, t, sizes, *, has_ids=True, ids=None, xy=None, loss=LOSS):
    """Step t, the rows from 8t on, in parts of these sizes."""
    (x, y), at = xy or data(), SIZE * (t % 4)
    with private.accumulate() as step:
        for size in sizes:
            rows = slice(at, at + size)
            whose = (np.arange(at, at + size) if ids is None else ids[rows]) if has_ids else None
            step.add(loss, (x[rows], y[rows]), ids=whose)
            at += size
    return step


def single(private, t, *, has_ids=True):
    (x, y), rows = data(), slice(SIZE * (t % 4), SIZE * (t % 4) + SIZE)
    ids = range(rows.start, rows.stop) if has_ids else None
    private.step(LOSS, x[rows], y[rows], ids=ids)


def sums_are_gone(private):
    sums = private._sums
    raw = [v for p in sums._programs.values() if p is not None for v in p.values.values()]
    return sums._step is None and not any(bool(v.any()) for v in [*sums.total.values(), *raw])


def alike(slow, fast):
    torch.testing.assert_close(weights(fast), weights(slow), **CLOSE)
    told = [
        [(row.step, row.batch, row.units.tolist()) for row in run.ledger.rows()]
        for run in (slow, fast)
    ]
    assert told[0] == told[1]
    for name in ("losses", "norms", "bad"):
        one, other = (getattr(run.outcome, name) for run in (slow, fast))
        assert one.dtype == other.dtype or name == "norms"
        torch.testing.assert_close(other.float(), one.float(), equal_nan=True, **CLOSE)
    assert slow.outcome.dropped == fast.outcome.dropped


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def rmsprop(model):
    return torch.optim.RMSprop(model.parameters(), lr=0.05)


@pytest.mark.parametrize("optimizer", [sgd, adam, rmsprop])
@pytest.mark.parametrize("sizes", [(5, 3), (2, 2, 2, 2), (3, 3, 1), (8,), (1, 7), (0, 4, 0, 4)])
def test_equal_the_eager_parts_between_single_steps(sizes, optimizer):
    """One stream of noise for both: rows, sums, parameters are those of a run that is eager."""
    slow, fast = twins(optimizer=optimizer)
    for private in (slow, fast):
        for t in range(9):
            if t in (2, 3, 6):
                single(private, t)
            else:
                assert isinstance(in_parts(private, t, sizes), StepInParts) == (private is fast)
                assert private is slow or sums_are_gone(fast)
    alike(slow, fast)
    assert fast._sums._programs
    assert not fast.fallbacks
    assert "rows are replays" in fast.why
    assert fast._parts.noise.step == 9


@pytest.mark.parametrize("engine", [Ghost, PerExample])
def test_every_step_has_its_own_sizes(engine):
    """Rows of programs come from the first parts; what fits none is summed by the engine."""
    slow, fast = twins(engine=engine(), rule=MinSeparation(12, 1, 12))
    every = [(3, 3, 2), (8,), (1, 1, 6), (4, 4), (7, 1), (2, 2, 2, 2)]
    for private in (slow, fast):
        for t, sizes in enumerate(every):
            in_parts(private, t, sizes)
    alike(slow, fast)
    assert fast._sums._rows == [3, 8]
    x, y = data(64)
    for private in (slow, fast):
        for begin, end in ((0, 20), (0, 25)):
            with private.accumulate() as step:
                step.add(LOSS, (x[begin:end], y[begin:end]), ids=np.arange(begin, end))
                step.add(LOSS, (x[30:33], y[30:33]), ids=np.arange(30, 33))
    alike(slow, fast)
    assert fast._sums._rows == [3, 8, 20]
    assert fast.fallbacks == ["a part of 25 rows is larger than the captured ones: eager"]


def test_rows_of_programs_follow_from_the_ledger_and_later_ones_change_nothing():
    luck = np.random.default_rng(0)
    for _ in range(30):
        private = make(compiled=True)
        first, sizes = private._part_sums(), luck.integers(1, 60, size=40).tolist()
        told = [first._rows_for(size) for size in sizes]
        again = PartSums(private.compiled)  # the same ledger, everything else anew
        assert [again._rows_for(size) for size in sizes] == told
        assert len(first._rows) <= MOST_SIZES


def test_sizes_of_secret_draws_are_not_written_down():
    private = make(compiled=True, rule=Poisson(steps=12, rate=0.25), strategy=identity())
    sums = private._part_sums()
    assert [sums._rows_for(size) for size in (1, 2, 3, 4, 5, 8, 9)] == [2, 2, 4, 4, 8, 8, 8]
    x, y = data()
    slow = make(compiled=False, rule=Poisson(steps=12, rate=0.25), strategy=identity())
    sampler, _ = (run.sampler(32) for run in (private, slow))
    for t in range(6):
        drawn = sampler.draw(t)
        for run in (private, slow):
            with run.accumulate() as step:
                for rows in np.array_split(drawn, 3):
                    step.add(LOSS, (x[rows], y[rows]), ids=rows)
    torch.testing.assert_close(weights(private), weights(slow), **CLOSE)
    assert not any("part_rows" in name for name in private.ledger.bound())


@pytest.mark.parametrize("planned", [1, 2, 3, 8, 513, 1000])
def test_every_size_of_secret_draws_has_a_program(planned):
    """Or the first ones to come would have them: others in a resumed run, which differed."""
    rule = Poisson(steps=12, rate=0.25)
    private = make(compiled=True, rule=rule, strategy=identity(), batch_size=planned)
    private.compiled.capacity = 2 * planned
    sums = private._part_sums()
    padded = [sums._rows_for(size) for size in range(1, 2 * planned + 1)]
    assert all(rows >= size for size, rows in enumerate(padded, start=1))
    assert len(set(padded)) <= sums.most


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_users_and_rows_that_are_not_finite(reduce, bad):
    slow, fast = twins(unit="user", reduce=reduce, rule=MinSeparation(12, 1, 12))
    ids = np.array([3, 3, 5, 9, 9, 7, 7, 7] * 4)
    x, y = data()
    x[6] = bad
    for private in (slow, fast):
        for t in range(3):
            in_parts(private, t, (2, 3, 3), ids=ids, xy=(x, y))
            assert private.outcome.nonfinite == (t == 0)
            assert len(private.outcome.norms) == 4
    alike(slow, fast)
    assert not fast.fallbacks
    with pytest.raises(InvalidInput, match="same part"):
        in_parts(fast, 3, (1, 7), ids=ids)
    assert sums_are_gone(fast)


def test_units_outside_their_participation_are_left_out():
    slow, fast = twins(rule=SinglePass(steps=6), on_violation="drop")
    x, y = data()
    for private in (slow, fast):
        for first, second in ((0, 4), (6, 10), (0, 4), (12, 2)):
            with private.accumulate() as step:
                for begin in (first, second):
                    rows = slice(begin, begin + 4)
                    step.add(LOSS, (x[rows], y[rows]), ids=np.arange(begin, begin + 4))
        assert private.outcome.dropped == 6
    alike(slow, fast)
    assert [row.claimed_units for row in fast.ledger.rows()] == [8, 6, 0, 2]


@pytest.fixture(params=[False, True], ids=["here", "elsewhere"])
def place(monkeypatch, request):
    """Batches in ordinary memory, or said to lie on a device, whose fingerprints come late."""
    if request.param:
        monkeypatch.setattr(fingerprint, "is_elsewhere", lambda batch: True)
    monkeypatch.setattr(fingerprint, "_digest", lambda v, s: device_print.of_tensors([v], s)[0])


@pytest.mark.usefixtures("place")
def test_parts_without_ids_are_one_unit_and_refused_twice():
    slow, fast = twins()
    for private in (slow, fast):
        for t in range(6):
            in_parts(private, t, (3, 3, 2), has_ids=False)
    alike(slow, fast)
    assert fast.ledger.bound()["in_parts"] == "yes"
    x, y = data()
    before, digest = weights(fast), fast.ledger.digest(5)

    def twice(then):
        with fast.accumulate() as step:
            for rows in (slice(16, 20), slice(16, 20), *then):
                step.add(LOSS, (x[rows], y[rows]))

    for then in ((), (slice(20, 24),)):
        with pytest.raises(ParticipationViolation, match="count twice"):
            twice(then)
    with pytest.raises(ParticipationViolation, match="seen before, or differs"):
        in_parts(fast, 6, (4, 4), has_ids=False)
    assert sums_are_gone(fast)
    assert torch.equal(weights(fast), before)
    assert fast.ledger.digest(5) == digest != b""
    in_parts(slow, 6, (3, 3, 2), has_ids=False)
    in_parts(fast, 6, (3, 3, 2), has_ids=False)
    alike(slow, fast)


@pytest.mark.usefixtures("place")
def test_a_batch_without_ids_that_may_not_come_again_is_left_out_as_a_whole():
    slow, fast = twins(rule=SinglePass(steps=4), on_violation="drop")
    for private in (slow, fast):
        for t in (0, 1, 0):
            in_parts(private, t, (5, 3), has_ids=False)
        assert private.outcome.dropped == 8
        assert np.isnan(private.outcome.loss)
    alike(slow, fast)


def test_random_layers_draw_by_step_and_part():
    """The masks are those of eager parts, where none is padded, and come again in a replay."""
    slow, fast = (make(compiled=c, model=network(0.5)) for c in (False, True))
    for private in (slow, fast):
        for t in range(4):
            torch.manual_seed(t)
            in_parts(private, t, (4, 4))
    alike(slow, fast)
    assert all(program.is_random for program in fast._sums._programs.values())


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path):
    """Replays of steps in parts, of any sizes, between single ones; other data are refused."""
    model = lambda: network(0.3)  # noqa: E731
    every = {0: (3, 3, 2), 2: (8,), 3: (1, 7), 4: (2, 2, 2, 2), 6: (3, 5), 7: (3, 3, 2)}

    def walk(private, steps):
        for t in steps:
            in_parts(private, t, every[t]) if t in every else single(private, t)

    whole = make(compiled=True, model=model(), run=tmp_path / "whole")
    walk(whole, range(12 - 2))
    first = make(compiled=True, model=model(), run=tmp_path / "run")
    walk(first, range(3))
    first.save()
    walk(first, range(3, 8))  # released after the checkpoint, then lost
    first.ledger.flush()
    del first
    again = make(compiled=True, model=model(), run=tmp_path / "run", on_replay="refuse")
    assert again.resume() == 3
    assert again._part_sums()._rows == [3, 8]
    x, y = data()
    with pytest.raises(ReplayRefused, match="its sum now differs"):
        in_parts(again, 3, (1, 7), xy=(x + 1, y))
    with pytest.raises(ReplayRefused, match="its sum now differs"):
        in_parts(again, 3, (1, 6))
    assert sums_are_gone(again)
    walk(again, range(3, 10))
    assert torch.equal(weights(again), weights(whole))
    digests = [[run.ledger.digest(t) for t in range(10)] for run in (again, whole)]
    assert digests[0] == digests[1]
    assert [note["step"] for note in again.ledger.notes("replay")] == [3, 4, 5, 6, 7]
    again.close()
    verdict = verify(tmp_path / "run")
    assert verdict.refuted == verdict.unchecked == (), verdict.words()


def test_a_step_that_cannot_be_repeated_is_passed_over(tmp_path):
    first = make(compiled=True, run=tmp_path / "run")
    in_parts(first, 0, (4, 4))
    first.save()
    in_parts(first, 1, (4, 4))
    first.ledger.flush()
    again = make(compiled=True, run=tmp_path / "run", on_replay="skip")
    assert again.resume() == 1
    before, (x, y) = weights(again), data()
    in_parts(again, 1, (4, 4), xy=(x + 1, y))
    assert again.outcome.is_skipped
    assert len(again.outcome.losses) == 8
    assert torch.equal(weights(again), before)
    assert sums_are_gone(again)
    in_parts(again, 2, (4, 4))
    assert again.steps_released == 3
    assert not again.outcome.is_skipped


def interrupted(*_, **__):
    raise KeyboardInterrupt


PLACES = {
    "start": "noshuffle.training.compiled.graphs.Captured.__call__",
    "marks": "noshuffle.training.compiled.program.Program.weigh",
    "print": "noshuffle.training.compiled.program.Program.print_of",
    "row": "noshuffle.release.ledger_file.time.time",
    "update": "noshuffle.training.compiled.update.FusedSGD.before",
}


@pytest.mark.parametrize("has_ids", [True, False], ids=["ids", "fingerprints"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.usefixtures("place")
def test_an_interrupted_step_leaves_no_raw_sum_and_can_be_repeated(monkeypatch, has_ids, where):
    private, never = make(compiled=True), make(compiled=True)
    for run in (private, never):
        for t in range(2):
            in_parts(run, t, (5, 3), has_ids=has_ids)
    in_parts(never, 2, (5, 3), has_ids=has_ids)
    with monkeypatch.context() as patch:
        patch.setattr(PLACES[where], interrupted)
        is_asked = where != "print" or (not has_ids and fingerprint.is_elsewhere(data()))
        with pytest.raises(KeyboardInterrupt) if is_asked else nullcontext():
            in_parts(private, 2, (5, 3), has_ids=has_ids)
    if not is_asked:
        return
    assert sums_are_gone(private)
    assert private.steps_released == (3 if where == "update" else 2)
    if where == "update":  # recorded: nothing but the same batch may follow
        told = "its sum now differs" if has_ids else "other data"
        with pytest.raises(ReplayRefused, match=told):
            in_parts(private, 0, (5, 3), has_ids=has_ids)
    in_parts(private, 2, (5, 3), has_ids=has_ids)
    assert torch.equal(weights(private), weights(never))


def test_an_interrupt_right_after_a_step_took_the_total_gives_it_back(monkeypatch):
    """All later batches in parts were eager."""
    private, begin = make(compiled=True), PartSums.begin
    in_parts(private, 0, (5, 3))

    def and_no_further(sums, step):
        assert begin(sums, step)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PartSums, "begin", and_no_further)
        with pytest.raises(KeyboardInterrupt):
            in_parts(private, 1, (5, 3))
    assert sums_are_gone(private)
    assert isinstance(in_parts(private, 1, (5, 3)), StepInParts)


def test_a_part_that_is_refused_or_fails_leaves_nothing():
    private, never = make(compiled=True), make(compiled=True)
    for run in (private, never):
        in_parts(run, 0, (4, 4))
    before = weights(private)
    x, y = data()

    def refused():
        with private.accumulate() as step:
            step.add(LOSS, (x[8:12], y[8:12]), ids=np.arange(8, 12))
            step.add(LOSS, (x[12:16], y[12:16]), ids=np.array([12, 13, 14, 0]))

    def fails(*_):
        raise ArithmeticError

    def failing():
        with private.accumulate() as step:
            step.add(LOSS, (x[8:12], y[8:12]), ids=np.arange(8, 12))
            with pytest.raises(ArithmeticError):
                step.add(fails, (x[12:16], y[12:16]), ids=np.arange(12, 16))

    def nothing():
        with private.accumulate():
            pass

    for wrong, error, match in (
        (refused, ParticipationViolation, "unit 0 may not"),
        (failing, InvalidInput, "not in its sum"),
        (nothing, InvalidInput, "at least one batch"),
    ):
        with pytest.raises(error, match=match):
            wrong()
        assert sums_are_gone(private)
        assert torch.equal(weights(private), before)
    for run in (private, never):
        in_parts(run, 1, (4, 4))
    assert torch.equal(weights(private), weights(never))


def test_two_steps_at_once_do_not_share_a_sum():
    """The one inside is eager; the one outside has lost its turn, and nothing of it is released."""
    private, never = make(compiled=True), make(compiled=True)
    x, y = data()
    for run in (private, never):
        in_parts(run, 0, (4, 4))

    def nested():
        with private.accumulate() as outer:
            outer.add(LOSS, (x[8:12], y[8:12]), ids=np.arange(8, 12))
            inner = in_parts(private, 1, (4, 4))
            assert not isinstance(inner, StepInParts)

    with pytest.raises(InvalidInput, match="ask for leave once a step"):
        nested()
    in_parts(never, 1, (4, 4))
    torch.testing.assert_close(weights(private), weights(never), **CLOSE)
    over = in_parts(private, 2, (4, 4))
    with pytest.raises(InvalidInput, match="this step is over"):
        over.add(LOSS, (x[24:28], y[24:28]), ids=np.arange(24, 28))
    with pytest.raises(InvalidInput):
        over.release()
    assert sums_are_gone(private)
    left = private.accumulate()
    left.__enter__().add(LOSS, (x[24:28], y[24:28]), ids=np.arange(24, 28))
    assert not sums_are_gone(private)
    del left
    assert sums_are_gone(private)


def test_gradients_that_were_given_out_are_not_where_the_sum_is():
    """Code of the user runs between parts."""
    private = make(compiled=True)
    in_parts(private, 0, (4, 4))
    given = [p.grad for p in private.model.parameters()]
    kept = [g.clone() for g in given]
    x, y = data()
    with private.accumulate() as step:
        step.add(LOSS, (x[8:12], y[8:12]), ids=np.arange(8, 12))
        assert all(p.grad is None for p in private.model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(given, kept))
        step.add(LOSS, (x[12:16], y[12:16]), ids=np.arange(12, 16))
    assert all(p.grad is not None for p in private.model.parameters())


def test_settings_and_parameters_that_move():
    slow, fast = twins()
    for private in (slow, fast):
        own = private._parts.optimizer
        rule = torch.optim.lr_scheduler.StepLR(own, 2, gamma=0.5)
        for t in range(12):
            if t == 5:
                own.param_groups[0]["momentum"] = 0.5
            if t == 7:
                weight = private.model[0].weight
                weight.data = weight.data.clone()
            if t == 9:
                own.load_state_dict(own.state_dict())
            in_parts(private, t, (5, 3))
            rule.step()
    alike(slow, fast)


def test_a_clip_norm_that_moves_goes_the_eager_way():
    clip = QuantileClip(initial=0.1, units=SIZE, bit_noise=4.0, rate=0.5)
    slow, fast = twins(clip=clip, strategy=identity())
    for private in (slow, fast):
        for t in range(6):
            single(private, t) if t % 2 else in_parts(private, t, (5, 3))
    assert fast._sums is None
    torch.testing.assert_close(weights(fast), weights(slow), rtol=1e-4, atol=1e-5)


def test_a_release_that_cannot_be_captured_is_the_eager_one(monkeypatch):
    slow, fast = twins()
    monkeypatch.setattr("noshuffle.training.compiled.release.CapturedRelease.capture", fails)
    for private in (slow, fast):
        for t in range(3):
            in_parts(private, t, (5, 3))
    alike(slow, fast)
    assert "the release of parts was not captured (ArithmeticError: no)" in fast.fallbacks
    assert sums_are_gone(fast)


def fails(*_):
    raise ArithmeticError("no")


def test_losses_that_cannot_be_captured_and_other_batches():
    """Each part its own kind; the losses of some are not by row."""
    model = ModelLoss(lambda m, x, y: nn.functional.cross_entropy(m(x["rows"]), y))
    slow, fast = twins()
    x, y = data()
    for private in (slow, fast):
        for t in range(4):
            with private.accumulate() as step:
                at = 8 * t
                step.add(LOSS, (x[at : at + 4], y[at : at + 4]), ids=np.arange(at, at + 4))
                at += 4
                part = {"rows": x[at : at + 4]}, y[at : at + 4]
                step.add(model, part, ids=np.arange(at, at + 4))
    alike(slow, fast)

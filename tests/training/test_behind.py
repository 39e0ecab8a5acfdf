"""A step whose fingerprint comes later than its sum is the step of the strict order.

A GPU does that by itself. Here a batch in ordinary memory is said to lie elsewhere, so that
everything but the device's own copies is held on any machine; the last tests need a GPU.
"""

from __future__ import annotations

import types
import warnings

import numpy as np
import pytest
import torch
from tests.runs import kept
from torch import nn

from noshuffle.clipping import Flat, Ghost, ModelLoss
from noshuffle.device_copy import DeviceCopy
from noshuffle.errors import InvalidInput, ParticipationViolation, ReplayRefused
from noshuffle.noise import test_source
from noshuffle.participation import Epochs, Poisson
from noshuffle.plan import Plan
from noshuffle.release import digest as device_print
from noshuffle.release import fingerprint
from noshuffle.strategies import identity, tree
from noshuffle.training import privatize
from noshuffle.training.step import Step

LOSS = nn.CrossEntropyLoss()
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _digests_of_a_device(monkeypatch):
    """A batch that is said to lie elsewhere is digested as a device would, early or late."""
    monkeypatch.setattr(fingerprint, "_digest", lambda v, s: device_print.of_tensors([v], s)[0])


@pytest.fixture
def elsewhere(monkeypatch):
    monkeypatch.setattr(fingerprint, "is_elsewhere", lambda batch: True)


def make(rule=None, strategy=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rule = rule or Epochs(2, 3)
    plan = Plan(participation=rule, strategy=strategy or tree(), noise_multiplier=1.0)
    source = test_source(seed=3, kind="aes")
    settings = {"clip_norm": 1.0, "batch_size": 4, "source": source, **options}
    return privatize(model, optimizer, plan, **settings)


def batches(count=3):
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 4, generator=g), torch.randint(3, (4,), generator=g), np.arange(4) + 4 * i)
        for i in range(count)
    ]


def walk(private, has_ids=True):
    for step in range(private.plan.steps):
        x, y, ids = batches()[step % 3]
        private.step(LOSS, x, y, ids=ids if has_ids else None)
    digests = [private.ledger.digest(t) for t in range(private.plan.steps)]
    rows = [(r.batch, r.units.tolist()) for r in private.ledger.rows()] + digests
    return rows, [p.detach().clone() for p in private.model.parameters()]


@pytest.mark.parametrize("has_ids", [True, False])
def test_rows_and_parameters_are_those_of_the_strict_order(has_ids, monkeypatch):
    strict = walk(make(), has_ids)
    begun = []
    real = fingerprint.begin
    monkeypatch.setattr(fingerprint, "is_elsewhere", lambda batch: True)
    monkeypatch.setattr(fingerprint, "begin", lambda *a, **k: begun.append(1) or real(*a, **k))
    late = walk(make(), has_ids)
    assert len(begun) == (0 if has_ids else 6)  # units with ids need no fingerprint
    assert late[0] == strict[0]
    assert all(torch.equal(a, b) for a, b in zip(late[1], strict[1]))


def test_a_unit_too_soon_is_stopped_before_its_gradient_is_computed(elsewhere):
    private = make()
    x, y, ids = batches()[0]
    private.step(LOSS, x, y, ids=ids)
    called = []
    private.model.register_forward_hook(lambda *_: called.append(1))
    with pytest.raises(ParticipationViolation, match="unit 0"):
        private.step(LOSS, x + 1, y, ids=ids)
    assert not called


def test_a_batch_without_ids_that_was_seen_is_not_released(elsewhere):
    private = make()
    x, y, _ = batches()[0]
    private.step(LOSS, x, y)
    before = [p.detach().clone() for p in private.model.parameters()]
    with pytest.raises(ParticipationViolation, match="seen before"):
        private.step(LOSS, x, y)
    assert private.steps_released == 1
    assert private._parts.noise.step == 1
    assert all(torch.equal(a, b) for a, b in zip(before, private.model.parameters()))
    assert all(p.grad is None for p in private.model.parameters())  # no raw sum is left behind
    private.step(LOSS, *batches()[1][:2])
    assert private.steps_released == 2


def test_dropping_by_ids_leaves_the_rows_out(elsewhere):
    private = make(on_violation="drop")
    x, y, ids = batches()[0]
    private.step(LOSS, x, y, ids=ids)
    private.step(LOSS, x, y, ids=np.array([0, 90, 91, 1]))
    assert private.outcome.dropped == 2
    assert private.ledger.row(1).units.tolist() == [90, 91]


def test_the_order_is_strict_for_replays_parts_and_dropped_batches(elsewhere, monkeypatch):
    x, y, ids = batches()[0]
    replayed = make()
    start = replayed.state_dict()
    start = {**start, "model": {k: v.clone() for k, v in start["model"].items()}}
    replayed.step(LOSS, x, y, ids=ids)
    after = [p.detach().clone() for p in replayed.model.parameters()]
    replayed.load_state_dict(start)

    def never(*args, **kwargs):
        raise AssertionError("begun")

    monkeypatch.setattr(fingerprint, "begin", never)
    with pytest.raises(ReplayRefused, match="its sum now differs"):
        replayed.step(LOSS, x + 1, y, ids=ids)
    replayed.step(LOSS, x, y, ids=ids)
    assert all(torch.equal(a, b) for a, b in zip(after, replayed.model.parameters()))
    with make().accumulate() as step:
        step.add(LOSS, (x[:2], y[:2]), ids=ids[:2])
        step.add(LOSS, (x[2:], y[2:]), ids=ids[2:], is_last=True)
    make(on_violation="drop").step(LOSS, x, y)


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("has_ids", [True, False])
def test_every_part_is_in_the_fingerprint_if_two_are_called_the_last(has_ids, is_late, monkeypatch):
    monkeypatch.setattr(fingerprint, "is_elsewhere", lambda batch: is_late)
    private, found = make(), []
    start = kept(private)
    (x, y, ids), (more, other, theirs) = batches()[:2]
    ids, theirs = (ids, theirs) if has_ids else (None, None)
    for is_first in (True, False):  # and may be repeated as they were
        with private.accumulate() as step:
            step.add(LOSS, (x, y), ids=ids, is_last=is_first)
            step.add(LOSS, (more, other), ids=theirs, is_last=True)
        found.append([p.detach().clone() for p in private.model.parameters()])
        private.load_state_dict(start)
    assert all(map(torch.equal, *found))
    told = "its sum now differs" if has_ids else "other data"
    for part in ((x, y, ids), (more, other, theirs)):  # the same noise on another sum
        with pytest.raises(ReplayRefused, match=told):
            private.step(LOSS, *part[:2], ids=part[2])
    names = [fingerprint.of_batch((x, y), None, secret=private._parts.secret)]
    names += [fingerprint.of_batch((more, other), None, secret=private._parts.secret)]
    assert private.ledger.row(0).batch not in names
    assert has_ids == (private.ledger.row(0).batch == b"")


def test_a_batch_that_was_seen_is_stopped_at_the_next_part(elsewhere):
    private = make()
    (x, y, _), (more, other, _) = batches()[:2]
    private.step(LOSS, x, y)

    def in_two_parts():
        with private.accumulate() as step:
            step.add(LOSS, (x, y), is_last=True)
            step.add(LOSS, (more, other), is_last=True)

    with pytest.raises(ParticipationViolation, match="seen before"):
        in_two_parts()
    assert private.steps_released == 1


def test_a_part_that_came_twice_ends_the_step_whoever_catches_the_refusal(elsewhere):
    """It is refused when the next part comes: its sum was made, and went out with the others."""
    private = make()
    (x, y, _), (more, other, _) = batches()[:2]

    def in_four_parts():
        with private.accumulate() as step:
            step.add(LOSS, (x, y))
            step.add(LOSS, (x, y))
            for rows in (slice(0, 2), slice(2, 4)):
                with pytest.raises(ParticipationViolation, match="count twice"):
                    step.add(LOSS, (more[rows], other[rows]))

    with pytest.raises(ParticipationViolation, match="count twice"):
        in_four_parts()
    assert private.steps_released == private._parts.noise.step == 0


@pytest.mark.parametrize("is_last", [True, False])
def test_a_part_that_failed_is_not_passed_over(is_last):
    private = make()
    (x, y, ids), (more, other, theirs) = batches()[:2]

    def fails(*args):
        raise ArithmeticError

    def in_two_parts():
        with private.accumulate() as step:
            step.add(LOSS, (x, y), ids=ids)
            with pytest.raises(ArithmeticError):
                step.add(fails, (more, other), ids=theirs, is_last=is_last)

    with pytest.raises(InvalidInput, match="not in its sum"):
        in_two_parts()
    assert private.steps_released == private._parts.noise.step == 0


def test_ids_are_those_of_the_moment():
    private = make(on_violation="drop")
    (x, y, ids), (more, other, _) = batches()[:2]
    with private.accumulate() as step:
        step.add(LOSS, (x, y), ids=ids)
        ids += 4  # one array for all parts, as loaders have it
        step.add(LOSS, (more, other), ids=ids)
    assert private.ledger.row(0).units.tolist() == list(range(8))


def test_what_a_loss_does_to_its_batch_comes_too_late(elsewhere):
    private = make()
    x, y, ids = batches()[0]
    name = fingerprint.of_batch((x, y, torch.ones(4)), None, secret=b"s")

    def rows(model, x, y, spare):
        spare.mul_(2.0)
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    private._parts.secret = b"s"
    private.step(ModelLoss(rows, by_row=True), x, y, torch.ones(4))
    assert private.ledger.row(0).batch == name
    scale = np.ones(2)
    read = fingerprint.begin((x, y, scale), ids, secret=b"s")
    name = fingerprint.of_batch((x, y, scale), ids, secret=b"s")
    x.unsqueeze_(1)
    scale *= 2.0
    ids += 1
    assert read() == name


def test_sampled_batches_are_checked_first(elsewhere):
    private = make(Poisson(steps=3, rate=0.5), identity())
    sampler = private.sampler(12)
    g = torch.Generator().manual_seed(4)
    x, y = torch.randn(12, 4, generator=g), torch.randint(3, (12,), generator=g)
    drawn = next(iter(sampler))
    private.step(LOSS, x[drawn], y[drawn], ids=drawn)
    with pytest.raises(ParticipationViolation, match="not the one"):
        private.step(LOSS, x, y, ids=np.arange(12))
    assert private.steps_released == 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_gradients_are_rounded_one_by_one_whatever_the_parameters_are(device):
    half, brain = torch.float16, torch.bfloat16
    shared = torch.randn(10, dtype=brain)
    tensors = [
        torch.randn(3, 5, dtype=brain),
        torch.randn(3, 5, dtype=half),
        torch.randn(2, 3, 4, 5, dtype=brain).to(memory_format=torch.channels_last),
        torch.tensor(1.5, dtype=half),
        torch.zeros(0, 3, dtype=brain),
        torch.randn(7),
        torch.randn(7, dtype=torch.float64),
        shared[:4],
        shared[4:],
        torch.randn(3, 4, dtype=half).t(),
        torch.randn(4, dtype=half),
    ]
    own = {str(i): nn.Parameter(t.to(device)) for i, t in enumerate(tensors)}
    kinds = {n: torch.promote_types(p.dtype, torch.float32) for n, p in own.items()}
    values = {n: torch.randn(p.shape, device=device, dtype=kinds[n]) for n, p in own.items()}
    values["10"].copy_(torch.tensor([1e6, -1e6, torch.nan, torch.inf]))
    step = types.SimpleNamespace(parts=types.SimpleNamespace(parameters=own))
    Step._give(step, values)
    for name, parameter in own.items():
        want, got = values[name].to(parameter.dtype), parameter.grad
        assert got.dtype is parameter.dtype
        assert torch.equal(got.nan_to_num(), want.nan_to_num())
        assert not got.requires_grad


def test_begun_digests_are_those_of_the_moment():
    values = [torch.arange(5000.0), torch.arange(7, dtype=torch.int16)]
    expected = [device_print.of_tensors([v], b"s")[0] for v in values]
    read = device_print.begin(values, b"s")
    values[0].zero_()
    assert read() == read() == expected
    assert device_print.begin([], b"s")() == []
    batch, ids = ({"a": values[1], "b": "text"}, torch.ones(2)), np.arange(2)
    name = fingerprint.of_batch(batch, ids, secret=b"s")
    assert fingerprint.begin(batch, ids, secret=b"s")() == name
    assert not fingerprint.is_elsewhere(batch)


# -- on a GPU --------------------------------------------------------------------------------------


def on_gpu(**options):
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(256, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plan = Plan(participation=Epochs(50, 2), strategy=tree(), noise_multiplier=1.0)
    settings = {"clip_norm": 1.0, "batch_size": 64, "compile": False, **options}
    return privatize(model, optimizer, plan, **settings)


def gpu_batches():
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(128, 256, generator=g).cuda(), torch.randint(10, (128,), generator=g).cuda()
    return [(x[i : i + 64], y[i : i + 64], np.arange(i, i + 64)) for i in (0, 64)]


@needs_gpu
@pytest.mark.parametrize("has_ids", [True, False])
def test_gpu_rows_are_those_of_the_strict_order(has_ids, monkeypatch):
    def rows():
        private = on_gpu(source=test_source(seed=1, kind="philox"))
        for step in range(6):
            x, y, ids = gpu_batches()[step % 2]
            private.step(LOSS, x, y, ids=ids if has_ids else None)
        return [(r.batch, r.units.tolist()) for r in private.ledger.rows()]

    late = rows()
    monkeypatch.setattr(fingerprint, "is_elsewhere", lambda batch: False)
    assert rows() == late


@needs_gpu
def test_a_step_waits_for_the_device_once(monkeypatch):
    """For the norms, when the sum is begun: the next step is launched while this one is at work."""
    private, given = on_gpu(), gpu_batches()

    def walk(steps):
        for step in range(steps):
            private.step(LOSS, *given[step % 2][:2], ids=given[step % 2][2])

    walk(10)  # trials, tables, compiled kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    waits = []
    real = DeviceCopy.read
    monkeypatch.setattr(DeviceCopy, "read", lambda own: waits.append(own) or real(own))
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            walk(4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [w for w in seen if "synchroniz" in str(w.message)]
    assert len(waits) == 8  # whether a unit is bad, and the fingerprint that came before it


@needs_gpu
@pytest.mark.parametrize("mode", ["fast", "lean"])
def test_losses_that_came_along_are_the_losses(mode):
    model, (x, y, _) = on_gpu().model, gpu_batches()[0]
    for _ in range(3):
        got = Ghost(mode=mode).clipped_sum(model, LOSS, (x, y), clip=Flat(1.0))
        assert got.shown is not None
        assert not got.shown.is_cuda
        assert torch.equal(got.shown, got.losses.cpu())

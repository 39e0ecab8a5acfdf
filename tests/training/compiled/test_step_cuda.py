"""The compiled step on a GPU: captured runs equal eager ones, and keep every rule."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.runs import weights
from torch import nn

from noshuffle.clipping import Flat, Ghost, PerExample
from noshuffle.errors import ParticipationViolation
from noshuffle.noise import test_source
from noshuffle.optim import FTRL
from noshuffle.participation import Epochs, SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import blt, identity, tree
from noshuffle.training import privatize, verify
from noshuffle.training.compiled.graphs import Captured, warmed
from noshuffle.training.compiled.sum import candidates
from noshuffle.training.models import build

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_products"),
]
LOSS = nn.CrossEntropyLoss()
SIZE = 16


def network(seed=0):
    torch.manual_seed(seed)
    return build("small_cnn", (1, 8, 8), 10).cuda()


def data(n=64, seed=1):
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 1, 8, 8, generator=g), torch.randint(10, (n,), generator=g)
    return x.cuda(), y.cuda()


#: Two ways whose sums differ in their last bits meet neighbouring points of the noise's grid now
#: and then (2⁻¹² here); noise of another step or scale would show as 1e-2 and more.
CLOSE, CELLS = {"rtol": 1e-3, "atol": 1e-4}, {"rtol": 1e-2, "atol": 3e-3}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def ftrl(model):
    return FTRL(model.parameters(), 0.2, momentum=0.9)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.02, capturable=True)


def plain_adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.02)


def make(*, compile, rule=None, strategy=None, optimizer=sgd, model=None, z=0.5, **options):
    model = model or network()
    rule = rule or Epochs(epochs=4, steps_per_epoch=4)
    plan = Plan(participation=rule, strategy=strategy or tree(), noise_multiplier=z)
    settings = {"clip_norm": 0.7, "batch_size": SIZE, "source": test_source(seed=1), **options}
    return privatize(model, optimizer(model), plan, compile=compile, **settings)


def walk(private, steps, *, sizes=(16, 16, 16, 11), has_ids=True, start=0):
    x, y = data()
    for t in range(start, start + steps):
        begin = SIZE * (t % 4)
        rows = slice(begin, begin + sizes[t % 4])
        ids = range(rows.start, rows.stop) if has_ids else None
        yield private.step(LOSS, x[rows], y[rows], ids=ids)


@pytest.mark.parametrize("optimizer", [sgd, ftrl, adam, plain_adam])
@pytest.mark.parametrize("strategy", [identity(), tree(), blt((0.9, 0.5), (0.1, 0.2))])
def test_captured_run_equals_the_eager_run(optimizer, strategy, off_grid):
    slow, fast = (make(compile=c, optimizer=optimizer, strategy=strategy) for c in (False, "auto"))
    has_ids = optimizer is not ftrl
    losses = list(walk(slow, 12, has_ids=has_ids))
    found = list(walk(fast, 12, has_ids=has_ids))
    assert "compiled for up to 16 rows" in fast.why, fast.fallbacks
    torch.testing.assert_close(found, losses, **CLOSE)
    torch.testing.assert_close(weights(fast), weights(slow), **CLOSE)
    assert fast._parts.noise.step == 12


def test_a_graph_under_the_callers_autocast_reads_the_weights_of_every_step():
    """It had captured casts that an eager pass left in autocast's cache: old weights, freed."""
    private, (x, y) = make(compile="auto"), data()
    for t in range(8):
        rows = slice(SIZE * (t % 4), SIZE * (t % 4 + 1))
        with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
            now = nn.functional.cross_entropy(private.model(x[rows]), y[rows], reduction="none")
        with torch.autocast("cuda", torch.bfloat16):
            private.advance(LOSS, (x[rows], y[rows]), ids=range(rows.start, rows.stop))
        torch.cuda.empty_cache()
        torch.testing.assert_close(private.outcome.losses, now.float().cpu(), rtol=0.05, atol=0.05)
    assert "compiled for up to 16 rows" in private.why, private.fallbacks


def test_captured_steps_between_batches_in_parts_equal_the_eager_run(off_grid):
    """Parts are eager: the graphs go on behind them."""
    runs, (x, y) = [make(compile=c) for c in (False, "auto")], data()
    for private in runs:
        for t in range(8):
            if t % 2 == 0:
                list(walk(private, 1, start=t))
                continue
            with private.accumulate() as step:
                for begin in (SIZE * (t % 4), SIZE * (t % 4) + 6):
                    rows = slice(begin, begin + 6)
                    step.add(LOSS, (x[rows], y[rows]), ids=range(begin, begin + 6))
    assert not runs[1].fallbacks
    torch.testing.assert_close(weights(runs[1]), weights(runs[0]), **CLOSE)


@pytest.mark.slow
def test_fused_run_equals_the_eager_run():
    slow, fast = make(compile=False), make(compile=True)
    list(walk(slow, 12))
    list(walk(fast, 12))
    torch.testing.assert_close(weights(fast), weights(slow), **CELLS)


def test_dropout_draws_anew_in_every_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)).cuda()
    private = make(compile="auto", model=model, z=0.0, rule=Epochs(4, 1))
    x, y = data()
    grads = []
    for _ in range(4):
        private.step(LOSS, x[:16], y[:16], ids=range(16))
        grads.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).clone())
    assert not torch.equal(grads[2], grads[3])


def test_nan_and_dropped_rows():
    runs = [
        make(compile=c, rule=SinglePass(steps=4), on_violation="drop", z=0.0)
        for c in (False, "auto")
    ]
    x, y = data()
    x[2], x[20] = float("nan"), float("inf")
    for private in runs:
        private.step(LOSS, x[:16], y[:16], ids=range(16))
        assert private.outcome.nonfinite == 1
        private.step(LOSS, x[8:24], y[8:24], ids=range(8, 24))
        assert (private.outcome.dropped, private.outcome.nonfinite) == (8, 1)
        private.step(LOSS, x[:16], y[:16], ids=range(16))
        assert private.outcome.dropped == 16
    torch.testing.assert_close(weights(runs[1]), weights(runs[0]), rtol=1e-4, atol=1e-5)
    assert bool(torch.isfinite(weights(runs[1])).all())


def test_refused_batches_release_nothing():
    private = make(compile="auto", rule=SinglePass(steps=4))
    x, y = data()
    private.step(LOSS, x[:16], y[:16], ids=range(16))
    before = weights(private)
    with pytest.raises(ParticipationViolation, match="unit 0"):
        private.step(LOSS, x[:16], y[:16], ids=range(16))
    assert torch.equal(weights(private), before)
    private.step(LOSS, x[16:32], y[16:32], ids=range(16, 32))
    assert private.steps_released == 2


@pytest.mark.parametrize("optimizer", [sgd, adam, plain_adam])
def test_a_resumed_run_goes_on_behind_the_steps_that_were_lost(tmp_path, optimizer):
    never = make(compile="auto", optimizer=optimizer)
    first = make(compile="auto", optimizer=optimizer, run=tmp_path / "run")
    list(walk(never, 8))
    list(walk(first, 8))
    first.save()
    list(walk(first, 2, start=8))  # released after the checkpoint, then lost
    assert [never.skip(), never.skip()] == [8, 9]
    again = make(compile="auto", optimizer=optimizer, run=tmp_path / "run")
    assert again.resume() == 10
    for private in (never, again):
        list(walk(private, 6, start=10))
        assert "compiled for up to 16 rows" in private.why, private.fallbacks
    assert torch.equal(weights(again), weights(never))
    again.save()
    again.close()
    assert verify(tmp_path / "run").answer == "NOT PRIVATE"  # a test seed, and nothing else


def test_a_run_resumed_in_its_own_process_goes_on_with_its_graphs(tmp_path):
    private = make(compile="auto", run=tmp_path / "run")
    never = make(compile="auto")
    for one in (private, never):
        rule = torch.optim.lr_scheduler.StepLR(one._parts.optimizer, 3, gamma=0.5)
        one.attach(rule=rule)
        for _ in walk(one, 4):
            rule.step()
    private.save()
    list(walk(private, 2, start=4))
    assert private.resume() == 6
    assert [never.skip(), never.skip()] == [4, 5]
    for one in (private, never):
        for _ in walk(one, 6, start=6):
            one._attached["rule"].step()
    assert torch.equal(weights(private), weights(never))


def test_an_oversized_batch_goes_the_eager_way():
    private = make(compile="auto", rule=SinglePass(steps=4))
    x, y = data()
    private.step(LOSS, x[:24], y[:24], ids=range(24))
    private.step(LOSS, x[24:40], y[24:40], ids=range(24, 40))
    assert any("larger than the captured 16" in note for note in private.fallbacks)


@pytest.mark.parametrize("engine", [Ghost(), PerExample()], ids=["rules", "written"])
def test_every_form_of_the_sum_agrees_on_the_gpu(engine):
    model = network()
    x, y = data(24)
    keep = torch.ones(24, dtype=torch.bool, device="cuda")
    keep[20:] = False
    clip = Flat(0.5)
    engine.clipped_sum(model, LOSS, (x, y), clip=clip)
    x[3], x[22] = float("nan"), float("nan")
    truth = engine.clipped_sum(model, LOSS, (x, y), clip=clip, weights=keep)
    for name, make_total in candidates(
        engine, model, LOSS, (x, y), keep, clip=clip, fuse=False
    ).items():
        sums = make_total()((x, y), keep)
        assert torch.equal(sums.bad, truth.bad), name
        for parameter, value in truth.values.items():
            torch.testing.assert_close(
                sums.values[parameter],
                value,
                rtol=1e-4,
                atol=1e-5,
                msg=lambda m, n=name: f"{n} {m}",
            )


def test_a_graph_that_nobody_holds_does_not_end_the_next_capture():
    """Given up in a cycle, it is found by the collector whenever that runs: not in a capture."""
    total = torch.zeros(1, device="cuda")

    def once():
        [[] for _ in range(100)]  # enough new containers for a collection, if one may run
        total.add_(1)

    warmed(once, total.device)
    old = Captured(once, captures=True)
    old.itself = old
    before = gc.get_threshold()
    try:
        del old
        gc.set_threshold(10, 1, 1)
        graph = Captured(once, captures=True)
    finally:
        gc.set_threshold(*before)
    graph()
    assert gc.isenabled()
    assert total.item() == 3.0


class Steps(nn.Module):
    """Maps over the steps of a sequence, wide enough for kernels of inner products."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.last = (nn.Linear(64, 64, dtype=dtype) for _ in range(2))

    def forward(self, x):
        return torch.tanh(self.last(torch.tanh(self.first(x)))).mean((1, 2))


@pytest.mark.parametrize("steps", [4, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_fused_clips_batches_that_come_later(steps, dtype):
    """A kernel is none of the operations that a compiler is told of: norms that it has taken of the
    first batch must not be those of all others. In the first nothing is clipped."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        found = []
        for compiles in (True, False):
            torch.manual_seed(0)
            model = Steps(dtype).cuda()
            plan = Plan(participation=SinglePass(3), strategy=identity(), noise_multiplier=1e-6)
            private = privatize(
                model,
                torch.optim.SGD(model.parameters(), lr=1e-3),
                plan,
                clip_norm=0.5,
                batch_size=SIZE,
                compile=compiles,
                source=test_source(seed=3),
            )
            loss = nn.MSELoss()
            for scale in (1e-3, 30.0, 300.0):
                x = torch.randn(SIZE, steps, 64, dtype=dtype, device="cuda")
                private.step(loss, x, scale * torch.ones(SIZE, dtype=dtype, device="cuda"))
                own = {n: p.grad.double() * SIZE for n, p in model.named_parameters()}
            found.append(torch.cat([g.reshape(-1) for g in own.values()]))
            if compiles:
                assert "fused" in private.why or private.fallbacks, private.why
        fast, slow = found
        assert float(fast.norm()) <= 0.5 * SIZE * 1.01
        assert float((fast - slow).norm()) <= 0.05 * float(slow.norm())
    finally:
        torch.set_float32_matmul_precision(before)

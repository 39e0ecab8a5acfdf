"""The compiled step without capture: the same arithmetic and the same rules as the eager step."""

import copy
import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.runs import weights
from torch import nn

from noshuffle.clipping import Flat, Ghost, ModelLoss, PerExample, PerLayer
from noshuffle.clipping.factor import slack
from noshuffle.clipping.forms import DenseGradient, OuterGradient
from noshuffle.clipping.rules_conv import Convolution
from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    NoshuffleError,
    ParticipationViolation,
    ProbablyNotMeant,
)
from noshuffle.noise import test_source
from noshuffle.optim import FTRL
from noshuffle.participation import Epochs, MinSeparation, Poisson, SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import identity, tree
from noshuffle.training import privatize, verify
from noshuffle.training.compiled import Compiled
from noshuffle.training.compiled import graphs as compiled_graphs
from noshuffle.training.compiled.flat import Flattened
from noshuffle.training.compiled.graphs import Signal
from noshuffle.training.compiled.staged import StagedUsers
from noshuffle.training.compiled.sum import candidates, short
from noshuffle.training.compiled.update import update_for
from noshuffle.training.models import build

LOSS = nn.CrossEntropyLoss()
SIZE = 8
#: What rounding in another order may do, and what it may do where values are put on a grid: sums
#: that differ in their last bits may meet neighbouring points.
CLOSE, CELL = {"rtol": 1e-5, "atol": 1e-6}, {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def _off_grid(monkeypatch):
    """Twins are compared before the noise's grid, which would hide or enlarge what differs."""
    monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data(n=32, seed=1):
    g = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)


def make(*, compiled, rule=None, strategy=None, optimizer=None, model=None, z=0.5, **options):
    model = model or network()
    optimizer = (optimizer or sgd)(model)
    rule = rule or Epochs(epochs=3, steps_per_epoch=4)
    plan = Plan(participation=rule, strategy=strategy or tree(), noise_multiplier=z)
    settings = {"clip_norm": 0.7, "batch_size": SIZE, "source": test_source(seed=1), **options}
    private = privatize(model, optimizer, plan, **settings)
    if compiled:
        private.compiled = Compiled(private._parts, capacity=SIZE, captures=False)
    return private


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def ftrl(model):
    return FTRL(model.parameters(), 0.2, momentum=0.9)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.05)


def walk(private, steps, *, sizes=(8, 8, 8, 5), has_ids=True, start=0):
    x, y = data()
    for t in range(start, start + steps):
        begin = SIZE * (t % 4)
        rows = slice(begin, begin + sizes[t % 4])
        ids = range(rows.start, rows.stop) if has_ids else None
        yield private.step(LOSS, x[rows], y[rows], ids=ids)


@pytest.mark.parametrize("optimizer", [sgd, ftrl, adam])
@pytest.mark.parametrize("has_ids", [True, False], ids=["ids", "none"])
def test_equals_the_eager_run_with_a_ragged_last_batch(optimizer, has_ids):
    slow, fast = (make(compiled=c, optimizer=optimizer) for c in (False, True))
    losses = list(walk(slow, 12, has_ids=has_ids))
    torch.testing.assert_close(list(walk(fast, 12, has_ids=has_ids)), losses, **CLOSE)
    torch.testing.assert_close(weights(fast), weights(slow), **CLOSE)
    assert not fast.fallbacks
    assert fast.steps_released == 12
    assert "compiled for up to 8 rows" in fast.why
    assert fast.outcome.norms.shape == (5,)
    torch.testing.assert_close(fast.outcome.norms, slow.outcome.norms.float(), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("strategy", "clip"), [(identity(), PerLayer(0.5)), (tree(), Flat(0.3))], ids=["layers", "flat"]
)
def test_other_clips_and_noise(strategy, clip):
    slow, fast = (
        make(compiled=c, strategy=strategy, clip=clip, clip_norm=None) for c in (False, True)
    )
    for private in (slow, fast):
        list(walk(private, 5))
    torch.testing.assert_close(weights(fast), weights(slow), **CLOSE)


def test_a_scheduler_moves_the_rate():
    runs = [make(compiled=c) for c in (False, True)]
    for private in runs:
        rule = torch.optim.lr_scheduler.StepLR(private._parts.optimizer, 2, gamma=0.5)
        for _ in walk(private, 8):
            rule.step()
    torch.testing.assert_close(weights(runs[1]), weights(runs[0]), **CLOSE)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_nonfinite_example_contributes_zero(bad):
    runs = [make(compiled=c, z=0.0) for c in (False, True)]
    x, y = data()
    x[3] = bad
    for private in runs:
        private.step(LOSS, x[:8], y[:8], ids=range(8))
        assert private.outcome.nonfinite == 1
        assert bool(torch.isfinite(weights(private)).all())
    torch.testing.assert_close(weights(runs[1]), weights(runs[0]), **CLOSE)


def test_dropped_units_weigh_nothing_even_if_not_finite():
    runs = [
        make(compiled=c, rule=SinglePass(steps=4), on_violation="drop", z=0.0)
        for c in (False, True)
    ]
    x, y = data()
    x[2] = float("nan")
    for private in runs:
        private.step(LOSS, x[:8], y[:8], ids=range(8))
        private.step(LOSS, x[2:10], y[2:10], ids=range(2, 10))
        assert private.outcome.dropped == 6
        assert private.outcome.nonfinite == 0
        assert private.outcome.losses.shape == (2,)
        private.step(LOSS, x[:8], y[:8], ids=range(8))  # nobody left: noise alone
        assert np.isnan(private.outcome.loss)
    torch.testing.assert_close(weights(runs[1]), weights(runs[0]), **CLOSE)


def test_units_outside_their_participation_are_refused_before_anything_runs():
    private = make(compiled=True, rule=MinSeparation(steps=6, separation=3, max_participations=2))
    x, y = data()
    private.step(LOSS, x[:8], y[:8], ids=range(8))
    (program,) = private.compiled._programs.values()
    program.sum = None  # would fail if it were called
    with pytest.raises(ParticipationViolation, match="it may come again from step 3 on"):
        private.step(LOSS, x[:8], y[:8], ids=range(8))
    with pytest.raises(InvalidInput, match="name each of the 8"):
        private.step(LOSS, x[:8], y[:8], ids=range(7))


def test_an_array_of_ids_that_the_caller_fills_again_is_read_again():
    private = make(compiled=True, rule=SinglePass(steps=4))
    x, y = data()
    ids = np.arange(8)
    private.step(LOSS, x[:8], y[:8], ids=ids)
    ids += 8
    private.step(LOSS, x[8:16], y[8:16], ids=ids)
    ids -= 8
    with pytest.raises(ParticipationViolation, match="already took part in step 0"):
        private.step(LOSS, x[16:24], y[16:24], ids=ids)


def test_a_row_is_written_before_the_noise():
    private = make(compiled=True)
    seen = []
    add = private._parts.noise.add_
    private._parts.noise.add_ = lambda *given, **more: (
        seen.append(private.steps_released),
        add(*given, **more),
    )
    list(walk(private, 3))
    assert seen == [1, 2, 3]


def test_horizon_and_steps_that_failed_half_way():
    private = make(compiled=True, rule=Epochs(1, 4))
    list(walk(private, 4))
    with pytest.raises(HorizonExceeded):
        next(walk(private, 1))
    broken = make(compiled=True)
    list(walk(broken, 1))
    broken._parts.noise.add_({n: torch.zeros_like(p) for n, p in broken._parts.parameters.items()})
    with pytest.raises(NoshuffleError, match="the noise stands at step 2, not 1"):
        list(walk(broken, 1, start=1))
    with pytest.raises(NoshuffleError, match="half-way"):
        list(walk(broken, 1, start=2))


def test_a_resumed_run_goes_on_behind_the_steps_that_were_lost(tmp_path):
    never, first = make(compiled=True), make(compiled=True, run=tmp_path / "run")
    list(walk(never, 4))
    list(walk(first, 4))
    first.save()
    list(walk(first, 2, start=4))  # released after the checkpoint, then lost
    assert [never.skip(), never.skip()] == [4, 5]
    again = make(compiled=True, run=tmp_path / "run")
    assert again.resume() == 6
    for private in (never, again):
        list(walk(private, 6, start=6))
    assert torch.equal(weights(again), weights(never))
    again.save()
    again.close()
    verdict = verify(tmp_path / "run")
    assert verdict.answer == "NOT PRIVATE", verdict.words()  # a test seed, and nothing else


def test_warnings_after_the_first_step_come_where_it_is_captured():
    private, (x, y) = make(compiled=True, batch_size=2, rule=SinglePass(9)), data()
    with pytest.warns(ProbablyNotMeant, match="batch size: 8 examples"):
        private.step(LOSS, x[:8], y[:8], ids=range(8))


def test_what_cannot_be_compiled_says_why():
    x, y = data()
    private = make(compiled=True, rule=SinglePass(steps=4))
    private.step(LOSS, x[:12], y[:12], ids=range(12))
    assert private.fallbacks == ["a batch of 12 rows is larger than the captured 8: eager"]
    private.step(LOSS, x[12:20], y[12:20], ids=range(12, 20))
    assert private.steps_released == 2
    for option in ("auto", True):
        assert "graphs need a CUDA device" in make(compiled=False, compile=option).why
    assert "compile=False" in make(compiled=False, compile=False).why
    with pytest.raises(InvalidInput, match="compile must be"):
        make(compiled=False, compile="yes")


def test_reasons_against_a_graph():
    from noshuffle.training.compiled.programs import why_not

    class Elsewhere:
        device = torch.device("cuda")
        dtype = torch.float32

        def numel(self):
            return 2**27

    def reason(private, wanted="auto"):
        private._parts.parameters = {"w": Elsewhere()}
        return why_not(private._parts, wanted=wanted)

    assert "microbatches" in reason(make(compiled=False, engine=PerExample(4)))
    assert "not fused" in reason(make(compiled=False))
    large = make(compiled=False)
    large._parts.noise._fused = object()
    assert "134,217,728 parameters" in reason(large)
    assert reason(large, wanted=True) == ""


def test_losses_that_are_made_anew_do_not_fill_the_memory():
    private = make(compiled=True, rule=Epochs(5, 4))
    x, y = data()
    for t in range(8):
        rows = slice(SIZE * (t % 4), SIZE * (t % 4) + SIZE)
        private.step(lambda a, b: LOSS(a, b), x[rows], y[rows], ids=range(rows.start, rows.stop))
    assert len(private.compiled._programs) == 4
    assert any("made anew" in note for note in private.fallbacks)


def test_training_mode_and_moved_parameters_get_their_own_program():
    private = make(compiled=True)
    list(walk(private, 1))
    private.model.eval()
    list(walk(private, 1, start=1))
    assert len(private.compiled._programs) == 2
    private.model[0].weight.data = private.model[0].weight.data.clone()
    list(walk(private, 1, start=2))
    assert len(private.compiled._programs) == 1


CHANGES = {
    "nothing": lambda run, x, y: (LOSS, (x, y)),
    "other numbers": lambda run, x, y: (LOSS, (x + 1, y)),
    "fewer rows": lambda run, x, y: (LOSS, (x[:5], y[:5])),
    "no rows": lambda run, x, y: (LOSS, (x[:0], y[:0])),
    "more rows than there is room for": lambda run, x, y: (
        LOSS,
        (x.repeat(SIZE, *[1] * (x.dim() - 1)), y.repeat(SIZE)),
    ),
    "rows that disagree": lambda run, x, y: (LOSS, (x[:5], y)),
    "a number": lambda run, x, y: (LOSS, (x, y[0])),
    "another type": lambda run, x, y: (LOSS, (x.double(), y)),
    "another shape": lambda run, x, y: (LOSS, (x[:, None], y)),
    "another device": lambda run, x, y: (LOSS, (x.to("meta"), y)),
    "one more tensor": lambda run, x, y: (LOSS, (x, y, y)),
    "a plain value": lambda run, x, y: (LOSS, (x, 3)),
    "another loss": lambda run, x, y: (nn.CrossEntropyLoss(), (x, y)),
    "another mode": lambda run, x, y: run.model[1].eval() and (LOSS, (x, y)),
    "another precision": lambda run, x, y: (
        torch.set_float32_matmul_precision("high") or (LOSS, (x, y))
    ),
    "a moved parameter": lambda run, x, y: (
        setattr(run.model[0].weight, "data", run.model[0].weight.data.clone()) or (LOSS, (x, y))
    ),
    "a frozen parameter": lambda run, x, y: (
        run.model[2].bias.requires_grad_(False) is None or (LOSS, (x, y))
    ),
    "forgotten programs": lambda run, x, y: run.compiled.reset() or (LOSS, (x, y)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_last_program_is_taken_again_only_where_all_is_as_it_was(change):
    private = make(compiled=True)
    x, y = data()
    private.step(LOSS, x[:8], y[:8], ids=range(8))
    (program,) = private.compiled._programs.values()
    before = torch.get_float32_matmul_precision()
    try:
        loss, batch = CHANGES[change](private, x[8:16], y[8:16])
        again = private.compiled.again(loss, batch)
    finally:
        torch.set_float32_matmul_precision(before)
    sizes = {"nothing": 8, "other numbers": 8, "fewer rows": 5}
    assert again == ((program, sizes[change]) if change in sizes else None)


def test_which_rows_count_whatever_came_before():
    """Sizes that move, rows left out: the mask is that of the last call."""
    luck, place = np.random.default_rng(4), torch.device("cpu")
    held = compiled_graphs.BatchBuffers((torch.zeros(2, 3),), capacity=9, device=place)
    for _ in range(300):
        size = int(luck.integers(0, 10))
        keep = luck.random(size) < 0.5 if luck.random() < 0.3 else None
        held.weigh(size, keep)
        wanted = np.zeros(9, dtype=bool)
        wanted[:size] = True if keep is None else keep
        assert held.keep.tolist() == wanted.tolist()


NEWER_NAMES = """
import torch
from noshuffle.clipping.products import repeatable
from noshuffle.training.compiled.programs import _numerics
cudnn, seen = torch.backends.cudnn, [_numerics()]
for place, precision in ((torch.backends.cuda.matmul, "tf32"), (cudnn.conv, "ieee")):
    place.fp32_precision = precision
    seen.append(_numerics())
    with repeatable():
        assert cudnn.deterministic and not cudnn.benchmark and _numerics() == seen[-1]
    assert not cudnn.deterministic
assert len(set(seen)) == 3, seen
"""


@pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv") or not hasattr(os, "fork"), reason="an older torch"
)
def test_precision_by_its_newer_names_is_looked_at_too():
    child = os.fork()  # torch cannot take such a setting back
    if not child:
        try:
            exec(NEWER_NAMES, {})
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_empty_and_sampled_batches():
    rule = Poisson(steps=13, rate=0.25)
    runs = [make(compiled=c, rule=rule, strategy=identity()) for c in (False, True)]
    x, y = data()
    sampler, _ = (private.sampler(32) for private in runs)
    runs[1].compiled.capacity = 32
    for step in range(12):
        rows = torch.from_numpy(sampler.draw(step))
        for private in runs:
            private.step(LOSS, x[rows], y[rows], ids=rows)
    nobody = type("Nobody", (), {"draw": lambda self, t: np.empty(0, int)})()
    for private in runs:
        private._parts.release._sampler = nobody
        private.step(LOSS, x[:0], y[:0], ids=[])
    torch.testing.assert_close(weights(runs[1]), weights(runs[0]), **CLOSE)


def test_parameters_in_another_order_of_memory():
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 3))
    twin = copy.deepcopy(model)
    model.to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    x, y = torch.randn(8, 2, 3, 3), torch.randint(3, (8,))
    runs = [make(compiled=c, model=m, z=0.0) for c, m in ((True, model), (False, twin))]
    for private in runs:
        private.step(LOSS, x, y, ids=range(8))
    torch.testing.assert_close(weights(runs[0]), weights(runs[1]), **CLOSE)
    gaps = nn.Linear(6, 3)
    gaps.weight.data = torch.zeros(3, 12)[:, ::2]
    whole = copy.deepcopy(gaps)
    whole.weight.data = whole.weight.data.contiguous()
    runs = [make(compiled=c, model=m) for c, m in ((True, gaps), (False, whole))]
    for private in runs:
        list(walk(private, 3))
    torch.testing.assert_close(weights(runs[0]), weights(runs[1]), **CLOSE)


def test_a_model_that_draws_from_elsewhere_is_not_frozen():
    calls = itertools.count(1)

    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x):
            return self.linear(x) * next(calls)

    private = make(compiled=True, model=Moody(), engine=PerExample())
    list(walk(private, 2))
    assert any("draws from elsewhere" in note for note in private.fallbacks)


CASES = {
    "cnn": (lambda: build("tanh_cnn", (1, 28, 28), 10), (1, 28, 28), 10),
    "mlp": (network, (6,), 3),
    "long": (lambda: nn.Sequential(nn.Linear(5, 300), nn.Linear(300, 300), Mean()), (9, 5), 300),
}


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [Ghost, PerExample], ids=["rules", "written"])
def test_every_form_of_the_sum_agrees_with_the_engine(case, kind):
    make_model, shape, classes = CASES[case]
    torch.manual_seed(3)
    model = make_model()
    x, y = torch.randn(6, *shape), torch.randint(classes, (6,))
    x[1] = float("nan")
    keep = torch.tensor([True] * 4 + [False] * 2)
    x[5] = float("inf")
    engine, clip = kind(), Flat(0.5)
    good = x.nan_to_num(0.0, 0.0, 0.0)
    engine.clipped_sum(model, LOSS, (good, y), clip=clip)  # the trial wants finite rows
    truth = engine.clipped_sum(model, LOSS, (x, y), clip=clip, weights=keep)
    found = candidates(engine, model, LOSS, (x, y), keep, clip=clip, fuse=False)
    assert len(found) == 3
    for name, build_total in found.items():
        sums = build_total()((x, y), keep)
        assert torch.equal(sums.bad, truth.bad), name
        assert sums.bad.tolist() == [False, True] + [False] * 4
        for parameter, value in truth.values.items():
            torch.testing.assert_close(
                sums.values[parameter],
                value,
                rtol=1e-4,
                atol=1e-6,
                msg=lambda m, n=name: f"{n} {m}",
            )
        kept = keep & ~truth.bad
        torch.testing.assert_close(
            sums.norms[kept].double(), truth.norms[kept].double(), rtol=1e-4, atol=0
        )


@pytest.mark.parametrize("most", [0, 8 * 300])
def test_wide_layers_beside_the_matrix_have_the_same_sum(monkeypatch, most):
    """Linear layers from a size on are products by themselves; rows without weight hold NaN."""
    g = torch.Generator().manual_seed(most)
    sizes = {"wide": (40, 30), "small": (5, 7)}
    keep = torch.rand(8, generator=g) < 0.7
    keep[1] = False
    forms, like = {}, {}
    for name, (o, i) in sizes.items():
        a, back = torch.randn(8, 1, i, generator=g), 3 * torch.randn(8, 1, o, generator=g)
        a[1], back[2] = torch.nan, torch.inf
        forms[name] = [OuterGradient(a, back, (o, i))]
        like[name] = torch.zeros(o, i)
    forms["bias"], like["bias"] = [DenseGradient(torch.randn(8, 5, generator=g))], torch.zeros(5)

    def found():
        flat = Flattened(forms, like, aim=2.0)
        return flat._others, flat(forms, torch.ones(8), keep)

    others, want = found()
    assert not others
    monkeypatch.setattr("noshuffle.training.compiled.flat.MOST_PAIRED", most)
    others, got = found()
    assert others == (list(sizes) if most == 0 else ["wide"])
    assert torch.equal(got.bad, want.bad)
    assert got.bad.tolist() == (keep & (torch.arange(8) == 2)).tolist()
    torch.testing.assert_close(got.norms, want.norms)
    for name, value in want.values.items():
        torch.testing.assert_close(got.values[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by_user", [False, True])
def test_gradients_written_where_they_lie_give_the_same_sum(monkeypatch, by_user):
    """Products and others, into rows whose length is no multiple of four; users, NaN and ∞ too."""
    g = torch.Generator().manual_seed(11)
    layer, keep = torch.nn.Conv2d(3, 5, 3), torch.arange(8) != 6
    x, back = torch.randn(8, 3, 9, 8, generator=g), torch.randn(8, 5, 7, 6, generator=g)
    a, of_a = torch.randn(8, 4, 6, generator=g), torch.randn(8, 4, 7, generator=g)
    back[1], a[2], x[6] = torch.nan, torch.inf, torch.nan

    def forms():
        return {
            "conv": [Convolution(layer, x.clone(), back.clone(), 8)],
            "steps": [OuterGradient(a, of_a, (7, 6))],
            "half": [OuterGradient(a.half(), of_a.half(), (7, 6))],
            "bias": [DenseGradient(back.sum((2, 3)))],
            "pair": [OuterGradient(a[:, :1], of_a[:, :1], (7, 6))],
        }

    shapes = {"conv": (5, 3, 3, 3), "steps": (7, 6), "half": (7, 6), "bias": (5,), "pair": (7, 6)}
    like = {name: torch.zeros(shape) for name, shape in shapes.items()}

    def found(fewest):
        monkeypatch.setattr("noshuffle.training.compiled.flat.FEWEST_DIRECT", fewest)
        users = None
        if by_user:
            users = StagedUsers(capacity=8, device=torch.device("cpu"), is_mean=False)
            users.stage(np.array([0, 1, 1, 2, 3, 3, 2, 4]), None)
        flat = Flattened(forms(), like, aim=20.0, rows=8, users=users)
        return flat(forms(), torch.ones(8), keep)

    want = found(10**9)
    for fewest in (1, 40, 43):
        got = found(fewest)
        assert torch.equal(got.bad, want.bad)
        torch.testing.assert_close(got.norms, want.norms, equal_nan=True)
        for name, value in want.values.items():
            assert value.isfinite().all()
            torch.testing.assert_close(got.values[name], value, rtol=1e-5, atol=1e-6)


def test_a_form_that_runs_a_batch_runs_it_as_the_graph_will(monkeypatch):
    """Other algorithms of cuDNN need room that the graph does not."""
    seen = []

    class Asks(Flattened):
        def __init__(self, *given, **more):
            seen.append(torch.backends.cudnn.deterministic)
            super().__init__(*given, **more)

    monkeypatch.setattr("noshuffle.training.compiled.sum.Flattened", Asks)
    make(compiled=True, engine=Ghost()).step(LOSS, *data(SIZE), ids=range(SIZE))
    assert seen == [True]


def test_a_form_that_loses_norms_is_not_taken_though_nothing_is_clipped_yet(monkeypatch):
    """Its sums of the first batch are right; those of larger gradients would not be bounded."""

    def lossy(*given, **more):
        found = candidates(*given, **more)
        name, build = list(found.items())[-1]

        def built():
            total = build()

            def run(batch, keep):
                sums = total(batch, keep)
                return replace(sums, norms=0.9 * sums.norms, report=None)

            return run

        return {**found, name: built}

    for form in (candidates, lossy):
        monkeypatch.setattr("noshuffle.training.compiled.choice.candidates", form)
        private = make(compiled=True, engine=Ghost(), clip_norm=1e3)
        private.step(LOSS, *data(SIZE), ids=range(SIZE))
        was_refused = "sum by rules in a matrix was not taken" in str(private.compiled.fallbacks)
        assert was_refused == (form is lossy)
        assert ("sum by rules, " in private.compiled.why) == (form is lossy)


@pytest.mark.parametrize("masked", [0, 5, 8])
def test_rows_without_a_gradient_do_not_keep_a_form_from_being_taken(masked):
    """Their norms are the tolerance of whoever took them, which forms need not have in common."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 20))

    def by_row(m, x, y):
        own = nn.functional.cross_entropy(m(x).mT, y, ignore_index=-100, reduction="none")
        return own.sum(1)

    private = make(compiled=True, model=model, engine=Ghost())
    y = torch.randint(20, (SIZE, 12))
    y[:masked] = -100
    private.step(ModelLoss(by_row, by_row=True), torch.randn(SIZE, 12, 6), y, ids=range(SIZE))
    assert "sum by rules in a matrix" in private.compiled.why
    assert not private.fallbacks


@pytest.mark.slow
def test_the_fused_form_agrees_too():
    model, (x, y) = network(), data(6)
    keep, clip = torch.tensor([True] * 5 + [False]), Flat(0.5)
    for engine in (Ghost(), PerExample()):
        truth = engine.clipped_sum(model, LOSS, (x, y), clip=clip, weights=keep)
        found = candidates(engine, model, LOSS, (x, y), keep, clip=clip, fuse=True)
        (name,) = [name for name in found if name.endswith("fused")]
        sums = found[name]()((x, y), keep)
        for parameter, value in truth.values.items():
            torch.testing.assert_close(sums.values[parameter], value, rtol=1e-4, atol=1e-6)


def test_a_signal_is_waited_for_and_a_lost_one_is_an_error(monkeypatch):
    signal = Signal(torch.device("cpu"), captures=False)
    for _ in range(3):
        signal.expect()
        signal.raise_()
        signal.wait()
    signal.reset()
    signal.expect()
    monkeypatch.setattr(compiled_graphs, "_PATIENCE", 600)
    with pytest.raises(NoshuffleError, match="lost a step"):
        signal.wait()


@pytest.mark.parametrize("has_ids", [True, False], ids=["ids", "none"])
@pytest.mark.parametrize("place", ["graphs.Captured.__call__", "update.FusedSGD.before"])
def test_an_interrupted_step_leaves_no_raw_sum_and_ends_the_run(monkeypatch, has_ids, place):
    """The place of the sum is that of the gradients given out before."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    private = make(compiled=True)
    list(walk(private, 2, has_ids=has_ids))
    (program,) = private.compiled._programs.values()
    with monkeypatch.context() as patch:
        patch.setattr(f"noshuffle.training.compiled.{place}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(walk(private, 1, start=2, has_ids=has_ids))
    assert all(bool((v == 0).all()) for v in program.sums.values.values())
    assert private.steps_released == 3
    with pytest.raises(NoshuffleError, match="half-way"):
        list(walk(private, 1, start=3, has_ids=has_ids))


@pytest.mark.parametrize("given", [np.zeros(3000), [1.0, 2.0], {"a": np.ones(8)}])
def test_values_that_cannot_be_cut_are_not_frozen(given):
    fn = ModelLoss(lambda m, x, y, s: nn.functional.cross_entropy(m(x), y))
    private = make(compiled=True)
    x, y = data()
    with pytest.raises(InvalidInput, match="cut by example"):
        private.step(fn, x[:8], y[:8], given, ids=range(8))
    assert private.steps_released == 0
    private.step(fn, x[:8], y[:8], 0.5, ids=range(8))  # a setting
    assert private.steps_released == 1


def test_frozen_tensors_and_buffers_that_move_are_captured_anew():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
            self.register_buffer("shift", torch.zeros(6))

        def forward(self, x):
            return self.layer(x * self.frozen + self.shift)

    private = make(compiled=True, model=Shifted())
    list(walk(private, 1))
    for t, move in enumerate(
        [
            lambda m: setattr(m, "shift", torch.ones(6)),
            lambda m: setattr(m.frozen, "data", torch.zeros(6)),
        ]
    ):
        (before,) = private.compiled._programs.values()
        move(private.model)
        list(walk(private, 1, start=t + 1))
        (after,) = private.compiled._programs.values()
        assert after is not before
    held = {t.data_ptr() for t in private.compiled._kept_alive if isinstance(t, torch.Tensor)}
    assert {t.data_ptr() for t in private.model.state_dict().values()} <= held


def test_a_frozen_layer_or_a_weight_of_the_loss_that_is_exchanged_is_captured_anew():
    def frozen():
        return nn.Linear(6, 6).requires_grad_(False)

    def only_trained(model):
        return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    model = nn.Sequential(nn.Sequential(frozen()), nn.Linear(6, 3))
    private = make(compiled=True, model=model, optimizer=only_trained)
    loss, (x, y) = nn.CrossEntropyLoss(weight=torch.ones(3)), data()
    changes = [
        lambda: None,
        lambda: model[0].__setitem__(0, frozen()),
        lambda: setattr(loss, "weight", torch.tensor([1.0, 2.0, 3.0])),
    ]
    seen = []
    for t, change in enumerate(changes):
        change()
        rows = slice(SIZE * t, SIZE * t + SIZE)
        private.step(loss, x[rows], y[rows], ids=range(rows.start, rows.stop))
        seen += private.compiled._programs.values()
        assert private.compiled._modules == list(model.modules())
    assert len(set(map(id, seen))) == 3 == len(seen)
    assert not private.fallbacks


@pytest.mark.parametrize("size", [SIZE, SIZE - 2])
def test_a_batch_that_wants_gradients_is_a_batch(size):
    runs = make(compiled=True), make(compiled=False)
    x, y = data()
    for t in range(3):
        rows = slice(SIZE * t, SIZE * t + size)
        ids = range(rows.start, rows.stop)
        runs[0].step(LOSS, (x[rows].clone().requires_grad_(t != 1) * 1), y[rows], ids=ids)
        runs[1].step(LOSS, x[rows], y[rows], ids=ids)
    assert not runs[0].fallbacks
    for own, other in zip(runs[0].model.parameters(), runs[1].model.parameters()):
        torch.testing.assert_close(own, other, **CLOSE)
    (program,) = runs[0].compiled._programs.values()
    assert not any(buffer.requires_grad for buffer in program.tensors)


def in_lanes(row):
    """Σ v² in float32 as the kernel adds it up: 1,024 lanes, then by halves."""
    padded = np.zeros(-(-len(row) // 1024) * 1024, dtype=np.float32)
    padded[: len(row)] = row
    total = np.zeros(1024, dtype=np.float32)
    for part in padded.reshape(-1, 1024):
        total += part * part
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    return float(total[0])


@pytest.mark.parametrize("width", [700, 2**16, 2**20])
def test_no_row_of_the_matrix_comes_out_longer_than_the_bound(width):
    """Small entries behind large ones are lost to rounding; the aim must leave room for all."""
    row = torch.full((1, width), 2.0**-12 * 0.999)
    row[0, :1024] = 1.0
    like = {"w": torch.zeros(width)}
    aim = 1.0 - slack(like["w"])
    flat = Flattened({"w": [DenseGradient(row)]}, like, aim=aim)
    sums = flat({"w": [DenseGradient(row)]}, torch.ones(1), torch.tensor([True]))
    assert float(sums.values["w"].double().norm()) <= 1.0
    norm = float(row.double().norm())
    factor = np.float32(float(flat._aim) / np.sqrt(in_lanes(row[0].numpy())))
    assert float(factor) * norm * (1 + 2**-23) <= 1.0


@pytest.mark.parametrize(("inputs", "size"), [(784, 1e-20), (2**20, 1e-22)])
def test_squares_that_underflow_do_not_hide_a_gradient(inputs, size):
    a, g = torch.full((1, 1, inputs), size), torch.full((1, 1, 1), 1.6e19)
    forms, like = {"w": [OuterGradient(a, g, (1, inputs))]}, {"w": torch.zeros(1, inputs)}
    for c in (0.01, 1.0):
        flat = Flattened(forms, like, aim=c * (1.0 - slack(like["w"])))
        sums = flat(forms, torch.ones(1), torch.tensor([True]))
        assert 0 < float(sums.values["w"].double().norm()) <= c
        short_sums = short(forms, like, torch.ones(1), torch.tensor([True]), clip=Flat(c))
        assert 0 < float(short_sums.values["w"].double().norm()) <= c


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "betas": (0.8, 0.95)}])
def test_a_fused_adam_is_torchs_own(kind, options):
    """Rate that moves, an eager step in between, a state that is loaded: one count for all."""
    slow, fast = network(), network()
    own, other = (kind(m.parameters(), lr=0.05, **options) for m in (slow, fast))
    update = update_for(other)
    assert update.name == f"fused {kind.__name__}"
    update.prepare()
    luck = torch.Generator().manual_seed(0)
    for step in range(8):
        for optimizer in (own, other):
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)
        grads = [torch.randn(p.shape, generator=luck) for p in slow.parameters()]
        for model in (slow, fast):
            for p, g in zip(model.parameters(), grads):
                p.grad = g.clone()
        own.step()
        if step == 3:
            other.step()  # a batch of another kind goes the eager way
            continue
        if step == 5:
            other.load_state_dict(copy.deepcopy(other.state_dict()))
            update.prepare()
        update.before()
        update.run({p: p.grad for p in fast.parameters()})
    for a, b in zip(slow.parameters(), fast.parameters()):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
        assert torch.equal(own.state[a]["step"], other.state[b]["step"])
        torch.testing.assert_close(other.state[b]["exp_avg_sq"], own.state[a]["exp_avg_sq"])


def test_adams_that_are_not_fused():
    model = network()
    for options in ({"amsgrad": True}, {"lr": torch.tensor(0.1)}):
        assert "not captured" in update_for(torch.optim.Adam(model.parameters(), **options)).name
    uneven = torch.optim.AdamW(model.parameters())
    model[0].weight.grad = torch.ones_like(model[0].weight)
    uneven.step()
    assert update_for(uneven).name == "AdamW, not captured"


def test_equals_the_eager_run_on_the_grid_too(monkeypatch):
    monkeypatch.undo()
    slow, fast = (make(compiled=c) for c in (False, True))
    torch.testing.assert_close(list(walk(fast, 6)), list(walk(slow, 6)), **CELL)
    torch.testing.assert_close(weights(fast), weights(slow), **CELL)

"""Hard cases: empty, ragged, non-finite, frozen, unused, tied, users, coupling, sensitivity."""

import itertools
import math

import pytest
import torch
from tests.clipping.twin import flat
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import noshuffle as ns
from noshuffle.clipping import Flat, Ghost, ModelLoss, PerExample, PerLayer, auto, validate
from noshuffle.clipping.check import UNCOMPILED
from noshuffle.clipping.objective import row_losses
from noshuffle.errors import InvalidInput, Unsupported

ENGINES = [PerExample, Ghost]
both = pytest.mark.parametrize("engine", ENGINES)


def small(dtype=torch.float64):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
    return model, (torch.randn(8, 4, dtype=dtype), torch.randint(3, (8,)))


class Tokens(nn.Module):
    def __init__(self, kind="attention", tie=True):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.kind = kind
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.norm = nn.LayerNorm(4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 9, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x)
        if self.kind == "conv":
            h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        if self.kind == "lstm":
            h = self.lstm(h)[0]
        if self.kind == "attention":
            h = self.attn(h, h, h)[0]
        return self.head(self.norm(h)).transpose(1, 2)


def gradient(model, loss_fn, batch, rows):
    """The plain gradient of the summed losses of some examples, one at a time."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in params.items()}
    for i in rows:
        loss = loss_fn(model(batch[0][i : i + 1]), batch[1][i : i + 1])
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        for name, grad in zip(params, grads):
            total[name] += 0 if grad is None else grad
    return flat(total)


@both
def test_empty_batch(engine):
    model, (x, y) = small()
    got = engine().clipped_sum(model, F.cross_entropy, (x[:0], y[:0]), clip=Flat(1.0))
    assert (got.units, got.nonfinite, got.bound) == (0, 0, 1.0)
    assert {n: v.shape for n, v in got.values.items()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    assert float(flat(got.values).norm()) == 0.0


@both
def test_ragged_batch_of_one_and_padding_weights(engine):
    model, (x, y) = small()
    eng = engine()
    for size in (8, 3, 1):
        want = engine().clipped_sum(model, F.cross_entropy, (x[:size], y[:size]), clip=Flat(0.1))
        mask = (torch.arange(8) < size).float()
        junk = x.clone()
        junk[size:] = math.nan
        got = eng.clipped_sum(model, F.cross_entropy, (junk, y), clip=Flat(0.1), weights=mask)
        torch.testing.assert_close(flat(got.values), flat(want.values))
        assert (got.units, got.nonfinite) == (size, 0)
        torch.testing.assert_close(got.norms[:size], want.norms)
        assert float(got.norms[size:].abs().sum()) == 0.0


@both
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize("place", [0, 5])
def test_nonfinite_example_contributes_exactly_zero(engine, value, place):
    model, (x, y) = small()
    rest = [i for i in range(8) if i != place]
    model[1] = nn.ReLU()
    want = engine().clipped_sum(model, F.cross_entropy, (x[rest], y[rest]), clip=Flat(0.1))
    x[place] = value
    got = engine().clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(0.1))
    assert got.nonfinite == 1
    assert got.bad.nonzero().flatten().tolist() == [place]
    torch.testing.assert_close(flat(got.values), flat(want.values))


@both
@pytest.mark.parametrize("kind", ["conv", "lstm", "attention", "plain"])
def test_nonfinite_gradient_through_every_form(engine, kind):
    torch.manual_seed(0)
    model = Tokens(kind).double()
    batch = (torch.randint(9, (5, 6)), torch.randint(9, (5, 6)), torch.ones(5).double())
    batch[2][2] = math.inf

    def loss(model, x, y, scale):
        return F.cross_entropy(model(x), y, reduction="none").mean(1) * scale

    rows = [0, 1, 3, 4]
    want = engine().clipped_sum(
        model, ModelLoss(loss, by_row=True), tuple(t[rows] for t in batch), clip=Flat(0.1)
    )
    got = engine().clipped_sum(model, ModelLoss(loss, by_row=True), batch, clip=Flat(0.1))
    assert got.nonfinite == 1
    torch.testing.assert_close(flat(got.values), flat(want.values))


@both
def test_zero_gradients_have_factor_one_and_no_nan(engine):
    model, (x, y) = small()
    for p in model.parameters():
        nn.init.zeros_(p)

    def nothing(out, y):
        return (out * 0.0).sum()

    got = engine().clipped_sum(model, nothing, (x, y), clip=Flat(1.0))
    assert got.nonfinite == 0
    assert float(flat(got.values).abs().max()) == 0.0


@both
def test_frozen_and_unused_parameters(engine):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.idle = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)
            self.use_idle = True

        def forward(self, x):
            h = torch.tanh(self.a(x))
            return self.b(h) + (self.idle(h) if self.use_idle else 0.0)

    model, (x, y) = Odd().double(), small()[1]
    model.a.weight.requires_grad_(False)
    eng = engine()
    first = eng.clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(1e6))
    assert "a.weight" not in first.values
    assert "a.bias" in first.values
    torch.testing.assert_close(
        flat(first.values), gradient(model, F.cross_entropy, (x, y), range(8))
    )
    model.use_idle = False  # stale values of the step before must not appear
    second = eng.clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(1e6))
    assert float(second.values["idle.weight"].abs().max()) == 0.0
    torch.testing.assert_close(
        flat(second.values), gradient(model, F.cross_entropy, (x, y), range(8))
    )


@both
def test_scalar_parameter_at_the_root_and_in_a_layer(engine):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.s = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.s

    class Root(Scale):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def forward(self, x):
            return self.lin(x) * self.s

    batch = small()[1]
    for model in (nn.Sequential(nn.Linear(4, 3), Scale()).double(), Root().double()):
        eng = engine()
        got = eng.clipped_sum(model, F.cross_entropy, batch, clip=Flat(1e6))
        torch.testing.assert_close(
            flat(got.values), gradient(model, F.cross_entropy, batch, range(8))
        )
        assert any(v.dim() == 0 for v in got.values.values())
        if engine is Ghost:
            assert eng.fallbacks
    assert "of its own" in auto(Root()).why


@both
@pytest.mark.parametrize("kind", ["conv", "lstm", "attention", "plain"])
@pytest.mark.parametrize("microbatch", [None, 3])
def test_users_are_added_up_before_clipping(engine, kind, microbatch):
    torch.manual_seed(1)
    model = Tokens(kind).double()
    batch = (torch.randint(9, (7, 5)), torch.randint(9, (7, 5)))
    units = torch.tensor([2, 0, 2, 1, 2, 0, 3])
    mask = torch.tensor([1, 1, 1, 1, 0, 1, 0])  # one example of a user, and all of another's
    clip, eng = 0.4, engine(microbatch)  # which looks at the model once
    for reduce in ("sum", "mean"):
        want = 0.0
        for u in range(3):
            rows = [i for i in range(7) if units[i] == u and mask[i]]
            g = gradient(model, F.cross_entropy, batch, rows)
            g = g / (len(rows) if reduce == "mean" else 1)
            want = want + g * min(1.0, clip / float(g.norm()))
        got = eng.clipped_sum(
            model, F.cross_entropy, batch, clip=Flat(clip), units=units, reduce=reduce, weights=mask
        )
        torch.testing.assert_close(flat(got.values), want, rtol=1e-6, atol=1e-9)
        assert (got.units, len(got.norms), len(got.losses)) == (3, 4, 7)


@pytest.mark.parametrize("microbatch", [1, 3, 8, 100])
def test_microbatches_change_nothing(microbatch):
    model, batch = small()
    want = PerExample().clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.3))
    got = PerExample(microbatch).clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.3))
    torch.testing.assert_close(flat(got.values), flat(want.values))
    torch.testing.assert_close(got.norms, want.norms)
    torch.testing.assert_close(got.losses, want.losses)


@both
@pytest.mark.parametrize("kind", ["conv", "lstm", "attention", "plain"])
def test_replacing_one_unit_moves_the_sum_by_at_most_twice_the_bound(engine, kind):
    torch.manual_seed(2)
    model = Tokens(kind)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)  # norms far above the clip norm
    x, y = torch.randint(9, (6, 5)), torch.randint(9, (6, 5))
    eng = engine()  # which looks at the model once
    for users, clip in itertools.product((False, True), (Flat(0.01), PerLayer(0.01))):
        told = {"clip": clip, "units": torch.tensor([0, 0, 1, 1, 2, 2]) if users else None}
        base = eng.clipped_sum(model, F.cross_entropy, (x, y), **told)
        rows = slice(0, 2) if users else slice(0, 1)
        x2, y2 = x.clone(), y.clone()
        x2[rows], y2[rows] = (x2[rows] + 3) % 9, (y2[rows] + 4) % 9
        other = eng.clipped_sum(model, F.cross_entropy, (x2, y2), **told)
        without = torch.tensor([0, 0 if users else 1, 1, 1, 1, 1])
        gone = eng.clipped_sum(model, F.cross_entropy, (x, y), weights=without, **told)
        assert base.bound == pytest.approx(0.01)
        assert float((flat(base.values) - flat(other.values)).norm()) <= 2 * base.bound * (1 + 1e-6)
        assert float((flat(base.values) - flat(gone.values)).norm()) <= base.bound * (1 + 1e-5)
        assert float(base.norms.min()) > 0.05


@both
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_padding_of_a_neighbour_changes_nothing(engine, reduction, smoothing):
    torch.manual_seed(5)
    model = Tokens("attention").double()
    x, y = torch.randint(9, (4, 6)), torch.randint(9, (4, 6))
    loss = nn.CrossEntropyLoss(reduction=reduction, label_smoothing=smoothing)
    before = engine().clipped_sum(model, loss, (x, y), clip=Flat(1.0))
    y2 = y.clone()
    y2[0, 2:] = -100
    after = engine().clipped_sum(model, loss, (x, y2), clip=Flat(1.0))
    assert float(before.norms[0]) != float(after.norms[0])
    torch.testing.assert_close(before.norms[1:], after.norms[1:], rtol=1e-12, atol=0)
    alone = loss(model(x[:1]), y2[:1]).sum()
    torch.testing.assert_close(after.losses[0], alone.detach())


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
        F.cross_entropy,
    ],
)
def test_row_losses_equal_the_criterion_of_one(loss):
    out, y = torch.randn(5, 3, 4), torch.randint(3, (5, 4))
    want = torch.stack([loss(out[i : i + 1], y[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(row_losses(loss, out, (y,)), want)
    for loss2 in (nn.MSELoss(), nn.MSELoss(reduction="sum"), F.mse_loss, F.l1_loss):
        target = torch.randn_like(out)
        want = torch.stack([loss2(out[i : i + 1], target[i : i + 1]) for i in range(5)])
        torch.testing.assert_close(row_losses(loss2, out, (target,)), want)


def test_loss_that_vmap_cannot_do_is_looped():
    out, y = torch.randn(4, 3), torch.randn(4, 3)

    def branching(out, y):
        return (out - y).abs().sum() if float(out.detach().sum()) > 0 else (out - y).square().sum()

    want = torch.stack([branching(out[i : i + 1], y[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(row_losses(branching, out, (y,)), want)


@both
def test_model_that_vmap_cannot_do(engine):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            if x.shape[0] == 1 and x.sum().item() > 0:
                return self.a(x)
            return self.b(x)

    model, batch = Branching().double(), small()[1]
    eng = engine()
    got = eng.clipped_sum(model, F.cross_entropy, batch, clip=Flat(1e6))
    if engine is PerExample:
        torch.testing.assert_close(
            flat(got.values), gradient(model, F.cross_entropy, batch, range(8))
        )
        assert "one example at a time" in eng.fallbacks[0]


def test_coupled_models_are_found_out():
    class Centre(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def forward(self, x):
            return self.lin(x - x.mean(0))

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 3)

        def forward(self, x):
            return F.linear(x, self.lin.weight) + self.lin(x)

    batch = small()[1]
    for model, word in ((Centre(), "an example changes"), (Functional(), "an example changes")):
        model, eng = model.double(), Ghost()
        got = eng.clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.1))
        want = PerExample().clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.1))
        torch.testing.assert_close(flat(got.values), flat(want.values))
        assert word in eng.fallbacks[0]


@both
def test_in_place_activations(engine):
    model, batch = small()
    model[1] = nn.ReLU(inplace=True)
    got = engine().clipped_sum(model, F.cross_entropy, batch, clip=Flat(1e6))
    torch.testing.assert_close(flat(got.values), gradient(model, F.cross_entropy, batch, range(8)))


@both
def test_dropout_draws_a_mask_per_example(engine):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double()
    x, y = torch.ones(6, 4).double(), torch.zeros(6, dtype=torch.long)
    eng = engine()
    got = eng.clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(1.0))
    assert len(set(got.norms.tolist())) == 6
    assert not eng.fallbacks


@both
def test_bfloat16_autocast(engine):
    model, batch = small(torch.float32)
    want = engine().clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eng = engine()
        got = eng.clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.1))
    assert not eng.fallbacks
    assert all(v.dtype == torch.float32 for v in got.values.values())
    assert float((flat(got.values) - flat(want.values)).norm()) < 0.05 * float(
        flat(want.values).norm()
    )


@both
def test_model_loss_with_dictionaries_and_parts_of_the_model(engine):
    model, (x, y) = small()

    def fn(model, inputs, y):
        return F.cross_entropy(model[2](torch.tanh(model[0](inputs["x"]))), y, reduction="none")

    want = engine().clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(0.2))
    for by_row in (True, False):
        eng = engine()
        got = eng.clipped_sum(model, ModelLoss(fn, by_row=by_row), ({"x": x}, y), clip=Flat(0.2))
        torch.testing.assert_close(flat(got.values), flat(want.values))
        assert bool(eng.fallbacks) == (engine is Ghost and not by_row)


@both
def test_compiled_wrapper_and_checkpointing(engine):
    model, batch = small()
    want = engine().clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.2))
    eng = engine()
    wrapped = torch.compile(model, backend="eager")
    for _ in range(2):
        got = eng.clipped_sum(wrapped, F.cross_entropy, batch, clip=Flat(0.2))
        torch.testing.assert_close(flat(got.values), flat(want.values))
    assert eng.fallbacks == [UNCOMPILED]


class Saved(nn.Module):
    """A model whose layers from `first` on are computed again in the backward pass."""

    def __init__(self, inner, *, first, is_reentrant):
        super().__init__()
        self.inner = inner
        self.first = first
        self.is_reentrant = is_reentrant

    def forward(self, x):
        before, after = self.inner[: self.first], self.inner[self.first :]
        return checkpoint(after, before(x), use_reentrant=self.is_reentrant)


@pytest.mark.parametrize("first", [0, 1])
@both
def test_activation_checkpointing(engine, first):
    model, batch = small()
    want = engine().clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.2))
    eng = engine()
    saved = Saved(model, first=first, is_reentrant=False)
    got = eng.clipped_sum(saved, F.cross_entropy, batch, clip=Flat(0.2))
    torch.testing.assert_close(flat(got.values), flat(want.values))
    assert bool(eng.fallbacks) == (engine is PerExample)  # vmap cannot


@both
def test_reentrant_checkpoints_and_sparse_embeddings_are_refused_in_clear_words(engine):
    model, batch = small()
    saved = Saved(model, first=1, is_reentrant=True)
    with pytest.raises(Unsupported, match="pass use_reentrant=False"):
        engine().clipped_sum(saved, F.cross_entropy, batch, clip=Flat(0.2))
    eng = engine()
    saved.is_reentrant = False
    eng.clipped_sum(saved, F.cross_entropy, batch, clip=Flat(0.2))
    saved.is_reentrant = True  # after the model was tried
    with pytest.raises(Unsupported, match="pass use_reentrant=False"):
        eng.clipped_sum(saved, F.cross_entropy, batch, clip=Flat(0.2))
    words = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    tokens = (torch.randint(9, (5, 2)), torch.randint(3, (5,)))
    with pytest.raises(Unsupported, match="leave sparse out"):
        engine().clipped_sum(words, F.cross_entropy, tokens, clip=Flat(0.2))
    words[0].requires_grad_(False)
    engine().clipped_sum(words, F.cross_entropy, tokens, clip=Flat(0.2))


@both
def test_hooks_on_parameters_are_refused_in_clear_words(engine):
    model, batch = small()
    eng = engine()
    eng.clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.2))
    hook = model[0].weight.register_hook(lambda g: g * 0.1)  # after the model was tried
    with pytest.raises(Unsupported, match=r"parameter '0\.weight' has a gradient hook"):
        eng.clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.2))
    with pytest.raises(Unsupported, match="has a gradient hook"):
        validate(model)
    hook.remove()
    model[2].bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(Unsupported, match=r"parameter '2\.bias' has a gradient hook"):
        engine().clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.2))
    model[2].requires_grad_(False)
    eng.clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.2))


def test_auto_says_that_a_whole_model_is_written_out():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x):
            return x @ self.weight

    for model in (Bare(), nn.Sequential(Bare(), nn.Linear(3, 1))):
        engine = auto(model)
        assert isinstance(engine, PerExample)
        assert engine.fallbacks == [engine.why]
        assert engine.why.startswith("whole model written out per example: ")


def test_cross_example_layers_are_refused_by_name():
    with pytest.raises(Unsupported, match=r"GroupNorm\(8, 8\)"):
        validate(nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)))
    with pytest.raises(Unsupported, match="SyncBatchNorm"):
        validate(nn.SyncBatchNorm(8))
    with pytest.raises(Unsupported, match="running statistics"):
        validate(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    for option in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        with pytest.raises(Unsupported, match="mixes examples"):
            validate(nn.Embedding(5, 3, **option))
    with pytest.raises(InvalidInput, match="trainable"):
        validate(nn.ReLU())
    validate(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval())


@both
def test_batch_norm_in_eval_mode_is_a_fixed_map(engine):
    model, batch = small()
    model = nn.Sequential(model[0], nn.BatchNorm1d(6), model[1], model[2]).double().eval()
    got = engine().clipped_sum(model, F.cross_entropy, batch, clip=Flat(1e6))
    torch.testing.assert_close(flat(got.values), gradient(model, F.cross_entropy, batch, range(8)))


@both
def test_bad_input_says_what_to_do(engine):
    model, (x, y) = small()

    def run(batch=(x, y), clip=1.0, **options):
        return engine().clipped_sum(model, F.cross_entropy, batch, clip=Flat(clip), **options)

    with pytest.raises(InvalidInput, match="agree on the number"):
        run((x, y[:3]))
    with pytest.raises(InvalidInput, match="no axis"):
        run((x, torch.tensor(1.0)))
    with pytest.raises(InvalidInput, match=r"0 \(left out\) or 1"):
        run(weights=torch.full((8,), 0.5))
    with pytest.raises(InvalidInput, match="whole number"):
        run(units=torch.ones(8))
    with pytest.raises(InvalidInput, match="reduce"):
        run(reduce="max")
    for bad in (0.0, -1.0, math.nan, math.inf, 1e-20):
        with pytest.raises(InvalidInput, match="clip_norm"):
            run(clip=bad)
    with pytest.raises(InvalidInput, match="must name every layer"):
        engine().clipped_sum(model, F.cross_entropy, (x, y), clip=PerLayer({"0": 1.0}))


@both
def test_per_layer_clips_every_layer_on_its_own(engine):
    model, (x, y) = small()
    spec = PerLayer({"0": 0.03, "2.weight": 0.04, "2.bias": 0.12})
    got = engine().clipped_sum(model, F.cross_entropy, (x[:1], y[:1]), clip=spec)
    assert got.bound == pytest.approx(0.13)
    first = torch.cat([got.values["0.weight"].flatten(), got.values["0.bias"].flatten()])
    assert float(first.norm()) == pytest.approx(0.03)
    assert float(got.values["2.weight"].norm()) == pytest.approx(0.04)
    assert float(got.values["2.bias"].norm()) == pytest.approx(0.12)


@both
@pytest.mark.parametrize("gap", [1e-3, 1e-5, 1e-6])
@pytest.mark.parametrize("embedded", [False, True])
def test_steps_that_nearly_cancel_are_still_clipped(engine, gap, embedded):
    torch.manual_seed(0)
    wide = nn.Embedding(60, 50) if embedded else nn.Linear(60, 50, bias=False)
    x = torch.zeros(4, 2, dtype=torch.long) if embedded else torch.randn(4, 1, 60).expand(4, 2, 60)
    v = torch.randn(50)

    def loss(out, size):
        return (size[:, 0] * (out[:, 0] @ v) - size[:, 1] * (out[:, 1] @ v)).sum()

    eng = engine()
    eng.clipped_sum(
        wide, loss, (x, torch.tensor([[1.0, 0.3]]).expand(4, 2)), clip=Flat(1.0)
    )  # earns its trust here
    for scale in (10.0, 1e3, 1e5):
        sizes = torch.tensor([[scale, scale * (1.0 - gap)]]).expand(4, 2)
        for i in range(4):
            mask = (torch.arange(4) == i).float()
            got = eng.clipped_sum(wide, loss, (x, sizes), clip=Flat(1e-3), weights=mask)
            assert float(flat(got.values).norm()) <= 1e-3
    assert not eng.fallbacks


@both
def test_a_layer_called_as_often_as_the_sequence_is_long(engine):
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x):
            h = x[:, 0]
            for t in range(1, x.shape[1]):
                h = torch.tanh(self.lin(h + x[:, t]))
            return h

    model, eng = Steps().double(), engine()
    for steps in (3, 5, 2):
        batch = (torch.randn(4, steps, 4).double(), torch.randint(4, (4,)))
        got = eng.clipped_sum(model, F.cross_entropy, batch, clip=Flat(1e6))
        torch.testing.assert_close(
            flat(got.values), gradient(model, F.cross_entropy, batch, range(4))
        )
    assert not eng.fallbacks


@both
def test_works_where_gradients_are_switched_off(engine):
    model, batch = small()
    want = engine().clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.2))
    with torch.no_grad():
        got = engine().clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.2))
    torch.testing.assert_close(flat(got.values), flat(want.values))
    assert float(flat(got.values).norm()) > 0.0


def test_adapters_beside_frozen_layers():
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down, self.up = base, nn.Linear(4, 2, bias=False), nn.Linear(2, 6)
            base.requires_grad_(False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model, batch = small()
    model = nn.Sequential(Adapter(model[0]), model[1], model[2].requires_grad_(False)).double()
    eng = auto(model)
    got = eng.clipped_sum(model, F.cross_entropy, batch, clip=Flat(1e6))
    assert isinstance(eng, Ghost)
    assert not eng.fallbacks
    assert set(got.values) == {"0.down.weight", "0.up.weight", "0.up.bias"}
    torch.testing.assert_close(flat(got.values), gradient(model, F.cross_entropy, batch, range(8)))


@pytest.mark.parametrize("width", [100, 1000, 2**16 + 5, 2**21])
def test_small_entries_behind_large_ones_are_not_lost_from_a_norm(width):
    """A float32 sum in few lanes would lose all of them: 1.5 % of the norm at four million."""
    from noshuffle.clipping.factor import SLACK
    from noshuffle.clipping.forms import DenseGradient, OuterGradient

    row = torch.full((2, width), 2.0**-12 * 0.999)
    row[:, :8] = 1.0
    truth = float(row[0].double().norm())
    assert float(DenseGradient(row).squares()[0]) ** 0.5 >= truth * (1 - SLACK)
    pair = OuterGradient(row.unsqueeze(1), row[:, :1000].unsqueeze(1), (min(width, 1000), width))
    truth *= float(row[0, :1000].double().norm())
    assert float(pair.squares()[0]) ** 0.5 >= truth * (1 - SLACK)


class Watching(nn.Module):
    """A layer that remembers something in a buffer whenever it trains."""

    def __init__(self, what, inner=False):
        super().__init__()
        self.what, self.linear = what, nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(())) if inner else 1.0
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        out = self.linear(x) * self.scale
        if self.training and self.what == "mean":
            self.seen.copy_(0.9 * self.seen + 0.1 * out.detach().mean(0))
        if self.training and self.what == "exchanged":
            self.seen = out.detach().mean(0)
        if self.training and self.what == "count":
            self.seen += 1
        if self.training and self.what == "weights":
            self.seen.copy_(self.linear.bias.detach())
        return out


@both
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("what", ["count", "weights"])
def test_buffers_that_know_nothing_of_the_data_may_change(engine, what, inner):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Watching(what, inner)).double()
    batch = (torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,)))
    got = engine().clipped_sum(model, F.cross_entropy, batch, clip=Flat(1e6))
    truth = gradient(model, F.cross_entropy, batch, range(6))
    torch.testing.assert_close(flat(got.values), truth, rtol=1e-9, atol=1e-12)


@both
@pytest.mark.parametrize("clip_norm", [1.0, 0.01, 0.001])
@pytest.mark.parametrize("scale", [1e30, 1e35, 1e36])
def test_factors_too_small_for_float32_do_not_lengthen(engine, scale, clip_norm):
    """0.001 / 1e38 has a few bits left in float32, and the product was 1.6e-4 too long."""
    model = nn.Linear(100_000, 1, bias=False)
    batch = torch.linspace(0.7, 1.0, 100_000).reshape(1, -1), torch.full((1,), scale)
    loss = lambda o, y: o.squeeze(1) * y  # noqa: E731
    found = engine().clipped_sum(model, loss, batch, clip=Flat(clip_norm))
    assert float(torch.linalg.vector_norm(flat(found.values))) <= clip_norm


@pytest.mark.parametrize("engine", [Ghost, PerExample])
def test_a_loss_without_a_gradient_is_refused(engine):
    """Torch refuses its backward pass; here noise alone would be released at every step."""
    model, batch = nn.Linear(3, 2), (torch.randn(4, 3), torch.randint(2, (4,)))

    def cut(outputs, y):
        return F.cross_entropy(outputs.detach(), y)

    with pytest.raises(InvalidInput, match="must depend on the trainable parameters"):
        engine().clipped_sum(model, cut, batch, clip=Flat(1.0))


def test_no_step_is_taken_in_inference_mode():
    model = nn.Linear(3, 2)
    plan = ns.Plan.fit(ns.SinglePass(steps=2), mechanism="tree", noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = ns.privatize(model, optimizer, plan, clip_norm=1.0, batch_size=4)
    x, y = torch.randn(4, 3), torch.randint(2, (4,))
    with torch.inference_mode(), pytest.raises(InvalidInput, match="outside torch"):
        private.step(F.cross_entropy, x, y)
    assert private.steps_released == 0
    with torch.no_grad():  # which a step does without, as it always has
        private.step(F.cross_entropy, x, y)
    assert float(private.outcome.norms.min()) > 0.0


def test_why_says_when_the_whole_model_is_written_out():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.inner(x) * self.scale

    engine = Ghost()
    batch = torch.randn(4, 3), torch.randint(2, (4,))
    engine.clipped_sum(Bare(), F.cross_entropy, batch, clip=Flat(1.0))
    assert "gradients of every example are written out" in engine.why
    assert "parameters of its own" in engine.why
    assert "nothing of size" not in engine.why

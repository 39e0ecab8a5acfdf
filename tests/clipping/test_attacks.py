"""Attempts to make one unit move the clipped sum by more than the clip norm."""

from functools import partial

import pytest
import torch
from tests.clipping.twin import flat
from torch import nn
from torch.nn import functional as F

from noshuffle.clipping import Flat, Ghost, ModelLoss, PerExample
from noshuffle.clipping.forms import OuterGradient
from noshuffle.clipping.per_example import one_at_a_time

WHOLE = "whole model written out per example"


def batch(size=6, *shape):
    torch.manual_seed(0)
    return torch.randn(size, *(shape or (4,))).double(), torch.randint(3, (size,))


def assert_alone(model, loss, rows, *, first=None, change=None, is_found=False, clip=0.05):
    """The sum is that of examples taken one by one, also after `change` and for later batches."""
    engine = Ghost()
    if first is not None:
        engine.clipped_sum(model, loss, first, clip=Flat(clip))
        assert is_found or not engine.fallbacks
    if change is not None:
        change(model)
    got = engine.clipped_sum(model, loss, rows, clip=Flat(clip))
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    want = torch.zeros_like(flat(got.values))
    for i in range(len(rows[0])):
        one = tuple(t[i : i + 1] for t in rows)
        by_row = isinstance(loss, ModelLoss)
        value = loss.fn(model, *one).sum() if by_row else loss(model(one[0]), *one[1:])
        grads = torch.autograd.grad(value, list(params.values()), allow_unused=True)
        own = {
            n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(params.items(), grads)
        }
        norm = float(flat(own).norm())
        want += flat(own) * min(1.0, clip / max(norm, 1e-300))
    torch.testing.assert_close(flat(got.values), want, rtol=1e-5, atol=1e-9)
    assert is_found is any(WHOLE in note for note in engine.fallbacks)


class Mixed(nn.Module):
    """One linear layer after a function of the batch; `gate` may start at zero."""

    def __init__(self, mix, *, gate=None):
        super().__init__()
        self.own, self.mixed, self.mix = nn.Linear(4, 3), nn.Linear(4, 3), mix
        if gate is not None:
            nn.init.constant_(self.mixed.weight, gate)
            nn.init.constant_(self.mixed.bias, gate)

    def forward(self, x):
        return self.own(x) + self.mixed(self.mix(x))


def test_an_example_that_sees_only_those_before_it():
    model = Mixed(lambda x: x.cumsum(0)).double()
    assert_alone(model, F.cross_entropy, batch(), is_found=True)


def test_a_frozen_layer_that_runs_along_the_batch():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(4, 5).requires_grad_(False), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0].mean(1))

    assert_alone(Late().double(), F.cross_entropy, batch(6, 5, 4), is_found=True)


def test_mixing_behind_a_gate_that_starts_at_zero():
    def open_it(model):
        nn.init.normal_(model.mixed.weight)

    model = Mixed(lambda x: x - x.mean(0), gate=0.0).double()
    assert_alone(model, F.cross_entropy, batch(), first=batch(), change=open_it, is_found=True)


@pytest.mark.parametrize("alike", [2, 6])
def test_copies_in_the_first_batch_do_not_hide_mixing(alike):
    x, y = batch()
    x[:alike], y[:alike] = x[0].clone(), y[0].clone()
    model = Mixed(lambda x: x - x.mean(0)).double()
    assert_alone(model, F.cross_entropy, batch(), first=(x, y), is_found=True)


def test_a_batch_of_equal_tokens_is_exchanged_for_zeros():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(12, 3)).double()
    engine, same = Ghost(), torch.ones(4, 3, dtype=torch.long)
    engine.clipped_sum(model, F.cross_entropy, (same, same[:, 0]), clip=Flat(1.0))
    assert not engine.fallbacks
    mixing = Mixed(lambda x: x - x.mean(0)).double()
    x, y = torch.ones(4, 4).double(), torch.zeros(4, dtype=torch.long)
    engine.clipped_sum(mixing, F.cross_entropy, (x, y), clip=Flat(1.0))
    assert WHOLE in engine.fallbacks[0]


def test_weak_mixing_in_half_precision():
    x, y = batch()
    model, engine = Mixed(lambda x: x + 0.05 * x.mean(0)).bfloat16(), Ghost()
    engine.clipped_sum(model, F.cross_entropy, (x.bfloat16(), y), clip=Flat(1.0))
    assert WHOLE in engine.fallbacks[0]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_mean_over_the_labels_of_the_batch(dropout):
    def mean(model, x, y):
        each = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
        return each.sum(1) / (y != -100).sum()

    x, y = torch.randn(6, 5, 4).double(), torch.randint(3, (6, 5))
    engine, model = Ghost(), nn.Sequential(nn.Linear(4, 3), nn.Dropout(dropout)).double()
    engine.clipped_sum(model, ModelLoss(mean, by_row=True), (x, y), clip=Flat(1.0))
    assert WHOLE in engine.fallbacks[0]
    assert model[1].training


class Turned(nn.Module):
    """Rows lie in another order for sequences of six."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.inner(x.transpose(0, 1)).transpose(0, 1) if x.shape[1] == 6 else self.inner(x)
        return self.head(torch.tanh(h).mean(1))


def test_rows_that_lie_otherwise_in_a_later_batch():
    (x, y), (longer, _) = batch(3, 5, 4), batch(3, 6, 4)
    assert_alone(Turned().double(), F.cross_entropy, (longer, y), first=(x, y), is_found=True)


@pytest.mark.parametrize("away", [1, 4])
def test_an_expert_that_saw_all_tokens_in_the_first_batch(away):
    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            rows = x.flatten(0, 1)
            mine, out = rows[:, 0] > -5.0, rows.clone()
            out[mine] = torch.tanh(self.inner(rows[mine]))
            return self.head(out.view_as(x).mean(1))

    x, y = batch(4, 5, 4)
    later = x.clone()
    later[0, :away, 0] = -9.0
    model = Expert().double()
    assert_alone(model, F.cross_entropy, (later, y), first=(x, y), is_found=True)


class Packed(nn.Module):
    """Padding is left out before the layers, and put back after them."""

    def __init__(self):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        there = x != 0
        out = self.inner.weight.new_zeros(*x.shape, 6)
        out[there] = torch.tanh(self.inner(self.embed(x)[there]))
        return self.head(out.mean(1))


def test_tokens_without_their_padding():
    """As many tokens for each example, on average, as if there were one row less of padding."""
    y = torch.tensor([0, 1, 2, 0])
    later = torch.randint(1, 9, (4, 6))
    later[0, 2:] = 0
    first = torch.randint(1, 9, (4, 5))
    assert_alone(Packed().double(), F.cross_entropy, (later, y), first=(first, y), is_found=True)


@pytest.mark.parametrize("kind", ["linear", "recurrent"])
def test_examples_in_the_order_of_their_lengths(kind):
    """In the first batch all lengths are the same, and the order that of the batch."""

    class InOrder(nn.Module):
        def __init__(self):
            super().__init__()
            layers = {"linear": nn.Linear(4, 4), "recurrent": nn.GRU(4, 4, batch_first=True)}
            self.inner, self.head = layers[kind], nn.Linear(4, 3)

        def forward(self, x):
            order = x[:, 0, 0].argsort(descending=True, stable=True)
            h = self.inner(x[order])
            h = h if isinstance(h, torch.Tensor) else h[0]
            return self.head(torch.tanh(h)[order.argsort()].mean(1))

    (x, y), (later, _) = batch(5, 3, 4), batch(5, 3, 4)
    x[:, 0, 0] = 1.0
    model = InOrder().double()
    assert_alone(model, F.cross_entropy, (later, y), first=(x, y), is_found=True)


@pytest.mark.parametrize(("most", "size"), [(8, 12), (13, 14), (40, 41)])
def test_mixing_of_large_batches_only(most, size):
    class Centred(nn.Module):
        def forward(self, h):
            return h - h.mean(0) if len(h) > most else h

    model = nn.Sequential(nn.Linear(4, 5), Centred(), nn.Tanh(), nn.Linear(5, 3)).double()
    assert_alone(model, F.cross_entropy, batch(size), is_found=True)


def test_examples_beyond_a_capacity_are_left_out():
    """As experts do that take so many tokens of a batch and no more."""

    class First(nn.Module):
        def forward(self, h):
            return h * (torch.arange(len(h)) < 15)[:, None]

    model = nn.Sequential(nn.Linear(4, 5), First(), nn.Tanh(), nn.Linear(5, 3)).double()
    assert_alone(model, F.cross_entropy, batch(20), is_found=True)


def test_a_model_that_keeps_many_examples_apart_is_not_written_out():
    for random in (nn.Identity(), nn.Dropout(0.5)):
        model, engine = nn.Sequential(nn.Linear(4, 5), random, nn.Linear(5, 3)), Ghost()
        for size in (13, 40, 80):
            x, y = batch(size)
            x[3] = torch.nan
            engine.clipped_sum(model, F.cross_entropy, (x.float(), y), clip=Flat(0.05))
        assert not engine.fallbacks


class Divided(torch.autograd.Function):
    """Nothing, but gradients are divided by the number of examples on their way back."""

    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return g / len(g)


class LargeOnly(torch.autograd.Function):
    """Nothing, but in large batches the rows are in each other's gradients."""

    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return g * (1 + ctx.saved_tensors[0].mean(0)) if len(g) > 12 else g


@pytest.mark.parametrize(("kind", "value"), [("square", 1e30), ("root", 0.0), ("", 1e25)])
@pytest.mark.parametrize("place", [0, 7, 14])
def test_one_example_does_not_hide_mixing_on_the_way_back(kind, value, place):
    """Its gradient is not finite, which 0·∞ makes that of all others, or they are as nothing."""

    class Own(nn.Module):
        def forward(self, h):
            if kind == "root":
                h = h / (h.square().sum(1, keepdim=True).sqrt() + 1e-3)
            return LargeOnly.apply(h.square() if kind == "square" else h)

    model = nn.Sequential(nn.Linear(4, 5, bias=False), Own(), nn.Linear(5, 3))
    engine, (x, y) = Ghost(), batch(15)
    good = x.clone()
    x[place] = value
    for rows in (x, good):  # where nothing is finite nothing is decided, and the next one is asked
        engine.clipped_sum(model, F.cross_entropy, (rows.float(), y), clip=Flat(0.05))
        assert engine.fallbacks
    assert any(WHOLE in note for note in engine.fallbacks)


@pytest.mark.parametrize("label", [0, 1, 2])
def test_a_wide_layer_is_not_written_out_for_a_label(label):
    """A gradient of zeros beside inputs 10⁴ times as large: what may have vanished is added."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 3))
    engine, y = Ghost(), torch.tensor([0, label, 2, 1])
    engine.clipped_sum(model, F.cross_entropy, (torch.randn(4, 1024), y), clip=Flat(1.0))
    assert engine.fallbacks == []


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_gradient_that_is_divided_by_the_number_of_examples(rate):
    class Own(nn.Module):
        def forward(self, h):
            return Divided.apply(F.dropout(h, rate, self.training))

    model, engine = nn.Sequential(nn.Linear(4, 5), Own(), nn.Linear(5, 3)).double(), Ghost()
    engine.clipped_sum(model, F.cross_entropy, batch(), clip=Flat(0.05))
    assert WHOLE in engine.fallbacks[0]


class Recall(nn.Module):
    """Adds something of its last input to the present one."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.last, self.calls = kind, None, 0

    def forward(self, h):
        self.calls += 1
        last, self.last = self.last, h.detach()
        if self.kind == "number":
            self.last = float(h.detach().mean())
        if last is None or self.kind == "shown":
            return h
        return h + (last if self.kind == "number" else last.mean(0))


@pytest.mark.parametrize("engine", [Ghost, PerExample, partial(PerExample, 2)])
@pytest.mark.parametrize("kind", ["tensor", "number"])
def test_a_model_that_remembers_the_example_before_forgets_it(kind, engine):
    """An example would move the gradients of those after it, by several clip norms."""
    model = nn.Sequential(nn.Linear(4, 5), Recall(kind), nn.Tanh(), nn.Linear(5, 3)).double()
    plain = nn.Sequential(model[0], nn.Tanh(), model[3])
    for _ in range(2):
        got = engine().clipped_sum(model, F.cross_entropy, batch(), clip=Flat(0.1))
        want = engine().clipped_sum(plain, F.cross_entropy, batch(), clip=Flat(0.1))
        torch.testing.assert_close(flat(got.values), flat(want.values))


def test_what_is_kept_to_be_looked_at_is_no_mixing():
    model = nn.Sequential(nn.Linear(4, 5), Recall("shown"), nn.Tanh(), nn.Linear(5, 3)).double()
    assert_alone(model, F.cross_entropy, batch())


def test_a_loss_that_counts_its_calls_is_not_taken_for_memory():
    calls = []

    def loss(out, y):
        calls.append(1)
        return F.cross_entropy(out, y) * (1.0 + 0.1 * len(calls))

    model = nn.Linear(4, 3).double()
    got = PerExample().clipped_sum(model, loss, batch(), clip=Flat(0.1))
    assert got.units == 6


def test_one_example_that_decides_how_often_a_layer_is_used():
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            h = torch.tanh(self.inner(x.double()))
            return self.head(torch.tanh(self.inner(h)) if int(x.max()) > 5 else h)

    y, x = batch()[1], torch.arange(24).reshape(6, 4) % 5
    later = x.clone()
    later[0, 0] = 9
    assert_alone(Again().double(), F.cross_entropy, (later, y), first=(x, y), is_found=True)


class Normalised(torch.autograd.Function):
    """Nothing, but large gradients of a batch are scaled down together."""

    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return g / g.norm().clamp(min=1.3)


def turned(h, by):
    """The rows of a batch, begun `by` places later."""
    return h[(torch.arange(len(h)) + by) % len(h)]


class Sudden(nn.Module):
    """A model that keeps examples apart until one of them is large, or not a number."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.head, self.kind, self.shift = nn.Linear(4, 4), nn.Linear(4, 3), kind, 0.0

    def forward(self, x):
        top = x.detach().abs().amax()
        if self.kind == "branch" and float(top) > 50:
            x = x / 255
        if self.kind == "factor":
            x = x * torch.where(top > 50, 1 / 255, 1.0)
        if self.kind == "order":
            by = (top > 50).long()
            return self.head(turned(torch.tanh(self.inner(turned(x, by))), -by))
        h = torch.tanh(self.inner(x - self.shift))
        if self.kind == "attribute" and float(top) > 50:
            self.shift = 1.0
        if self.kind == "nan" and not h.isfinite().all():
            h = torch.zeros_like(h)
        if self.kind == "outside":  # for large examples the weights are used once more
            h = h + (x.abs().amax(1, keepdim=True) > 50) * F.linear(x / 60, self.inner.weight)
        return self.head(Normalised.apply(h) if self.kind == "backward" else h)


@pytest.mark.parametrize("kind", ["branch", "factor", "order", "nan", "backward"])
def test_what_an_extreme_example_sets_off(kind):
    (x, y), later = batch(), batch()[0]
    later[2] = torch.nan if kind == "nan" else 60.0
    model, engine = Sudden(kind).double(), Ghost()
    engine.clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(0.05))
    got = engine.clipped_sum(model, F.cross_entropy, (later, y), clip=Flat(0.05))
    want = PerExample().clipped_sum(model, F.cross_entropy, (later, y), clip=Flat(0.05))
    torch.testing.assert_close(got.values, want.values)
    assert "written out per example" in engine.fallbacks[0]


@pytest.mark.parametrize("engine", [Ghost, PerExample])
def test_what_an_extreme_example_leaves_behind_is_gone(engine):
    model, (x, y) = Sudden("attribute").double(), batch()
    x[2] = 60.0
    engine().clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(0.05))
    assert model.shift == 0.0


def test_a_layer_replaced_after_the_trial_is_seen():
    def replace(model):
        model[0] = nn.Linear(4, 4).double()

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    assert_alone(model, F.cross_entropy, batch(), first=batch(), change=replace)


def test_an_input_changed_in_place_after_its_layer():
    class Rewrites(nn.Module):
        """Autocast keeps a copy of the input for autograd, so that torch does not complain."""

        def __init__(self):
            super().__init__()
            self.first, self.conv, self.head = nn.Linear(4, 4), nn.Conv1d(5, 5, 1), nn.Linear(4, 3)
            self.is_rewriting = False

        def forward(self, x):
            h = torch.tanh(self.first(x)).clone()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                u = self.conv(h)
                if self.is_rewriting:
                    h.mul_(1e-3)
            return self.head((u.float() + h).mean(1))

    x, y = batch(6, 5, 4)
    model, engine = Rewrites(), Ghost()
    engine.clipped_sum(model, F.cross_entropy, (x.float(), y), clip=Flat(0.05))
    assert not engine.fallbacks
    model.is_rewriting = True
    got = engine.clipped_sum(model, F.cross_entropy, (x.float(), y), clip=Flat(0.05))
    want = PerExample().clipped_sum(model, F.cross_entropy, (x.float(), y), clip=Flat(0.05))
    assert "changed in place" in engine.fallbacks[0]
    torch.testing.assert_close(got.values, want.values, rtol=0.02, atol=1e-5)


@pytest.mark.parametrize("kind", [nn.Linear, partial(nn.Conv1d, kernel_size=1)])
def test_a_gradient_changed_by_a_hook(kind):
    """Norm and sum are of what the hook of a tensor has made of it."""

    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.head = kind(4, 4), nn.Linear(20 if kind is not nn.Linear else 4, 3)

        def forward(self, x):
            h = self.first(x)
            if h.requires_grad:
                h.register_hook(lambda g: 30.0 * g)
            return self.head(torch.tanh(h).flatten(1))

    rows = batch(6, 4, 5) if kind is not nn.Linear else batch()
    assert_alone(Hooked().double(), F.cross_entropy, rows)


@pytest.mark.parametrize("kind", ["attention", "lstm"])
def test_windows_of_a_sequence_fall_back(kind):
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
            self.run, self.head = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            w = x.reshape(-1, 3, 4)
            h = self.attend(w, w, w)[0] if kind == "attention" else self.run(w)[0]
            return self.head(h.reshape(len(x), -1, 4).mean(1))

    assert_alone(Windows().double(), F.cross_entropy, batch(4, 6, 4), is_found=True)


@pytest.mark.parametrize("steps", [1, 8])
@pytest.mark.parametrize(
    ("of_input", "of_gradient"), [(3e-24, 1e18), (1e18, 3e-24), (1e-22, 1e17), (1e-22, 3e17)]
)
def test_squares_that_vanish_are_still_clipped(steps, of_input, of_gradient):
    """An input so small that its square is zero, times a gradient so large that it matters."""

    def loss(model, x, y):
        return (model(x) * y).flatten(1).sum(1)

    torch.manual_seed(0)
    model, engine = nn.Linear(64, 64, bias=False), Ghost()
    x, y = torch.rand(4, steps, 64), torch.rand(4, steps, 64)
    engine.clipped_sum(model, ModelLoss(loss, by_row=True), (x, y), clip=Flat(1.0))
    form = OuterGradient(x * of_input, y * of_gradient, (64, 64))
    truth = torch.bmm(form.g.double().mT, form.a.double()).flatten(1).norm(dim=1)
    assert steps == 1 or not form.is_small()
    assert bool((form.squares().double().sqrt() >= truth * (1.0 - 1e-6)).all())
    got = engine.clipped_sum(
        model,
        ModelLoss(loss, by_row=True),
        (x * of_input, y * of_gradient),
        clip=Flat(1e-5),
        weights=torch.tensor([1, 0, 0, 0]),
    )
    assert not engine.fallbacks
    assert float(flat(got.values).norm()) <= 1e-5


def rows_of_their_own(model, x, y):
    return F.cross_entropy(model(x), y, reduction="none")


def rows_of_the_batch(model, x, y):
    return rows_of_their_own(model, x, y) * x.mean()


def wrapped(fn):
    def inner(*given):
        return fn(*given)

    return inner


@pytest.mark.parametrize("wrap", [partial, wrapped])
def test_a_second_loss_in_the_same_wrapper_is_tried_too(wrap):
    model, engine = nn.Linear(4, 3).double(), Ghost()
    for fn, is_good in ((rows_of_their_own, True), (rows_of_the_batch, False)):
        engine.clipped_sum(model, ModelLoss(wrap(fn), by_row=True), batch(), clip=Flat(1.0))
        assert bool(engine.fallbacks) != is_good


def test_what_an_example_writes_into_a_buffer_is_not_seen_by_the_next():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("middle", torch.zeros(4))
            self.head = nn.Linear(4, 3)

        def forward(self, x):
            self.middle.mul_(0.5).add_(0.5 * x.detach().mean(0))
            return self.head(x - self.middle)

    model, (x, y) = Centred().double(), batch()
    other = x.clone()
    other[0] += 3.0
    found = []
    for rows in (x, other):
        model.middle.zero_()
        found.append(one_at_a_time(model, F.cross_entropy, (rows, y))[0]["head.weight"])
    torch.testing.assert_close(found[0][1:], found[1][1:])
    assert not torch.equal(found[0][0], found[1][0])
    engine = Ghost()
    engine.clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(1.0))
    assert WHOLE in engine.fallbacks[0]
    assert not model.middle.any()


@pytest.mark.parametrize("engine", [Ghost, PerExample])
def test_a_layer_at_two_places_keeps_its_parameters(engine):
    """Written out per example, it was left with dead tensors, which no optimizer moves."""
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 3)).double()
    own = list(model.parameters())
    engine().clipped_sum(model, F.cross_entropy, batch(), clip=Flat(0.1))
    assert all(p is q for p, q in zip(own, model.parameters(), strict=True))

"""Half precision: sums match autograd's, and no contribution is longer than the clip norm."""

import math

import pytest
import torch
from tests.clipping.twin import flat, loop
from torch import nn
from torch.nn import functional as F

import noshuffle as ns
from noshuffle.clipping import Flat, Ghost, ModelLoss, PerExample, gram
from noshuffle.clipping.forms import OuterGradient, RowGradient, merge, squares
from noshuffle.clipping.products import aligned, bmm, mm, roundoff, weighted

HALF = [torch.bfloat16, torch.float16]
half = pytest.mark.parametrize("dtype", HALF)


class Block(nn.Module):
    """A transformer block with tied embeddings, long enough for Gram matrices."""

    def __init__(self, tie):
        super().__init__()
        self.token, self.place = nn.Embedding(40, 32), nn.Embedding(12, 32)
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.last, self.head = nn.RMSNorm(32), nn.Linear(32, 40, bias=not tie)
        if tie:
            self.head.weight = self.token.weight

    def forward(self, x):
        h = self.token(x) + self.place(torch.arange(x.shape[1]))
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(h)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(self.last(h + self.out(mixed.transpose(1, 2).flatten(2))))


def token_losses(out, y):
    return F.cross_entropy(out.float().flatten(0, 1), y.flatten(), reduction="none")


def rows(model, x, y):
    return token_losses(model(x), y).view(len(x), -1).mean(1)


def cast(model, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return rows(model, x, y)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
@pytest.mark.parametrize("mode", ["fast", "lean"])
def test_sums_match_the_loop_in_the_same_precision(how, tie, mode):
    torch.manual_seed(0)
    model = Block(tie)
    model = model.bfloat16() if how == "bfloat16" else model
    loss = ModelLoss(rows if how == "bfloat16" else cast, by_row=True)
    batch = (torch.randint(40, (6, 12)), torch.randint(40, (6, 12)))
    truth, norms, norm = loop(model, loss, batch)
    engine = Ghost(mode=mode)
    got = engine.clipped_sum(model, loss, batch, clip=Flat(norm))
    assert not engine.fallbacks
    assert float((flat(got.values) - flat(truth)).norm()) < 0.02 * float(flat(truth).norm())
    torch.testing.assert_close(got.norms, norms, rtol=0.02, atol=0.0)
    assert all(v.dtype == torch.float32 for v in got.values.values())
    for i in (0, 3, 5):  # what one example contributes, alone
        alone = engine.clipped_sum(
            model, loss, batch, clip=Flat(0.05), weights=(torch.arange(6) == i).float()
        )
        assert 0.049 <= float(flat(alone.values).norm()) <= 0.05


def random_pair(kind, dtype, steps=24, i=40, o=56):
    """Inputs and output gradients of four examples: independent, alike, or nearly cancelling."""
    a, g = torch.randn(4, steps, i), torch.randn(4, steps, o)
    if kind == "alike":
        a, g = a[:, :1] + 0.01 * a, g[:, :1] + 0.01 * g
    if kind == "cancelling":
        sign = torch.tensor([1.0, -1.0]).repeat(steps // 2).reshape(1, -1, 1)
        a, g = a[:, :1].expand(-1, steps, -1), sign * g[:, :1] + 0.003 * g
    return a.to(dtype), g.to(dtype)


def true_norm(a, g):
    return torch.bmm(g.double().mT, a.double()).flatten(1).norm(dim=1)


@half
@pytest.mark.parametrize("kind", ["independent", "alike", "cancelling"])
def test_norms_are_not_too_small_and_scaled_products_stay_inside(kind, dtype):
    torch.manual_seed(1)
    for steps in (1, 2, 16):
        a, g = random_pair(kind, dtype, steps=max(steps, 2))
        a, g = a[:, :steps], g[:, :steps]
        form = OuterGradient(a, g, (56, 40))
        assert steps == 1 or not form.is_small()
        found, truth = form.squares().double().sqrt(), true_norm(a, g)
        assert bool((found >= truth).all())
        if kind != "cancelling":
            assert bool((found <= truth * 1.01).all())
        factors = 0.3 / found
        # what a GPU multiplies: the factor goes in, and the result is rounded to half precision
        small = (a.float() * factors.reshape(-1, 1, 1).float()).to(dtype)
        assert bool((true_norm(small, g) <= 0.3 * (1.0 + 1e-6)).all())


@half
def test_tied_norms_are_not_too_small(dtype):
    torch.manual_seed(2)
    for kind in ("independent", "alike"):
        a, g = random_pair(kind, dtype)
        index = torch.randint(56, (4, 24))
        h = torch.randn(4, 24, 40).to(dtype)
        forms = merge([RowGradient(index, h, (56, 40)), OuterGradient(a, g, (56, 40))])
        truth = sum(f.dense().double() for f in forms).flatten(1).norm(dim=1)
        found = squares(forms).double().sqrt()
        assert bool((found >= truth).all())
        assert bool((found <= truth * 1.01).all())


@half
def test_products_are_wide(dtype):
    torch.manual_seed(0)
    x, y = torch.randn(3, 5, 4).to(dtype), torch.randn(3, 5, 7).to(dtype)
    f = torch.rand(3).double()
    assert bmm(x.mT, y).dtype == mm(x[0].mT, y[0]).dtype == torch.float32
    torch.testing.assert_close(bmm(x.mT, y), torch.bmm(x.float().mT, y.float()))
    want = torch.einsum("b,bto,bti->oi", f.float(), x.float(), y.float())
    torch.testing.assert_close(weighted(x, y, f), want)
    torch.testing.assert_close(weighted(y, x, f), want.mT)
    assert roundoff(x) == 0.5 * torch.finfo(dtype).eps
    assert aligned(x) is x
    for one, other in zip(gram.sums(x, y), gram.sums(x.float(), y.float())):
        torch.testing.assert_close(one, other)


def test_sums_in_half_precision_would_break_the_bound():
    """Why sums are float32: ten thousand small contributions, rounded, swallow one example."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    x = torch.ones(600, 1, dtype=torch.bfloat16)
    loss = ModelLoss(lambda model, x: model(x).float()[:, 0], by_row=True)
    for engine in (Ghost(), Ghost(mode="lean"), PerExample()):
        all_of_them = engine.clipped_sum(model, loss, (x,), clip=Flat(1.0))
        without = engine.clipped_sum(model, loss, (x[:-1],), clip=Flat(1.0))
        change = float(all_of_them.values["weight"] - without.values["weight"])
        assert 0.98 <= change <= 1.0  # in bfloat16: 0 or 4


def test_early_norms_are_the_norms_of_users_too():
    torch.manual_seed(0)
    model, loss = Block(False).bfloat16(), ModelLoss(rows, by_row=True)
    batch = (torch.randint(40, (6, 12)), torch.randint(40, (6, 12)))
    alone = Ghost().clipped_sum(model, loss, batch, clip=Flat(0.1))
    users = Ghost().clipped_sum(model, loss, batch, clip=Flat(0.1), units=torch.arange(6))
    torch.testing.assert_close(alone.norms, users.norms, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("mode", ["fast", "lean"])
def test_a_bfloat16_model_trains_and_its_noise_is_added_in_float32(mode, monkeypatch):
    torch.manual_seed(0)
    model = Block(True).bfloat16()
    plan = ns.Plan.fit(ns.SinglePass(steps=3), mechanism="tree", noise_multiplier=1.0)
    private = ns.privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        clip_norm=1.0,
        batch_size=6,
        engine=Ghost(mode=mode),
    )
    seen = []
    add = private._parts.noise.add_

    def watched(values, **options):
        seen.extend(v.dtype for v in values.values())
        return add(values, **options)

    monkeypatch.setattr(private._parts.noise, "add_", watched)
    before = model.qkv.weight.detach().clone()
    x, y = torch.randint(40, (2, 6, 12))
    private.step(ModelLoss(rows, by_row=True), x, y)
    assert set(seen) == {torch.float32}
    assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
    assert not torch.equal(before, model.qkv.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("place", [0, 1])
def test_one_example_does_not_decide_how_the_others_are_added_up(dtype, place: int) -> None:
    """A huge one in the first batch had it written out per example, which rounds all otherwise."""
    sums, draw = [], torch.Generator().manual_seed(3)
    x = torch.randn(6, 5, 1, generator=draw, dtype=torch.float64)
    y = torch.randn(6, 2, generator=draw, dtype=torch.float64)
    model = Averaged()
    for value in (1.0, 1e30 if dtype is torch.float32 else 3e38):
        rows = x.clone()
        rows[place] = value
        engine = Ghost()
        found = engine.clipped_sum(
            model.to(dtype),
            lambda out, want: ((out - want) ** 2).sum(),
            (rows.to(dtype), y.to(dtype)),
            clip=Flat(0.1),
        )
        assert engine.fallbacks == []
        sums.append(torch.cat([part.double().flatten() for part in found.values.values()]))
    moved = float((sums[0] - sums[1]).norm()) / 0.1
    assert moved <= 1 + 1e-5


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(1, 16, bias=False)
        self.out = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.first(x) ** 2).mean(1)


class Rooted(Averaged):
    """A gradient that is not finite where all inputs are zero, and a loss that is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.out(h / (h.square().sum(-1, keepdim=True).sqrt() + 1e-3)).mean(1)


class Bounded(Averaged):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.first(x))).mean(1)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("kind", "value"), [(Rooted, 0.0), (Rooted, math.nan), (Bounded, 1e19), (Bounded, -1e30)]
)
def test_an_example_with_a_finite_loss_does_not_decide_it_either(
    kind, value: float, dtype, place: int
) -> None:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(40, 5, 1, generator=draw)
    y = torch.randint(2, (40,), generator=draw)
    sums, model = [], kind().to(dtype)
    for odd in (math.nan, value):
        rows = x.clone()
        rows[place] = odd
        engine = Ghost()
        batch = (rows.to(dtype), y)
        found = engine.clipped_sum(model, nn.CrossEntropyLoss(), batch, clip=Flat(0.1))
        assert engine.fallbacks == []
        sums.append(torch.cat([part.double().flatten() for part in found.values.values()]))
    assert float((sums[0] - sums[1]).norm()) <= 0.1 * (1 + 1e-5)

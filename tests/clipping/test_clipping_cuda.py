"""Clipping on a GPU: kernels against their plain forms, half precision, real memory limits."""

import pytest
import torch
from tests.clipping.twin import flat
from torch import nn
from torch.nn import functional as F

from noshuffle.clipping import Flat, Ghost, ModelLoss, PerExample, gpu_kernels, gram
from noshuffle.clipping.forms import OuterGradient
from noshuffle.clipping.products import aligned, weighted

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
CUDA = "cuda"


@pytest.fixture(autouse=True)
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def true_squares(a, g):
    return torch.bmm(g.double().mT, a.double()).square().sum((1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 33, 64, 64), (2, 128, 100, 200), (2, 300, 768, 1001)])
@pytest.mark.parametrize("kind", ["independent", "alike"])
def test_kernel_norms_are_not_too_small(dtype, shape, kind):
    torch.manual_seed(0)
    b, t, i, o = shape
    a, g = torch.randn(b, t, i, device=CUDA), torch.randn(b, t, o, device=CUDA)
    if kind == "alike":
        a, g = a[:, :1] + 0.01 * a, g[:, :1] + 0.01 * g
    a, g = a.to(dtype), g.to(dtype)
    assert gpu_kernels.HAS_TRITON
    assert gram.has_kernel(a, g)
    found, truth = gram.squares(a, g), true_squares(a, g)
    slack = 2.0**-8 if dtype == torch.float32 else 0.0  # TF32 is provided for by the clip norm
    assert bool((found >= truth * (1.0 - slack)).all())
    assert bool((found <= truth * 1.02).all())
    plain = gram.bounded(a, g, gram.rounding_tolerance(a, g))
    torch.testing.assert_close(found, plain, rtol=4e-3, atol=0.0)
    turned = gram.squares(a.mT.contiguous().mT, g)
    torch.testing.assert_close(turned, found, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weighted_sums_of_rows_of_odd_length(dtype):
    torch.manual_seed(0)
    a, g = (torch.randn(3, 40, w, device=CUDA).to(dtype) for w in (64, 1001))
    factors = torch.tensor([0.3, 1.0, 0.0], device=CUDA).double()
    wide = aligned(g)
    assert wide.shape[2] % 64 == 0
    torch.testing.assert_close(gpu_kernels.rescale(a, factors.float())[1], a[1])
    want = torch.einsum("b,bto,bti->oi", factors.float(), g.float(), a.float())
    got = OuterGradient(a, wide, (1001, 64), (1001, 64)).total(factors)
    assert got.dtype == torch.float32
    assert float((got - want).norm() / want.norm()) < 4e-3
    assert float((weighted(a, g, factors) - want.mT).norm() / want.norm()) < 4e-3
    for i in range(3):  # a contribution alone
        form = OuterGradient(a[i : i + 1], wide[i : i + 1], (1001, 64), (1001, 64))
        alone = form.total(0.1 / form.squares().sqrt())
        assert 0.098 <= float(alone.double().norm()) <= 0.1


class Net(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.token = nn.Embedding(601, 128)
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 256), nn.Linear(256, 128)
        self.head = nn.Linear(128, 601, bias=not tie)
        if tie:
            self.head.weight = self.token.weight

    def forward(self, x):
        h = self.token(x)
        return self.head(h + self.down(F.gelu(self.up(self.norm(h)))))


def rows(model, x, y):
    each = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten(), reduction="none")
    return each.view(len(x), -1).mean(1)


def cast(model, x, y):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return rows(model, x, y)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("how", ["bfloat16", "autocast", "tf32", "float32"])
@pytest.mark.parametrize("mode", ["fast", "lean", "auto"])
def test_sums_match_the_loop(how, tie, mode):
    if how == "float32":
        torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    model = Net(tie).to(CUDA)
    model = model.bfloat16() if how == "bfloat16" else model
    loss = ModelLoss(cast if how == "autocast" else rows, by_row=True)
    x, y = torch.randint(601, (2, 8, 100), device=CUDA)
    engine = Ghost(mode=mode)
    got = engine.clipped_sum(model, loss, (x, y), clip=Flat(0.01))
    total, norms = 0.0, []
    for i in range(8):
        value = loss.fn(model, x[i : i + 1], y[i : i + 1]).sum()
        grads = torch.autograd.grad(value, list(model.parameters()))
        grad = torch.cat([g.double().reshape(-1) for g in grads])
        norms.append(grad.norm())
        total = total + grad * min(1.0, 0.01 / float(grad.norm()))
    # float32: norms are given room for the rounding of 100 steps that might all have cancelled
    tolerance = {"float32": 3e-4, "tf32": 5e-3}.get(how, 0.02)
    assert not engine.fallbacks
    assert float((flat(got.values) - total).norm() / total.norm()) < tolerance
    torch.testing.assert_close(got.norms, torch.stack(norms), rtol=max(tolerance, 1e-4), atol=0.0)
    alone = engine.clipped_sum(
        model, loss, (x, y), clip=Flat(0.01), weights=(torch.arange(8) == 2).float()
    )
    assert 0.0098 <= float(flat(alone.values).norm()) <= 0.01


@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("where", [1, 6])
def test_a_sum_begun_in_vain_is_the_sum_of_the_strict_order(mode, where):
    """The device is asked after the sum: a bad unit makes all of it worthless, dropout included."""
    torch.manual_seed(0)
    layers = [nn.Embedding(50, 64), nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 50)]
    model = nn.Sequential(*layers).to(CUDA, torch.bfloat16)
    x = torch.randint(50, (8, 40), device=CUDA)

    def rows(model, x, bad):
        each = F.cross_entropy(model(x).flatten(0, 1), x.flatten(), reduction="none")
        return each.view(len(x), -1).mean(1) * torch.where(bad, torch.nan, 1.0)

    loss = ModelLoss(rows, by_row=True)
    bad = torch.arange(8, device=CUDA) == where
    hopeful, strict = Ghost(mode=mode), Ghost(mode=mode)
    strict.clipped_sum(model, loss, (x, bad), clip=Flat(0.1))  # and has seen a bad one
    for spoils in (torch.zeros_like(bad), bad, bad):
        found = []
        for engine in (hopeful, strict):
            torch.manual_seed(5)
            found.append(engine.clipped_sum(model, loss, (x, spoils), clip=Flat(0.1)))
        got, want = found
        assert torch.equal(got.bad, spoils)
        # Not to the bit: rows of an embedding are added up in any order.
        torch.testing.assert_close(flat(got.values), flat(want.values), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["fast", "lean"])
def test_a_counter_does_not_tell_whether_a_unit_was_bad(mode):
    """It is saved with the model: a sum begun in vain must not make it go on by two."""

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("runs", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.runs += 1
            return x

    counts = []
    for bad in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Counter(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)).to(CUDA)
        x, y = torch.randn(16, 64, device=CUDA), torch.randint(3, (16,), device=CUDA)
        engine = Ghost(mode=mode)
        for _ in range(2):
            engine.clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(1.0))
        x[2] = torch.nan if bad else 1.0
        assert engine.clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(1.0)).nonfinite == bad
        counts.append(int(model[0].runs))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("how", [PerExample, Ghost])
def test_sums_under_autocast_stay_inside_the_bound(how):
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).to(CUDA)
        x, y = torch.randn(2, 64, device=CUDA), torch.randint(10, (2,), device=CUDA)
        alone = torch.tensor([1, 0], device=CUDA)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            got = how().clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(0.1), weights=alone)
        assert all(value.dtype == torch.float32 for value in got.values.values())
        assert 0.097 < float(flat(got.values).norm()) <= 0.1


def test_a_bad_example_spoils_only_itself():
    torch.manual_seed(0)
    model = Net(False).to(CUDA).bfloat16()
    x, y = torch.randint(601, (2, 8, 100), device=CUDA)

    def poisoned(model, x, y, bad):
        return rows(model, x, y) * torch.where(bad, torch.inf, 1.0)

    bad = torch.arange(8, device=CUDA) == 3
    engine, loss = Ghost(), ModelLoss(poisoned, by_row=True)
    engine.clipped_sum(model, loss, (x, y, torch.zeros_like(bad)), clip=Flat(0.01))
    got = engine.clipped_sum(model, loss, (x, y, bad), clip=Flat(0.01))
    want = engine.clipped_sum(
        model, loss, (x, y, torch.zeros_like(bad)), clip=Flat(0.01), weights=(~bad).float()
    )
    assert got.nonfinite == 1
    torch.testing.assert_close(flat(got.values), flat(want.values), rtol=1e-2, atol=1e-6)


def test_a_full_device_makes_it_lean():
    torch.manual_seed(0)
    model = Net(False).to(CUDA)
    x, y = torch.randint(601, (2, 64, 512), device=CUDA)
    engine, loss = Ghost(), ModelLoss(rows, by_row=True)
    want = engine.clipped_sum(model, loss, (x, y), clip=Flat(0.01))
    assert "fast, in one part: needs about" in engine.why
    torch.cuda.empty_cache()
    _, whole = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2.5e8) / whole)
    try:
        got = engine.clipped_sum(model, loss, (x, y), clip=Flat(0.01))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    (known,) = engine._known[model].values()
    (chosen,) = known.parts.values()
    assert chosen.parts > 1
    torch.testing.assert_close(flat(got.values), flat(want.values), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last_have_the_sum_of_channels_first(dtype):
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
    model = nn.Sequential(conv, norm, nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 5)).to(
        CUDA, dtype
    )
    x, y = torch.randn(6, 3, 8, 8, device=CUDA, dtype=dtype), torch.arange(6, device=CUDA) % 5
    want = PerExample().clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(0.1))
    model.to(memory_format=torch.channels_last)
    last, engine = x.to(memory_format=torch.channels_last), Ghost()
    got = engine.clipped_sum(model, F.cross_entropy, (last, y), clip=Flat(0.1))
    assert not engine.fallbacks
    room = 1e-2 if dtype is torch.bfloat16 else 2e-3
    torch.testing.assert_close(flat(got.values), flat(want.values), rtol=room, atol=room * 0.1)

"""Norms and sums of convolutions by kernels are those of gradients written out.

On a GPU where there is one, else in Triton's interpreter; without Triton only the tables.
"""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.clipping import (
    Flat,
    Ghost,
    conv_gram,
    conv_halves,
    conv_kernels,
    forms,
    gpu_kernels,
    norm_kernels,
    rules_conv,
)
from noshuffle.clipping.forms import OuterGradient

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

on_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")
with_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
SHAPES = [
    # examples, channels, outputs, size, kernel, stride, padding, dilation
    (3, 16, 24, (9, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 17, 33, (8, 9), (3, 2), (2, 1), (1, 0), (1, 2)),
    (4, 20, 5, (6, 6), (1, 1), (2, 2), (0, 0), (1, 1)),
    (1, 3, 130, (5, 11), (5, 3), (1, 2), (2, 1), (1, 1)),
]


def case(shape: Any, *, last: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x, g, and the gradient of every example."""
    n, c, o, size, kernel, stride, padding, dilation = shape
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(n, c, *size, generator=draw).to(DEVICE)
    weight = torch.randn(o, c, *kernel, generator=draw).to(DEVICE).requires_grad_()
    outs = [F.conv2d(x[i : i + 1], weight, None, stride, padding, dilation) for i in range(n)]
    g = torch.randn(n, *outs[0].shape[1:], generator=draw).to(DEVICE)
    with exactly():
        grads = [torch.autograd.grad(outs[i], weight, g[i : i + 1])[0] for i in range(n)]
    if last:
        x, g = (t.to(memory_format=torch.channels_last) for t in (x, g))
    return x, g, torch.stack(grads)


@contextmanager
def exactly() -> Any:
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@with_triton
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_give_norms_and_sum(shape: Any, last: bool) -> None:
    x, g, truth = case(shape, last=last)
    how = {"kernel": shape[4], "how": shape[5:]}
    loose = 4e-3 if HAS_GPU else 3e-5
    squares = conv_kernels.squares(x, g, **how)
    assert torch.allclose(squares, truth.double().flatten(1).square().sum(1), rtol=loose)
    factors = torch.linspace(0.2, 1.0, len(x), device=DEVICE)
    wanted = (factors.reshape(-1, 1, 1, 1, 1) * truth).sum(0)
    total = conv_kernels.total(x, g, factors, **how)
    assert (total - wanted).norm() <= loose * wanted.norm()
    # one that is left out may hold anything
    x[0], factors[0] = torch.nan, 0.0
    rest = (factors.reshape(-1, 1, 1, 1, 1) * truth).sum(0)
    total = conv_kernels.total(x, g, factors, **how)
    assert (total - rest).norm() <= loose * max(float(rest.norm()), 1e-9)


@with_triton
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_several_pictures_of_an_example_are_one_gradient(last: bool) -> None:
    shape = (6, *SHAPES[1][1:])
    x, g, truth = case(shape, last=last)
    truth = truth.unflatten(0, (3, 2)).sum(1)
    how: Any = {"kernel": shape[4], "how": shape[5:], "pictures": 2}
    x[2:4] *= 1e4
    truth[1] *= 1e4
    (half, of_x, _), (half_g, of_g, _) = (conv_halves.halves(t, pictures=2) for t in (x, g))
    for u, v, units in ((x, g, 1.0), (half, half_g, of_x.double() * of_g)):
        squares = conv_kernels.squares(u, v, **how) * units**2
        assert torch.allclose(squares, truth.double().flatten(1).square().sum(1), rtol=4e-3)
        factors = torch.tensor([1.0, 1e-4, 0.0], device=DEVICE)
        wanted = (factors.reshape(-1, 1, 1, 1, 1) * truth).sum(0)
        total = conv_kernels.total(u, v, factors * units, **how)
        assert (total - wanted).norm() <= 4e-3 * wanted.norm()


@pytest.mark.parametrize("shape", SHAPES)
def test_tables_tell_which_taps_lie_inside(shape: Any) -> None:
    _, _, _, size, kernel, stride, padding, dilation = shape
    ones = torch.ones(1, 1, *size)
    taps = F.unfold(ones, kernel, dilation, padding, stride)[0].T.long()  # [positions, taps]
    out = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(size, padding, dilation, kernel, stride)
    ]
    how: Any = {"stride": stride, "padding": padding, "dilation": dilation, "out": tuple(out)}
    found = conv_kernels.taps_inside(kernel, size, **how)
    assert found == [int(sum(bit << i for i, bit in enumerate(row))) for row in taps.tolist()]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(8, 64), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 10),
    ).to(DEVICE)  # fmt: skip


def clipped(rows: Tensor, labels: Tensor, kind: str, weights: Tensor | None = None) -> Any:
    with torch.autocast("cuda", torch.bfloat16, enabled=kind == "bf16"):
        return Ghost().clipped_sum(
            network(), nn.CrossEntropyLoss(), (rows, labels), clip=Flat(1.0), weights=weights
        )


@on_gpu
@with_triton
@pytest.mark.parametrize("kind", ["tf32", "bf16"])
def test_one_example_moves_the_sum_by_the_bound(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_conv, "FEWEST_WINDOWS", 1)
    calls: list[int] = []
    run = conv_kernels.total
    monkeypatch.setattr(conv_kernels, "total", lambda *a, **k: (calls.append(1), run(*a, **k))[1])
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(64, 3, 16, 16, generator=draw).to(DEVICE)
    y = torch.randint(10, (64,), generator=draw).to(DEVICE)
    for size in (1.0, 1e3, 1e-3):
        x[5] *= size
        keep = torch.ones(64, device=DEVICE)
        whole = clipped(x, y, kind, keep)
        assert calls
        keep[5] = 0.0
        without = clipped(x, y, kind, keep)
        moved = [whole.values[k].double() - without.values[k].double() for k in whole.values]
        assert torch.stack([t.norm() for t in moved]).norm() <= 1.0


@on_gpu
@with_triton
def test_kernels_and_windows_agree_on_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(32, 3, 16, 16, generator=draw).to(DEVICE)
    y = torch.randint(10, (32,), generator=draw).to(DEVICE)
    weights = torch.ones(32, device=DEVICE)
    weights[3] = 0.0
    found = []
    for fewest in (1, 2**60):
        monkeypatch.setattr(rules_conv, "FEWEST_WINDOWS", fewest)
        monkeypatch.setattr(rules_conv, "FEWEST_BY_WEIGHT", fewest)
        found.append(clipped(x, y, "tf32", weights))
    for name, value in found[1].values.items():
        assert (found[0].values[name] - value).norm() <= 1e-2 * value.norm() + 1e-6
    assert torch.allclose(found[0].norms, found[1].norms, rtol=1e-2)


@with_triton
def test_halves_have_the_unit_of_their_example() -> None:
    x = torch.randn(4, 20, 7, 6, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    x[1], x[2], x[3] = x[1] * 1e20, x[2] * 1e-30, 0.0
    half, units, _ = conv_halves.halves(x)
    back = half.double() * units.double().reshape(-1, 1, 1, 1)
    gap = (back - x.double()).abs().flatten(1)
    largest = x.double().abs().flatten(1).amax(1, keepdim=True)
    assert bool((gap <= 2.0**-11 * x.double().abs().flatten(1) + 2.0**-38 * largest).all())
    alone, unit, _ = conv_halves.halves(x[1:2])
    assert torch.equal(alone[0], half[1])
    assert float(unit[0]) == float(units[1])
    x[0, 0, 0, 0], x[1, 1, 1, 1] = torch.nan, torch.inf
    half, _, _ = conv_halves.halves(x)
    assert torch.isfinite(half).flatten(1).all(1).tolist() == [False, False, True, True]


@with_triton
@pytest.mark.parametrize("programs", [1, 500])
@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_halves_of_several_pictures(
    programs: int, is_pair: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one part or many: a unit by the largest entry of all pictures, each number by itself."""
    monkeypatch.setattr(conv_halves, "PROGRAMS", programs)
    x = torch.randn(6, 20, 13, 12, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    x *= torch.logspace(-3, 9, 6, device=DEVICE).reshape(-1, 1, 1, 1)
    if last:
        x = x.to(memory_format=torch.channels_last)
    found, units, _ = conv_halves.halves(x, pictures=3, is_pair=is_pair)
    most = x.reshape(2, -1).abs().amax(1)
    wanted = 2.0 ** (torch.floor(torch.log2(most)) - 14.0)
    assert torch.equal(units, wanted)
    scaled = x / wanted.repeat_interleave(3).reshape(-1, 1, 1, 1)
    first = scaled.half()
    assert torch.equal(found[:, :20], first)
    if is_pair:
        assert torch.equal(found[:, 20:], (scaled - first.float()).half())


@with_triton
@pytest.mark.parametrize("held", [8192, 64])
@pytest.mark.parametrize("last", ["", "x", "g", "xg"])
def test_group_norms_by_a_kernel(held: int, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_kernels, "MOST_HELD", held)
    draw = torch.Generator().manual_seed(4)
    x = (torch.randn(3, 12, 5, 9, generator=draw) * 2.0 + 3.0).to(DEVICE)
    g = torch.randn(3, 12, 5, 9, generator=draw).to(DEVICE)
    if "x" in last:
        x = x.to(memory_format=torch.channels_last)
    if "g" in last:
        g = g.to(memory_format=torch.channels_last)
    weight, bias = norm_kernels.channel_sums(x, g, groups=4, eps=1e-5)
    unit = F.group_norm(x, 4, eps=1e-5)
    torch.testing.assert_close(weight, (unit * g).sum((2, 3)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias, g.sum((2, 3)), rtol=1e-4, atol=1e-4)


@with_triton
def test_an_axis_of_one_entry_may_have_any_stride() -> None:
    """torch calls such a tensor contiguous, and a step along it would lead to another example."""
    x = torch.randn(4, 1, 3, 24, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    odd = x.permute(0, 2, 3, 1)  # [4, 3, 24, 1]
    plain = torch.empty(odd.shape, device=DEVICE).copy_(odd)
    for one, other in zip(conv_halves.halves(odd), conv_halves.halves(plain)):
        assert torch.equal(one, other)
    g = torch.randn(4, 22, 1, 8, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    odd_g = g.permute(0, 3, 1, 2)  # [4, 8, 22, 1]
    plain_g = torch.empty(odd_g.shape, device=DEVICE).copy_(odd_g)
    how: Any = {"kernel": (3, 1), "how": ((1, 1), (0, 0), (1, 1))}
    found = [conv_kernels.squares(a, b, **how) for a, b in ((odd, odd_g), (plain, plain_g))]
    assert torch.equal(*found)
    sums = [norm_kernels.channel_sums(t, t, groups=2, eps=1e-5) for t in (odd_g, plain_g)]
    for one, other in zip(*sums):  # another layout is added up in another order
        assert torch.allclose(one, other, rtol=1e-5)


@with_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_is_of_what_the_norms_were_taken_of(shape: Any, dtype: torch.dtype) -> None:
    """What one example adds, at factor one, is no longer than its norm says: rounding included."""
    x, g, _ = case(shape, last=True)
    x, g = x.to(dtype), g.to(dtype)
    how: Any = {"kernel": shape[4], "how": shape[5:]}
    squares = conv_kernels.squares(x, g, **how)
    for b in range(len(x)):
        alone = torch.zeros(len(x), device=DEVICE)
        alone[b] = 1.0
        added = conv_kernels.total(x, g, alone, **how).double().square().sum()
        assert 1.0 - 2.0**-15 < float(added / squares[b]) <= 1.0, "more than what is left for it"


@with_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 70, 9, 11), (2, 5, 4, 4), (1, 64, 8, 8), (2, 3, 1, 7)])
def test_pictures_are_turned_as_torch_turns_them(shape: Any, dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    x[0, 1] = torch.nan
    (found, _), wanted = (
        conv_halves.turned(x, dtype),
        x.to(dtype, memory_format=torch.channels_last),
    )
    assert found.dtype is dtype
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))


@with_triton
def test_a_factor_of_zero_reads_nothing() -> None:
    x = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    x[1] = torch.nan
    found = gpu_kernels.rescale(x, torch.tensor([1.0, 0.0, 0.5], device=DEVICE))
    assert torch.equal(found[0], x[0])
    assert torch.equal(found[1], torch.zeros_like(x[1]))
    assert torch.equal(found[2], 0.5 * x[2])


@with_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_form_that_is_used_up_leaves_out_what_has_factor_zero(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(10)
    a = torch.randn(3, 5, 7, generator=draw).to(DEVICE, dtype)
    g = torch.randn(3, 5, 4, generator=draw).to(DEVICE, dtype)
    factors = torch.tensor([0.5, 0.0, 1.0], device=DEVICE)
    wanted = OuterGradient(a, g, (4, 7)).kept(factors != 0).total(factors)
    a[1, 2], g[1, 3] = torch.nan, torch.inf
    monkeypatch.setattr(forms, "is_rescaled", lambda *t: True)
    found = OuterGradient(a, g, (4, 7)).spent(factors)
    assert torch.allclose(found, wanted, rtol=1e-2, atol=1e-2)
    assert not g[1].any(), "not taken out in place"
    assert a[1].isnan().any(), "inputs may be somebody else's"


@with_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16 if HAS_GPU else torch.float16])
@pytest.mark.parametrize("shape", [(3, 130, 70, (4, 4), (3, 3), (1, 1), (1, 1), (1, 1)), SHAPES[1]])
def test_norms_by_inner_products_of_windows(
    shape: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never below those of the gradients, and little above; windows that cancel included."""
    x, g, _ = case(shape, last=True)
    x, g = x.to(dtype), g.to(dtype)
    how: Any = {"kernel": shape[4], "how": shape[5:]}
    g[0, :, 0, 1] = -g[0, :, 0, 0]
    found = []
    for is_paid in (True, False):
        monkeypatch.setattr(conv_gram, "pays", lambda *a, is_paid=is_paid: is_paid)
        found.append(conv_kernels.squares(x, g, **how))
    inner, truth = found[0], found[1] / (1.0 + 2.0**-16)
    assert bool((inner >= truth).all())
    assert torch.allclose(inner, truth, rtol=2e-3)


@with_triton
@pytest.mark.parametrize(("steps", "width"), [(5, 40), (33, 300), (1, 7)])
def test_layer_norms_by_a_kernel(steps: int, width: int) -> None:
    draw = torch.Generator().manual_seed(11)
    x = (torch.randn(3, steps, width, generator=draw) * 3.0 + 2.0).to(DEVICE)
    g = torch.randn(3, steps, width, generator=draw).to(DEVICE)
    unit = F.layer_norm(x, (width,), eps=1e-5)
    for found, wanted in zip(
        norm_kernels.layer_sums(x, g, size=3, eps=1e-5), ((unit * g).sum(1), g.sum(1))
    ):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)
    x[1] = torch.nan  # stays with its example
    weight, _ = norm_kernels.layer_sums(x, g, size=3, eps=1e-5)
    assert weight[[0, 2]].isfinite().all()
    assert weight[1].isnan().all()


@pytest.mark.parametrize("kind", ["half", "pair", "float"])
def test_norms_and_sums_add_up_in_the_same_order(kind: str) -> None:
    for outputs in (5, 24, 32, 33, 64, 130, 512):
        for positions in (1, 16, 25, 64, 1024):
            norms, sums = (
                conv_kernels.tile(outputs, 288, positions, is_total=is_total, kind=kind)
                for is_total in (False, True)
            )
            assert norms[2:4] == sums[2:4]

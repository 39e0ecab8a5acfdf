"""Convolutions in full single precision by kernels: pairs of half-precision numbers.

The twin is written out in float64. On a GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
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
    rules_conv,
)

HAS_GPU = torch.cuda.is_available()
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
SHAPES = [
    # examples, channels, outputs, size, kernel, stride, padding, dilation
    (3, 16, 24, (9, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
    (2, 17, 33, (8, 9), (3, 2), (2, 1), (1, 0), (1, 2)),
    (4, 20, 5, (6, 6), (1, 1), (2, 2), (0, 0), (1, 1)),
    (1, 3, 130, (5, 11), (5, 3), (1, 2), (2, 1), (1, 1)),
    (2, 130, 70, (4, 4), (3, 3), (1, 1), (1, 1), (1, 1)),
]


@pytest.fixture(autouse=True)
def _full_precision() -> Any:
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def written_out(x: Tensor, g: Tensor, shape: Any) -> Tensor:
    """The gradient of every example in float64."""
    n, c, o, _, kernel, *how = shape
    weight = torch.zeros(o, c, *kernel, dtype=torch.float64, device=x.device, requires_grad=True)
    found = []
    for i in range(n):
        out = F.conv2d(x[i : i + 1].double(), weight, None, *how)
        found.append(torch.autograd.grad(out, weight, g[i : i + 1].double())[0])
    return torch.stack(found)


def case(shape: Any) -> tuple[Tensor, Tensor]:
    n, c, o, size, kernel, *how = shape
    x = drawn(n, c, *size)
    out = F.conv2d(x, torch.zeros(o, c, *kernel, device=DEVICE), None, *how)
    return x, drawn(*out.shape, seed=4)


def as_pairs(x: Tensor, g: Tensor, pictures: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    both = [conv_halves.halves(t, pictures=pictures, is_pair=True) for t in (x, g)]
    return both[0][0], both[1][0], both[0][1].double() * both[1][1]


def test_pairs_have_twenty_two_bits_in_the_unit_of_their_example() -> None:
    x = drawn(5, 20, 7, 6)
    x *= torch.logspace(-6, 0, 20, device=DEVICE).reshape(-1, 1, 1)
    x[1], x[2], x[3], x[4] = x[1] * 1e30, x[2] * 1e-30, 0.0, x[4] * 1e-40
    pair, units, _ = conv_halves.halves(x, is_pair=True)
    hi, lo = pair.double().chunk(2, 1)
    assert pair.nbytes == x.nbytes, "as much memory as what they replace"
    assert bool((lo.abs() <= 2.0**-11 * hi.abs()).all())
    own = x.double() / units.double().reshape(-1, 1, 1, 1)
    assert bool(((own - hi - lo).abs() <= (2.0**-22 * own.abs()).clamp_min(2.0**-25)).all())
    assert torch.equal(conv_halves.pair_sum(pair).double(), hi + lo)
    alone, unit, _ = conv_halves.halves(x[1:2], is_pair=True)
    assert torch.equal(alone[0], pair[1])
    assert float(unit[0]) == float(units[1])
    x[0, 0, 0, 0], x[1, 1, 1, 1] = torch.nan, torch.inf
    pair, _, _ = conv_halves.halves(x, is_pair=True)
    assert torch.isfinite(pair).flatten(1).all(1).tolist() == [False, False, True, True, True]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_and_sum_in_single_precision(shape: Any, last: bool) -> None:
    x, g = case(shape)
    truth, size = written_out(x, g, shape), written_out(x.abs(), g.abs(), shape)
    if last:
        x, g = (t.to(memory_format=torch.channels_last) for t in (x, g))
    u, v, units = as_pairs(x, g)
    how: Any = {"kernel": shape[4], "how": shape[5:], "is_pair": True}
    squares = conv_kernels.squares(u, v, **how) * units.square()
    assert torch.allclose(squares, truth.flatten(1).square().sum(1), rtol=3e-4)
    factors = torch.linspace(0.2, 1.0, len(x), device=DEVICE).double()
    each = factors.reshape(-1, 1, 1, 1, 1)
    total = conv_kernels.total(u, v, factors * units, **how)
    assert bool(((total - (each * truth).sum(0)).abs() <= 1e-6 * (each * size).sum(0)).all())
    # one that is left out may hold anything
    x[0], g[0, 0], each[0] = torch.nan, torch.inf, 0.0
    u, v, units = as_pairs(x, g)
    total = conv_kernels.total(u, v, each.flatten() * units, **how)
    assert bool(((total - (each * truth).sum(0)).abs() <= 1e-6 * (each * size).sum(0)).all())


def test_several_pictures_of_an_example_are_one_gradient() -> None:
    shape = (6, *SHAPES[1][1:])
    x, g = case(shape)
    x[2:4] *= 1e4
    truth = written_out(x, g, shape).unflatten(0, (3, 2)).sum(1)
    u, v, units = as_pairs(x, g, pictures=2)
    how: Any = {"kernel": shape[4], "how": shape[5:], "pictures": 2, "is_pair": True}
    squares = conv_kernels.squares(u, v, **how) * units.square()
    assert torch.allclose(squares, truth.flatten(1).square().sum(1), rtol=3e-4)
    factors = torch.tensor([1.0, 1e-4, 0.0], device=DEVICE)
    wanted = (factors.reshape(-1, 1, 1, 1, 1) * truth).sum(0)
    assert (conv_kernels.total(u, v, factors * units, **how) - wanted).norm() <= (
        1e-6 * wanted.norm()
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_the_sum_is_of_what_the_norms_were_taken_of(
    shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv_gram, "pays", lambda *a: False)
    u, v, _ = as_pairs(*case(shape))
    how: Any = {"kernel": shape[4], "how": shape[5:], "is_pair": True}
    squares = conv_kernels.squares(u, v, **how)
    for b in range(len(u)):
        alone = torch.zeros(len(u), device=DEVICE)
        alone[b] = 1.0
        added = conv_kernels.total(u, v, alone, **how).double().square().sum()
        assert 1.0 - 2.0**-15 < float(added / squares[b]) <= 1.0, "more than what is left for it"


@pytest.mark.parametrize("kind", ["random", "cancelling", "one sign"])
@pytest.mark.parametrize("shape", [SHAPES[4], SHAPES[1]])
def test_norms_by_inner_products_are_never_below_what_is_added(
    kind: str, shape: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, g = case(shape)
    if kind == "cancelling":
        g[:, :, :, 1::2] = -g[:, :, :, :-1:2][..., : g[:, :, :, 1::2].shape[3]]
        x[:] = x[:, :, :1, :1] * (1.0 + 1e-4 * x)
    if kind == "one sign":  # each second half as large as it can be, all of them alike
        x, g = (t.abs().half().float() * (1.0 + 2.0**-12) for t in (x, g))
    u, v, _ = as_pairs(x, g)
    how: Any = {"kernel": shape[4], "how": shape[5:], "is_pair": True}
    found = []
    for is_paid in (True, False):
        monkeypatch.setattr(conv_gram, "pays", lambda *a, is_paid=is_paid: is_paid)
        found.append(conv_kernels.squares(u, v, **how))
    inner, truth = found[0], found[1] / (1.0 + 2.0**-16)
    assert bool((inner >= truth).all())
    if kind != "cancelling":
        assert torch.allclose(inner, truth, rtol=3e-4)


def test_forms_in_pairs_do_what_forms_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Huge and tiny examples beside each other, and one that holds what is no number."""
    shape = (6, *SHAPES[0][1:])
    layer = nn.Conv2d(16, 24, 3, padding=1).to(DEVICE)
    x, g = case(shape)
    x[1], g[1] = x[1] * 1e30, g[1] * 1e-32
    x[2], g[2] = x[2] * 1e-30, g[2] * 1e-3
    x[3], g[3] = x[3] * 1e-42, g[3] * 1e35  # below what float32 holds with all its bits
    truth = written_out(x, g, shape)
    x[4, 0, 0, 0] = torch.nan
    monkeypatch.setattr(rules_conv, "_has_kernels", lambda *a: True)
    made = rules_conv.convolution(layer, x, g, 6)
    form: Any = made["weight"]
    assert form.is_pair
    assert form.is_fused
    assert form.x.nbytes + form.g.nbytes == x.nbytes + g.nbytes
    keep = torch.tensor([True, True, True, True, False, True], device=DEVICE)
    good = [0, 1, 2, 3, 5]
    size = truth.flatten(1).norm(dim=1)
    assert torch.allclose(form.squares().sqrt()[good], size[good], rtol=1e-4, atol=0.0)
    assert form.squares()[4].isnan()
    form = form.kept(keep)
    assert form.squares()[4] == 0.0
    factors = torch.where(keep, 0.5 / size.clamp_min(0.5), 0.0)
    wanted = (factors.reshape(-1, 1, 1, 1, 1)[good] * truth[good]).sum(0)
    for found in (
        form.total(factors),
        form.spent(factors),
        form.scaled(factors).total(torch.ones(6, device=DEVICE)),
        (form.dense() * factors.float().reshape(-1, 1, 1, 1, 1)).sum(0),
    ):
        assert (found - wanted).norm() <= 2e-6 * wanted.norm()
    parts = g.double().sum((2, 3))
    fresh: Any = rules_conv.convolution(layer, x, g, 6)["weight"]
    x_unit = fresh.kept(keep).channels.double()[0] / parts[0]
    assert torch.allclose(x_unit, x_unit[:1].expand_as(x_unit), rtol=1e-5)


@pytest.mark.parametrize("examples", [1, 2, 63, 500])
@pytest.mark.parametrize("tiles", [1, 5, 72, 5000])
def test_every_example_has_a_program(examples: int, tiles: int) -> None:
    each = conv_kernels.evenly(examples, tiles, parts=3, at_once=396)
    assert 1 <= each <= examples
    assert -(-examples // each) * tiles <= max(4 * 396, tiles), "tables of all groups"


def test_examples_of_several_programs_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_kernels, "evenly", lambda *a, **k: 2)
    shape = (5, *SHAPES[0][1:])
    x, g = case(shape)
    u, v, units = as_pairs(x, g)
    how: Any = {"kernel": shape[4], "how": shape[5:], "is_pair": True}
    truth = written_out(x, g, shape)
    squares = conv_kernels.squares(u, v, **how) * units.square()
    assert torch.allclose(squares, truth.flatten(1).square().sum(1), rtol=3e-5)
    assert (conv_kernels.total(u, v, units, **how) - truth.sum(0)).norm() <= (
        1e-6 * truth.sum(0).norm()
    )


def test_parts_that_cancel_leave_other_examples_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the second one is zero, its halves are huge."""
    monkeypatch.setattr(conv_kernels, "evenly", lambda *a, **k: 2)  # both by one program
    x, g = drawn(2, 16, 8, 8), drawn(2, 16, 8, 8, seed=4)
    x[1] = 1e15 * x[1, :, :1, :1]
    g[1] = 1e15 * g[1, :, :1, :1]
    g[1, :, 4:] *= -1.0
    u, v, units = as_pairs(x, g)
    how: Any = {"kernel": (1, 1), "how": ((1, 1), (0, 0), (1, 1)), "is_pair": True}
    assert conv_kernels.squares(u, v, **how)[1] == 0.0
    alone = conv_kernels.total(u, v, units * torch.tensor([1.0, 0.0], device=DEVICE), **how)
    assert torch.equal(conv_kernels.total(u, v, units, **how), alone)


@pytest.mark.parametrize("lost", ["nothing", "x", "g"])
def test_kernels_that_drop_half_of_a_pair_are_refused(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules_conv._agrees.cache_clear()
    whole, calls = conv_halves.halves, []

    def halves(t: Tensor, **how: Any) -> tuple[Tensor, ...]:
        pair, *rest = whole(t, **how)
        calls.append(1)
        if lost == ("x" if len(calls) % 2 else "g"):
            pair[:, pair.shape[1] // 2 :] = 0.0
        return pair, *rest

    monkeypatch.setattr(conv_halves, "halves", halves)
    kinds = (torch.float32, torch.float32)
    assert rules_conv._agrees(DEVICE, *kinds, True) is (lost == "nothing")
    rules_conv._agrees.cache_clear()


def network() -> nn.Module:
    torch.manual_seed(0)
    wide = 64 if HAS_GPU else 8
    return nn.Sequential(
        nn.Conv2d(3, wide, 3, padding=1), nn.GroupNorm(4, wide), nn.ReLU(),
        nn.Conv2d(wide, wide, 3, stride=2, padding=1), nn.GroupNorm(4, wide), nn.ReLU(),
        nn.Conv2d(wide, wide, 3, padding=1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(wide, 10),
    ).to(DEVICE)  # fmt: skip


def clipped(model: nn.Module, x: Tensor, y: Tensor, weights: Tensor) -> Any:
    rows = (x, y)
    return Ghost().clipped_sum(model, nn.CrossEntropyLoss(), rows, clip=Flat(1.0), weights=weights)


def with_kernels(monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    if HAS_GPU:
        for name in ("FEWEST_WINDOWS", "FEWEST_BY_WEIGHT"):
            monkeypatch.setattr(rules_conv, name, 1 if is_on else 2**60)
    else:
        monkeypatch.setattr(rules_conv, "_has_kernels", lambda *a: is_on)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e6, 1e15])
def test_one_example_moves_the_sum_by_the_bound(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_kernels(monkeypatch, True)
    calls: list[bool] = []
    run = conv_kernels.total

    def total(*args: Any, **how: Any) -> Tensor:
        calls.append(how["is_pair"])
        return run(*args, **how)

    monkeypatch.setattr(conv_kernels, "total", total)
    many = 64 if HAS_GPU else 6
    x, keep = drawn(many, 3, 8, 8), torch.ones(many, device=DEVICE)
    y = torch.arange(many, device=DEVICE) % 10
    x[5] *= scale
    model = network()
    whole = clipped(model, x, y, keep)
    assert calls
    assert all(calls)
    keep[5] = 0.0
    without = clipped(model, x, y, keep)
    moved = [whole.values[k].double() - without.values[k].double() for k in whole.values]
    assert torch.stack([t.norm() for t in moved]).norm() <= 1.0


def test_kernels_and_windows_agree_on_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    many = 32 if HAS_GPU else 6
    x, weights = drawn(many, 3, 8, 8), torch.ones(many, device=DEVICE)
    y = torch.arange(many, device=DEVICE) % 10
    weights[3] = 0.0
    found = []
    for is_on in (True, False):
        with_kernels(monkeypatch, is_on)
        found.append(clipped(network(), x, y, weights))
    for name, value in found[1].values.items():
        assert (found[0].values[name] - value).norm() <= 2e-5 * value.norm()
    assert torch.allclose(found[0].norms, found[1].norms, rtol=1e-4)

"""Norms of convolutions on a GPU have one tolerance, whichever way finds them.

Kernels run on a GPU where there is one, else in Triton's interpreter.
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
    conv_patches,
    conv_tolerance,
    gram,
    rules_conv,
)
from noshuffle.clipping.conv_windows import padded
from noshuffle.clipping.tolerance import RoundingTolerance

HAS_GPU = torch.cuda.is_available()
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
on_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")
KINDS = ["half", "halves", "pair"]
SHAPES: list[Any] = [
    # pictures, channels, outputs, size, kernel, stride, padding, dilation
    (1, 16, 24, (9, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
    (3, 70, 5, (8, 9), (3, 2), (2, 1), (1, 0), (1, 2)),
    (2, 3, 2, (20, 24), (1, 1), (1, 1), (0, 0), (1, 1)),
]


@pytest.fixture(params=KINDS)
def kind(request: Any) -> Any:
    with torch.backends.cudnn.flags(allow_tf32=request.param != "pair"):
        yield request.param


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def form_of(layer: Any, x: Tensor, g: Tensor, size: int, kind: str) -> Any:
    """As the kernels of a GPU have it."""
    x, g = (t.half() for t in (x, g)) if kind == "half" else (x, g)
    sides = tuple((p, p) for p in layer.padding)
    form = rules_conv._fused(layer, x, g, size, sides if any(map(any, sides)) else ())
    assert form.is_fused
    assert form.is_pair == (kind == "pair")
    return form


def slow(form: Any, x: Tensor, g: Tensor) -> tuple[list[float], list[float], list[int]]:
    """√S, R and n of every example, window by window in float64."""
    layer, size = form.layer, form.size
    x, g = (t.half().double() if form.units is None else t.double() for t in (x, g))
    w = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    long_w = w.norm(dim=1).reshape(size, -1)
    long_g = g.flatten(2).norm(dim=1).reshape(size, -1)
    both = long_w * long_g
    return (
        both.norm(dim=1).tolist(),
        [sum(one) for one in both.tolist()],
        [sum(v > 0.0 for v in one) for one in long_g.tolist()],
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_formula(kind: str, shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_gram, "pays", lambda *a: False)
    pictures, channels, outputs, space, *how = shape
    layer, size = nn.Conv2d(channels, outputs, *how).to(DEVICE), 4
    x = drawn(size * pictures, channels, *space)
    g = drawn(*layer(x).shape, seed=4)
    if kind != "half":  # each in its own unit
        x[:pictures] *= 1e12
        g[pictures:][:pictures] *= 1e-9
    g[pictures:][:pictures, :, 1:] = 0.0  # one with few positions
    g[-pictures:] = 0.0
    form = form_of(layer, x, g, size, kind)
    units = 1.0 if form.units is None else form.units.square()
    plain = conv_kernels.squares(form.x, form.g, **form._kernels) * units
    found = form.squares().tolist()
    inputs = channels * layer.weight[0, 0].numel()
    share = gram.allowance(torch.float32, inputs, outputs) + 2.0**-20
    kinds = set()
    for b, (far, along, n) in enumerate(zip(*slow(form, x, g))):
        is_few = n * (inputs + outputs) < 4 * inputs * outputs
        kinds.add(is_few)
        gamma = 2.0**-24 * (n**0.5 / 4.0 + 2.0) + 2.0**-29 * n
        more = share * along**2 if is_few else gamma**2 * along**2 + 2.0**-14 * far**2
        assert found[b] - float(plain[b]) == pytest.approx(more, rel=1e-3), (b, n)
    assert found[-1] == 0.0
    assert float(plain[0]) > 0.0
    assert kinds == ({True, False} if outputs == 2 else kinds)


def test_what_is_no_number_stays_in_its_example(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_gram, "pays", lambda *a: False)
    layer, size = nn.Conv2d(16, 24, 3, padding=1).to(DEVICE), 4
    x = drawn(size, 16, 6, 5)
    g = drawn(*layer(x).shape, seed=4)
    alone = form_of(layer, x, g, size, kind).squares()
    x[1, 0, 2, 2], g[2, 3, 1, 1] = torch.nan, torch.inf
    found = form_of(layer, x, g, size, kind).squares()
    assert torch.equal(found[[0, 3]], alone[[0, 3]])
    assert not found[[1, 2]].isfinite().any()
    keep = torch.tensor([True, False, False, True], device=DEVICE)
    assert form_of(layer, x, g, size, kind).kept(keep).squares()[1] == 0.0


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("channels", [3, 64, 150])
def test_lengths_come_with_copies(channels: int, last: bool) -> None:
    x = drawn(6, channels, 9, 8) * torch.logspace(-3, 3, 6, device=DEVICE).reshape(-1, 1, 1, 1)
    wanted = x.double().square().sum(1)
    x = x.to(memory_format=torch.channels_last) if last else x
    for pictures in (1, 3):
        for is_pair in (False, True):
            _, units, found = conv_halves.halves(x, pictures=pictures, is_pair=is_pair)
            units = units.double().repeat_interleave(pictures).reshape(-1, 1, 1)
            assert torch.allclose(found.double().sum(0) * units.square(), wanted, rtol=1e-5)
    found = conv_halves.turned(x, torch.float32)[1]
    assert found.shape[1:] == wanted.shape
    assert torch.allclose(found.double().sum(0), wanted, rtol=1e-5)


def test_ordinary_norms_are_hardly_raised() -> None:
    """Of 32 × 32 positions in the widths of residual nets, and of large pictures."""
    for positions, width in ((1024, 16), (1024, 64), (1024, 512), (224**2, 64), (2**20, 64)):
        widths = 9 * width, width
        lengths = torch.full((1, positions), widths[0] ** 0.5), torch.full((1, positions), 8.0)
        squared = (lengths[0] * lengths[1]).double().square().sum(1)  # steps that are orthogonal
        how = conv_tolerance.tolerance(torch.zeros(1), *widths)
        found = float((conv_tolerance.raised(squared, lengths, widths, how) / squared).sqrt())
        assert 1.0 < found < (1.005 if positions == 1024 else 1.0015), (positions, width)


def test_the_kernel_of_lengths_is_the_plain_form() -> None:
    assert conv_tolerance._agrees(DEVICE)
    squared, long_w, long_g = torch.rand(3, 4, 40, generator=torch.Generator().manual_seed(5))
    squared, lengths = squared[:, 0].to(DEVICE), (long_w.to(DEVICE), long_g.to(DEVICE))
    lengths[1][0, 3:], lengths[1][1] = 0.0, 0.0
    lengths[0][2, 0] = torch.nan
    how = RoundingTolerance(gram.smallest(torch.float32), 3e-7, 2.0**-9, 1e-6)
    found = conv_tolerance._of_lengths(squared, lengths, (3, 2), how)
    wanted = conv_tolerance.raised(squared, lengths, (3, 2), how)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0.0, equal_nan=True)


def ways(
    layer: Any, x: Tensor, g: Tensor, size: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[Tensor, Tensor]]:
    """Norms and gradients of every example by each way that a GPU has for so many positions."""
    widths, positions = (layer.weight[0].numel(), len(layer.weight)), g[:, 0].numel() // size
    is_few = positions < conv_tolerance.few_below(*widths)
    found: dict[str, tuple[Tensor, Tensor]] = {}
    ones = torch.eye(size, device=DEVICE)
    for name, is_paid in (("fused", False), ("inner", True))[: 1 + is_few]:
        monkeypatch.setattr(conv_gram, "pays", lambda *a, is_paid=is_paid: is_paid)
        form = form_of(layer, x, g, size, kind)
        found[name] = form.squares().sqrt(), torch.stack([form.total(one) for one in ones])
    if kind == "half":
        x, g = x.half().float(), g.half().float()
    sides = tuple((p, p) for p in layer.padding)
    plain = rules_conv.Convolution(layer, padded(x, sides, mode="zeros"), g, size)
    for name, is_small in (("written", True), ("windows", False))[: 1 + is_few]:
        outer = plain._outer()
        full = outer.dense() if is_small else None
        monkeypatch.setattr(type(outer), "is_small", lambda self: False)
        norms = conv_tolerance.of_windows(outer, full).reshape(size, -1).sum(1).sqrt()
        found[name] = norms, torch.stack([plain.total(one) for one in ones])
    return found


@pytest.mark.parametrize("shape", [(64, 64, 4), (4, 8, 24)], ids=["few", "many"])
@pytest.mark.parametrize("left", [1e-1, 1e-3, 1e-5, 0.0])
def test_rows_that_nearly_cancel_are_clipped_alike(
    kind: str, left: float, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two frames of which one takes the other back: the second is the first, its gradient minus."""
    (channels, outputs, side), size = shape, 3
    layer = nn.Conv2d(channels, outputs, 3, padding=1, bias=False).to(DEVICE)
    x = drawn(size, 1, channels, side, side).abs().expand(-1, 2, -1, -1, -1)
    x = x.flatten(0, 1).contiguous()
    g = drawn(size, 1, outputs, side, side, seed=4).expand(-1, 2, -1, -1, -1).clone()
    g[:, 1] *= -(1.0 - left)
    found = ways(layer, x, g.flatten(0, 1), size, kind, monkeypatch)
    assert len(found) == (4 if side == 4 else 2)
    clipped = {k: (full.double().flatten(1).T / norms) for k, (norms, full) in found.items()}
    for one in clipped.values():
        assert float(one.norm(dim=0).max()) <= 1.0 + 2.0**-9, "more than the bound"
    most = 0.005 if kind == "pair" else 0.06  # ways with ten bits and without
    for name, one in clipped.items():
        assert float((one - clipped["fused"]).norm(dim=0).max()) <= most, (name, left)


@pytest.mark.parametrize("side", [8, 24], ids=["few", "many"])
def test_patches_that_nearly_cancel_are_clipped_alike(
    kind: str, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By kernels and by windows, as which a batch is long or short; not as a linear map."""
    layer, size, left = nn.Conv2d(8, 16, 2, stride=2, bias=False).to(DEVICE), 3, 1e-2
    x = drawn(size, 1, 8, side, side).abs().expand(-1, 2, -1, -1, -1).flatten(0, 1).contiguous()
    g = drawn(size, 1, 16, side // 2, side // 2, seed=4).expand(-1, 2, -1, -1, -1).clone()
    g[:, 1] *= -(1.0 - left)
    g = g.flatten(0, 1)
    found = ways(layer, x, g, size, kind, monkeypatch)
    assert len(found) == (4 if side == 8 else 2)
    clipped = {k: (full.double().flatten(1).T / norms) for k, (norms, full) in found.items()}
    most = 0.005 if kind == "pair" else 0.06
    for name, one in clipped.items():
        assert float((one - clipped["fused"]).norm(dim=0).max()) <= most, name
    if (kind, side) == ("pair", 24):
        norms = conv_patches.by_patches(layer, x, g, size)["weight"].squares().sqrt()
        other = clipped["fused"] * found["fused"][0] / norms
        assert float((other - clipped["fused"]).norm(dim=0).min()) > 0.1


def test_a_form_that_was_written_out_has_its_own_units(kind: str) -> None:
    layer, size = nn.Conv2d(4, 6, 3, padding=1).to(DEVICE), 2
    x, g = 1e3 * drawn(size, 4, 6, 5), 1e-3 * drawn(size, 6, 6, 5, seed=4)
    form = rules_conv._fused(layer, x, g, size, ((1, 1), (1, 1)))
    truth = form.dense().double().flatten(1).square().sum(1)
    assert not form.is_fused
    assert torch.allclose(form.squares().double(), truth, rtol=1e-3)
    assert bool((form.squares() >= truth * (1.0 - 1e-6)).all())


def test_frames_of_padding_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_gram, "pays", lambda *a: False)
    layer, size = nn.Conv2d(4, 6, 3, bias=False).to(DEVICE), 2
    found = []
    for frames in (5, 9):
        x, g = (torch.zeros(size, frames, c, s, s, device=DEVICE) for c, s in ((4, 6), (6, 4)))
        x[:, :5], g[:, :5] = drawn(size, 5, 4, 6, 6), drawn(size, 5, 6, 4, 4, seed=4)
        g[0, :2], g[0, 2:4] = g[0, 2:4].clone(), -g[0, 2:4]
        x[0, :2] = x[0, 2:4]
        g[0, 4] = 0.0
        x[0, 5:] = 1.0  # where no gradient is
        found.append(form_of(layer, x.flatten(0, 1), g.flatten(0, 1), size, kind).squares())
    torch.testing.assert_close(*found, rtol=1e-5, atol=0.0)


class Frames(nn.Module):
    """A number for every frame of an example."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.own = nn.Conv2d(16, wide, 3, bias=False)
        self.last = nn.Linear(wide, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.tanh(self.own(x.flatten(0, 1))).mean((2, 3)).float()
        with torch.autocast(found.device.type, enabled=False):  # two frames may nearly cancel
            rated: Tensor = self.last(found)
        return rated.reshape(x.shape[:2])


@pytest.mark.parametrize("wide", [pytest.param(32, marks=on_gpu), 64])
@pytest.mark.parametrize("first", [pytest.param("windows", marks=on_gpu), "kernels"])
def test_a_long_example_does_not_change_the_norms_of_the_others(
    kind: str, first: str, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others are padded to it, and their gradients are found in another way then.

    In the interpreter by inner products of windows, then by the kernel for many positions.
    """
    if not HAS_GPU:
        if kind == "half":
            pytest.skip("autocast is for a GPU here")
        monkeypatch.setattr(rules_conv, "_has_kernels", lambda *a: True)
    torch.manual_seed(0)
    size, model, engine = 100 if HAS_GPU else 12, Frames(wide).to(DEVICE), Ghost()
    usual = (torch.rand(16, 5, 5) + 0.01 * torch.randn(size, 1, 16, 5, 5)).to(DEVICE)
    calls: list[bool] = []
    run = conv_kernels.squares
    monkeypatch.setattr(
        conv_kernels, "squares", lambda *a, **k: (calls.append(True), run(*a, **k))[1]
    )

    def loss(out: Tensor, signs: Tensor) -> Tensor:
        return 3e4 * (out * signs).sum()

    def clipped(x: Tensor, signs: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=HAS_GPU and kind == "half"):
            found = engine.clipped_sum(model, loss, (x, signs), clip=Flat(1.0))
        assert not engine.fallbacks
        return found.values["own.weight"].double()

    def total(frames: int, fewest: int) -> Tensor:
        for name in ("FEWEST_WINDOWS", "FEWEST_BY_WEIGHT"):
            monkeypatch.setattr(rules_conv, name, fewest)
        x, signs = (torch.zeros(size, frames, *s, device=DEVICE) for s in ((16, 5, 5), ()))
        x[:, :2], signs[:, 0], signs[:, 1] = usual, 1.0, -0.999  # which nearly cancel
        x[0, 2:], signs[0, 2:] = 1.0, 1.0
        return clipped(x, signs)

    clipped(drawn(size, 2, 16, 5, 5), drawn(size, 2, seed=4).abs())  # an ordinary batch
    calls.clear()
    few = total(2, 2**60 if first == "windows" else 1)
    before = len(calls)
    assert (before > 0) is (first == "kernels")
    many = total(8, 1)
    assert len(calls) > before
    assert float((many - few).norm()) <= 2.0, "its own two norms"

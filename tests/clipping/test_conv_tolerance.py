"""Norms of convolutions leave room for rounding, the same whichever way they are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from noshuffle.clipping import Flat, Ghost, gram
from noshuffle.clipping.conv_windows import sides_of, with_tolerance
from noshuffle.clipping.rules_conv import Convolution, convolution

LAYERS: list[tuple[Any, tuple[int, ...]]] = [
    (nn.Conv2d(4, 6, 3), (7, 6)),
    (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(2, 1), groups=2), (7, 6)),
    (nn.Conv2d(4, 8, 3, padding="same", groups=4), (5, 5)),
    (nn.Conv1d(3, 5, 4, padding=2, padding_mode="circular"), (9,)),
    (nn.Conv3d(2, 4, 2, dtype=torch.float64), (3, 4, 3)),
    (nn.Conv2d(16, 32, 3), (5, 4)),
]


def weight_of(layer: Any, x: Tensor, g: Tensor, size: int) -> Convolution:
    form = convolution(layer, x, g, size)["weight"]
    assert isinstance(form, Convolution)
    return form


@pytest.mark.parametrize("frames", [1, 3])
@pytest.mark.parametrize(("layer", "space"), LAYERS)
@pytest.mark.parametrize("scale", [1.0, 1e-18])
def test_it_is_what_inner_products_of_windows_have_or_sums_lose(
    layer: Any, space: tuple[int, ...], frames: int, scale: float
) -> None:
    torch.manual_seed(0)
    size, kind = 3, layer.weight.dtype
    x = torch.randn(size * frames, layer.in_channels, *space, dtype=kind)
    g = torch.randn_like(layer(x)) / scale
    form = weight_of(layer, x * scale, g, size)
    outer = form._outer()
    lengths = [t.double().norm(dim=2) for t in (outer.a, outer.g)]
    tiny, widths = gram.smallest(kind), (outer.a.shape[2], outer.g.shape[2])
    _, reach, lost = gram._beside(*lengths, widths=widths, tiny=tiny)
    reach, lost = reach.reshape(size, -1), lost.reshape(size, -1)
    steps = lengths[0].shape[1]
    is_few = widths[0] * widths[1] > steps * sum(widths)
    room = is_few * (lost + gram.allowance(kind, *widths) * reach.square())
    moved = (not is_few) * 0.5 * torch.finfo(kind).eps * (steps**0.5 / 4 + 2) * reach.norm(dim=1)
    for squared in (torch.zeros(size), torch.rand(size)):
        found = with_tolerance(squared, layer, form.x, form.g, size=size, sides=form.sides)
        expected = (squared.double().sqrt() + moved).square() + room.sum(1)
        if is_few:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=0.0)
        else:
            assert bool((expected <= found * (1 + 1e-6)).all())
            assert bool((found <= (squared.double().sqrt() + 3 * moved).square() * 1.001).all())


@pytest.mark.parametrize("power", [-80, -62, 62, 80])
def test_squares_neither_vanish_nor_overflow(power: int) -> None:
    """In single precision 2⁻⁸⁰ squared is none and 2⁸⁰ squared infinite; products here are not."""
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 8, 3, padding=1)
    x, g = torch.randn(4, 3, 12, 12), torch.randn(4, 8, 12, 12)
    scaled = x * 2.0**power, g * 2.0**-power
    first, other = (
        with_tolerance(torch.zeros(4), layer, a, b, size=4, sides=sides_of(layer))
        for a, b in ((x, g), scaled)
    )
    assert bool((first > 0.0).all())
    torch.testing.assert_close(first, other, rtol=1e-12, atol=0.0)


def with_blank_frames(t: Tensor, size: int, many: int) -> Tensor:
    frames = t.reshape(size, -1, *t.shape[1:])
    blank = torch.zeros(size, many, *t.shape[1:])
    return torch.cat([frames, blank], 1).flatten(0, 1)


@pytest.mark.parametrize(
    ("space", "powers"),
    [((3,), (70, -70)), ((3,), (-70, 70)), ((4,), (60, 0)), ((4,), (0, 60))],
)
def test_what_overflows_does_so_beside_a_longer_example(
    space: tuple[int], powers: tuple[int, int]
) -> None:
    """One position is an outer product by itself, whose norm is a number; of two frames that cancel
    the gradient is one, and products of two inner products are none."""
    torch.manual_seed(0)
    layer, frames = nn.Conv1d(12, 40, 3), space[0] - 2
    x = torch.randn(3, 12, *space).repeat_interleave(frames, 0) * 2.0 ** powers[0]
    g = torch.randn(3, 40, frames).repeat_interleave(frames, 0) * 2.0 ** powers[1]
    g[1::2] *= -0.99 if frames == 2 else 1.0
    alone = weight_of(layer, x, g, 3)
    beside = weight_of(layer, *(with_blank_frames(t, 3, 30) for t in (x, g)), 3)
    assert torch.isfinite(alone.square).tolist() == torch.isfinite(beside.square).tolist()


@pytest.mark.parametrize("space", [(12, 12), (30, 30)])
def test_a_blank_picture_stays_within_the_bound(space: tuple[int, int]) -> None:
    """In front of a norm of channels its gradients cancel: norm and sum are nothing but rounding,
    which differs where they are found in two ways."""
    torch.manual_seed(0)
    size, layer = 260, nn.Conv2d(3, 64, 3)
    x = torch.randn(size, 3, 1, 1).expand(-1, -1, *space).contiguous()
    g = torch.randn_like(layer(x)).detach()
    form = weight_of(layer, x, g - g.mean((2, 3), keepdim=True), size)
    factors = form.square.rsqrt()
    for row in range(4):
        alone = torch.zeros_like(factors)
        alone[row] = factors[row]
        assert form.total(alone).double().norm() <= 1.0 + 1e-6


@pytest.mark.parametrize("size", [16, 63, 255, 910, 1024, 4096])
@pytest.mark.parametrize("layer", [nn.Conv2d(1, 16, (5, 6)), nn.Conv2d(1, 8, 3)])
def test_one_more_blank_picture_moves_a_sum_by_its_own(layer: nn.Conv2d, size: int) -> None:
    """Where norm and sum are nothing but rounding, all would be rounded in another way if their
    number decided how gradients are found."""
    torch.manual_seed(0)
    x = torch.randn(1, 1, 1, 1).expand(size + 1, -1, 12, 12).contiguous()
    g = torch.randn_like(layer(x[:1])).detach()
    g = (g - g.mean((2, 3), keepdim=True)).expand(size + 1, -1, -1, -1).contiguous()
    sums = []
    for many in (size, size + 1):
        form = weight_of(layer, x[:many], g[:many], many)
        sums.append(form.total(form.square.rsqrt()).double())
    assert float((sums[1] - sums[0]).norm()) <= 1.0 + 1e-2


class Frames(nn.Module):
    """A number for every frame of an example."""

    def __init__(self, own: nn.Conv2d) -> None:
        super().__init__()
        self.own = own
        self.last = nn.Linear(own.out_channels, 1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.tanh(self.own(x.flatten(0, 1))).mean((2, 3))
        rated: Tensor = self.last(found)
        return rated.reshape(x.shape[:2])


@pytest.mark.parametrize(
    ("size", "own", "space"),
    [
        (100, {"in_channels": 16, "out_channels": 32}, (5, 5)),
        (400, {"in_channels": 8, "out_channels": 4, "stride": 3}, (8, 8)),  # patches
    ],
)
def test_a_long_example_does_not_change_the_norms_of_the_others(
    size: int, own: dict[str, int], space: tuple[int, int]
) -> None:
    """All others are padded to it, and their gradients were found in another way then."""
    torch.manual_seed(0)
    shape = (own["in_channels"], *space)
    model, engine = Frames(nn.Conv2d(**own, kernel_size=3, bias=False)), Ghost()
    usual = torch.rand(shape) + 0.01 * torch.randn(size, 1, *shape)

    def loss(out: Tensor, signs: Tensor) -> Tensor:
        return 3e4 * (out * signs).sum()

    def total(frames: int) -> Tensor:
        x, signs = torch.zeros(size, frames, *shape), torch.zeros(size, frames)
        x[:, :2], signs[:, 0], signs[:, 1] = usual, 1.0, -0.999  # which nearly cancel
        x[0, 2:], signs[0, 2:] = 1.0, 1.0
        found = engine.clipped_sum(model, loss, (x, signs), clip=Flat(1.0))
        return found.values["own.weight"].double()

    first = torch.randn(size, 2, *shape), torch.rand(size, 2)
    engine.clipped_sum(model, loss, first, clip=Flat(1.0))
    assert not engine.fallbacks
    assert float((total(8) - total(2)).norm()) <= 2.0
    assert not engine.fallbacks

"""Convolutions of stride 1 by pairs of half-precision numbers, against float64.

On a GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.clipping import conv_input, conv_pairs
from noshuffle.clipping.conv_halves import halves
from noshuffle.clipping.shared_copies import COPIES

HAS_GPU = torch.cuda.is_available()
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
SHAPES = [
    # examples, channels, outputs, size, kernel, padding, dilation
    (3, 16, 24, (9, 7), (3, 3), (1, 1), (1, 1)),
    (2, 17, 33, (8, 9), (3, 2), (2, 0), (1, 2)),
    (4, 20, 16, (6, 6), (1, 1), (0, 0), (1, 1)),
    (1, 40, 130, (5, 11), (5, 3), (2, 1), (1, 1)),
    (2, 70, 70, (4, 4), (3, 3), (1, 1), (1, 1)),
]


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def run(x: Tensor, weight: Tensor, padding: Any, dilation: Any) -> Tensor:
    pair, units, _ = halves(x, is_pair=True)
    how = {"padding": padding, "dilation": dilation, "like": x}
    return conv_pairs.convolved(pair, units, weight, **how)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_convolution_with_twenty_bits(shape: Any, last: bool) -> None:
    n, c, o, size, kernel, *how = shape
    x, weight = drawn(n, c, *size), drawn(o, c, *kernel, seed=4)
    x = x.to(memory_format=torch.channels_last) if last else x
    found = run(x, weight, *how)
    wanted = F.conv2d(x.double(), weight.double(), None, 1, *how)
    assert found.dtype is torch.float32
    assert found.shape == wanted.shape
    assert found.is_contiguous(memory_format=torch.channels_last) or not last
    # all terms of a sum may cancel: what rounding does is in proportion to their sizes
    room = F.conv2d(x.abs().double(), weight.abs().double(), None, 1, *how)
    assert float(((found - wanted).abs() / room).max()) < 2.0**-19


def test_each_of_the_three_products_counts() -> None:
    x, weight = (drawn(*s).half().float() * (1 + 2.0**-12) for s in ((2, 16, 5, 5), (16, 16, 3, 3)))
    found, wanted = run(x, weight, (1, 1), (1, 1)), F.conv2d(x, weight, None, 1, 1)
    assert float((found - wanted).norm() / wanted.norm()) < 2e-6


def test_an_example_stays_by_itself() -> None:
    """Its neighbours may hold anything: their bits are the same."""
    x, weight = drawn(4, 16, 6, 5), drawn(20, 16, 3, 3, seed=4)
    alone = run(x, weight, (1, 1), (1, 1))
    for value in (torch.nan, torch.inf, 1e38, 1e-40, 0.0):
        moved = x.clone()
        moved[1] = value
        found = run(moved, weight, (1, 1), (1, 1))
        assert torch.equal(found[[0, 2, 3]], alone[[0, 2, 3]]), value


@pytest.mark.parametrize("scale", [1e-24, 1e-12, 1e12, 1e25])
def test_sizes_of_examples_and_weights_do_not_matter(scale: float) -> None:
    x, weight = drawn(3, 16, 6, 5) * scale, drawn(20, 16, 3, 3, seed=4) * 1e-6
    x[1] *= 1e-6
    found = run(x, weight, (1, 1), (1, 1)).double()
    wanted = F.conv2d(x.double(), weight.double(), None, 1, 1)
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm()) <= 2.0**-18 * float(other.norm())


@pytest.mark.parametrize("border", [0, 1, 2])
def test_gradients_at_an_input_are_those_of_autograd(border: int, monkeypatch: Any) -> None:
    layer = nn.Conv2d(16, 24, 3, padding=border).to(DEVICE)
    x = drawn(3, 16, 8, 7).requires_grad_()
    out = layer(x)
    g = drawn(*out.shape, seed=5)
    (wanted,) = torch.autograd.grad(layer.double()(x.double()), x, g.double())
    layer.float()
    monkeypatch.setattr(conv_pairs, "is_work", lambda *_: True)
    found = conv_input.input_gradient(layer, layer.weight.detach(), g, x.shape[2:])
    assert float((found - wanted).norm() / wanted.norm()) < 1e-5
    if not HAS_GPU:
        assert conv_pairs._agrees(DEVICE)


def test_pairs_that_were_made_are_taken(monkeypatch: Any) -> None:
    """The norms of a layer have made them; the gradient at its input is the same tensor."""
    g, weight = drawn(3, 24, 8, 7), drawn(16, 24, 3, 3, seed=4)
    calls = []

    def counted(t: Tensor, **how: Any) -> Any:
        calls.append(t)
        return halves(t, **how)

    monkeypatch.setattr(conv_pairs, "halves", counted)
    token = COPIES.set({})
    try:
        held = conv_pairs.copy_of(g, (1, True), lambda t: halves(t, is_pair=True))
        found = conv_pairs.by_pairs(g, weight, padding=(1, 1), dilation=(1, 1))
    finally:
        COPIES.reset(token)
    assert [t.shape for t in calls] == [weight.shape]
    assert held[0].shape == (3, 48, 8, 7)
    torch.testing.assert_close(found, F.conv2d(g, weight, None, 1, 1), rtol=1e-4, atol=1e-4)

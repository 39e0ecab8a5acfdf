"""Which convolutions of patches are linear maps: by layer and picture, on a CPU and on a GPU.

Stand-ins for tensors of a GPU: which form is made of them is compared, nothing is computed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from noshuffle.clipping import conv_kernels, rules_conv
from noshuffle.clipping.forms import OuterGradient
from noshuffle.clipping.rules_conv import Convolution

#: Layers whose stride is their kernel, the side of a picture, and how many numbers a window has.
PATCHES = nn.Conv2d(4, 6, 2, stride=2)
LONG, WHOLE = nn.Conv2d(4, 6, 6, stride=6), nn.Conv2d(4, 6, 5, stride=5)


class OnGpu(Tensor):
    """Says that it lies on a GPU."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda"))


def form(layer: nn.Conv2d, side: int, size: int, dtype: torch.dtype = torch.float32) -> Any:
    """What the rule makes of a batch on a GPU."""
    places = side // layer.kernel_size[0]
    x = torch.zeros(size, layer.in_channels, side, side, dtype=dtype).as_subclass(OnGpu)
    g = torch.zeros(size, layer.out_channels, places, places, dtype=dtype).as_subclass(OnGpu)
    return rules_conv.convolution(layer, x, g, size)["weight"]


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are good there, for batches of more than five pictures of PATCHES."""
    monkeypatch.setattr(conv_kernels, "HAS_TRITON", True)
    monkeypatch.setattr(rules_conv, "_agrees", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("FEWEST_WINDOWS", "FEWEST_BY_WEIGHT"):
        monkeypatch.setattr(rules_conv, name, 6 * 4 * 64)

    def fused(layer: Any, x: Tensor, g: Tensor, size: int, sides: Any) -> Convolution:
        lengths = (torch.ones(1, size, 1, 1), torch.ones(1, size, 1, 1))
        return Convolution(layer, x, g, size, sides, lengths=lengths)

    monkeypatch.setattr(rules_conv, "_fused", fused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_patches_are_convolutions_in_short_batches_as_in_long_ones(dtype: torch.dtype) -> None:
    found = [form(PATCHES, 8, size, dtype) for size in (1, 5, 6, 40)]
    assert [type(own) for own in found] == [Convolution] * 4
    assert [own.is_fused for own in found] == [False, False, True, True]


@pytest.mark.parametrize("size", [1, 400])
@pytest.mark.parametrize(
    ("layer", "side", "dtype"),
    [
        (LONG, 12, torch.float32),  # more taps than kernels know
        (WHOLE, 5, torch.float32),  # one position
        (PATCHES, 8, torch.float64),
    ],
)
def test_others_are_linear_maps_in_every_batch(
    layer: nn.Conv2d, side: int, dtype: torch.dtype, size: int
) -> None:
    assert type(form(layer, side, size, dtype)) is OuterGradient

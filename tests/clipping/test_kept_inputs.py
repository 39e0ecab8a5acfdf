"""Inputs in the form that autograd keeps: the numbers of a layer stay the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noshuffle.clipping.kept_inputs import cast_early


class InFull(nn.Linear):
    """A head that stays in float32 under autocast; its input was rounded all the same."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), self.weight, self.bias)


@pytest.mark.parametrize("kind", [nn.Linear, InFull])
def test_a_cast_before_the_call_changes_no_number(kind: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    layer, x = kind(64, 3), torch.randn(5, 64)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plain = layer(x)
        with cast_early([layer]):
            assert torch.equal(layer(x), plain)

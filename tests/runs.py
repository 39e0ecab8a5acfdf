"""What tests compare of private runs: weights, named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from noshuffle import Private


def weights(private: Private) -> Tensor:
    """All parameters, one behind the other."""
    return torch.cat([p.detach().reshape(-1) for p in private.model.parameters()])


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether these are the same tensors by name, to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def agree(a: nn.Module, b: nn.Module) -> None:
    """Raise where two models are apart by more than rounding."""
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

"""Numbers that are the same everywhere: draws of NumPy's frozen generator, and what is kept of a
large array without keeping it."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

PROJECTIONS = 8


def draws(name: str) -> np.random.RandomState:
    """A generator of this name. Its stream is frozen, unlike that of `default_rng` and of torch."""
    return np.random.RandomState(zlib.crc32(name.encode()))


def normal(name: str, *shape: int) -> NDArray[np.float64]:
    """Standard normal numbers of this name."""
    return draws(name).standard_normal(shape)


def fill(model: nn.Module) -> None:
    """Weights that follow from their names and shapes alone: norms near one, others by fan-in."""
    import torch

    with torch.no_grad():
        for name, p in model.named_parameters():
            values = normal(name, *p.shape)
            if p.dim() > 1:
                values = values / np.sqrt(values[0].size)
            else:
                values = 0.2 * values + (1.0 if "norm" in name and "weight" in name else 0.0)
            p.copy_(torch.from_numpy(np.asarray(values)))


def projections(values: Iterable[tuple[str, Any]]) -> list[float]:
    """Sums of all numbers under eight choices of random signs, and their norm, in float64."""
    flat = [(name, _flat(value)) for name, value in values]
    signs = [draws(f"signs {name}").randint(0, 2, (PROJECTIONS, len(v))) for name, v in flat]
    sums = [
        float(sum((2 * s[i] - 1) @ v for s, (_, v) in zip(signs, flat))) for i in range(PROJECTIONS)
    ]
    return [short(v) for v in (*sums, float(np.sqrt(sum(v @ v for _, v in flat))))]


def short(value: float) -> float:
    """Nine digits: what float32 holds."""
    return float(f"{value:.9g}")


def bits(value: Any) -> dict[str, Any]:
    """Numbers to the bit: ends in hexadecimal, and SHA-256 of all bytes (little-endian)."""
    array = value.detach().numpy() if isinstance(value, Tensor) else np.asarray(value)
    flat = np.ascontiguousarray(array).reshape(-1)
    ends = [float(v).hex() for v in (*flat[:3], *flat[-3:])]
    raw = flat.astype(flat.dtype.newbyteorder("<")).tobytes()
    return {"ends": ends, "sha256": hashlib.sha256(raw).hexdigest()}


def _flat(value: Any) -> NDArray[np.float64]:
    array = value.detach().numpy() if isinstance(value, Tensor) else np.asarray(value)
    return array.astype(np.float64).reshape(-1)

"""The random generators that loaders and augmentations draw from, as plain values.

Kept with a checkpoint, so that a resumed run draws what it would have drawn. No state of its own.

>>> before = rng_state(); drawn = torch.rand(2); restore_rng(before)
>>> torch.equal(drawn, torch.rand(2))
True
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The generators that loaders and augmentations draw from, as tensors and plain values."""
    _, words, place, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    version, numbers, spare = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(words, dtype=np.int64)),
        "numpy_rest": [int(place), int(has_gauss), float(gauss)],
        "python": [
            version,
            torch.tensor(numbers, device="cpu"),
            spare,
        ],  # 625 values would be pickled one by one
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Put the generators back as `rng_state` found them."""
    torch.set_rng_state(state["torch"])
    words, (place, has_gauss, gauss) = state["numpy"].numpy().astype(np.uint32), state["numpy_rest"]
    np.random.set_state(("MT19937", words, place, has_gauss, gauss))  # noqa: NPY002
    version, numbers, spare = state["python"]
    random.setstate((version, tuple(torch.as_tensor(numbers, device="cpu").tolist()), spare))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])

"""Random numbers that come again: a generator set for a step, and all generators of a process.

Dropout and the like draw from torch's default generators. Inside a step these are set from a seed
of the run and the step (`seeded`), so that masks do not depend on what else has drawn, and an
honest replay of a step has the same sum. Loaders and augmentations draw outside of steps: from
torch's, NumPy's and Python's generators, which `captured` describes as plain values for a
checkpoint and `restore` puts back. No state.

>>> with seeded(7, torch.device("cpu")):
...     first = torch.rand(2)
>>> with seeded(7, torch.device("cpu")):
...     print(torch.equal(first, torch.rand(2)))
True
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's generators of host and device as this seed sets them; then as they were before."""
    host = torch.default_generator
    before = host.get_state()
    own = None if device.type == "cpu" else _generator(device)
    before_device = None if own is None else own.get_state()
    host.manual_seed(seed)
    if own is not None:
        own.manual_seed(seed)
    try:
        yield
    finally:
        host.set_state(before)
        if own is not None and before_device is not None:
            own.set_state(before_device)


def _generator(device: torch.device) -> torch.Generator | None:
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    found: torch.Generator = torch.cuda.default_generators[index]
    return found


def captured() -> dict[str, Any]:
    """The generators of this process as tensors and plain values."""
    _, words, place, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002
    version, numbers, spare = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(words, dtype=np.int64)),
        "numpy_rest": [int(place), int(has_gauss), float(gauss)],
        "python": [version, list(numbers), spare],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put the generators back as `captured` found them."""
    torch.set_rng_state(state["torch"])
    words, (place, has_gauss, gauss) = state["numpy"].numpy().astype(np.uint32), state["numpy_rest"]
    np.random.set_state(("MT19937", words, place, has_gauss, gauss))  # noqa: NPY002
    version, numbers, spare = state["python"]
    random.setstate((version, tuple(numbers), spare))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])

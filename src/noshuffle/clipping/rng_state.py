"""Random numbers drawn again: torch's generators, remembered and put back. No state.

>>> again = rng_state_of(torch.device("cpu"))
>>> first = torch.rand(3)
>>> again()
>>> torch.equal(first, torch.rand(3))
True
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def rng_state_of(device: torch.device) -> Callable[[], None]:
    """What to call to have the generators of host and device as they are now."""
    on_host = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def again() -> None:
        torch.set_rng_state(on_host)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, device)

    return again

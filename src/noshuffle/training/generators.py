"""torch's random generators, set for a block of code and then as they were.

The masks of a step come from the secret of its run; the user's own draws go on as if nothing had
been drawn.

State: torch's own, within the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def generators(device: torch.device) -> list[torch.Generator]:
    """torch's generators of host and device."""
    found: list[torch.Generator] = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        found.append(torch.cuda.default_generators[index])
    return found


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's generators of host and device as this seed sets them; then as they were before."""
    before = [(generator, generator.get_state()) for generator in generators(device)]
    for generator, _ in before:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)

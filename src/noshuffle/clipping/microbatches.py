"""Fast or lean: how many parts of a batch are clipped one after the other.

    fast   the whole batch at once: one forward, one backward; inputs and output gradients of all
           linear layers are held until the factors are known
    lean   two or more parts, each done as above and added to one sum: the memory of a part
    auto   fast where the device has room for it, else lean with as few parts as fit

What a step needs is measured once on two small pieces of the first batch, bytes(n) = fixed +
n·per_example, and compared with what the device has left; a step that runs out of memory all the
same is done in twice as many parts. No state here.

>>> decide("lean", 32, None, 0)[0], decide("auto", 32, Need(2**30, 2**28), 6 * 2**30)[0]
(2, 2)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from noshuffle.clipping.factor import ClippedSum
from noshuffle.clipping.objective import Batch, BatchShape, take
from noshuffle.clipping.units import joined
from noshuffle.triton_shim import is_capturing

MODES = ("auto", "fast", "lean")
#: The part of the free memory that a step may count on: allocators need some for themselves.
USABLE = 0.9
#: The choice is looked at again in so many steps: an optimizer takes its memory after the first.
LOOKS = 4


class Need(NamedTuple):
    """Bytes that a clipped sum of n examples takes: fixed + n·per_example."""

    fixed: float
    per_example: float

    def bytes(self, examples: int) -> float:
        return self.fixed + self.per_example * examples


class Microbatch(NamedTuple):
    """Some examples of a batch: their rows, and their units, numbered from 0 within it."""

    rows: Tensor | slice
    units: Tensor | None


def free_bytes(device: torch.device) -> int:
    """What the device and torch's allocator can still give."""
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + held)


def measure(run: Callable[[int], object], *, size: int, device: torch.device) -> Need | None:
    """What a step needs, from `run(n)` on few examples; None where it cannot be measured."""
    small = max(1, size // 8)
    if device.type != "cuda" or size < 2 * small:
        return None
    peaks = []
    for count in (small, 2 * small):
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        try:
            run(count)
        except torch.OutOfMemoryError:
            return Need(0.0, float(free_bytes(device)) / count * 2.0)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    slope = max(0.0, (peaks[1] - peaks[0]) / small)
    return Need(max(0.0, peaks[1] - 2 * small * slope), slope)


def decide(mode: str, size: int, need: Need | None, free: float) -> tuple[int, str]:
    """How many parts, and why in words."""
    parts = 2 if mode == "lean" and size > 1 else 1
    reason = "as asked for" if mode != "auto" else "nothing to weigh up"
    if mode != "fast" and need is not None:
        while parts < size and need.bytes(-(-size // parts)) > USABLE * free:
            parts = min(size, 2 * parts)
        gib = 2.0**30
        wanted = need.bytes(-(-size // parts)) / gib
        reason = f"needs about {wanted:.2f} GiB of {free / gib:.2f} GiB free"
    return parts, f"{'fast, in one part' if parts == 1 else f'lean, in {parts} parts'}: {reason}"


def microbatches(size: int, parts: int, units: Tensor | None) -> list[Microbatch]:
    """Cut a batch into at most `parts` pieces; all examples of a unit stay together.

    Guarantees: every example is in exactly one piece, every unit in exactly one; the units of the
    pieces, one after the other, are the units of the batch in order. One piece is the batch itself,
    its rows in their own order.
    """
    if parts <= 1 or size <= 1:
        return [Microbatch(slice(0, size), units)]
    if units is None:
        step = -(-size // parts)
        return [Microbatch(slice(i, min(i + step, size)), None) for i in range(0, size, step)]
    of = units.detach().cpu().long()
    order = torch.argsort(of, stable=True)
    ends = torch.cumsum(torch.bincount(of), 0)  # examples of units 0 … u, in that order
    found: list[Microbatch] = []
    start, first = 0, 0
    while start < size:
        full = start + -(-size // parts)
        unit = int(torch.searchsorted(ends, min(full, size)))  # ends here, or a little later
        rows = order[start : int(ends[unit])]
        found.append(Microbatch(rows, of[rows] - first))
        start, first = int(ends[unit]), unit + 1
    return found if len(found) > 1 else microbatches(size, 1, units)


@dataclass
class Chosen:
    """The parts for batches of one kind."""

    parts: int
    need: Need | None
    looks: int = 0


def choose_parts(
    memory: dict[tuple[int, int], Chosen],
    mode: str,
    shape: BatchShape,
    *,
    device: torch.device,
    run: Callable[[int], object],
    say: Callable[[str], None],
) -> Chosen:
    """The parts for a batch of this shape; `memory`: earlier choices; `run(n)` clips n rows."""
    # Batches that need about the same memory: as many examples, and as long within a quarter.
    kind = shape.size, round(math.log(max(1, shape.entries), 1.25))
    chosen = memory.get(kind)
    if chosen is None:
        is_measured = mode != "fast" and not is_capturing(device)
        need = measure(run, size=shape.size, device=device) if is_measured else None
        chosen = memory[kind] = Chosen(1, need)
    elif chosen.need is None or chosen.looks >= LOOKS or is_capturing(device):
        return chosen
    free = float(free_bytes(device)) if chosen.need is not None else 0.0
    parts, words = decide(mode, shape.size, chosen.need, free)
    chosen.looks += 1
    if parts > chosen.parts or chosen.looks == 1:
        chosen.parts = parts
        say(words)
    return chosen


Run = Callable[[Batch, Tensor | None, Tensor | None, Mapping[str, Tensor] | None], ClippedSum]


def in_parts(
    one: Run,
    batch: Batch,
    units: Tensor | None,
    weights: Tensor | None,
    *,
    chosen: Chosen,
    size: int,
) -> ClippedSum:
    """The clipped sum, piece by piece; `one(rows, units, weights, onto)` does a piece."""
    while True:
        try:
            return _added_up(one, batch, units, weights, microbatches(size, chosen.parts, units))
        except torch.OutOfMemoryError:
            if chosen.need is None or chosen.parts >= size:
                raise
        chosen.parts = min(size, 2 * chosen.parts)  # outside the handler, which holds the frames
        torch.cuda.empty_cache()


def _added_up(
    one: Run,
    batch: Batch,
    units: Tensor | None,
    weights: Tensor | None,
    pieces: Sequence[Microbatch],
) -> ClippedSum:
    done: list[ClippedSum] = []
    if len(pieces) == 1:
        return one(batch, units, weights, None)
    for piece in pieces:
        marks = None if weights is None else weights[piece.rows]
        onto = done[0].values if done else None
        done.append(one(take(batch, piece.rows), piece.units, marks, onto))
    found = joined(done)
    if not isinstance(pieces[0].rows, Tensor):
        return found
    order = torch.cat([p.rows for p in pieces])  # type: ignore[misc]
    losses = torch.empty_like(found.losses)
    return replace(found, losses=losses.index_copy_(0, order.to(losses.device), found.losses))

"""Noise buffers in the memory of the host, of which the device holds two blocks at a time.

    block k + 1 comes in   |   the noise of block k is added, its buffers go on   |   k − 1 goes out

on three CUDA streams. A block is some tiles of the row of all tensors, and a shard of each of them,
so that every block draws what the whole would (`layout`): the bits are those of buffers that stay
on the device. BLT-4 for 1.3·10⁹ parameters keeps 21 GB on the host instead, and moves them both
ways in every step, at once: 0.4 s at 50 GB/s, which pays where a step is many microbatches.

Half the bytes on the device, at the price of random words: `compact`. To draw all past rows again
would need no buffer, but t draws in step t; banded inverses (`FeedForward`) and dense matrices are
made that way, and have no state to move.

State: none of its own; the buffers are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from noshuffle.errors import one_of
from noshuffle.noise.gaussian import TILE
from noshuffle.noise.layout import Layout

#: Tiles of a block: 2²⁴ numbers, 64 MiB a buffer.
BLOCK_TILES = 2**14
#: Where buffers may lie; "auto" takes the host where they would fill half of what is free, and
#: "compact" keeps 16 bits of each number on the device (`compact`).
PLACES = ("auto", "device", "host", "compact")

#: Adds the noise of step `step` to the flat tensors of one block.
AddFn = Callable[..., None]
#: Makes that, for a layout and the buffers of a block.
MakeFn = Callable[[Layout, Tensor], AddFn]


def is_hosted(memory: str, *, size: int, device: torch.device) -> bool:
    """Whether buffers of `size` bytes are to lie on the host."""
    one_of(PLACES, noise_memory=memory)
    if memory != "auto":
        return memory == "host" and size > 0
    if device.type != "cuda" or not size:
        return False
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return 2 * size > torch.cuda.mem_get_info(device)[0] + cached


def host_buffers(shape: tuple[int, ...], *, device: torch.device) -> Tensor:
    """Zeros that the device can copy from and to while it works."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")


class HostedStep:
    """The blocks of a layout, whose buffers `state` (buffers, tiles, 1024) lie on the host.

    Guarantees: as the steps that `make` gives for each block; every block is brought forward once.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        state: Tensor,
        device: torch.device,
        make: MakeFn,
        chunk_tiles: int,
    ) -> None:
        self._state = state
        blocks = Layout.of(layout.shapes, starts=layout.starts, chunk_tiles=BLOCK_TILES).chunks
        most = max((block.tiles for block in blocks), default=0)
        spaces = [
            torch.empty(state.shape[0] * most * TILE, dtype=torch.float32, device=device)
            for _ in blocks[:2]
        ]
        self._blocks: list[tuple[Any, Tensor, AddFn]] = []
        for number, block in enumerate(blocks):
            held = spaces[number % 2][: state.shape[0] * block.tiles * TILE]
            held = held.view(-1, block.tiles, TILE)
            shapes = {piece.name: (piece.end - piece.begin,) for piece in block.pieces}
            starts = {piece.name: piece.tile * TILE + piece.lead for piece in block.pieces}
            own = Layout.of(shapes, starts=starts, chunk_tiles=chunk_tiles)
            self._blocks.append((block, held, make(own, held)))
        stream: Any = torch.cuda.Stream
        self._streams = [stream(device) for _ in "io"] if device.type == "cuda" else []
        self._device = device

    def add_(self, targets: Mapping[str, Tensor], *, step: int) -> None:
        """Add the noise of `step` to flat tensors, and bring all buffers forward."""
        if not self._streams:
            for block, held, add in self._blocks:
                self._copy(block, held)
                add(self._parts(block, targets), step=step)
                self._copy(block, held, is_back=True)
            return
        inward, outward = self._streams
        main = torch.cuda.current_stream(self._device)
        inward.wait_stream(outward)  # what the step before has sent back
        inward.wait_stream(main)  # whoever has set the buffers
        gone: list[Any] = []
        for number, (block, held, add) in enumerate(self._blocks):
            with torch.cuda.stream(inward):
                if number >= 2:
                    inward.wait_event(gone[number - 2])
                self._copy(block, held)
            main.wait_stream(inward)
            add(self._parts(block, targets), step=step)
            outward.wait_stream(main)
            with torch.cuda.stream(outward):
                self._copy(block, held, is_back=True)
                gone.append(outward.record_event())

    def wait(self) -> None:
        """Until the host holds the buffers as the last step left them."""
        for stream in self._streams:
            stream.synchronize()

    def _copy(self, block: Any, held: Tensor, *, is_back: bool = False) -> None:
        # Buffer by buffer: only copies of one stretch run beside the device's work.
        for there, here in zip(self._state[:, block.first : block.first + block.tiles], held):
            (there if is_back else here).copy_(here if is_back else there, non_blocking=True)

    def _parts(self, block: Any, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {piece.name: targets[piece.name][piece.begin : piece.end] for piece in block.pieces}

"""The noise of a step on a GPU by one kernel: the tables it reads, and its launch.

    small tables on the device  ──►  one launch of `triton_kernels.add_noise` per tensor type

The numbers of the steps lie on a tape (`tape`), of which a counter on the device reads the next
record; sizes, places and generator keys of the tensors in a table of regions, beside their
addresses. Where the source has several keys, a record names the key of each draw. Many small
tensors thus cost one launch, which reads nothing from the host: it can be captured in a CUDA graph
and replayed, the counter goes on by itself, and the tape is filled up between replays.

State: the counter, which only mirrors the number of steps that the stream has released. A second
counter holds how many steps may begin; a replay beyond it reads the record of NaN.

>>> is_ready(torch.device("cpu"))
False
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise import triton_kernels
from noshuffle.noise.gaussian import TILE
from noshuffle.noise.layout import Layout
from noshuffle.noise.philox import BLOCKS, address, split_seed
from noshuffle.noise.source import Source
from noshuffle.noise.step_plan import StepPlans
from noshuffle.noise.tape import STEPS, WORDS, StepTape, record_tape
from noshuffle.triton_shim import is_capturing, tl

#: Tiles of one program where there are many of them; a small model has more use for more programs.
TILES, MANY_TILES = 4, 2**14
WARPS = 4
#: Registers of a thread, so that many programs fit beside each other: without buffers, with a few.
#: Left alone the compiler takes more, and the memory waits; many buffers need what they need.
REGISTERS, REGISTERS_OF_FEW, FEW = 56, 72, 4


def is_ready(device: torch.device) -> bool:
    """Whether the kernel can run there. NOSHUFFLE_FUSED=off in the environment says no."""
    is_off = os.environ.get("NOSHUFFLE_FUSED", "").lower() in ("off", "0")
    return device.type == "cuda" and triton_kernels.HAS_TRITON and not is_off


@dataclass(frozen=True)
class ProgramTables:
    """For one choice of tensor types: the regions, and per type which program works on which."""

    regions: Tensor
    owners: tuple[tuple[torch.dtype, Tensor], ...]


class Fused:
    """Adds the noise of a step to flat tensors and brings the buffers forward, in one pass.

    Guarantees: adds the same numbers as the torch path of `NoiseStream`, bit for bit. A replay that
    was not announced turns its tensors into NaN; it never repeats a draw, nor makes one that the
    stream has not counted.
    """

    def __init__(
        self,
        plans: StepPlans,
        *,
        layout: Layout,
        source: Source,
        state: Tensor,
        scale: float,
        steps: int,
        tiles: int | None = None,
        warps: int = WARPS,
    ) -> None:
        self._plans, self._scale, self._steps = plans, scale, steps
        self._device, self._state, self._warps = state.device, state, warps
        # Measured: a program with buffers to move is quickest when it owns one tile.
        is_light = not plans.buffers and layout.tiles >= MANY_TILES
        self._tiles = tiles or (TILES if is_light else 1)
        few = REGISTERS_OF_FEW if plans.buffers <= FEW else 0
        self._registers = few if plans.buffers else REGISTERS
        self._table, self._names = _regions(layout, source)
        self._segment_fn = source.segment if source.later else None
        self._keys = _keys(self._names, source).to(self._device)
        self._has_decays = bool(plans.buffers) and bool(plans.at(0).decays)
        self._words = self._zeros(WORDS, torch.int32)
        self._offsets = self._zeros(STEPS + 1, torch.int32)
        self._clock = self._zeros(2, torch.int32)
        self._one_step = torch.ones_like(self._clock)
        self._one_replay = torch.tensor([1, 0], dtype=torch.int32, device=self._device)
        where = [state.data_ptr(), layout.tiles * TILE, self._keys.data_ptr(), source.segments]
        self._places = torch.tensor(where, dtype=torch.int64, device=self._device)
        self._tape: StepTape | None = None
        self._next = -1
        self._programs: dict[tuple[torch.dtype, ...], ProgramTables] = {}
        self._addresses: tuple[int, ...] = ()
        self._targets = self._zeros(max(1, len(self._names)), torch.int64)
        self._spare: tuple[Tensor, Tensor] | None = None
        self._counter = self._one_replay
        self._captured: list[tuple[Tensor, Tensor]] = []

    def add_(self, targets: Mapping[str, Tensor], *, step: int) -> None:
        """Add the noise of `step` to contiguous tensors. While a graph is being captured nothing
        runs: each replay then adds the noise of the next step that was announced.
        """
        is_captured = is_capturing(self._device)
        key = tuple(targets[name].dtype for name in self._names)
        if not is_captured:
            self._seek(step=step, count=1)
        elif key not in self._programs or self._spare is None:
            raise Unsupported("call prepare() with tensors of the same types before each capture")
        tables = self._programs.get(key) or self._planned(key)
        found = tuple(targets[name].data_ptr() for name in self._names)
        where = self._captured_table(found) if is_captured else self._table_of(found)
        self._clock.add_(self._counter if is_captured else self._one_step)
        for dtype, owners in tables.owners:
            self._launch(tables, dtype, owners, where, programs=len(owners))

    def prepare(self, targets: Mapping[str, Tensor], *, counts_itself: bool = False) -> None:
        """Build the tables and compile the kernel for tensors like these; adds nothing.

        A graph keeps a table of addresses to itself, so this comes before every capture. One that
        `counts_itself` allows its own replays: for an owner that never replays it unannounced.
        """
        self._counter = self._one_step if counts_itself else self._one_replay
        key = tuple(targets[name].dtype for name in self._names)
        tables = self._programs.get(key) or self._planned(key)
        for dtype, owners in tables.owners:
            self._launch(tables, dtype, owners, self._targets, programs=0)
        if self._spare is None and self._device.type == "cuda":
            pinned = torch.zeros(
                len(self._targets), dtype=torch.int64, pin_memory=True, device="cpu"
            )
            self._spare = (pinned, torch.zeros_like(self._targets))

    def announce(self, *, step: int, count: int, counts_itself: bool = False) -> None:
        """Allow `count` replays, the steps [step, step + count), on the current CUDA stream."""
        self._seek(step=step, count=count)
        if not counts_itself:
            self._clock[1].add_(count)

    def forget(self) -> None:
        """Set the counters anew at the next step: an announced replay may never have run."""
        self._next = -1

    def _seek(self, *, step: int, count: int) -> None:
        """Put the records of these steps on the tape, and both counters at the first of them."""
        tape = self._tape
        if tape is None or not tape.first <= step <= step + count <= tape.first + tape.count:
            form: dict[str, Any] = {"scale": self._scale, "segment_fn": self._segment_fn}
            tape = record_tape(self._plans, first=step, steps=self._steps, **form)
            if count > tape.count:
                raise InvalidInput(f"at most {tape.count} steps can be announced, got {count}")
            self._write(tape)
        if self._next != step:
            self._clock.fill_(step - tape.first)
        self._next = step + count

    def _write(self, tape: StepTape) -> None:
        if len(tape.words) > len(self._words):
            if self._captured:
                raise Unsupported("a step needs a longer tape than the captured graph has")
            self._words = self._zeros(len(tape.words), torch.int32)
        self._words[: len(tape.words)].copy_(torch.from_numpy(tape.words.view(np.int32)))
        self._offsets.copy_(torch.from_numpy(tape.offsets))
        self._tape, self._next = tape, -1

    def _zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=self._device)

    def _planned(self, key: tuple[torch.dtype, ...]) -> ProgramTables:
        """Share the regions of each type out among programs of `tiles` tiles."""
        table, owners = self._table.copy(), []
        for dtype in dict.fromkeys(key):
            _element(dtype)
            index = np.flatnonzero([other == dtype for other in key])
            programs = -(-table[index, 2] // self._tiles)
            table[index, 9] = np.cumsum(programs) - programs
            owner = np.repeat(index, programs).astype(np.int32)
            owners.append((dtype, torch.from_numpy(owner).to(self._device)))
        regions = torch.from_numpy(table).to(self._device)
        self._programs[key] = ProgramTables(regions, tuple(owners))
        return self._programs[key]

    def _table_of(self, addresses: tuple[int, ...]) -> Tensor:
        """The table of addresses, written again only when tensors have moved."""
        if addresses != self._addresses:
            is_cuda = self._device.type == "cuda"
            # Pinned, or the host would wait here for all that the device has to do.
            table = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
            self._targets[: len(addresses)].copy_(table, non_blocking=True)
            self._addresses = addresses
        return self._targets

    def _captured_table(self, addresses: tuple[int, ...]) -> Tensor:
        """A table of its own for a graph, copied from pinned memory that stays as it is."""
        assert self._spare is not None
        pinned, table = self._spare
        pinned[: len(addresses)] = torch.tensor(addresses, dtype=torch.int64, device="cpu")
        table.copy_(pinned, non_blocking=True)
        self._captured.append(self._spare)
        self._spare = None
        return table

    def _launch(
        self,
        tables: ProgramTables,
        dtype: torch.dtype,
        owners: Tensor,
        where: Tensor,
        *,
        programs: int,
    ) -> None:
        kernel: Any = triton_kernels.add_noise
        is_nvidia = self._device.type == "cuda" and torch.version.hip is None
        limit = {"maxnreg": self._registers} if is_nvidia and self._registers else {}
        # Triton launches on the current device, which need not be the one of these tensors.
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            kernel[(programs,)](
                owners,
                tables.regions,
                where,
                self._words,
                self._offsets,
                self._clock,
                STEPS,
                self._places,
                ELEMENT=_element(dtype),
                TILES=self._tiles,
                DECAYS=self._plans.buffers if self._has_decays else 0,
                HAS_LISTS=bool(self._plans.buffers) and not self._has_decays,
                HAS_RING=self._segment_fn is not None,
                ASSEMBLY=is_nvidia,
                num_warps=self._warps,
                num_stages=1,
                enable_fp_fusion=False,
                **limit,
            )


def _element(dtype: torch.dtype) -> Any:
    name, known = str(dtype).removeprefix("torch."), ("float32", "bfloat16", "float16", "float64")
    if name not in known:
        raise Unsupported(f"noise can be added to {', '.join(known)}, got {dtype}")
    return getattr(tl, name)


def _keys(names: Sequence[str], source: Source) -> Tensor:
    """Key (2) and tag (2) of every tensor under every key of the ring: regions × segments × 4."""
    rows = [split_seed(source.seed(name, s)) for name in names for s in range(source.segments)]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(
        len(names), source.segments, 4
    )


def _regions(
    layout: Layout, source: Source
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], tuple[str, ...]]:
    """Per tensor that is not empty: numel, elements of its first tile that come before it, tiles,
    first tile in the buffers, first block, key (2), tag (2), first program (set by `_planned`).
    """
    first: dict[str, tuple[int, int]] = {}
    tiles: dict[str, int] = {}
    for chunk in layout.chunks:
        for piece in chunk.pieces:
            first.setdefault(piece.name, (chunk.first + piece.at, piece.tile))
            tiles[piece.name] = tiles.get(piece.name, 0) + piece.tiles
    rows = []
    for name, (flat, tile) in first.items():
        address(row=0, tile=tile + tiles[name] - 1)
        numel = int(np.prod(layout.shapes[name], dtype=np.int64))
        skip = layout.starts[name] - tile * TILE
        words = split_seed(source.seed(name))
        rows.append((numel, skip, tiles[name], flat, tile * BLOCKS, *words, 0))
    return np.array(rows, dtype=np.int64).reshape(-1, 10), tuple(first)

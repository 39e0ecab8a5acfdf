"""A whole step of AES noise on a CPU in one compiled loop: draw, correlate, scale, add.

    value ← grid(value + row t of scale·C⁻¹Z) · times

tile by tile, so that the numbers live in the first-level cache from the cipher to the value; the
memory traffic of a step is the values and the buffers, once. The bits are those of the chunk by
chunk form (`chunk_step`), its slow twin and its stand-in where there is no compiler, no AES in
hardware, or a value of another type (`whole_step_check` compares them before the first use).
Values are all float32 or all float64, noise and buffers float32. Pieces are handed out to threads
as they come.

State: round keys, and the table of pieces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.c_library import together
from noshuffle.noise import native
from noshuffle.noise.constants import TILE
from noshuffle.noise.correlate import dense
from noshuffle.noise.grid import grid_of
from noshuffle.noise.layout import Layout
from noshuffle.noise.step_plan import StepPlan

#: Tiles below which a second thread costs more than it saves.
_ALONE = 96


class WholeStep:
    """The pieces of a layout, ready to receive noise.

    Guarantees: `add_` changes every element of every value exactly once, by a number that does not
    depend on the number of threads or on which of them came to it.
    """

    def __init__(
        self, layout: Layout, *, seeds: Mapping[str, bytes], state: Tensor, workers: int
    ) -> None:
        self._library: Any = native.library()
        self._names = sorted(seeds)
        self._state = state
        self._schedules = {name: self._schedule(seed) for name, seed in seeds.items()}
        numbers = {name: number for number, name in enumerate(self._names)}
        rows = [
            (
                ctypes.addressof(self._schedules[piece.name]),
                *(piece.tile, piece.tiles, chunk.first + piece.at, numbers[piece.name]),
                *(span.begin, span.end, span.at - piece.at * TILE),
            )
            for chunk in layout.chunks
            for piece, span in zip(chunk.pieces, chunk.spans)
        ]
        self._pieces = np.array(rows, dtype=np.int64).reshape(-1, 8)
        self._workers = workers if layout.tiles >= _ALONE else 1

    def _schedule(self, seed: bytes) -> ctypes.Array[ctypes.c_uint8]:
        schedule = (ctypes.c_uint8 * 240)()
        self._library.aes_schedule(ctypes.create_string_buffer(seed, len(seed)), schedule)
        return schedule

    def fits(self, values: Mapping[str, Tensor]) -> bool:
        """Whether the values are of a kind that the loop knows."""
        kinds = {value.dtype for value in values.values()}
        is_known = kinds <= {torch.float32} or kinds == {torch.float64}
        return is_known and all(value.is_contiguous() for value in values.values())

    def add_(
        self, values: Mapping[str, Tensor], *, move: StepPlan, scale: float, times: float
    ) -> None:
        """Add the noise of one move on the grid, bring the buffers forward, multiply by `times`."""
        buffers = self._state.shape[0]
        factor = 1.0 if buffers else move.gain * scale
        is_double = any(value.dtype is torch.float64 for value in values.values())
        rows = np.array([row for row, _ in move.draws], dtype=np.uint64)
        weights = np.array([w * factor for _, w in move.draws], dtype=np.float32)
        places = np.array([values[name].data_ptr() for name in self._names], dtype=np.uint64)
        decays = (ctypes.c_float * buffers)(*move.decays) if move.decays else None
        inner, outer = dense(move.inner, buffers, 1.0), dense(move.outer, buffers, scale)
        step = _Step(
            *(0, len(self._pieces), self._state.stride(0), self._pieces.ctypes.data),
            *(places.ctypes.data, rows.ctypes.data, weights.ctypes.data),
            *(_address(inner), _address(decays), _address(outer), self._state.data_ptr()),
            *(len(rows), buffers, move.store, move.gain * scale),
            *(grid_of(move, scale=scale), times, is_double, times),
        )
        together(self._library.add_noise, step, threads=self._workers)


class _Step(ctypes.Structure):
    """One step as `native_text` declares it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next", "count", "stride")),
        *((name, ctypes.c_void_p) for name in ("pieces", "values", "rows", "weights")),
        *((name, ctypes.c_void_p) for name in ("inner", "decays", "outer", "state")),
        *((name, ctypes.c_int) for name in ("draws", "buffers", "store")),
        *((name, ctypes.c_float) for name in ("gain", "grid", "times")),
        *(("is_double", ctypes.c_int), ("factor", ctypes.c_double)),
    )


def _address(numbers: ctypes.Array[ctypes.c_float] | None) -> int | None:
    return None if numbers is None else ctypes.addressof(numbers)

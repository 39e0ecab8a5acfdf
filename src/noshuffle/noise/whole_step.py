"""A whole step of AES noise on a CPU in one compiled loop: draw, correlate, scale, add.

    value ← grid(value + row t of scale·C⁻¹Z) · times

tile by tile, so that the numbers live in the first-level cache from the cipher to the value; the
memory traffic of a step is the values and the buffers, once. The bits are those of the chunk by
chunk form (`chunk_step`), its slow twin and its stand-in where there is no compiler, no AES in
hardware, or a value of another type (`whole_step_check` compares them before the first use).
Values are all float32 or all float64, noise and buffers float32. Pieces are handed out to threads
as they come.

State: round keys, for every name one schedule a key of the ring, and the table of pieces.
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
from noshuffle.noise.source import Source
from noshuffle.noise.step_plan import StepPlan

#: Bytes of the round keys of AES-256.
_SCHEDULE = 240
#: Tiles below which a second thread costs more than it saves.
_ALONE = 96


class WholeStep:
    """The pieces of a layout, ready to receive noise.

    Guarantees: `add_` changes every element of every value exactly once, by a number that does not
    depend on the number of threads or on which of them came to it.
    """

    def __init__(self, layout: Layout, *, source: Source, state: Tensor, workers: int) -> None:
        self._library: Any = native.library()
        self._names = sorted(layout.shapes)
        self._source, self._state = source, state
        numbers = {name: number for number, name in enumerate(self._names)}
        # Round keys of every name, one schedule for each key of the ring.
        self._schedules = np.zeros((len(numbers), source.segments, _SCHEDULE), dtype=np.uint8)
        for name, number in numbers.items():
            for segment in range(source.segments):
                self._expand(source.seed(name, segment), into=self._schedules[number, segment])
        rows = [
            (
                self._schedules[numbers[piece.name]].ctypes.data,
                *(piece.tile, piece.tiles, chunk.first + piece.at, numbers[piece.name]),
                *(span.begin, span.end, span.at - piece.at * TILE),
            )
            for chunk in layout.chunks
            for piece, span in zip(chunk.pieces, chunk.spans)
        ]
        self._pieces = np.array(rows, dtype=np.int64).reshape(-1, 8)
        self._workers = workers if layout.tiles >= _ALONE else 1

    def _expand(self, seed: bytes, *, into: np.ndarray) -> None:
        """The round keys of a seed."""
        self._library.aes_schedule(ctypes.create_string_buffer(seed, len(seed)), into.ctypes.data)

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
        # Without a ring nobody has to say which key a draw takes.
        segment_fn = self._source.segment if self._source.later else None
        keys = segment_fn and np.array([segment_fn(row) for row, _ in move.draws], dtype=np.int32)
        weights = np.array([w * factor for _, w in move.draws], dtype=np.float32)
        places = np.array([values[name].data_ptr() for name in self._names], dtype=np.uint64)
        decays = (ctypes.c_float * buffers)(*move.decays) if move.decays else None
        inner, outer = dense(move.inner, buffers, 1.0), dense(move.outer, buffers, scale)
        step = _Step(
            *(0, len(self._pieces), self._state.stride(0), self._pieces.ctypes.data),
            *(places.ctypes.data, rows.ctypes.data),
            *(None if keys is None else keys.ctypes.data, weights.ctypes.data),
            *(_address(inner), _address(decays), _address(outer), self._state.data_ptr()),
            *(len(rows), buffers, move.store, move.gain * scale),
            *(grid_of(move, scale=scale), times, is_double, times),
        )
        together(self._library.add_noise, step, threads=self._workers)


class _Step(ctypes.Structure):
    """One step as `native_text` declares it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next", "count", "stride")),
        *((name, ctypes.c_void_p) for name in ("pieces", "values", "rows", "keys", "weights")),
        *((name, ctypes.c_void_p) for name in ("inner", "decays", "outer", "state")),
        *((name, ctypes.c_int) for name in ("draws", "buffers", "store")),
        *((name, ctypes.c_float) for name in ("gain", "grid", "times")),
        *(("is_double", ctypes.c_int), ("factor", ctypes.c_double)),
    )


def _address(numbers: ctypes.Array[ctypes.c_float] | None) -> int | None:
    return None if numbers is None else ctypes.addressof(numbers)

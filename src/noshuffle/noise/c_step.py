"""A step of AES noise on a CPU in one compiled loop: draw, correlate, scale, add.

    value ← grid(value + row t of scale·C⁻¹Z) · times

tile by tile, so that the numbers live in the first-level cache from the cipher to the value
(`native/noise.c`, `c_library`). The bits are those of torch (`torch_step`), its stand-in where
there is no library or no AES in hardware. Values are all float32 or all float64, noise and buffers
float32. Pieces are handed out to threads as they come. A compiler that contracts a product and a
sum, an instruction set that rounds in another way, or a slip in the C text would give noise that
another machine could not continue: before the first use in a process (`library`) a few steps of
every kind are made in both forms, and must come out equal, bit for bit.

State: round keys, for every name one schedule a key of the ring, the table of pieces, and the steps
that were made ready, by their kind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.c_library import load, together
from noshuffle.noise.gaussian import CPU_CHUNK, TILE
from noshuffle.noise.layout import Layout
from noshuffle.noise.source import Source, test_source
from noshuffle.noise.step_plan import Pairs, StepPlan, StepPlans, grid_of
from noshuffle.noise.torch_step import TorchStep
from noshuffle.strategies.recipe import Buffered, FeedForward, Forest, Recipe

#: Bytes of the round keys of AES-256.
_SCHEDULE = 240
#: Tiles below which a second thread costs more than it saves.
_ALONE = 96
#: Kinds of steps that are kept ready; a tree has one a height, a schedule of scales one a step.
_KINDS = 64


class NoiseJob(ctypes.Structure):
    """One step as `native/noise.c` declares it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("next", "count", "stride")),
        *((name, ctypes.c_void_p) for name in ("pieces", "values", "rows", "keys", "weights")),
        *((name, ctypes.c_void_p) for name in ("inner", "decays", "outer", "state")),
        *((name, ctypes.c_int) for name in ("draws", "buffers", "store")),
        *((name, ctypes.c_float) for name in ("gain", "grid", "times")),
        *(("is_double", ctypes.c_int), ("factor", ctypes.c_double)),
    )


#: A job, and the arrays whose addresses it holds.
Prepared = tuple[NoiseJob, tuple[Any, ...]]


class CStep:
    """The pieces of a layout, ready to receive noise.

    Guarantees: `add_` changes every element of every value exactly once, by a number that does not
    depend on the number of threads or on which of them came to it.
    """

    def __init__(
        self, layout: Layout, *, source: Source, state: Tensor, loaded: ctypes.CDLL
    ) -> None:
        self._library: Any = loaded
        self._names = sorted(layout.shapes)
        self._source, self._state = source, state
        numbers = {name: number for number, name in enumerate(self._names)}
        # Round keys of every name, one schedule for each key of the ring.
        self._schedules = np.zeros((len(numbers), source.segments, _SCHEDULE), dtype=np.uint8)
        for name, number in numbers.items():
            for segment in range(source.segments):
                seed, into = source.seed(name, segment), self._schedules[number, segment]
                self._library.aes_schedule(seed, into.ctypes.data)
        rows = [
            (
                self._schedules[numbers[piece.name]].ctypes.data,
                *(piece.tile, piece.tiles, chunk.first + piece.at, numbers[piece.name]),
                *(piece.begin, piece.end, piece.lead),
            )
            for chunk in layout.chunks
            for piece in chunk.pieces
        ]
        self._pieces = np.array(rows, dtype=np.int64).reshape(-1, 8)
        self._threads = torch.get_num_threads() if layout.tiles >= _ALONE else 1
        self._addresses = (ctypes.c_void_p * len(numbers))()
        self._jobs: dict[Any, Prepared] = {}

    def fits(self, values: Mapping[str, Tensor]) -> bool:
        """Whether the values lie in order and are all float32 or all float64."""
        kinds = set()
        for value in values.values():
            if not value.is_contiguous():
                return False
            kinds.add(value.dtype)
        return kinds <= {torch.float32} or kinds == {torch.float64}

    def add_(
        self, values: Mapping[str, Tensor], *, plan: StepPlan, scale: float, times: float
    ) -> None:
        """Add the noise of one step on the grid, bring the buffers forward, multiply by `times`."""
        is_double = bool(values) and next(iter(values.values())).dtype is torch.float64
        weights = tuple([weight for _, weight in plan.draws])
        kind = (plan.inner, plan.gain, plan.outer, plan.store, plan.decays, scale, times, is_double)
        if (prepared := self._jobs.get((weights, kind))) is None:
            if len(self._jobs) >= _KINDS:
                self._jobs.clear()
            prepared = self._prepared(plan, scale=scale, times=times, is_double=is_double)
            self._jobs[weights, kind] = prepared
        job = prepared[0]
        drawn = [row for row, _ in plan.draws]
        rows = (ctypes.c_uint64 * len(drawn))(*drawn)
        job.next, job.rows = 0, ctypes.addressof(rows)
        # Without a ring nobody has to say which key a draw takes.
        segment_fn = self._source.segment if self._source.later else None
        keys = segment_fn and (ctypes.c_int32 * len(drawn))(*map(segment_fn, drawn))
        job.keys = ctypes.addressof(keys) if keys else None
        self._addresses[:] = [values[name].data_ptr() for name in self._names]
        add_noise = self._library.add_noise
        if self._threads == 1:
            add_noise(ctypes.addressof(job))
        else:
            together(add_noise, job, threads=self._threads)

    def _prepared(self, plan: StepPlan, *, scale: float, times: float, is_double: bool) -> Prepared:
        """What steps of one kind have in common: all but the rows that are drawn, and the values.

        Most mechanisms have a few kinds of steps, and to make one ready takes longer than the noise
        of a thousand numbers.
        """
        buffers = self._state.shape[0]
        factor = 1.0 if buffers else plan.gain * scale
        weights = np.array([w * factor for _, w in plan.draws], dtype=np.float32)
        decays = np.array(plan.decays, dtype=np.float32)
        inner, outer = _dense(plan.inner, buffers, 1.0), _dense(plan.outer, buffers, scale)
        job = NoiseJob(
            *(0, len(self._pieces), self._state.stride(0), self._pieces.ctypes.data),
            *(ctypes.addressof(self._addresses), None, None, weights.ctypes.data),
            *(inner.ctypes.data, decays.ctypes.data if len(decays) else None, outer.ctypes.data),
            *(self._state.data_ptr(), len(plan.draws), buffers, plan.store, plan.gain * scale),
            *(grid_of(plan, scale=scale), times, is_double, times),
        )
        return job, (weights, decays, inner, outer)


def _dense(pairs: Pairs, count: int, factor: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Pairs of (buffer, weight) as one number a buffer, times a factor."""
    values = np.zeros(count, dtype=np.float32)
    for buffer, weight in pairs:
        values[buffer] = weight * factor
    return values


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled step, or None where there is none for this processor, or it is switched off.

    Guarantees: it is handed out only after steps of every kind were found equal to those of torch,
    bit for bit, whose cipher is that of the `cryptography` package.
    """
    loaded = load()
    return loaded if loaded is not None and agrees(loaded) else None


#: Every kind of step: decays with taps and gains, no buffers, stores and outer buffers.
_RECIPES: tuple[Recipe, ...] = (
    Buffered(
        (0.9, 0.5), (-0.2, -0.1), ((0, 1.0), (1, 0.3)), (1.0, 1.2, 0.7), draw_scale=(1.5,) * 3
    ),
    FeedForward((1.0, -0.5), scale=(1.0, 1.2, 0.7)),
    Forest("honaker", 3),
)
_SHAPES, _SCALE, _TIMES = {"w": (2 * (TILE + 9),), "b": (3,)}, 0.3, (1.0, 1 / 7, 1.0)


def agrees(loaded: ctypes.CDLL) -> bool:
    """Whether a library is for this processor, and leaves what torch does."""
    library: Any = loaded
    library.aes_schedule.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
    library.aes_schedule.restype = library.add_noise.restype = None
    library.add_noise.argtypes = [ctypes.c_void_p]
    if not library.is_for_here():
        return False
    cases = [(recipe, kind) for recipe in _RECIPES for kind in (torch.float32, torch.float64)]
    return all(
        torch.equal(_after_steps(*case, None), _after_steps(*case, loaded)) for case in cases
    )


@torch.no_grad()
def _after_steps(recipe: Recipe, kind: torch.dtype, loaded: ctypes.CDLL | None) -> Tensor:
    """Values and buffers after three steps, end to end; by torch without a library."""
    plans, source = StepPlans.of(recipe), test_source(seed="native", kind="aes")
    layout = Layout.of(_SHAPES, chunk_tiles=CPU_CHUNK)
    # Types and device are named, since the defaults may be others.
    shape = (plans.buffers, layout.tiles, TILE)
    state = torch.zeros(shape, dtype=torch.float32, device="cpu")
    start = torch.linspace(-1.0, 1.0, _SHAPES["w"][0], dtype=kind, device="cpu")
    values = {"w": start.clone(), "b": start[:3].clone()}
    for step, times in enumerate(_TIMES):
        plan = plans.at(step)
        if loaded is not None:
            c_step = CStep(layout, source=source, state=state, loaded=loaded)
            c_step.add_(values, plan=plan, scale=_SCALE, times=times)
        else:
            TorchStep(layout, source=source, state=state).add_(values, plan=plan, scale=_SCALE)
            for value in values.values():
                value.mul_(times)
    buffers = [piece for pieces in layout.views(state).values() for piece in pieces]
    return torch.cat([part.flatten() for part in (*values.values(), *buffers)])

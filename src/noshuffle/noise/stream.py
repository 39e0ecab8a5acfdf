"""The noise of a run, one step at a time: row t of scale·C⁻¹Z onto named tensors.

    value ← grid(value + row t of scale·C⁻¹Z)      rounded at random to 2⁻¹⁰ of the noise (`grid`)

Z has independent standard normal rows, one per draw, made by a `Source` from (row, name, element);
C⁻¹ is given by a recipe of the strategy (Denisov et al. 2022, arXiv 2202.08312), run as one
`StepPlan` a step. A step has three forms with the same bits, all in float32: in C for AES on a CPU
(`c_step`), as one kernel on CUDA with Triton and philox (`fused`), and by torch for everything else
(`torch_step`). State kept: the number of steps released, and the recipe's buffers in float32 as one
flat tensor (none for independent noise, banded inverses and dense matrices, whose past draws are
made again). What is saved of it:

    {**identity, "later": names of later keys, "step": rows released,
     "buffers": {name: (count, *shape)}}

with an identity (recipe, source, key, scale, horizon, shapes) that must be that of the stream that
goes on: another one would add the noise of another mechanism. Buffers are saved without the padding
of tiles, so that neither layout nor device matter to whoever goes on.

>>> from noshuffle.noise.source import test_source
>>> from noshuffle.strategies.recipe import FeedForward
>>> stream = NoiseStream(FeedForward(weights=(1.0, -1.0)), test_source(seed=1), {"w": (2, 3)},
...                      scale=0.5, steps=10)
>>> first, second = torch.zeros(2, 3), torch.zeros(2, 3)
>>> stream.add_({"w": first})
>>> stream.add_({"w": second})
>>> z = torch.empty(2, 2, 3)
>>> for row in range(2):
...     test_source(seed=1).normal_(z[row], row=row, name="w")
>>> bool(torch.allclose(second, 0.5 * (z[1] - z[0]), atol=0.5 * 2**-10)), stream.step
(True, 2)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    NoshuffleError,
    Unsupported,
    non_negative,
    whole,
)
from noshuffle.noise import c_step, fused
from noshuffle.noise.c_step import CStep
from noshuffle.noise.fused import Fused
from noshuffle.noise.gaussian import CPU_CHUNK, DEVICE_CHUNK, TILE, TORCH_CHUNK
from noshuffle.noise.grid import check_spread
from noshuffle.noise.layout import Layout
from noshuffle.noise.source import AnySource, Source, check_ring
from noshuffle.noise.step_plan import StepPlans, fingerprint, rows_used
from noshuffle.noise.torch_step import TorchStep
from noshuffle.one_owner import OneOwner
from noshuffle.strategies.recipe import Recipe
from noshuffle.triton_shim import is_capturing

#: Raised whenever the numbers of a stream change, so that none is continued with other numbers.
VERSION = 2
_NOT_FUSED = "only fused noise can be captured: install triton and use philox"


class NoiseStream(OneOwner):
    """Adds scale·(row t of C⁻¹Z) to named tensors, t = 0, 1, …

    Guarantees: the noise of element i of `name` at step t, and the coins that round its sum with
    the value to the grid, are functions of (keys, recipe, scale, t, name, i) only. Every step adds
    noise to every tensor, whatever the values are (zero, infinite and NaN included), and counts as
    released once it has begun to change them: a step that fails half-way leaves a stream that
    refuses to go on, rather than one that would draw the same noise twice onto different values.
    Past the horizon nothing is drawn. A stream cannot be copied, and a forked process cannot use
    it. Of two threads in one step the second is refused like one after a failed step.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: AnySource,
        shapes: Mapping[str, Sequence[int]],
        *,
        scale: float,
        steps: int,
        device: torch.device | str = "cpu",
    ) -> None:
        non_negative(scale=scale)
        check_spread(scale)
        whole(steps=steps)
        self._plans = StepPlans.of(recipe)
        if self._plans.horizon is not None and steps > self._plans.horizon:
            raise InvalidInput(
                f"the recipe covers {self._plans.horizon} steps, steps={steps}; fit it again"
            )
        self.scale = float(scale)
        self.horizon = int(steps)
        self._device = torch.device(device)
        on_cpu = self._device.type == "cpu"
        # One compiled step, where there is one for this device and source; else torch.
        kind = source.on(self._device).kind if isinstance(source, Source) else ""
        loaded = c_step.library() if kind == "aes" and on_cpu else None
        chunk = CPU_CHUNK if loaded else TORCH_CHUNK if on_cpu else DEVICE_CHUNK
        self._layout = Layout.of(shapes, chunk_tiles=chunk)
        self._source = source.on(self._device)
        self._source.check_names(self._layout.shapes)
        self._identity = {
            "version": VERSION,
            "recipe": fingerprint(recipe),
            "source": self._source.kind,
            "key": self._source.ring[0][1],
            "scale": self.scale,
            "horizon": self.horizon,
            "shapes": {name: list(shape) for name, shape in self._layout.shapes.items()},
        }
        self._step = 0
        self._is_broken = False
        self._lock = threading.Lock()
        shape = (self.buffers, self._layout.tiles, TILE)
        self._state = torch.zeros(shape, dtype=torch.float32, device=self._device)
        parts: dict[str, Any] = {"source": self._source, "state": self._state}
        self._fused, self._c_step, self._torch_step = None, None, None
        if kind == "philox" and fused.is_ready(self._device):
            more: dict[str, Any] = {"scale": self.scale, "steps": self.horizon}
            self._fused = Fused(self._plans, layout=self._layout, **parts, **more)
        else:
            self._torch_step = TorchStep(self._layout, **parts)
        if loaded is not None:  # for all values but those of mixed types
            self._c_step = CStep(self._layout, loaded=loaded, **parts)

    @property
    def step(self) -> int:
        """Rows released so far; the next one is row `step`."""
        return self._step

    @property
    def is_test(self) -> bool:
        """Whether the noise comes from a named test seed, which protects nobody."""
        return self._source.is_test

    @property
    def buffers(self) -> int:
        """Model-sized float32 tensors kept between steps."""
        return self._plans.buffers

    def rows_used(self, step: int) -> int:
        """How many rows steps 0 … step−1 have drawn from: the first row for a fresh key."""
        whole(at_least=0, at_most=self.horizon, step=step)
        return rows_used(self._plans, step)

    def add_(self, values: Mapping[str, Tensor], *, times: float = 1.0) -> None:
        """Add the noise of this step to every named tensor, in place, and go on to the next.

        With `times`, the noisy values are then multiplied by it. Low-precision values are raised to
        float32, receive the noise on its grid there and are rounded once. Add what is to be
        protected first: noise that was added to zeros would leave what is added to it later bare
        below the grid. While a CUDA graph is captured nothing is added or counted; see `prepare`.
        """
        is_captured = is_capturing(self._device)
        if is_captured and self._fused is None:
            # A graph would freeze the row and add the same noise at every replay.
            raise Unsupported(_NOT_FUSED)
        if os.getpid() != self._owner:  # before the lock: a fork may have inherited it closed
            self.check_owner()
        with self._lock:  # the row belongs to one thread
            self._check_left(0 if is_captured else 1)
            self._check(values)
            self._is_broken = not is_captured
        if self._c_step is not None and self._c_step.fits(values):
            plan = self._plans.at(self._step)
            self._c_step.add_(values, plan=plan, scale=self.scale, times=times)
        else:
            self._add_noise(values, times=times)
        if not is_captured:
            self._step += 1
            self._is_broken = False

    @torch.no_grad()
    def _add_noise(self, values: Mapping[str, Tensor], *, times: float) -> None:
        # Views where that is possible; a tensor with other strides is copied there and back, and so
        # is one in half precision, which only the kernel takes as it is.
        if self._fused is not None:
            plain = {name: value.contiguous() for name, value in values.items()}
            self._fused.add_({n: value.view(-1) for n, value in plain.items()}, step=self._step)
        else:
            plain = {name: _wide(value).contiguous() for name, value in values.items()}
            plan = self._plans.at(self._step)
            if self._c_step is not None and self._c_step.fits(plain):
                self._c_step.add_(plain, plan=plan, scale=self.scale, times=1.0)
            else:
                assert self._torch_step is not None
                flat = {name: value.view(-1) for name, value in plain.items()}
                self._torch_step.add_(flat, plan=plan, scale=self.scale)
        for name, noisy in plain.items():
            if noisy is not values[name]:
                values[name].copy_(noisy)
        if times != 1.0:
            _times_(list(values.values()), times)

    def prepare(self, values: Mapping[str, Tensor], *, counts_itself: bool = False) -> None:
        """Make ready to capture `add_` on tensors like these in a CUDA graph; adds nothing.

        With `counts_itself` the graph allows its own replays, which saves a launch a step; its
        owner must announce each one nevertheless, in the same words.
        """
        self._check(values)
        if self._fused is None:
            raise Unsupported(_NOT_FUSED)
        self._fused.prepare(values, counts_itself=counts_itself)

    def announce(self, *, replays: int = 1, counts_itself: bool = False) -> None:
        """Count the steps of the next replays of a captured graph as released, and allow them.

        Call it before the replays, on their CUDA stream. One that was not announced gives NaN
        (unless the graph counts itself).
        """
        whole(replays=replays)
        self.check_owner()
        with self._lock:
            self._check_left(replays)
            if self._fused is None:
                raise Unsupported(_NOT_FUSED)
            self._fused.announce(step=self._step, count=replays, counts_itself=counts_itself)
            self._step += replays

    def _check_left(self, steps: int) -> None:
        self._check_unbroken()
        if self._step + steps > self.horizon:
            raise HorizonExceeded(
                f"the noise was planned for {self.horizon} steps, {self._step} are released and "
                f"{steps} more were to come; plan again"
            )

    def _check_unbroken(self) -> None:
        if self._is_broken:
            raise NoshuffleError(
                "an earlier step failed half-way; go on from the last checkpoint of the stream"
            )

    def _check(self, values: Mapping[str, Tensor]) -> None:
        shapes = self._layout.shapes
        if values.keys() != shapes.keys():
            missing, extra = sorted(shapes.keys() - values), sorted(values.keys() - shapes)
            raise InvalidInput(
                f"tensors are matched by name: missing {missing}, not expected {extra}"
            )
        for name, value in values.items():
            if value.shape != shapes[name]:
                raise InvalidInput(
                    f"{name!r} must have shape {shapes[name]}, got {tuple(value.shape)}"
                )
            if not value.is_floating_point() or value.device.type != self._device.type:
                raise InvalidInput(
                    f"{name!r} must be floating point on {self._device}, "
                    f"got {value.dtype} on {value.device}"
                )

    def state_dict(self) -> dict[str, Any]:
        """Everything but the key: plain numbers, fingerprints and copies of the buffers."""
        self.check_owner()
        self._check_unbroken()
        buffers = _read_buffers(self._state, layout=self._layout)
        later = [list(key) for key in self._source.ring[1:]]
        return {**self._identity, "later": later, "step": self._step, "buffers": buffers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the stream that wrote `state` stopped; refuses another stream's.

        The keys of rows that `state` has not drawn from may differ: a run goes on under fresh ones.
        """
        _check_identity(state, self._identity)
        whole(at_least=0, at_most=self.horizon, step=state["step"])
        check_ring(state, self._source.ring, used=self.rows_used(state["step"]))
        _check_buffers(state["buffers"], layout=self._layout, count=self.buffers)
        _write_buffers_(self._state, state["buffers"], layout=self._layout)
        self._step, self._is_broken = int(state["step"]), False
        if self._fused is not None:
            self._fused.forget()


def _times_(values: Sequence[Tensor], factor: float) -> None:
    wide = [value for value in values if value.element_size() >= 4]
    if wide:
        torch._foreach_mul_(wide, factor)
    for value in values:  # all at once, torch would round the factor to half precision too
        if value.element_size() < 4:
            value.mul_(factor)


def _wide(value: Tensor) -> Tensor:
    """In at least single precision."""
    return value.float() if value.element_size() < 4 else value


def _check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise where a saved state is that of another stream."""
    for key, expected in identity.items():
        if key not in state or state[key] != expected:
            shown = "another" if key == "shapes" else repr(state.get(key))
            raise InvalidInput(
                f"the saved noise state has {shown} {key}, this stream has "
                f"{'its own' if key == 'shapes' else repr(expected)}; "
                "resume with the plan and key of the run that was saved"
            )


def _read_buffers(state: Tensor, *, layout: Layout) -> dict[str, Tensor]:
    """Copies of the buffers in ordinary memory; empty without buffers."""
    if not len(state):
        return {}
    buffers = {}
    for name, pieces in layout.views(state).items():
        shape = (len(state), *layout.shapes[name])
        buffers[name] = torch.cat(pieces, dim=1).view(shape).cpu().clone()
    return buffers


def _check_buffers(saved: Mapping[str, Any], *, layout: Layout, count: int) -> None:
    """Raise where saved buffers are not `count` float32 ones of every tensor."""
    names = set(layout.shapes) if count else set()
    if set(saved) != names:
        raise InvalidInput(f"the saved buffers must be those of {sorted(names)}")
    for name, own in saved.items():
        shape = (count, *layout.shapes[name])
        if own.dtype != torch.float32 or tuple(own.shape) != shape:
            raise InvalidInput(
                f"the saved buffer of {name!r} must be float32 of shape {shape}, "
                f"got {own.dtype} of {tuple(own.shape)}"
            )


def _write_buffers_(state: Tensor, saved: Mapping[str, Tensor], *, layout: Layout) -> None:
    """Make `state` what `_read_buffers` gave; `saved` was checked."""
    # The padding of a tile is never read by anyone, so it need not be restored.
    state.zero_()
    for name, pieces in layout.views(state).items() if len(state) else ():
        flat = saved[name].reshape(len(state), -1)
        for piece, part in zip(pieces, torch.split(flat, [p.shape[1] for p in pieces], dim=1)):
            piece.copy_(part)

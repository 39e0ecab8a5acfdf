"""Captured programs by kind of batch: when one fits, when it must be forgotten, when none can be.

A graph freezes shapes, types, plain values, modes of modules, precision settings and addresses: a
batch is given the program that was captured for exactly these, and a tensor of model or loss that
lies elsewhere makes all programs worthless. `Compiled` captures the steps.
State: the programs, what they must keep alive, and the log `fallbacks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_flatten

from noshuffle.clipping import Ghost, ModelLoss, PerExample
from noshuffle.clipping.objective import Criterion, take
from noshuffle.training.compiled.choice import choose
from noshuffle.training.compiled.program import Program
from noshuffle.training.step_parts import Parts

#: Models beyond this are bound by arithmetic, not by launches, and want their memory (a ViT-B/16 of
#: 86 M is not: 64 images take 39 ms as a graph and 103 without one on an H200).
LARGEST = 10**8
#: Kinds of values in a batch that a program may freeze: their text says all about them.
_PLAIN = (type(None), bool, int, float, str, bytes)


def why_not(parts: Parts, *, wanted: bool | str) -> str:
    """Why a run cannot have a compiled step; empty if it can."""
    device = next(iter(parts.parameters.values())).device
    if wanted is False:
        return "compile=False"
    if device.type != "cuda":
        return f"graphs need a CUDA device, the parameters are on {device.type}"
    if parts.threshold.is_adaptive:
        return "the clip norm follows a quantile, which the host moves behind every step"
    if any(p.dtype == torch.float64 for p in parts.parameters.values()):
        return "the compiled step is written for float32, the parameters are float64"
    if not isinstance(parts.engine, Ghost | PerExample):
        return f"the engine {type(parts.engine).__name__} is not known to run without waiting"
    if parts.engine.microbatch is not None:
        return "the engine takes microbatches"
    if parts.noise._fused is None:
        return "the noise is not fused: install triton and use philox"
    count = sum(p.numel() for p in parts.parameters.values())
    if wanted == "auto" and count > LARGEST:
        return (
            f"{count:,} parameters are bound by arithmetic, not by launches; compile=True captures "
            "nevertheless"
        )
    return ""


@dataclass(frozen=True)
class _Last:
    """A batch of tensors that was given a program, and all that the program was chosen by."""

    program: Program
    loss_fn: Any
    kinds: list[tuple[torch.Size, torch.dtype]]  # shapes of one row
    modes: list[bool]
    numerics: tuple[Any, ...]


class Programs:
    """The programs of one run, for batches of up to `capacity` rows.

    Guarantees: `find` gives a program only for what it was captured with; None means that the
    batch has to be worked on without one, and `fallbacks` says why.
    """

    #: Kinds of batches that get a program of their own.
    most = 4

    def __init__(self, parts: Parts, *, capacity: int, captures: bool) -> None:
        self.parts, self.capacity, self.captures = parts, capacity, captures
        self.fallbacks: list[str] = []
        self.device = parts.device
        self._programs: dict[Any, Program | None] = {}
        self._kept_alive: list[Any] = []
        self._stores: list[dict[str, Any]] = []
        self._where: list[Any] = []
        self._watch()
        self._last: _Last | None = None

    def again(
        self, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...]
    ) -> tuple[Program, int] | None:
        """The program of the last batch and the size of this one, where `find` would give that one.

        Guarantees: everything that `find` looks at is looked at, and is as it was.
        """
        last = self._last
        if last is None or loss_fn is not last.loss_fn or len(batch) != len(last.kinds):
            return None
        sizes: set[int] = set()
        for leaf, (shape, dtype) in zip(batch, last.kinds):
            if not isinstance(leaf, Tensor) or leaf.dtype is not dtype or not leaf.dim():
                return None
            size, *inner = leaf.shape
            if inner != list(shape) or leaf.device != self.device:
                return None
            sizes.add(size)
        if len(sizes) != 1 or not 1 <= min(sizes) <= self.capacity:
            return None
        if last.modes != [module.training for module in self._modules]:
            return None
        if last.numerics != _numerics() or self._where != self._addresses():
            return None
        return last.program, sizes.pop()

    def find(
        self,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        leaves: Sequence[Any],
        spec: Any,
        *,
        size: int,
    ) -> Program | None:
        """The program for a batch with these leaves; the first of its kind is captured now."""
        self._last = None
        if size > self.capacity:
            self.say(f"a batch of {size} rows is larger than the captured {self.capacity}: eager")
            return None
        if any(isinstance(leaf, Tensor) and leaf.device != self.device for leaf in leaves):
            self.say(f"a batch was not on {self.device}: eager")
            return None
        if any(not isinstance(leaf, Tensor) and type(leaf) not in _PLAIN for leaf in leaves):
            self.say("a batch held more than tensors and plain values: eager")
            return None
        if self._where != self._addresses():
            self.reset()
        kinds = tuple(
            [(v.shape[1:], v.dtype) if isinstance(v, Tensor) else repr(v) for v in leaves]
        )
        modes = [module.training for module in self._modules]
        numerics = _numerics()
        key = (id(loss_fn), spec, kinds, tuple(modes), numerics)
        if key not in self._programs:
            if not size:
                return None  # nothing can be tried on nobody
            if len(self._programs) >= self.most:
                self.say(
                    f"more than {self.most} kinds of batches, losses or modes; the others are "
                    "eager (is loss_fn made anew in every step?)"
                )
                return None
            # A graph reads memory, not tensors: nothing else may come to lie there.
            if isinstance(loss_fn, Module):
                self._stores = self._stores + _stores(list(loss_fn.modules()))
            held = [t.detach() for own in self._stores for t in own.values() if t is not None]
            self._kept_alive += [loss_fn, *held]
            self._programs[key] = self._build(loss_fn, batch, size)
            self._where = self._addresses()
        program = self._programs[key]
        if program is not None and leaves is batch:
            shapes = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
            self._last = _Last(program, loss_fn, shapes, modes, numerics)
        return program

    def _build(
        self, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...], size: int
    ) -> Program | None:
        raise NotImplementedError

    def capture(
        self,
        loss_fn: Criterion | ModelLoss,
        batch: tuple[Any, ...],
        size: int,
        *,
        fuse: bool,
        finish: Callable[[Program], None],
    ) -> tuple[Program, str] | None:
        """A program with the best form of the clipped sum, and its name.

        `finish` captures the rest. None where anything fails: `fallbacks` has the reason.
        """
        devices = [self.device] if self.device.type == "cuda" else []
        with self.at_home(), torch.random.fork_rng(devices=devices):
            try:
                program = Program(self.parts, batch, capacity=self.capacity, captures=self.captures)
                # Trials take rows of these buffers: zeros cannot be taken to extremes.
                full = take(batch, torch.arange(self.capacity, device="cpu") % size)
                program.stage(tree_flatten(full)[0], self.capacity)
                program.weigh(size, None)
                program.stage_units(size, None, np.arange(size) // 2)
                chosen = choose(program, loss_fn, fuse=fuse, say=self.say)
                if chosen is None:
                    return None
                finish(program)
            except Exception as error:
                line = " ".join(str(error).split())[:200]
                self.say(f"not captured ({type(error).__name__}: {line}): eager")
                return None
        return program, chosen

    def at_home(self) -> AbstractContextManager[Any]:
        """With the device of the run as the current one."""
        if self.captures and torch.cuda.current_device() != self.device.index:
            return torch.cuda.device(self.device)
        return nullcontext()

    def _watch(self) -> None:
        """Take the model as it is now for the one that programs are captured with."""
        self._modules = list(self.parts.model.modules())
        self._trees = [m._modules for m in self._modules if m._modules]
        self._stores = _stores(self._modules)
        self._where = self._addresses()

    def _addresses(self) -> list[Any]:
        """Where all tensors of model and losses lie, frozen ones too (~: not trained); its layers.

        A layer without trained parameters may be exchanged, and a graph would go on with the old.
        """
        held = [t for own in self._stores for t in own.values() if t is not None]
        where: list[Any] = [t.data_ptr() if t.requires_grad else ~t.data_ptr() for t in held]
        for own in self._trees:
            where += own.values()
        return where

    def reset(self) -> None:
        """Forget everything that was captured."""
        self._last = None
        self._programs.clear()
        self._kept_alive.clear()
        self._watch()

    def say(self, note: str) -> None:
        """Log a fallback, once."""
        if note not in self.fallbacks:
            self.fallbacks.append(note)


def _stores(modules: Sequence[Module]) -> list[dict[str, Any]]:
    """Where modules hold their parameters and buffers by name."""
    return [own for m in modules for own in (m._parameters, m._buffers) if own]


def flat(batch: tuple[Any, ...]) -> tuple[Sequence[Any], Any]:
    """Leaves and structure; a tuple of tensors, as most batches are, has only its length."""
    if all(isinstance(leaf, Tensor) for leaf in batch):
        return batch, len(batch)
    return tree_flatten(batch)


def _numerics() -> tuple[Any, ...]:
    """Settings of torch that a capture freezes."""
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    cast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    try:
        return torch.get_float32_matmul_precision(), cudnn.allow_tf32, cast
    except RuntimeError:  # set by their newer names, of which the older ones refuse to tell
        return matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision, cast

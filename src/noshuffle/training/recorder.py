"""Recorder: the forward passes of a user's own loop, with what their gradients are read from.

Hooks of the layer rules record each pass of the model while it runs (`clipping.RecordedPass`), and
`criterion` sends its losses back through it. The rules are known from the first batch of a kind on;
that one is a step of the engine's own, from the inputs that are kept here. A pass belongs to its
outputs, and is gone with them. Random layers draw by the seed of the step, and the generators of
the caller go on as if nothing had been drawn. What a pass writes into the model is undone
(`state`). State: the readings by kind of input, and the passes by their outputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from noshuffle.clipping.check import as_written, trainable
from noshuffle.clipping.ghost import state_of
from noshuffle.clipping.ghost_forms import Reading, RecordedPass
from noshuffle.clipping.layers import NotByLayer
from noshuffle.clipping.objective import BatchShape, cuttable, shape_of
from noshuffle.clipping.state import is_wrapped, restored
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.training.generators import seeded
from noshuffle.training.step_parts import Parts

#: The arguments of `torch.autocast`.
Autocast = tuple[str, torch.dtype, bool]
#: Kinds of inputs whose rules are kept.
KINDS = 16
NOT_ITS_OUTPUT = (
    "the criterion needs what the private model returned, as it is, so that nothing between model "
    "and loss can mix examples; put what stands between into its function: "
    "private.criterion(lambda out, y: loss(out.flatten(0, 1), y)). (A model that was compiled or "
    "wrapped after privatize, or ran under no_grad, was not recorded)"
)


def tensors_of(output: Any) -> list[Tensor]:
    """The tensors of an output, in order: itself, or those of a mapping, tuple, list, dataclass."""
    if isinstance(output, Tensor):
        return [output]
    parts: Any = ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif is_dataclass(output):
        parts = [getattr(output, own.name) for own in fields(output)]
    elif isinstance(output, tuple | list):
        parts = output
    return [tensor for part in parts for tensor in tensors_of(part)]


def autocast_of(device: torch.device) -> Autocast:
    """The autocast that is on, as arguments of `torch.autocast`."""
    kind = device.type
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


@dataclass(eq=False)
class ForwardPass:
    """One forward pass, until its loss has come back."""

    inputs: tuple[Any, ...]  # args and kwargs
    shape: BatchShape
    seed: int
    autocast: Autocast
    reading: Reading | None = None  # known from an earlier batch of this kind
    recorded: LoopPass | None = None
    outputs: list[weakref.ref[Tensor]] = field(default_factory=list)
    stamps: list[tuple[int, int]] = field(default_factory=list)  # of outputs, then of inputs
    is_plain: bool = False  # one tensor of one argument: `model(x)`
    has_criterion: bool = False

    def end(self, output: Any) -> list[Tensor]:
        """The pass has ended; its outputs."""
        args, kwargs = self.inputs
        outputs = tensors_of(output)
        self.is_plain = isinstance(output, Tensor) and len(args) == 1 and not kwargs
        self.outputs = list(map(weakref.ref, outputs))
        self.stamps = [*map(_stamp, outputs), *map(_stamp, _tensors(self.inputs))]
        return outputs

    @property
    def has_upstream(self) -> bool:
        """Whether something in front of the model would be trained by its loss."""
        return any(tensor.requires_grad for tensor in _tensors(self.inputs))

    def numbers_of(self, tensors: list[Tensor]) -> list[int]:
        """Which of the outputs these are; raises if they are none, or no longer what they were."""
        known = [output() for output in self.outputs]
        numbers = [next((i for i, t in enumerate(known) if t is one), -1) for one in tensors]
        if -1 in numbers or any(_stamp(t) != self.stamps[i] for i, t in zip(numbers, tensors)):
            raise Unsupported(NOT_ITS_OUTPUT)
        if list(map(_stamp, _tensors(self.inputs))) != self.stamps[len(known) :]:
            raise InvalidInput(
                "an input of the model was written to between its forward pass and "
                "loss.backward(); give the model a tensor of its own (x.clone())"
            )
        return numbers

    def is_recorded_by(self, reading: Reading) -> bool:
        """Whether it was recorded as this reading, perhaps of another criterion, would have it."""
        known = self.reading
        if self.recorded is None or not self.recorded.is_whole or known is None:
            return False
        if known is reading:
            return True
        layout, other = known.layout, reading.layout
        if layout is None or other is None:
            return False
        is_same = layout.calls == other.calls and layout.shared == other.shared
        return bool(is_same and known.layers == reading.layers)


def _stamp(tensor: Tensor) -> tuple[int, int]:
    """What a write into a tensor, or a hook on its gradient, changes."""
    version = -1 if tensor.is_inference() else tensor._version
    return version, len(tensor._backward_hooks or ())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class LoopPass(RecordedPass):
    """A pass whose layers are called otherwise than in the trial goes on, and is not recorded."""

    is_whole = True

    def seen(self, *call: Any) -> None:
        try:
            super().seen(*call)
        except NotByLayer:
            self.tape.is_on = self.is_whole = False


@dataclass(frozen=True)
class _Known:
    """The reading of one kind of inputs, of a model as it was."""

    kind: tuple[Any, ...]
    alive: tuple[Any, ...]  # what the kind is known by, so that no other object has its id
    reading: Reading


class Recorder:
    """Records the passes of one model; `next_part` tells the step and the part that come next."""

    def __init__(self, parts: Parts, next_part: Callable[[], tuple[int, int]]) -> None:
        self.parts, self._next_part = parts, next_part
        self.is_paused = False  # while a private step, or a trial, runs the model
        self._known: list[_Known] = []
        self._passes = WeakTensorKeyDictionary()
        self._open: tuple[ForwardPass, ExitStack] | None = None
        model = parts.model
        self._handles = [
            model.register_forward_pre_hook(_Hook(self, "begin"), with_kwargs=True),
            model.register_forward_hook(_Hook(self, "end"), with_kwargs=True, always_call=True),
        ]
        for handle in self._handles:
            weakref.finalize(self, handle.remove)

    def stop(self) -> None:
        """Record nothing from here on."""
        for handle in self._handles:
            handle.remove()

    # -- a pass ----------------------------------------------------------------------------------

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pass begins."""
        if self._open is not None:  # it was interrupted
            self._open[1].close()
            self._open = None
        if self.is_paused or not torch.is_grad_enabled():
            return
        _refuse_wrappers()
        parts, inputs = self.parts, (args, kwargs)
        if any(map(is_wrapped, _tensors(inputs))):
            return  # a function transform of the caller's
        try:
            shape = shape_of(cuttable(inputs))
        except InvalidInput:  # said by the criterion, if it comes to that
            return
        seed = parts.release.seed(*self._next_part())
        one = ForwardPass(inputs, shape, seed, autocast_of(parts.device))
        with ExitStack() as stack:
            stack.enter_context(seeded(one.seed, parts.device))
            self._record(one, stack)
            self._open = one, stack.pop_all()

    def _record(self, one: ForwardPass, stack: ExitStack) -> None:
        """Have the layers recorded, by the rules for passes of this kind."""
        model, shape = self.parts.model, one.shape
        kind = shape.kinds, state_of(model)[0]
        stack.enter_context(restored(model))
        known = next((k for k in self._known if k.kind == kind), None)
        if known is None or known.reading.layout is None or not shape.size:
            return
        one.reading = known.reading
        one.recorded = LoopPass(
            model,
            size=shape.size,
            inner=shape.inner,
            layers=known.reading.layers,
            layout=known.reading.layout,
            names={id(p): name for name, p in trainable(model).items()},
        )
        stack.enter_context(as_written(model))
        stack.enter_context(one.recorded.hooks())

    def end(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A forward pass has ended; without an output, by an error."""
        if self._open is None:
            return
        (one, stack), self._open = self._open, None
        stack.close()
        inputs = set(map(id, tree_leaves(one.inputs)))
        for tensor in one.end(output):
            if tensor.requires_grad and id(tensor) not in inputs:  # which the pass holds itself
                self._passes[tensor] = one

    def pass_of(self, output: Any) -> tuple[ForwardPass, list[Tensor], Callable[[Any], Any]]:
        """The pass that this came from, its tensors, and what takes them out of a model's output.

        `output`: what the model returned, or a structure of tensors of it.
        """
        tensors, spec = tree_flatten(output)
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise Unsupported(NOT_ITS_OUTPUT)
        passes = {one for one in map(self._passes.get, tensors) if one is not None}
        if len(passes) > 1:
            raise Unsupported(
                "these outputs come from several forward passes of the model; let one forward "
                "take all inputs and return all outputs, or use private.step with a ModelLoss"
            )
        if not passes:
            raise Unsupported(NOT_ITS_OUTPUT)
        one = passes.pop()
        numbers = one.numbers_of(tensors)

        def taken(whole: Any) -> Any:
            found = tensors_of(whole)
            return tree_unflatten([found[number] for number in numbers], spec)

        return one, tensors, taken

    def learn(self, one: ForwardPass, reading: Reading) -> None:
        """Record passes of this kind by this reading from now on."""
        if one.is_recorded_by(reading):
            return
        state, alive = state_of(self.parts.model)
        kind = one.shape.kinds, state
        others = [known for known in self._known if known.kind != kind]
        self._known = [_Known(kind, alive, reading), *others][:KINDS]


class _Hook:
    """A hook of a `Recorder`, inert in copies and pickles of the model; keeps none alive."""

    def __init__(self, recorder: Recorder, method: str) -> None:
        self._recorder: Callable[[], Any] = weakref.ref(recorder)
        self._method = method

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        recorder = self._recorder()
        if recorder is not None:
            getattr(recorder, self._method)(module, *rest)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._recorder = type(None)


def _refuse_wrappers() -> None:
    """Raise if the pass is one of DistributedDataParallel, which waits for raw gradients."""
    # torch 2.6 to 2.13: set while it runs the module inside.
    if getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise Unsupported(
            "DistributedDataParallel adds up raw gradients, of which there are none; call the "
            "module that was given to privatize"
        )

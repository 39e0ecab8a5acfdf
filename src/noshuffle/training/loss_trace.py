"""The calls of torch between a forward pass and `backward`, noted.

Weights under `no_grad`, masks and numbers that were read leave no node in a graph. A torch function
mode sees every call, and `loss_replay` repeats them with other rows; what the user's code is given
stays as it is. State: the calls since the last forward pass, at most `MOST_CALLS` and `MOST_BYTES`.

>>> import torch
>>> outputs = torch.ones(4, 3).requires_grad_() * 1
>>> with LossTrace([outputs], []) as trace:
...     loss = (outputs * outputs.max().item()).mean()
>>> [call.name for call in trace.calls], list(trace.reads)
(['max', 'item', 'mul', 'mean'], [1])
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from noshuffle.clipping.layers import tensors
from noshuffle.training.generators import generators
from noshuffle.training.loss_branches import CallSite
from noshuffle.training.loss_numbers import MOST_NUMBERS, EarlierNumbers, values
from noshuffle.training.loss_rows import Call, memory

_modes: Any = _get_current_function_mode_stack
#: Calls of a loss that are noted, and bytes of their results, at most.
MOST_CALLS, MOST_BYTES = 2_000, 1 << 30
#: Calls that give a truth value, or numbers, of tensors to Python; sizes only after a selection.
TESTS = ("__bool__", "is_nonzero", "equal", "allclose", "__contains__")
READS = (*TESTS, "item", "tolist", "__float__", "__int__", "__index__", "numpy", "__array__")
SIZES = ("__len__", "size", "numel", "__get__")
SELECTIONS = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive")
#: Who asks for truth values and numbers to check and to log them.
LOGGING = ("torch", "torchmetrics", "lightning", "pytorch_lightning")
#: Where torch writes its methods in Python.
METHODS = ("torch.overrides", "torch._tensor")
#: Frames that a place is followed through, at most.
MOST_FRAMES = 4


class Read(NamedTuple):
    """Numbers that Python has from a tensor, and who asked for them."""

    values: Tensor
    sites: list[CallSite]
    is_test: bool


class LossTrace(TorchFunctionMode):
    """Notes what is called while it is on.

    `outputs` are those of a pass that gradients come back to, `inputs` what it was given, `earlier`
    has the numbers of losses before.
    """

    def __init__(
        self, outputs: Sequence[Tensor], inputs: Any, earlier: EarlierNumbers | None = None
    ) -> None:
        super().__init__()
        self.is_on = True
        self.outputs, self.device = list(outputs), outputs[0].device
        self.sizes = {len(one) if one.dim() else 0 for one in outputs}
        self.starts = {one.grad_fn._sequence_nr() for one in outputs if one.grad_fn is not None}
        given = tensors(inputs)
        self.inputs = {memory(one) for one in given}
        self.examples = [  # what statistics of a batch may have been taken of
            one
            for one in given
            if one.dim() and {len(one)} == self.sizes and one.is_floating_point()
            if one.numel() <= MOST_NUMBERS
        ]
        self.earlier = EarlierNumbers() if earlier is None else earlier
        self.random = [(g, g.get_state()) for g in generators(self.device)]
        self.calls: list[Call] = []
        self.reads: dict[int, Read] = {}  # by number of the call
        self._has_selected, self._bytes = False, 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_on:
            try:
                self._note(func, args, kwargs or {}, result)
            except Exception:  # an odd kind of tensor: the loss is not tried, the loop goes on
                self.drop()
        return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        frame = None if torch.compiler.is_compiling() else sys._getframe(2)
        kind = self.device.type
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        call = Call(func, args, kwargs, result, torch.is_grad_enabled(), cast)
        is_read = call.name in READS or (self._has_selected and call.name in SIZES)
        read, made = values(result) if is_read else None, call.made
        if read is None and not made:
            return
        kept = [one for one in call.given if isinstance(one, nn.Parameter)]
        self._bytes += sum(one.nbytes for one in (*made, *kept))  # these are copied
        if read is not None:
            self._bytes += read.nbytes
            sites = call_sites(frame, METHODS, MOST_FRAMES)
            is_truth = len(read) == 1 and call.given[0].dtype is torch.bool
            self.reads[len(self.calls)] = Read(read, sites, call.name in TESTS or is_truth)
            call = call._replace(result=None)
        if len(self.calls) == MOST_CALLS or self._bytes > MOST_BYTES:
            self.drop()
            return
        self.calls.append(call._replace(sites=call_sites(frame, LOGGING, 1)))
        is_mask = any(one.dtype is torch.bool for one in call.given[1:])
        self._has_selected |= call.name in SELECTIONS or (call.name == "__getitem__" and is_mask)

    def enter(self) -> None:
        """Begin, unless a mode of somebody else is on, which may end before this one."""
        default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
        above = _modes()
        self.is_on = all(isinstance(one, LossTrace) or one is default for one in above)
        if self.is_on:
            torch._C._push_on_torch_function_stack(self)
        else:
            self.drop()

    def drop(self) -> None:
        """End, and keep nothing alive."""
        self.is_on, self.calls, self.reads = False, [], {}
        self.outputs, self.random, self.examples = [], [], []

    def leave(self) -> None:
        """The same, and off the stack of modes, whatever lies above."""
        self.drop()
        above = list[Any]()
        if any(one is self for one in _modes()):
            while (one := torch._C._pop_torch_function_stack()) is not self:
                above.append(one)
            for one in reversed(above):
                torch._C._push_on_torch_function_stack(one)


def call_sites(frame: FrameType | None, passed: Sequence[str], most: int) -> list[CallSite]:
    """Where a call was made, after the first frames that are `passed`; up to a library's own."""
    found = list[CallSite]()
    while frame is not None and len(found) < most:
        name = str(frame.f_globals.get("__name__", ""))
        root = name.partition(".")[0]
        if found or not (name in passed or root in passed):
            if root in LOGGING:
                break
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found

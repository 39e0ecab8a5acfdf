"""What a model keeps from one run to the next, and whether any of it is the data's.

Noise covers the gradients of trained parameters and nothing else: a running mean in a buffer, a
bias that the first batch initialises would publish raw statistics; a layer that adds its last input
to the present one lets an example move the gradients of the next. So a model is tried before it is
trusted, each run from the same state and under the same random numbers:

    written      what is kept after example 0  ≠  after example 1                →  refused, by name
                 (in batches, too: after examples 0 and 1  ≠  after 0 and 0)
    remembered   loss of 0 after a run of 0  ≠  loss of 0 after a run of 1       →  refused

Counters, caches that depend on shapes and power iterations come out the same and may change
(`Findings.may_change`). Where a loss does not come out the same twice the second question has no
answer. Objects of classes other than `ModelState` names, and globals, are seen by their effect on a
loss alone. `snapshot.Watch` goes on after every step with what was found here. No state.

>>> class Mean(torch.nn.Linear):
...     def forward(self, x):
...         self.mean.copy_(x.detach().mean(0)); return super().forward(x)
>>> model = Mean(2, 1); model.register_buffer("mean", torch.zeros(2))
>>> refuse_written(model, lambda row: model(torch.full((1, 2), float(row))))
Traceback (most recent call last):
    ...
noshuffle.errors.Unsupported: buffer 'mean' of the model keeps statistics of the data, which are \
not private and would be saved with it; leave that layer out, or in eval mode
>>> model.mean
tensor([0., 0.])
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import parameter
from torch.utils._pytree import tree_leaves

from noshuffle.clipping.products import HALF
from noshuffle.errors import Unsupported

_OF_TORCH = frozenset(nn.Module().__dict__)  # what torch keeps in every module
_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
#: Containers of attributes are gone into so deep, and up to so many entries.
_DEPTH, _ENTRIES = 4, 10_000


def same(a: Any, b: Any) -> bool:
    """Equal; tensors in type, shape and numbers, NaN included."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b)
    if a is b or a.shape != b.shape or a.dtype != b.dtype:
        return a is b
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _has_numbers(t: Tensor) -> bool:
    return not parameter.is_lazy(t) and not t.is_meta and t.layout is torch.strided


def mark(t: Tensor) -> tuple[int, int]:
    """Numbers that a write into the tensor, or other memory under it, makes others."""
    if t.is_inference() or is_wrapped(t) or not _has_numbers(t):
        return -1, 0
    return t._version, t.data_ptr()


#: Whether a tensor means something under `torch.func` only (torch 2.x has no public name).
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


class Content:
    """A tensor, the memory under it, and what it held."""

    def __init__(self, tensor: Tensor, *, on_host: bool = False) -> None:
        self.tensor, self.mark, self._memory = tensor, mark(tensor), tensor.detach()
        self._copy = self._memory.cpu() if on_host else self._memory.clone()

    def is_kept_by(self, other: Any) -> bool:
        return isinstance(other, Tensor) and same(other.detach(), self._copy)

    def put_back(self) -> None:
        t, memory = self.tensor, self._memory
        if not self.is_kept_by(t):
            if (t.data_ptr(), t.shape, t.dtype) != (memory.data_ptr(), memory.shape, memory.dtype):
                t.data = memory  # undoes `p.data = …`
            memory.copy_(self._copy)


class ModelState:
    """Everything that a model keeps, as it is now: parameters of any kind, buffers, submodules, the
    attributes of modules, and what lists, dictionaries, sets, tuples and NumPy arrays among them
    hold. Without `has_trained`, the numbers of parameters that are trained are left out; without
    `is_compared`, nobody asks for `changes`."""

    def __init__(
        self, model: nn.Module, *, has_trained: bool = True, is_compared: bool = True
    ) -> None:
        self._model = model
        self._entries: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        tensors: dict[int, Tensor] = {}
        for module in model.modules():
            for holder in (module._parameters, module._buffers, module._modules, module.__dict__):
                is_own = holder is module.__dict__
                own = {k: v for k, v in holder.items() if not is_own or k not in _OF_TORCH}
                self._entries.append((holder, own))
                self._go_into(tuple(own.values()), tensors, depth=_DEPTH if is_own else 1)
        if not has_trained:
            tensors = {i: t for i, t in tensors.items() if not (t.is_leaf and t.requires_grad)}
        on_host = _are_too_many(tensors.values())
        self._contents = {i: Content(t, on_host=on_host) for i, t in tensors.items()}
        self._before = _named_tensors(model) if is_compared else {}
        self._marks = {name: mark(t) for name, t in self._before.items()}
        self._extras = _extra_state(model) if is_compared else {}

    def _go_into(self, value: Any, tensors: dict[int, Tensor], *, depth: int) -> None:
        """Note the tensors and containers in an attribute."""
        if isinstance(value, Tensor):
            if _has_numbers(value):
                tensors[id(value)] = value
        elif isinstance(value, np.ndarray):
            self._containers.append((value, value.copy()))
        elif depth and type(value) in (*_CONTAINERS, tuple) and len(value) <= _ENTRIES:
            if type(value) is not tuple:
                self._containers.append((value, copy.copy(value)))
            for inner in value.values() if isinstance(value, dict) else value:
                self._go_into(inner, tensors, depth=depth - 1)

    def put_back(self) -> None:
        """All as it was; what a run made is gone again, what it filled is empty."""
        for holder, before in self._entries:
            own = {k: v for k, v in holder.items() if k in before or k not in _OF_TORCH}
            is_same = list(own) == list(before) and all(own[k] is v for k, v in before.items())
            if not is_same:
                for name in own:
                    del holder[name]
                holder.update(before)
        for container, before in self._containers:
            if isinstance(container, np.ndarray):
                container[...] = before
            elif isinstance(container, list):
                container[:] = before
            else:
                container.clear()
                (container.extend if isinstance(container, deque) else container.update)(before)
        with torch.no_grad():
            for content in self._contents.values():
                content.put_back()

    def has_changed(self) -> bool:
        """Whether anything of it is not as it was."""
        for holder, before in self._entries:
            own = {k: v for k, v in holder.items() if k in before or k not in _OF_TORCH}
            if list(own) != list(before) or any(own[k] is not v for k, v in before.items()):
                return True
        for container, before in self._containers:
            if isinstance(container, np.ndarray):
                if not np.array_equal(container, before, equal_nan=container.dtype.kind in "fc"):
                    return True
                continue
            if not _hold_the_same(container, before):
                return True
        return not all(content.is_kept_by(content.tensor) for content in self._contents.values())

    def changes(self) -> tuple[dict[str, Any], set[str]]:
        """What became of tensors that a run changed, by name, and all that it wrote into."""
        now = _named_tensors(self._model)
        changed: dict[str, Any] = dict.fromkeys(self._before.keys() - now.keys())
        written = set(changed)
        for name, t in now.items():
            before: Any = self._before.get(name)
            content = self._contents.get(id(before))
            if t is not before or self._marks[name] != mark(t):
                written.add(name)
            if t is before if content is None else content.is_kept_by(t):
                continue
            changed[name] = t.detach().clone() if _has_numbers(t) else t
            written.add(name)
        extras = _extra_state(self._model)
        changed.update({k: v for k, v in extras.items() if v != self._extras.get(k)})
        return changed, written


def _hold_the_same(a: Any, b: Any) -> bool:
    """Whether two containers of one kind hold the same objects; those of a dictionary by key."""
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(v is w for v, w in zip(a.values(), b.values()))
    if isinstance(a, set):
        return set(map(id, a)) == set(map(id, b))
    return all(v is w for v, w in zip(a, b))


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, under every name that each has."""
    return {
        f"{prefix}.{key}" if prefix else key: value
        for prefix, module in model.named_modules()
        for holder in (module._parameters, module._buffers)
        for key, value in holder.items()
        if value is not None
    }


def kept_tensors(model: nn.Module) -> list[Tensor]:
    """Every tensor of a model: parameters, buffers, and what attributes of its modules hold."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        own = {k: v for k, v in vars(module).items() if k not in _OF_TORCH}
        held = (module._parameters, module._buffers, own)
        found |= {id(t): t for t in tree_leaves(held) if isinstance(t, Tensor)}
    return list(found.values())


def _are_too_many(tensors: Iterable[Tensor]) -> bool:
    """Whether copies of all of them would take more than a quarter of a GPU's free memory."""
    found = [t for t in tensors if t.is_cuda]
    if not found:
        return False
    size = sum(t.numel() * t.element_size() for t in found)
    return 4 * size > torch.cuda.mem_get_info(found[0].device)[0]


def _extra_state(model: nn.Module) -> dict[str, str]:
    """What modules add to their `state_dict` by themselves, in words that can be compared."""
    usual = nn.Module.get_extra_state
    return {
        f"{name}.extra state": repr(module.get_extra_state())
        for name, module in model.named_modules()
        if type(module).get_extra_state is not usual
    }


@contextmanager
def put_back_after(model: nn.Module, *, has_trained: bool = True) -> Iterator[None]:
    """The model is the same after the block as before, whatever is run in it.

    Without `has_trained`, if nothing in it writes into parameters that are trained.
    """
    state = ModelState(model, has_trained=has_trained, is_compared=False)
    try:
        yield
    finally:
        state.put_back()


@dataclass
class Findings:
    """What a model was seen to do: tensors that runs change in the same way whatever the data, and
    such as they write into without a change."""

    may_change: set[str] = field(default_factory=set)
    may_be_written: set[str] = field(default_factory=set)


def refuse_written(
    model: nn.Module, run: Callable[[int], object], findings: Findings | None = None
) -> Findings:
    """Raise if `run(0)` and `run(1)` leave a parameter or a buffer unlike; else what they change.

    Guarantees: the model is as before, also where this raises.
    """
    findings, state = findings or Findings(), ModelState(model)
    seen: list[dict[str, Any]] = []
    touched: set[str] = set()
    for which in (0, 1):
        try:
            with torch.no_grad():
                run(which)
            changed, written = state.changes()
        finally:
            state.put_back()
        seen.append(changed)
        touched |= written
    first, second = seen
    for name in {**first, **second}:
        if name not in first or name not in second or not same(first[name], second[name]):
            raise Unsupported(_why_refused(model, name))
    findings.may_change |= first.keys()
    findings.may_be_written |= touched
    return findings


def _why_refused(model: nn.Module, name: str) -> str:
    if name not in dict(model.named_parameters(remove_duplicate=False)):
        return (
            f"buffer {name!r} of the model keeps statistics of the data, which are not private and "
            "would be saved with it; leave that layer out, or in eval mode"
        )
    return (
        f"parameter {name!r} is set by the forward pass from the data, which no noise covers; do a "
        "data-dependent initialisation on public data before privatize, leave that layer out, or "
        "in eval mode"
    )


def refuse_memory(
    model: nn.Module, run: Callable[[int], Tensor], *others: Callable[[], object]
) -> None:
    """Raise if the loss `run(0)` depends on what came before: itself, `run(1)`, one of others."""
    losses = []
    first_runs: list[Callable[[], object]] = [partial(run, which) for which in (0, 0, 1)]
    for before in (*first_runs, *others):
        with put_back_after(model), torch.no_grad():
            before()
            losses.append(float(run(0)))
    first, again, *rest = losses
    low = any(p.dtype in HALF for p in model.parameters())
    low = low or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    tolerance = (2e-3 if low else 1e-5) * max(abs(first), 1e-6)
    is_moved = not all(abs(first - other) <= tolerance for other in rest)
    if is_moved and abs(first - again) <= 0.1 * tolerance:
        raise Unsupported(
            "the model, or its loss, keeps something of one example that changes the loss of the "
            "next one, which no clipping bounds; let it forget between calls (an attribute set in "
            "forward, say)"
        )

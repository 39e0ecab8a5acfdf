"""A forward pass leaves nothing in a model: `restored` undoes what it wrote.

Noise covers the gradients of trained parameters and nothing else. A running mean in a buffer would
publish raw statistics, and a layer that keeps its last input would let one example move the
gradients of the next. So nothing that a pass writes outlives it:

    buffers, frozen tensors up to 64 KiB,   the pass runs on clones, and the originals return
    tensors that are attributes
    other attributes                        put back, with the contents of lists, dictionaries,
                                            sets, deques and NumPy arrays, at every depth
    larger frozen tensors, and trained      watched by version; the step is refused when they moved

Not seen: what an object of another class hides, globals, and writes through `.data` into watched
tensors after the first pass, which compares their numbers. Nothing here waits for a device, but for
that first pass; in a CUDA graph the clones are nodes. No state.

>>> class Mean(nn.Linear):
...     def forward(self, x):
...         self.mean.copy_(x.detach().mean(0)); return super().forward(x)
>>> model = Mean(2, 1); model.register_buffer("mean", torch.zeros(2))
>>> with restored(model):
...     out = model(torch.ones(1, 2))
>>> model.mean
tensor([0., 0.])
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_not
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import parameter

from noshuffle.errors import ProbablyNotMeant, Unsupported
from noshuffle.user_warnings import warn_user

#: Bytes of a frozen tensor up to which a pass runs on a clone of it.
SMALL = 2**16
_OF_TORCH = frozenset(nn.Module().__dict__)  # what torch keeps in every module
_ENTERED = (list, dict, set, deque, OrderedDict, defaultdict, tuple, np.ndarray)

#: Whether a tensor means something under `torch.func` only (torch 2.x has no public name).
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


@contextmanager
def restored(*modules: Any, changed: set[str] | None = None) -> Iterator[None]:
    """Undo what the block writes into these modules; what is no module is passed over.

    `changed` is filled with the names of what was restored; the numbers of all parameters are then
    compared, too.

    Guarantees: buffers and small frozen tensors hold what they held, whatever the block did to
    them. Raises Unsupported if a trained or a large frozen tensor was written to.
    """
    passes = [_Pass(m, is_first=changed is not None) for m in modules if isinstance(m, nn.Module)]
    moved = []
    try:
        yield
    finally:
        for one in reversed(passes):
            moved += one.restore(changed)
    if moved:
        raise Unsupported(
            f"parameter {moved[0]!r} is set by the forward pass, which no noise covers; initialise "
            "it on public data before privatize, leave that layer out, or in eval mode"
        )


def warn_of_restored(changed: set[str]) -> None:
    """Name once what every forward pass of a run changes in vain."""
    if changed:
        shown = ", ".join(map(repr, sorted(changed)[:8])) + (", …" if len(changed) > 8 else "")
        warn_user(
            f"the forward pass writes into {shown} of the model; each pass is undone, since no "
            "noise covers them: running statistics, spectral norms, moving targets and code books "
            "stand still in training",
            ProbablyNotMeant,
        )


class _Pass:
    """One module as it was before a pass, with clones in the place of what the pass may write."""

    def __init__(self, model: nn.Module, *, is_first: bool) -> None:
        self._model, self._clones = model, dict[int, tuple[Tensor, int]]()
        self._entries: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}  # in containers
        self._watched: list[tuple[nn.Parameter, int]] = []
        self._numbers: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self._seen: set[int] = set()
        for module in model.modules():
            own = module.__dict__
            for holder in (own, module._modules, module._parameters, module._buffers):
                self._entries.append((holder, holder.copy()))
            for key, p in module._parameters.items():
                if p is None or id(p) in self._seen:
                    if id(p) in self._clones:
                        module._parameters[key] = self._clones[id(p)][0]  # type: ignore[assignment]
                elif p.requires_grad and not is_first:
                    self._seen.add(id(p))
                    self._watched.append((p, p._version))
                else:
                    self._read(module, key, p, is_first=is_first)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = self._clone(buffer)
            for key, value in own.items():
                if key not in _OF_TORCH:
                    if isinstance(value, Tensor):
                        own[key] = self._clone(value)
                    elif type(value) in _ENTERED:
                        self._go_into(value)

    def _read(self, module: nn.Module, key: str, p: nn.Parameter, *, is_first: bool) -> None:
        """Watch a parameter, or put a clone in its place."""
        self._seen.add(id(p))
        if not _has_numbers(p):
            return
        if not p.requires_grad and p.numel() * p.element_size() <= SMALL:
            clone = nn.Parameter(p.detach().clone(), requires_grad=False)
            self._clones[id(p)] = clone, _version(clone)
            module._parameters[key] = clone
            return
        if not p.is_inference():
            self._watched.append((p, p._version))
        if is_first:
            self._numbers.append((p, p.detach(), p.detach().clone()))

    def _clone(self, t: Tensor) -> Tensor:
        """A clone of a tensor, the same one wherever it stands."""
        if id(t) in self._seen or not _has_numbers(t) or t.requires_grad:
            return t
        if id(t) not in self._clones:
            clone = t.detach().clone()
            self._clones[id(t)] = clone, _version(clone)
        return self._clones[id(t)][0]

    def _go_into(self, value: Any) -> None:
        """Note the containers in an attribute, and the tensors in them."""
        if type(value) not in _ENTERED or id(value) in self._containers:
            return
        self._containers[id(value)] = value, copy.copy(value)
        if isinstance(value, np.ndarray):
            return
        for inner in value.values() if isinstance(value, dict) else value:
            if isinstance(inner, Tensor):
                if id(inner) not in self._seen and not inner.requires_grad and _has_numbers(inner):
                    self._seen.add(id(inner))
                    self._tensors[id(inner)] = inner, inner.detach().clone()
            else:
                self._go_into(inner)

    def restore(self, changed: set[str] | None) -> list[str]:
        """Put everything back; the names of watched parameters that were written to."""
        if changed is not None:
            changed |= self._changes()
        moved = []
        for p, version in self._watched:
            if p._version != version:
                moved.append(p)
        for p, memory, numbers in self._numbers:
            if not _same(p.detach(), numbers):
                moved.append(p)
                with torch.no_grad():
                    p.data = memory  # undoes `p.data = …`
                    memory.copy_(numbers)
        exchanged = []
        for holder, before in self._entries:
            if holder is not before and any(map(is_not, map(holder.get, before), before.values())):
                exchanged += self._exchanged(holder, before)
            holder.clear()
            holder.update(before)
        for container, before in self._containers.values():
            _fill(container, before)
        for tensor, numbers in self._tensors.values():
            with torch.no_grad():
                tensor.detach().copy_(numbers)
        if not moved and not exchanged:
            return []
        names = {id(p): name for name, p in self._model.named_parameters()}
        return [*dict.fromkeys(names.get(id(p), "?") for p in (*moved, *exchanged))]

    def _exchanged(self, holder: dict[str, Any], before: dict[str, Any]) -> list[nn.Parameter]:
        """Trained parameters in the place of which a pass has put others."""
        return [
            value
            for key, value in before.items()
            if isinstance(value, nn.Parameter) and value.requires_grad
            if holder.get(key) is not value
        ]

    def _changes(self) -> set[str]:
        """The names of what the pass has left otherwise, apart from watched parameters."""
        found = set()
        names = {id(holder): n for n, m in self._model.named_modules() for holder in _holders(m)}
        of_clone = {original: clone for original, (clone, _) in self._clones.items()}
        written = {
            id(clone) for clone, version in self._clones.values() if clone._version > version
        }
        for holder, before in self._entries:
            prefix = names.get(id(holder), "")
            for key in {**before, **holder}:
                was, now = before.get(key), holder.get(key)
                was = of_clone.get(id(was), was)
                container, filled = self._containers.get(id(was), (None, None))
                is_kept = was is now and id(was) not in written
                if key not in _OF_TORCH and not (is_kept and _hold_the_same(container, filled)):
                    found.add(f"{prefix}.{key}" if prefix else key)
        return found


def _holders(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module.__dict__, module._modules, module._parameters, module._buffers


def _has_numbers(t: Tensor) -> bool:
    is_plain = t.layout is torch.strided and not t.is_meta
    return is_plain and not parameter.is_lazy(t) and not is_wrapped(t)


def _version(t: Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _hold_the_same(a: Any, b: Any) -> bool:
    """Whether two containers of one kind hold the same objects."""
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if a is None or len(a) != len(b):
        return a is None
    if isinstance(a, set):
        return bool(a == b)
    inner = [list(c.items()) if isinstance(c, dict) else list(enumerate(c)) for c in (a, b)]
    return all(k == l and v is w for (k, v), (l, w) in zip(*inner))


def _fill(container: Any, before: Any) -> None:
    """Give a container the contents that it had."""
    if isinstance(container, np.ndarray):
        container[...] = before
    elif isinstance(container, list):
        container[:] = before
    elif not isinstance(container, tuple):
        container.clear()
        (container.extend if isinstance(container, deque) else container.update)(before)

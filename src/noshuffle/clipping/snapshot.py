"""A model as it was when it was last looked at, and whether it still is: its parts, its tensors.

What an engine knows about a model stays true until somebody changes it; to compare with a
`Snapshot` walks the modules once.

    same    the same module objects of the same classes under the same names, in the same modes,
            with the same parameter objects that ask for a gradient, compiled or not as before, the
            same hooks, and no other forward of their own

`Watch` compares the tensors of a model around a step: what is not trained has no noise, so all that
the trial has not allowed (`statefulness.Findings`) must be as before:

    always              the same objects at the same places, in the same memory, of the same version
    small, on a CPU     the same numbers, which also shows writes through `.data`

Not seen: writes of a CUDA graph, and through `.data` into tensors that are trained, large or on a
GPU; plain attributes; what the trial has allowed. State: the modules, except the model itself.

>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh()); shot = Snapshot(model)
>>> before = shot.holds(model); model[1].eval(); before, shot.holds(model)
Tanh()
(True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from noshuffle.clipping.check import (
    delicate,
    is_compiled,
    refuse,
    refuse_hooks,
    trainable,
    validate,
)
from noshuffle.clipping.statefulness import Content, Findings, is_wrapped, mark

#: Where modules keep what runs in the place of their class's forward, and before and after it.
_CALLS = ("forward", "_compiled_call_impl")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
#: Untrained tensors of a CPU with so many numbers in all are compared number by number.
SMALL = 1 << 14
#: Bytes of untrained tensors of which a copy is kept, to be put back.
COPIED = 1 << 26


class Snapshot:
    """What was found out about a model as a whole.

    Guarantees: raises what `validate` raises; where `holds` is true and `check` does not raise,
    `validate` would not either, and all that is public here is what it would be now.
    """

    def __init__(self, model: nn.Module) -> None:
        validate(model)
        self.like = trainable(model)
        self.device = next(iter(self.like.values())).device
        self.names = {id(p): name for name, p in self.like.items()}
        self.is_compiled = is_compiled(model)
        self.watch = Watch(model)
        self._delicate = delicate(model)
        self._parts = [(None if m is model else m, *_seen(m)) for m in model.modules()]

    def holds(self, model: nn.Module) -> bool:
        """Whether the model is as it was."""
        for module, kind, training, children, own, asks, calls, hooks in self._parts:
            module = model if module is None else module
            if module.__class__ is not kind or module.training is not training:
                return False
            if (module._modules or children) and tuple(module._modules.items()) != children:
                return False
            if module._parameters or own:
                now = module._parameters
                if tuple(now) != tuple(own) or any(map(is_not, now.values(), own.values())):
                    return False
                for p, asked in zip(now.values(), asks):
                    if (p is not None and p.requires_grad) is not asked:
                        return False
            held = module.__dict__
            if any(map(is_not, map(held.get, _CALLS), calls)):
                return False
            if (hooks or any(map(held.get, _HOOKS))) and _hooks(held) != hooks:
                return False
        return True

    def check(self) -> None:
        """Raise if a layer was set so that it couples examples, or a parameter has a hook."""
        for name, layer in self._delicate:
            refuse(name, layer)
        for p in self.like.values():
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                refuse_hooks(self.like)


def _seen(module: nn.Module) -> tuple[Any, ...]:
    """Everything about one module that `holds` compares."""
    own = dict(module._parameters)
    asks = [p is not None and p.requires_grad for p in own.values()]
    children = tuple(module._modules.items())
    held = module.__dict__
    calls = tuple(map(held.get, _CALLS))
    return type(module), module.training, children, own, asks, calls, _hooks(held)


def _hooks(held: dict[str, Any]) -> list[int]:
    """The hooks of a module; every one that is made has a number of its own."""
    return [number for name in _HOOKS for number in held.get(name) or ()]


class Watch:
    """The parameters and buffers of a model around one step: `begin`, run it, `end`.

    Guarantees: `end` names every one that is another object, lies elsewhere or was written into
    since `begin`, unless the findings allow it or it holds the same numbers; one that is not
    trained has its value back then, as far as copies go (`COPIED`), and so have the numbers, flags
    and texts that its module has as attributes: the length of a table belongs to the table.
    """

    def __init__(self, model: nn.Module) -> None:
        self._holders = [
            (prefix, holder)
            for prefix, module in model.named_modules()
            for holder in (module._parameters, module._buffers)
        ]
        self._attributes = {prefix: module.__dict__ for prefix, module in model.named_modules()}
        self._attributes_before: list[dict[str, Any]] = []
        self._entries: list[dict[str, Tensor | None]] = []
        self._tensors: list[Tensor] = []
        self._marks: list[tuple[int, int]] = []
        self._untrained: list[int] = []
        self._small: frozenset[int] = frozenset()
        self._contents: dict[int, Content] = {}

    def begin(self) -> None:
        """Remember what is there."""
        tensors, self._marks = self._look()
        self._attributes_before = list(map(dict.copy, self._attributes.values()))
        if not self._entries or not _are_the_same(tensors, self._tensors):
            self._read(tensors)
        for i in self._untrained:
            known = self._contents.get(i)
            if known is None or i in self._small or known.mark != self._marks[i]:
                self._contents[i] = Content(tensors[i])

    def end(self, findings: Findings) -> list[str]:
        """The names of what changed and must not have; it is as before then."""
        tensors, marks = self._look()
        if marks == self._marks and _are_the_same(tensors, self._tensors):
            for i in self._small:
                if not self._contents[i].is_kept_by(tensors[i]):
                    break
            else:
                return []
        return self._changed(findings)

    @contextmanager
    def around(
        self, findings: Findings, when_changed: Callable[[list[str]], None]
    ) -> Iterator[None]:
        """`begin`, the block, `end`, and a call with the names of what changed, if anything did."""
        self.begin()
        try:
            yield
        finally:
            changed = self.end(findings)
        if changed:
            when_changed(changed)

    def _look(self) -> tuple[list[Tensor], list[tuple[int, int]]]:
        tensors: list[Tensor] = []
        marks: list[tuple[int, int]] = []
        for _, holder in self._holders:
            for t in holder.values():
                if t is not None:
                    tensors.append(t)
                    try:
                        marks.append((t._version, t.data_ptr()))
                    except RuntimeError:  # an inference tensor has no version, others no memory
                        marks.append(mark(t))
        return tensors, marks

    def _read(self, tensors: list[Tensor]) -> None:
        """Find out which tensors there are, and of which to keep a copy."""
        self._tensors = tensors
        self._entries = [dict(holder) for _, holder in self._holders]
        self._untrained, self._contents, small = [], {}, []
        bytes_left, numbers_left = COPIED, SMALL
        for i, t in enumerate(tensors):
            if t.requires_grad or t.layout is not torch.strided or t.is_meta:
                continue
            bytes_left -= t.numel() * t.element_size()
            if bytes_left >= 0:
                self._untrained.append(i)
            numbers_left -= t.numel()
            if numbers_left >= 0 <= bytes_left and t.device.type == "cpu":
                small.append(i)
        self._small = frozenset(small)

    def _changed(self, findings: Findings) -> list[str]:
        before = {id(t): (i, m) for i, (t, m) in enumerate(zip(self._tensors, self._marks))}
        found = []
        attributes = dict(zip(self._attributes, self._attributes_before))
        for (prefix, holder), entries in zip(self._holders, self._entries):
            for key in dict.fromkeys([*entries, *holder]):
                name = f"{prefix}.{key}" if prefix else key
                was, now = entries.get(key), holder.get(key)
                i, marked = before.get(id(was), (-1, (0, 0)))
                content = self._contents.get(i)
                may_change = name in findings.may_change
                if now is not None and is_wrapped(now):  # vmap left it there: it has to go
                    is_fine, may_change = False, may_change or name in findings.may_be_written
                elif may_change or was is None or now is None:
                    is_fine = may_change or was is now
                elif content is not None:
                    is_fine = content.is_kept_by(now)
                else:
                    is_fine = was is now and mark(now) == marked
                    is_fine = is_fine or name in findings.may_be_written
                if is_fine:
                    continue
                if not may_change:
                    found.append(name)
                if key in entries:
                    holder[key] = was
                else:
                    del holder[key]
                if content is not None:
                    with torch.no_grad():
                        content.put_back()
                    own, then = self._attributes[prefix], attributes[prefix]
                    own |= {k: v for k, v in then.items() if _is_plain(v) and _is_plain(own.get(k))}
        return found


def _is_plain(value: Any) -> bool:
    """A number, a flag or a text, and nothing that a loss may be made of."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.requires_grad
    return isinstance(value, int | float | str | None)


def _are_the_same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and not any(map(is_not, a, b))

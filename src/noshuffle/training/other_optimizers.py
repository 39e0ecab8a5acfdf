"""Other optimizers over the parameters of a private run: refused before they move anything.

A second optimizer that was made over the same parameters steps on whatever is in `.grad`: the raw
gradients of a backward pass of the user's own. The statement of the run would know nothing of it.
torch asks a global hook before the step of every optimizer in the process; this one looks for
parameters, and for memory, that a living run trains. Optimizers of other models pass, and so does
everything that a private step does itself (an optimizer may hold another one inside). State: the
living runs, held weakly; the hook is there only while one lives.

>>> class Run: ...
>>> model, run = torch.nn.Linear(2, 1), Run()
>>> own = torch.optim.SGD(model.parameters(), lr=0.1)
>>> release = keep_to_owner(run, own, dict(model.named_parameters()))
>>> torch.optim.SGD(model.parameters(), lr=0.1).step()
Traceback (most recent call last):
    ...
noshuffle.errors.Unsupported: this SGD is not the optimizer of the private run that trains \
'weight', and would move it by raw gradients; use private.step alone, give the SGD other \
parameters, or end the run before (private.close())
>>> release(); torch.optim.SGD(model.parameters(), lr=0.1).step()
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from noshuffle.clipping.captured import memory
from noshuffle.errors import Unsupported
from noshuffle.training.untraced import never_traced

#: The living runs: the optimizer of each, by id, and what it trains.
_Owned = tuple[int, Mapping[str, Tensor]]
_trained: weakref.WeakKeyDictionary[Any, _Owned] = weakref.WeakKeyDictionary()
_changing = threading.RLock()  # a run may be collected while another one joins
_hook: RemovableHandle | None = None


class _InStep(threading.local):
    """How many private steps this thread is in: those of other threads say nothing about it."""

    depth = 0


#: Raised by `hooks.at_work` while a private step moves its optimizer, and what that holds inside.
in_step = _InStep()


def keep_to_owner(
    owner: object, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> Callable[[], None]:
    """Let no optimizer but this one move the parameters while `owner` lives; returns the end of it.

    Guarantees: the step of any other optimizer that holds one of them, or a tensor in the same
    memory, raises outside private steps before it moves a parameter; for optimizers that are
    torch's or derived from them. Weights that are written by hand cannot be seen.
    """
    global _hook
    with _changing:
        _trained[owner] = (id(optimizer), parameters)
        if _hook is None:
            # torch.compile(optimizer.step) would trace the look, and keep what it found.
            _hook = register_optimizer_step_pre_hook(never_traced(_refuse_strangers))
    end = weakref.finalize(owner, _remove_unused)
    end.atexit = False
    this = weakref.ref(owner)

    def release() -> None:
        if (run := this()) is not None:
            with _changing:
                _trained.pop(run, None)
        end()

    return release


def _remove_unused() -> None:
    """Take the hook away when nobody needs it any more."""
    global _hook
    with _changing:
        is_needed = any(run() is not None for run in _trained.keyrefs())
        if _hook is not None and not is_needed:
            _hook.remove()
            _hook = None


def _refuse_strangers(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if in_step.depth:
        return
    given = [p for group in optimizer.param_groups for p in group["params"]]
    with _changing:
        runs = list(_trained.values())
    # Asked for anew each time: values may have been moved to another device meanwhile.
    ids, places = {id(p) for p in given}, {memory(p) for p in given} - {0}
    for own_optimizer, parameters in runs:
        if own_optimizer == id(optimizer):  # refused by a hook of its own (`hooks.guard`)
            continue
        for name, parameter in parameters.items():
            if id(parameter) in ids or memory(parameter) in places:
                kind = type(optimizer).__name__
                raise Unsupported(
                    f"this {kind} is not the optimizer of the private run that trains {name!r}, "
                    f"and would move it by raw gradients; use private.step alone, give the {kind} "
                    "other parameters, or end the run before (private.close())"
                )

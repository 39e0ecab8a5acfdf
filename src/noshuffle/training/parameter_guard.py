"""What a private run holds: the parameters it was built for, and the optimizer that moves them.

A model can change under a run: a layer exchanged, `load_state_dict(assign=True)`, parameters frozen
or unfrozen. Steps would then train objects that are not in the model any more, or release sums of
others. `ParameterGuard` knows every parameter by its place in the model and is asked before each
step.

An optimizer can be stepped by somebody else: an old loop with `loss.backward(); optimizer.step()`
trains on raw gradients, and the statement would know nothing of it. `guard` refuses that for as
long as the run lives. State: the places; one hook on the optimizer.

>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(2, 2))
>>> guarded = ParameterGuard(model, dict(model.named_parameters()))
>>> guarded.check(); model[0] = nn.Linear(2, 2); guarded.check()
Traceback (most recent call last):
    ...
noshuffle.errors.InvalidInput: parameter '0.weight' is no longer the one that was privatized; load \
values in place (load_state_dict without assign=True), or build the run anew
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from noshuffle.errors import InvalidInput, Unsupported

#: Set on an optimizer while a private step moves it.
_MARK = "_is_in_private_step"


class ParameterGuard:
    """The parameters of a run, and where each of them is in the model."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        places: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any, str]] = {}
        for name, parameter in parameters.items():
            module: Any = model
            *path, last = name.split(".")
            for key in path:  # every module on the way: one of them may be exchanged
                where, module = module._modules, module._modules.get(key)
                if module is None:
                    break
                places.setdefault((id(where), key), (where, key, module, name))
            else:
                if module._parameters.get(last) is parameter:
                    own = module._parameters
                    places[id(own), last] = (own, last, parameter, name)
        self._places = list(places.values())

    def check(self) -> None:
        """Raise if a parameter was replaced, or frozen, since the run was built."""
        for where, key, what, name in self._places:
            if where.get(key) is not what:
                raise InvalidInput(
                    f"parameter {name!r} is no longer the one that was privatized; load values in "
                    "place (load_state_dict without assign=True), or build the run anew"
                )
        for name, parameter in self._parameters.items():
            if not parameter.requires_grad:
                raise InvalidInput(
                    f"parameter {name!r} was frozen after privatize; freeze it before, or set its "
                    "learning rate to 0"
                )

    def check_names(self, names: Collection[str]) -> None:
        """Raise if the model trains others than the parameters of the run."""
        for name in names:
            if name not in self._parameters:
                raise InvalidInput(
                    f"parameter {name!r} became trainable after privatize and has no noise; "
                    "unfreeze or add parameters before, or freeze it"
                )


def guard(optimizer: torch.optim.Optimizer, owner: object) -> Callable[[], None]:
    """Let nobody but private steps move the optimizer while `owner` lives; returns the end of it.

    Guarantees: `optimizer.step()` outside `at_work` raises before any parameter is moved, for
    optimizers that are torch's or derived from them.
    """
    register: Any = getattr(optimizer, "register_step_pre_hook", None)
    if register is None:
        return lambda: None
    handle: RemovableHandle = register(_refuse)
    weakref.finalize(owner, handle.remove)
    return handle.remove


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer runs hooks of somebody else."""
    before = optimizer._optimizer_step_pre_hooks.values()
    return any(hook is not _refuse for hook in before) or bool(optimizer._optimizer_step_post_hooks)


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not optimizer.__dict__.get(_MARK):
        raise Unsupported(
            "this optimizer belongs to a private run, and stepping it by hand would train on raw "
            "gradients; use private.step, or private.optimizer.step() (private.close() ends a run)"
        )


@contextmanager
def at_work(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While a private step moves the optimizer."""
    before = optimizer.__dict__.get(_MARK, False)
    optimizer.__dict__[_MARK] = True
    try:
        yield
    finally:
        optimizer.__dict__[_MARK] = before

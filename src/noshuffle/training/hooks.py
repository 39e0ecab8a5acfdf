"""What a private run hangs on the model and the optimizer that it was given.

A model can change under a run: a layer exchanged, parameters frozen or unfrozen, others given to
the optimizer. Steps would train objects that are not in the model: `ParameterGuard` is asked before
each. An optimizer can be stepped by an old loop on raw gradients, of which the statement would know
nothing: `guard` refuses that for as long as the run lives. Steps that compiled code calls are
`untraced`. State: places of parameters.

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
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from noshuffle.errors import InvalidInput, Unsupported

#: Set on an optimizer while a private step moves it.
_MARK = "_is_in_private_step"

_Method = TypeVar("_Method", bound=Callable[..., Any])


def untraced(method: _Method) -> _Method:
    """A method that runs as it is inside torch.compile.

    Ledger, keys and hooks are nothing to compile: torch 2.13 ended in a RecursionError over them.
    Where nothing is traced, torch's compiler is not imported.
    """

    @wraps(method)
    def plain(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a constant of what is traced, which ends here
            disable: Any = torch.compiler.disable
            return disable(method)(*args, **options)
        return method(*args, **options)

    return plain  # type: ignore[return-value]


class ParameterGuard:
    """The parameters of a run, and where each of them is in the model."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._parameters, self._optimizer = dict(parameters), optimizer
        self._own = {id(parameter) for parameter in parameters.values()}
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
        """Raise if a parameter was replaced or frozen since the run was built, or one joined."""
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
        for group in () if self._optimizer is None else self._optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self._own and parameter.requires_grad:
                    raise InvalidInput(
                        f"a parameter of shape {tuple(parameter.shape)} outside the private model "
                        "joined the optimizer after privatize (add_param_group), and its gradient "
                        "would be raw; make it part of the model before, or freeze it"
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

    Guarantees: its `step()` outside `at_work` raises before any parameter is moved, for optimizers
    that are torch's or derived from them.
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
            "gradients; use private.step, or private.criterion and private.optimizer.step() "
            "(private.close() ends a run)"
        )


@contextmanager
def at_work(recorder: Any, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """While a step runs the model its `Recorder` (None: there is none) records nothing; an
    optimizer that is given may be moved."""
    own: dict[str, Any] = {} if optimizer is None else optimizer.__dict__
    before = own.get(_MARK, False), recorder is not None and recorder.is_paused
    own[_MARK] = True
    if recorder is not None:
        recorder.is_paused = True
    try:
        yield
    finally:
        own[_MARK] = before[0]
        if recorder is not None:
            recorder.is_paused = before[1]

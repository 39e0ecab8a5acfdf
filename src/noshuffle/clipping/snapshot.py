"""A model as it was when it was last looked at, and whether it still is.

What an engine knows about a model (which parameters are trained, which layers are watched, that no
layer couples examples) stays true until somebody changes the model. Finding it out again in every
step walks the modules half a dozen times; comparing with a snapshot walks them once.

    same    the same module objects of the same classes under the same names, in the same modes,
            with the same parameter objects that ask for a gradient, compiled or not as before

Settings of single layers (`max_norm` of an embedding) may change without that; `check` looks at
those in every step. State: the modules, except the model itself, so that it can go.

>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh()); shot = Snapshot(model)
>>> before = shot.holds(model); model[1].eval(); before, shot.holds(model)
Tanh()
(True, False)
"""

from __future__ import annotations

from operator import is_not
from typing import Any

from torch import nn

from noshuffle.clipping.check import delicate, refuse, refuse_hooks, trainable, validate
from noshuffle.clipping.inputs import is_compiled


class Snapshot:
    """What was found out about a model as a whole.

    Guarantees: raises what `validate` raises; where `holds` is true and `check` does not raise,
    `validate` would not either, and `like`, `names` and `is_compiled` are what they would be now.
    """

    def __init__(self, model: nn.Module) -> None:
        validate(model)
        self.like = trainable(model)
        self.names = {id(p): name for name, p in self.like.items()}
        self.is_compiled = is_compiled(model)
        self._delicate = delicate(model)
        self._parts = [(None if m is model else m, *_seen(m)) for m in model.modules()]

    def holds(self, model: nn.Module) -> bool:
        """Whether the model is as it was."""
        for module, kind, training, children, own, asks, impl in self._parts:
            module = model if module is None else module
            if module.__class__ is not kind or module.training is not training:
                return False
            if (module._modules or children) and tuple(module._modules.items()) != children:
                return False
            if module._parameters or own:
                now = module._parameters
                if tuple(now) != tuple(own) or any(map(is_not, now.values(), own.values())):
                    return False
                if asks != [p is not None and p.requires_grad for p in now.values()]:
                    return False
            if module.__dict__.get("_compiled_call_impl") is not impl:
                return False
        return True

    def check(self) -> None:
        """Raise if a layer was set so that it couples examples, or a parameter has a hook."""
        for name, layer in self._delicate:
            refuse(name, layer)
        refuse_hooks(self.like)


def _seen(module: nn.Module) -> tuple[Any, ...]:
    """Everything about one module that `holds` compares."""
    own = dict(module._parameters)
    asks = [p is not None and p.requires_grad for p in own.values()]
    children = tuple(module._modules.items())
    impl = module.__dict__.get("_compiled_call_impl")
    return type(module), module.training, children, own, asks, impl

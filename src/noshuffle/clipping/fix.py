"""Make a model fit for private training: exchange what mixes examples, and say what was done.

    model, changes = noshuffle.fix(model)

    BatchNorm               GroupNorm of its scale and shift (statistics of one example alone), or,
                            with statistics="keep", itself with the statistics that it has, frozen
    InstanceNorm            without running statistics
    Embedding, -Bag         without max_norm, scale_grad_by_freq, sparse

The model is changed in place; tied layers stay tied. A GroupNorm computes something else, so a
trained model must be trained further. Kept statistics must come from public data: nobody can check
that, and the change says so. Build the optimizer afterwards: parameters may be new. What is left
(layers of one's own, hooks) is refused by `privatize`, by name. No state.

>>> model, changes = fix(nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)))
>>> type(model[1]).__name__, changes
('GroupNorm', ("layer '1': BatchNorm2d(8) is GroupNorm(8, 8) now, with its scale and shift",))
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from noshuffle.errors import InvalidInput, instance_of, one_of


class FixedModel(NamedTuple):
    """A model that `fix` went over, and what it changed, a sentence each."""

    model: nn.Module
    changes: tuple[str, ...]


class _Frozen:
    """A BatchNorm that `model.train()` leaves in eval mode: a fixed affine map."""

    def train(self, mode: bool = True) -> Any:
        return super().train(False)  # type: ignore[misc]


class FrozenBatchNorm1d(_Frozen, nn.BatchNorm1d):
    """BatchNorm1d with the statistics that it was given."""


class FrozenBatchNorm2d(_Frozen, nn.BatchNorm2d):
    """BatchNorm2d with the statistics that it was given."""


class FrozenBatchNorm3d(_Frozen, nn.BatchNorm3d):
    """BatchNorm3d with the statistics that it was given."""


FROZEN: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: FrozenBatchNorm1d,
    nn.BatchNorm2d: FrozenBatchNorm2d,
    nn.BatchNorm3d: FrozenBatchNorm3d,
}


def fix(model: nn.Module, *, statistics: str = "replace") -> FixedModel:
    """Exchange what mixes examples; `statistics` of BatchNorm: "replace" them, or "keep" them.

    Guarantees: what torch's own layers would be refused for (`check.validate`) is gone; all other
    layers, parameters and modes are as they were.
    """
    instance_of(nn.Module, model=model)
    one_of(("replace", "keep"), statistics=statistics)
    exchanged: dict[nn.Module | None, nn.Module] = {}
    changes: list[str] = []
    for name, layer in list(model.named_modules()):
        new = _fixed(name, layer, statistics, changes)
        if new is not layer:
            exchanged[layer] = new.train(layer.training)
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):  # a tied one has several names
            if child in exchanged:
                parent._modules[key] = exchanged[child]
    return FixedModel(exchanged.get(model, model), tuple(changes))


def _fixed(name: str, layer: nn.Module, statistics: str, changes: list[str]) -> nn.Module:
    """The layer that stands in for this one, often itself."""
    where = f"layer {name!r}: {type(layer).__name__}"
    if isinstance(layer, _BatchNorm) and not isinstance(layer, _Frozen):
        wide = layer.num_features
        if statistics == "keep":
            changes.append(f"{where}({wide}) keeps its statistics, which must be of public data")
            return _frozen(name, layer)
        group = _group_norm(layer)
        how = f"GroupNorm({group.num_groups}, {wide}) now, with its scale and shift"
        changes.append(f"{where}({wide}) is {how}")
        return group
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None
        changes.append(f"{where} has no running statistics any more")
    elif isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        for option, off in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if getattr(layer, option, off):
                setattr(layer, option, off)
                changes.append(f"{where} is without {option}")
    return layer


def _group_norm(layer: Any) -> nn.GroupNorm:
    """One group for rows of numbers, where a group of one channel would be all zero."""
    wide = layer.num_features
    groups = 1 if isinstance(layer, nn.BatchNorm1d) else math.gcd(32, wide)
    like = next(
        (t for t in (layer.weight, layer.running_mean) if t is not None),
        torch.zeros(0, device="cpu"),
    )
    options: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
    new = nn.GroupNorm(groups, wide, eps=layer.eps, affine=layer.affine, **options)
    if layer.affine:
        new.weight, new.bias = layer.weight, layer.bias
    return new


def _frozen(name: str, layer: Any) -> nn.Module:
    kind = FROZEN.get(type(layer))
    if kind is None or layer.running_mean is None:
        raise InvalidInput(
            f"layer {name!r} ({type(layer).__name__}) has no statistics that could be kept; use "
            "statistics='replace'"
        )
    new: nn.Module = kind.__new__(kind)
    new.__dict__ = layer.__dict__.copy()  # the same parameters and buffers
    return new.train(False)

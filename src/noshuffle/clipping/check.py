"""What a model must not contain: layers through which one example changes another's gradient.

Batch normalisation in training mode mixes the batch into every gradient; an embedding with
`max_norm` rewrites its own weights with the data, and one with `scale_grad_by_freq` counts across
the batch. All are refused (batch normalisation in eval mode and dropout are allowed), and so is
what autograd does not carry through clipping: sparse embedding gradients, reentrant checkpoints and
hooks on parameters.

>>> from torch import nn
>>> validate(nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)))
Traceback (most recent call last):
    ...
noshuffle.errors.Unsupported: layer '1' (BatchNorm2d) mixes examples; use nn.GroupNorm(8, 8) \
instead, or noshuffle.fix(model).model (statistics='keep' freezes it with those of a \
pretrained net)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from noshuffle.errors import InvalidInput, Unsupported, instance_of

#: Layers that may mix examples, depending on how they are set.
DELICATE = (_InstanceNorm, _BatchNorm, nn.Embedding, nn.EmbeddingBag)


#: What engines say of a model that went through `torch.compile`.
UNCOMPILED = "compiled parts run as written: clipping needs the calls of the layers"


def original(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile`'s wrapper: per-example gradients need the layers."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def is_compiled(model: nn.Module) -> bool:
    """Whether a part of the model is run by `torch.compile`."""
    for m in model.modules():
        if "_orig_mod" in m._modules or m.__dict__.get("_compiled_call_impl") is not None:
            return True
    return False


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Run compiled parts uncompiled, for as long as the block lasts."""
    with torch.compiler.set_stance("force_eager") if is_compiled(model) else nullcontext():
        yield


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """With the model in eval mode; then every module as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; a tied one appears once, under its first name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def validate(model: nn.Module) -> None:
    """Refuse a model in which examples are coupled, and name the replacement.

    Guarantees: a model of torch's own layers that passes has, for every example, a gradient that
    does not depend on the rest of the batch. Own layers are the author's responsibility; the ghost
    engine tries them on the first batch before it trusts them.
    """
    instance_of(nn.Module, model=model)
    for name, layer in model.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            where = f"layer {name!r}" if name else "the model"
            raise Unsupported(
                f"{where} is scripted or traced (torch.jit), which hides its layers from clipping; "
                "give the module it was made from"
            )
    if not any(p.requires_grad for p in model.parameters()):
        raise InvalidInput("the model must have a trainable parameter, got none that requires grad")
    for name, layer in delicate(model):
        refuse(name, layer)
    refuse_hooks(trainable(model))


def delicate(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers whose settings decide whether examples are coupled."""
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, DELICATE)]


def refuse(name: str, layer: nn.Module) -> None:
    """Raise if a delicate layer, as it is set now, couples examples."""
    kind, why = type(layer).__name__, ""
    if isinstance(layer, _InstanceNorm):
        if layer.track_running_stats and layer.training:
            why = "keeps statistics of the data that are not private; use "
            why += f"nn.{kind}({layer.num_features}, affine=True) without running statistics"
    elif isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
        wide = layer.num_features
        why = f"mixes examples; use nn.GroupNorm({math.gcd(32, wide)}, {wide}) instead, or "
        why += "noshuffle.fix(model).model"
        if layer.running_mean is not None:  # of a pretrained backbone, say
            why += " (statistics='keep' freezes it with those of a pretrained net)"
    elif isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        if layer.max_norm or layer.scale_grad_by_freq:
            option = "max_norm" if layer.max_norm else "scale_grad_by_freq"
            why = f"mixes examples; leave {option} out"
        elif layer.sparse and layer.weight.requires_grad:
            why = "has sparse=True, but noise reaches every row: private gradients are dense; "
            why += "leave sparse out"
    if why:
        raise Unsupported(f"layer {name!r} ({kind}) {why}")


def refuse_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise if a gradient is to be changed on its way into a parameter: clipping has none there."""
    for name, p in parameters.items():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise Unsupported(
                f"parameter {name!r} has a gradient hook, which no per-example gradient passes; "
                "remove it, and mask or scale in the forward pass instead"
            )


def refuse_reentrant(error: RuntimeError) -> None:
    """Raise in clear words if an error of autograd comes from a reentrant checkpoint."""
    if "use_reentrant=True" in str(error):
        raise Unsupported(
            "activation checkpointing with use_reentrant=True hides its layers from clipping; pass "
            "use_reentrant=False (Hugging Face: gradient_checkpointing_kwargs)"
        ) from error

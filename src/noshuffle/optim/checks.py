"""What is asked of an optimizer before it is given private gradients. No state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from noshuffle.errors import InvalidInput, Unsupported, instance_of


def check_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> None:
    """The optimizer moves exactly the parameters that are clipped and noised."""
    instance_of(torch.optim.Optimizer, optimizer=optimizer)
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Unsupported(
            f"{kind} asks for the loss several times a step, and every answer would need noise of "
            "its own; use another optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise Unsupported(f"{kind} takes sparse gradients, and private ones are dense; use Adam")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise Unsupported(
            f"{kind}(differentiable=True) moves no parameters in place; leave the option out"
        )
    given = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    missing = [name for name, p in parameters.items() if id(p) not in given]
    if missing:
        raise InvalidInput(
            f"parameter {missing[0]!r} is trainable but not in the optimizer; add it, or freeze it "
            "with requires_grad_(False)"
        )
    if len(given) > len(parameters):
        raise InvalidInput(
            "the optimizer has trainable parameters that do not belong to the model; their "
            "gradients would not be private"
        )


def one_device(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    devices = {p.device for p in parameters.values()}
    if len(devices) != 1:
        raise Unsupported(f"all parameters must be on one device, got {sorted(map(str, devices))}")
    return devices.pop()


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Learning rates and the like, without the parameters themselves."""
    return [
        {k: _plain(v) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

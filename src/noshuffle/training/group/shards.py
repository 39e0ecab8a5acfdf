"""Which part of every parameter lies on this rank, and how sums and states get there.

A replicated parameter lies on every rank as a whole. `fully_shard` (FSDP2) leaves rank r with the
rows [r·⌈m/R⌉, …) of a parameter with m rows: the elements [start, start + numel) of the flattened
one, so a noise stream with that `start` draws exactly its part of the whole parameter's noise.

    reduce     all_reduce (replicated) or reduce_scatter (sharded) of 64-bit integers: exact
    gathered   the model with its whole parameters and without FSDP's hooks, for clipping
    whole/own  states between "all of it" (checkpoints, any number of ranks) and "my part"

No state.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.training.group.team import Team

#: torch 2.13 renamed both.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class ShardLayout:
    """Where the part of one parameter that this rank holds lies in the whole."""

    shape: tuple[int, ...]
    local: tuple[int, ...]
    start: int
    is_sharded: bool

    @property
    def rows(self) -> slice:
        """The rows of the whole that are here."""
        first = self.start // max(1, math.prod(self.shape[1:]))
        return slice(first, first + self.local[0])


def layouts(parameters: Mapping[str, nn.Parameter], team: Team) -> dict[str, ShardLayout]:
    """The layout of every parameter; a layout whose shards are not contiguous is refused."""
    return {name: _layout(name, parameter, team) for name, parameter in parameters.items()}


def _layout(name: str, parameter: nn.Parameter, team: Team) -> ShardLayout:
    shape, value = tuple(parameter.shape), parameter.data
    if not isinstance(value, DTensor):
        return ShardLayout(shape, shape, 0, False)
    layout = value.placements
    if len(layout) != 1 or layout[0] not in (Shard(0), Replicate()):
        raise Unsupported(
            f"parameter {name!r} is laid out as {layout}; only fully_shard over one mesh axis, "
            "sharding rows, is supported (no tensor parallelism, no hybrid sharding)"
        )
    ranks = dist.get_process_group_ranks(value.device_mesh.get_group())
    if ranks != dist.get_process_group_ranks(team.group or dist.group.WORLD):
        raise Unsupported(
            f"parameter {name!r} is sharded over the ranks {ranks}, which are not those of the "
            "group that trains it; shard over the same ranks in the same order"
        )
    local = tuple(value.to_local().shape)
    if layout[0] == Replicate():
        return ShardLayout(shape, local, 0, False)
    rows = -(-shape[0] // team.size)
    first = min(team.rank * rows, shape[0])
    return ShardLayout(shape, local, first * math.prod(shape[1:]), True)


def add_up(total: Tensor, team: Team) -> None:
    """Add a 64-bit integer tensor up over the ranks, in place."""
    if team.size > 1:
        dist.all_reduce(total, group=team.group)


def reduce(total: Tensor, layout: ShardLayout, team: Team) -> Tensor:
    """Add a 64-bit integer tensor up over the ranks; returns the part that belongs here."""
    if not layout.is_sharded:
        add_up(total, team)
        return total
    rows = -(-layout.shape[0] // team.size)
    padded = total.new_zeros((rows * team.size, *layout.shape[1:]))
    padded[: layout.shape[0]] = total
    out = total.new_empty((rows, *layout.shape[1:]))
    _reduce_scatter(out, padded, group=team.group)
    return out[: layout.local[0]]


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A local part as the same kind of tensor as `parameter`."""
    if not isinstance(parameter, DTensor):
        return value
    layout: Any = {"shape": parameter.shape, "stride": parameter.stride()}
    mesh, placements = parameter.device_mesh, parameter.placements
    made: Tensor = DTensor.from_local(value, mesh, placements, run_check=False, **layout)
    return made


def cut(value: Tensor, parameter: Tensor, layout: ShardLayout) -> Tensor:
    """My part of a whole tensor that has the shape of `parameter`, laid out like it."""
    if not isinstance(parameter, DTensor):
        return value
    mine = value[layout.rows] if layout.is_sharded else value
    return like(mine.to(parameter.to_local().device).clone(), parameter)


def whole(state: Any) -> Any:
    """The same state with whole tensors instead of shards (every rank must call it)."""
    return tree_map(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, state)


def gather_rows(
    value: Tensor, layout: ShardLayout, team: Team, *, dim: int, device: torch.device
) -> Tensor:
    """A plain tensor whose axis `dim` is sharded as `layout` says, as a whole, in ordinary memory.

    It travels from `device`, since NCCL takes nothing from elsewhere.
    """
    if not layout.is_sharded:
        return value
    rows = -(-layout.shape[0] // team.size)
    mine = value.movedim(dim, 0).to(device)
    padded = mine.new_zeros((rows, *mine.shape[1:]))
    padded[: mine.shape[0]] = mine
    out = mine.new_empty((rows * team.size, *mine.shape[1:]))
    _all_gather(out, padded, group=team.group)
    return out[: layout.shape[0]].movedim(0, dim).contiguous().cpu()


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied anywhere in the model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """The model with its whole parameters, as if FSDP had never touched it (a collective call).

    Clipping engines choose rules by the class of a layer and run the model several times, under
    vmap too; FSDP's own classes and hooks would get in the way, so they are taken off meanwhile.
    """
    managed: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    kept = []
    for module in managed:
        module.unshard()
    try:
        for module in managed:
            kept.append((module, type(module), module._forward_pre_hooks, module._forward_hooks))
            module._forward_pre_hooks = _foreign(module._forward_pre_hooks)
            module._forward_hooks = _foreign(module._forward_hooks)
            bases = type(module).__mro__  # `fully_shard` derived the class from one of them
            module.__class__ = next(c for c in bases if not issubclass(c, FSDPModule))
        yield
    finally:
        for module, kind, before, after in kept:
            module.__class__ = kind
            module._forward_pre_hooks, module._forward_hooks = before, after
        for module in managed:
            module.reshard()


def _foreign(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """The hooks that are not FSDP's."""
    ours = "torch.distributed.fsdp"
    return OrderedDict(
        (k, h) for k, h in hooks.items() if not str(getattr(h, "__module__", "")).startswith(ours)
    )


def check_policies(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse policies that gather parameters in another type or on another device."""
    own = {name: (p.dtype, p.device.type) for name, p in parameters.items()}
    with gathered(model):
        full = {n: (p.dtype, p.device.type) for n, p in model.named_parameters() if n in own}
    for name, kept in own.items():
        if full.get(name) != kept:
            raise Unsupported(
                f"FSDP keeps {name!r} as {kept} and gathers it as {full.get(name)}; mixed "
                "precision and offload policies are not supported, use torch.autocast in the model"
            )
    if set(full) != set(own):
        raise InvalidInput(f"the model has other parameters when gathered: {set(full) ^ set(own)}")

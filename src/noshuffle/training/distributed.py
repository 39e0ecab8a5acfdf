"""Private training on many devices: every rank its own part of the batch, one guarantee.

    clipped sums of all ranks  →  added up  →  one noise  →  ÷ planned batch  →  update

The model is whole on every rank (as with DDP) or sharded by FSDP2 (`fully_shard`; while it clips, a
device holds the whole parameters and one 64-bit sum of each). The noise of an element is a function
of (key, step, name, index), so a rank draws that of its own shard and the result is the same for
any number of ranks, bit for bit (`group.step`). Rank 0 holds the files. docs/distributed.md has a
script.

>>> privatize_distributed(nn.Linear(2, 1), None, None, batch_size=4)
Traceback (most recent call last):
    ...
noshuffle.errors.InvalidInput: there is no process group; start the script with torchrun and call \
torch.distributed.init_process_group() first, or use privatize
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from noshuffle.clipping import Clip, Flat, auto
from noshuffle.clipping.check import original, trainable
from noshuffle.clipping.norm_histogram import CountingClip
from noshuffle.errors import whole
from noshuffle.noise import Source
from noshuffle.plan import Plan
from noshuffle.release import fingerprint
from noshuffle.release.account import Account
from noshuffle.release.facts import INITIAL, one_device
from noshuffle.release.folder import RunFolder
from noshuffle.release.keys import KeyRing
from noshuffle.release.opening import Opened, Run, open_run
from noshuffle.release.release import Release
from noshuffle.release.spending import Ancestor
from noshuffle.training.assemble import Choices, check_arguments
from noshuffle.training.group import shards
from noshuffle.training.group.ledger import GroupLedger
from noshuffle.training.group.private import Elsewhere, GroupPrivate
from noshuffle.training.group.step import GroupParts
from noshuffle.training.group.team import Team
from noshuffle.training.step_parts import Engine

#: A planned batch has this many blocks by default: up to 8 ranks share it evenly.
BLOCKS = 8


def privatize_distributed(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    *,
    batch_size: int,
    clip_norm: float | None = None,
    clip: Clip | CountingClip | None = None,
    group: Any = None,
    block: int | None = None,
    unit: str | None = None,
    reduce: str = "mean",
    engine: Engine | None = None,
    source: Source | None = None,
    run: RunFolder | str | Path | None = None,
    on_violation: str = "refuse",
    loss_reduction: str = "mean",
    on_replay: str = "auto",
    initial: str = INITIAL,
    moved: bool = False,
    budget: Account | None = None,
) -> GroupPrivate:
    """Bind a model, an optimizer and a plan on every rank of a process group.

    Every rank calls it with the same arguments; a difference is refused by name. Beyond those of
    `privatize`:
        batch_size: the planned batch of all ranks together.
        group: the process group; all ranks by default.
        block: units that are clipped in one piece. Runs with the same blocks agree bit for bit on
            any number of ranks. By default an eighth of the batch; larger blocks are faster.
        source: on every rank the same; by default rank 0 makes (or finds) the key and sends it.
        run: a folder that rank 0 alone reads and writes.
        budget: drawn on by rank 0 alone.

    Guarantees: ranks that disagree on plan, key, clipping, batch size, parameters or optimizer do
    not start. What is released is what one process would have released from the whole batch.
    """
    team = Team.of(group)
    inner = original(model)

    def described() -> dict[str, Any]:
        chosen = Choices(reduce, on_violation, loss_reduction, on_replay)
        check_arguments(model, optimizer, plan, engine, clip_norm, clip, batch_size, unit)
        if block is not None:
            whole(block=block)
        parameters = trainable(inner)
        shards.layouts(parameters, team)
        return {
            "plan": plan.hash,
            "key": None if source is None else source.fingerprint,
            "clip": repr(clip_norm if clip is None else clip),
            "batch_size": batch_size,
            "block": block,
            **vars(chosen),
            "engine": type(engine).__name__,
            "run": run is not None,
            "budget": budget is not None,
            "initial": initial,
            "device": one_device(parameters).type,
            "optimizer": type(optimizer).__name__,
            "optimizer settings": repr(fingerprint.settings_of(optimizer)),
            "parameter shapes": {n: (tuple(p.shape), str(p.dtype)) for n, p in parameters.items()},
        }

    team.agree("privatize_distributed", described)
    parameters = trainable(inner)
    layouts = shards.layouts(parameters, team)
    device = one_device(parameters)
    is_sharded = shards.is_sharded(inner)
    if is_sharded:
        shards.check_policies(inner, parameters)
    team.agree("the parameters", lambda: _digests(inner))
    bound = clip if clip is not None else Flat(float(clip_norm))  # type: ignore[arg-type]
    opened = _opened(plan, team, run=run, source=source, device=device, budget=budget)
    made: list[Release] = []

    def build() -> None:
        made.append(
            Release(
                plan,
                opened,
                {name: layout.local for name, layout in layouts.items()},
                clip=bound,
                divisor=batch_size,
                device=device,
                starts={name: layout.start for name, layout in layouts.items()},
                facts={"initial": initial, "isolation": "tried"},
            )
        )

    team.meet("the facts of the run", build)
    if engine is None:
        with shards.gathered(inner) if is_sharded else nullcontext():
            # Ranks with unlike free memory must not sum in unlike parts.
            engine = auto(inner, mode="fast")
    parts = GroupParts(
        model=inner,
        parameters=parameters,
        optimizer=optimizer,
        engine=engine,
        release=made[0],
        **Choices(reduce, on_violation, loss_reduction, on_replay).of_steps(plan, device),
        team=team,
        layouts=layouts,
        block=block or -(-batch_size // BLOCKS),
        is_sharded=is_sharded,
    )
    private = GroupPrivate(model, plan, parts)
    private.write_statement()
    return private


def _opened(
    plan: Plan,
    team: Team,
    *,
    run: Run,
    source: Source | None,
    device: torch.device,
    budget: Account | None,
) -> Opened:
    """Rank 0 opens the run; the others hear of its keys and facts."""
    here: list[Opened] = []

    def begin() -> tuple[KeyRing, tuple[Ancestor, ...], dict[str, str | None], int]:
        def make(path: Path | None) -> GroupLedger:
            return GroupLedger(plan, team=team, path=path)

        opened = open_run(plan, run=run, source=source, device=device, make=make, budget=budget)
        here.append(opened)
        facts, released = opened.ledger.facts(), opened.ledger.released
        return opened.ring, opened.ancestors, facts, released

    ring, ancestors, facts, released = team.lead("the run folder", begin)
    if here:
        return here[0]
    folder = None if run is None else RunFolder.of(run)
    ledger = GroupLedger.elsewhere(plan, team=team, facts=facts, released=released)
    seen = None if folder is None else Elsewhere(folder.path, ancestors)
    recipe = plan.strategy.recipe(plan.steps)
    return Opened(seen, ledger, ring, recipe, ancestors, None)


def _digests(model: nn.Module) -> dict[str, str]:
    """Of what should be the same on all ranks: parameters, frozen ones too, and buffers."""
    kinds = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    return {
        f"the values of {kind} {name!r}": hashlib.blake2b(
            value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, digest_size=8
        ).hexdigest()
        for kind, named in kinds.items()
        for name, tensor in named
        if not isinstance(value := tensor.detach(), DTensor)
        and value.layout is torch.strided
        and value.numel()
    }

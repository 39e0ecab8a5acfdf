"""A run on many ranks: which rows are whose, and whole states from parts.

Rank 0 holds the folder. A saved state holds whole tensors, so a run goes on with another number of
ranks, or sharded where it was not, and ends with the same bits. To save, every rank holds the whole
state for a moment.

>>> share(4, rank=1, ranks=3)
(1, 2)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from noshuffle.errors import InvalidInput, Unsupported, whole
from noshuffle.release.folder import RunFolder
from noshuffle.release.spending import Ancestor
from noshuffle.release.unit_ids import Ids, as_ids
from noshuffle.training.compiled.blocks import BlockSums
from noshuffle.training.group import shards
from noshuffle.training.group.batch_blocks import blocks_of
from noshuffle.training.group.step import GroupParts, GroupStep
from noshuffle.training.group.team import is_known_to_all
from noshuffle.training.hooks import at_work
from noshuffle.training.passes import Listener
from noshuffle.training.private import Private
from noshuffle.training.step import Step
from noshuffle.training.unchanged import PrivateOptimizer


def share(blocks: int, *, rank: int, ranks: int) -> tuple[int, int]:
    """The blocks [begin, end) of a batch that a rank takes, as evenly as they go."""
    return blocks * rank // ranks, blocks * (rank + 1) // ranks


class Elsewhere(RunFolder):
    """The run folder as seen by a rank that does not hold it: writes go nowhere."""

    def __init__(self, path: Path, ancestors: tuple[Ancestor, ...]) -> None:
        super().__init__(path)
        object.__setattr__(self, "_ancestors", ancestors)

    def ancestors(self) -> tuple[Ancestor, ...]:
        found: tuple[Ancestor, ...] = self._ancestors  # type: ignore[attr-defined]
        return found

    def _rank_0_does(self, *args: Any, **kwargs: Any) -> None: ...

    write_statement = write_config = append_metrics = forget_metrics_after = _rank_0_does


class GroupPrivate(Private):
    """A model in private training on many ranks. Build it with `privatize_distributed`.

    `step`, `accumulate`, `state_dict`, `save` and `resume` are collective calls: every rank makes
    them, in the same order. Statements and properties are local.
    """

    _parts: GroupParts

    def rows(self, size: int | None = None, *, ids: Any = None) -> Ids:
        """The rows of a batch that are this rank's: whole blocks, users never torn apart.

        Give the size of the whole batch, or (needed if the unit is a user) the ids of all rows.
        """
        team, block = self._parts.team, self._parts.block
        users = None
        if self._parts.groups_users:
            if ids is None:
                raise InvalidInput("a plan with unit='user' splits batches by user; pass ids=")
            users = self._parts.release.identify(ids)
        if size is None:
            size = len(as_ids(ids)) if ids is not None else None
        if size is None or (users is not None and len(users) != size):
            raise InvalidInput("give the size of the whole batch, or the ids of all its rows")
        whole(at_least=0, size=size)
        blocks = blocks_of(size, users, block=block)
        begin, end = share(len(blocks), rank=team.rank, ranks=team.size)
        return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *blocks[begin:end]]))

    @property
    def why(self) -> str:
        """How a step is computed, and the reasons."""
        sums = self._parts.sums
        how = sums.why if isinstance(sums, BlockSums) else sums and f"blocks not captured: {sums}"
        return "; ".join(part for part in (getattr(self._parts.engine, "why", ""), how) if part)

    @property
    def fallbacks(self) -> list[str]:
        """What could not be done the fast way, each said once."""
        sums = self._parts.sums
        return super().fallbacks + (sums.fallbacks if isinstance(sums, BlockSums) else [])

    def _new_step(self) -> Step:
        return GroupStep(self._parts, index=self._index)

    @contextmanager
    def _accumulate(self, *, is_captured: bool = False) -> Iterator[Step]:
        """Several parts of one batch, one release at the end; the same number on every rank."""
        step = self._new_step()
        with at_work(self._listener):
            try:
                yield step
            except Exception as error:
                if not is_known_to_all(error):  # the others wait for the next part or release
                    failed = error
                    self._parts.team.meet("a step that is given up", lambda: _again(failed))
                raise
        with at_work(self._listener, self._parts.optimizer):
            seen = step.release()
        self._finish(seen)

    def _listen(self) -> Listener | None:
        return None if self._parts.is_sharded else super()._listen()

    @property
    def optimizer(self) -> PrivateOptimizer:
        """For an unchanged loop, on models that are whole on every rank."""
        if self._parts.is_sharded:
            raise Unsupported(
                "under fully_shard `loss.backward()` would add up raw gradients between ranks; "
                "use private.step"
            )
        return super().optimizer

    def state_dict(self) -> dict[str, Any]:
        """The whole state, the same on every rank and for any number of them."""
        state = super().state_dict()
        layouts, team = self._parts.layouts, self._parts.team
        device = next(iter(self._parts.parameters.values())).device
        noise = dict(state["noise"])
        noise["buffers"] = {  # in one order on every rank; a stream lists empty shards first
            name: shards.gather_rows(
                noise["buffers"][name], layouts[name], team, dim=1, device=device
            )
            for name in sorted(noise["buffers"])
        }
        noise["shapes"] = {name: list(layout.shape) for name, layout in layouts.items()}
        noise["starts"] = dict.fromkeys(layouts, 0)
        state = {**state, "noise": noise}
        return {key: shards.whole(value) for key, value in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a whole state was taken, by this or another number of ranks."""
        layouts, parameters = self._parts.layouts, self._parts.parameters
        noise = state["noise"]
        if noise is not None:  # None: a phase begins here (`release.extension`)
            if noise.get("shapes") != {n: list(p.shape) for n, p in layouts.items()}:
                raise InvalidInput("the saved state belongs to a model with other parameters")
            buffers = {
                name: value[:, layouts[name].rows] if layouts[name].is_sharded else value
                for name, value in noise["buffers"].items()
            }
            shapes = {name: list(layout.local) for name, layout in layouts.items()}
            starts = {name: layout.start for name, layout in layouts.items()}
            noise = {**noise, "buffers": buffers, "shapes": shapes, "starts": starts}
        model = {
            name: shards.cut(value, parameters[name].data, layouts[name])
            if name in parameters
            else value
            for name, value in state["model"].items()
        }
        super().load_state_dict(
            {**state, "noise": noise, "model": model, "optimizer": self._cut_optimizer(state)}
        )

    def _cut_optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        """Optimizer state with this rank's part of every tensor that has its parameter's shape."""
        saved: dict[str, Any] = state["optimizer"]
        names = {id(p): name for name, p in self._parts.parameters.items()}
        listed = [p for group in self._parts.optimizer.param_groups for p in group["params"]]
        order = [index for group in saved["param_groups"] for index in group["params"]]
        found = dict(saved["state"])
        for index, parameter in zip(order, listed):
            name = names.get(id(parameter))
            if name is None or index not in found:
                continue
            found[index] = {
                key: shards.cut(value, parameter.data, self._parts.layouts[name])
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape
                else value
                for key, value in found[index].items()
            }
        return {**saved, "state": found}

    def save(self) -> Path:
        """Rank 0 writes a checkpoint and the statement; returns when they are there."""
        state = self.state_dict()
        return self._parts.team.lead("a checkpoint", lambda: self._parts.release.save(state))

    def resume(self) -> int:
        """Rank 0 reads the newest checkpoint, if there is one, and sends it to all."""
        release = self._parts.release
        state = self._parts.team.lead("the newest checkpoint", release.saved)
        if state is not None:
            self._parts.team.meet("loading", lambda: self.load_state_dict(state))
        release.need_folder().forget_metrics_after(self._index)
        return self._index

    def close(self, *, keep_keys: bool = False) -> None:
        """Rank 0 brings the evidence up to date, and seals a finished run."""
        if self._parts.team.is_lead:
            super().close(keep_keys=keep_keys)
        else:
            self._end()


def _again(error: Exception) -> None:
    raise error

"""Batches whose rows are named by their place in a data set, for every driver of a `Release`.

    for batch in names.batches(loader):     from the next step of the run on, in an order that is
        step(batch)                         a function of the step; the names wait in `names`
        └─ names.take(None, rows=…)         and the next step takes them

Tensors carry no names. Each batch that is yielded opens a slot for its names, and the next step, or
part of a step, takes them: a second batch without a step between is refused, and so is a step
without a batch. `Batch` carries names through a loader that has some of its own. State: the slot,
the data set whose places are the names, and what samplers of the caller's have drawn.

>>> from noshuffle.participation import SinglePass
>>> plan = Plan.fit(SinglePass(steps=2), mechanism="tree", noise_multiplier=0.0)
>>> release = Release(plan, {"sum": ()}, clip=1.0)
>>> names = RowNames(release)
>>> for batch in names.batches(DataLoader(range(10, 14), batch_size=2)).named():
...     ticket = release.admit(names.take(None, rows=len(batch)))
...     release.close(ticket, {"sum": torch.zeros(())})
...     release.finish(ticket)
...     print(batch.tolist(), ticket.units.tolist())
[10, 11] [0, 1]
[12, 13] [2, 3]
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch as torch
from torch.utils.data import BatchSampler
from torch.utils.data import DataLoader as DataLoader

from noshuffle.errors import InvalidInput, whole
from noshuffle.participation import Epochs
from noshuffle.participation.base import InEpochs
from noshuffle.plan import Plan
from noshuffle.release.history import History
from noshuffle.release.named_loader import (
    NAME_THEM,
    OF_CALLER,
    NamedBatch,
    NamedLoader,
    RowOrder,
    check_base,
    content_of,
    look_through,
    named,
    turn_of,
    why_no_places,
)
from noshuffle.release.release import Release
from noshuffle.release.units import Ids


@dataclass(frozen=True)
class Batch:
    """What goes into one step: the arguments of the loss, and the unit of every example."""

    data: tuple[Any, ...]
    ids: Any = None


class RowNames:
    """Places as names of rows, for one run.

    Guarantees: a run names rows of one data set, and a batch takes part under the names that were
    read together with its rows.
    """

    def __init__(self, release: Release) -> None:
        self.release = release
        #: Whether rows are named by place from here on.
        self.are_places = False
        self._readers: dict[tuple[int, int], PrivateBatches] = {}
        self._base: Any = None
        self._names: Ids = np.empty(0, dtype=np.int64)
        #: The step and part that the names are for.
        self._step, self._part, self._is_taken = -1, 0, True

    def batches(
        self, loader: Any, *, parts: int = 1, begin_pass: Callable[[int], None] | None = None
    ) -> PrivateBatches:
        """What reads this loader for the run: the same object every time, which knows what a
        sampler of the caller's has drawn. See `PrivateBatches`."""
        reader = self._readers.get((id(loader), parts))
        if reader is None:  # it holds the loader, whose number is not given again
            reader = PrivateBatches(self, loader, parts=parts, begin_pass=begin_pass)
            self._readers[id(loader), parts] = reader
        return reader

    def use_places_of(self, dataset: Any) -> Ids:
        """The place of every row; the run is held to this data set.

        On record: the number of rows, and under the secret of the run the list of files.
        """
        base, places = look_through(dataset)
        if self._base is not None:
            check_base(self._base, base)
        rows, whole_set = len(places), len(base)
        self.release.bind("rows", f"{rows}" if rows == whole_set else f"{rows} of {whole_set}")
        content = content_of(dataset).encode("utf-8", "surrogatepass")
        if content:
            key = hashlib.blake2b(self.release.secret, person=b"files").digest()
            self.release.bind("files", hashlib.blake2b(content, key=key).hexdigest()[:32])
        self._base, self.are_places = base, True
        return places

    def open(self, names: Ids, *, step: int, part: int) -> bool:
        """Open the slot for a batch that is about to be yielded.

        False where the step has been given up: its batch is not used.
        """
        now, due = self.release.step, step + (part > 0)
        if part == 0 and step < now:
            self._step, self._is_taken = -1, True
            return False
        if part and self._step != step:  # given up with the parts before
            return False
        is_waiting = self._is_due and not self._is_taken
        is_other = is_waiting and (part > 0 or not np.array_equal(names, self._names))
        if due > now or is_other:
            raise InvalidInput(
                f"a second batch came before step {now - (part > 0 and due == now)} had taken the "
                "first; take one step with each batch (parts= says how many batches one "
                "private.accumulate() takes), or give it up by skip()"
            )
        if due < now:
            raise InvalidInput(
                f"step {step} is over, and a further part of it came; take all {part + 1} parts in "
                "one private.accumulate()"
            )
        self._names, self._step, self._part, self._is_taken = names, step, part, False
        return True

    @property
    def _is_due(self) -> bool:
        """Whether the names are for the step, or the part of it, that comes next."""
        return self._step >= 0 and self.release.step == self._step + (self._part > 0)

    def take(self, ids: Any, *, rows: int) -> Ids:
        """The names of the batch that is waiting, for a step that came without `ids`.

        A step that was refused before its row was written may be taken again.
        """
        if ids is not None:
            raise InvalidInput(
                "batches(loader) names the rows of this run, and ids= would be a second way; leave "
                "ids= out"
            )
        if not self._is_due or (self._is_taken and self._part):
            raise InvalidInput(
                f"step {self.release.step} came without a batch of batches(loader), which names "
                "the rows of this run; take the next batch first"
            )
        if rows != len(self._names):
            raise InvalidInput(
                f"{len(self._names)} rows were read and {rows} came into the step; collate_fn and "
                "loop must keep every row, or name them yourself (ids=)"
            )
        self._is_taken = True
        return self._names


class PrivateBatches:
    """The batches of a loader, from the next step of a run on; see `Private.batches`.

    Iterating reads the rest of the pass that the run stands in, and nothing once its plan ends. A
    loader that gives `Batch` with ids keeps these names; the order is a function of the step all
    the same. `begin_pass` is called with the step that a pass began with, before a sampler of the
    caller's draws: it sets the random states that such a sampler may draw from.

    Guarantees: with torch's own samplers, the batch of step t depends on t, on the loader and on a
    public seed of the run, however often the run was killed. The batches of another sampler are
    compared with those on record before the first step.
    """

    def __init__(
        self,
        names: RowNames,
        loader: Any,
        *,
        parts: int = 1,
        begin_pass: Callable[[int], None] | None = None,
    ) -> None:
        whole(parts=parts)
        self._names, self._release, self._plan = names, names.release, names.release.plan
        self._parts, self._begin_pass = parts, begin_pass
        if self._plan.participation.is_sampled:
            raise InvalidInput(
                "a sampled plan draws its batches in secret; give DataLoader(…, batch_sampler="
                "private.sampler(population)), and pass its indices on as ids="
            )
        if why := why_no_places(loader):
            raise InvalidInput(f"{why}; {NAME_THEM}")
        self._dataset, self._loader, self._source = loader.dataset, NamedLoader(loader), loader
        self.order = RowOrder(loader, seed=self._release.order_seed)
        #: Steps in one pass.
        self.length = -(-self.order.batches // parts)
        check_length(self._plan, self.length)
        self._places: Ids | None = None
        self._is_compared = self.order.kind != OF_CALLER

    def named(self) -> Self:
        """The same, whose rows are named by place; raises where they cannot be."""
        self._name_rows()
        return self

    def _name_rows(self) -> Ids:
        """The place of every row."""
        if self._plan.unit == "user":
            raise InvalidInput(
                "the plan protects users, and the place of a row names an example; pass ids="
            )
        if self._places is None or not self._names.are_places:
            self._places = self._names.use_places_of(self._dataset)
        return self._places

    def __len__(self) -> int:
        return self.order.batches

    @property
    def steps_released(self) -> int:
        """The number of the run's next step."""
        return self._release.step

    def __iter__(self) -> Iterator[Any]:
        """What the loader would give, from the next step on."""
        release, parts = self._release, self._parts
        release.check_ready()
        first = release.step
        if first >= self._plan.steps:
            return
        number, behind = divmod(first, self.length)
        batches = self.of_pass(number)
        remaining = slice(behind * parts, (behind + self._plan.steps - first) * parts)
        for i, (rows, batch) in enumerate(self._loader.read(batches[remaining])):
            step, part = first + i // parts, i % parts
            if isinstance(batch, Batch) and batch.ids is not None:
                yield batch
                continue
            if self._open(rows, batches, step=step, part=part):
                yield batch

    def of_pass(self, number: int) -> Sequence[Sequence[int]]:
        """The batches of a pass; the run keeps to one source of their order."""
        start = number * self.length
        batches = self.order.of_pass(
            number,
            turn=turn_of(self._plan, number),
            begin=lambda: None if self._begin_pass is None else self._begin_pass(start),
        )
        self._release.bind("order", self.order.kind)
        return batches

    def loader(self) -> DataLoader[NamedBatch]:
        """A DataLoader of whole passes, for a loop that counts batches itself; see `open`."""
        return named(self._source, _WholePass(self))

    def open(self, rows: Sequence[int], *, part: int = 0) -> None:
        """Name the rows of the batch that the next step, or part of it, takes."""
        step = self._release.step - (part > 0)
        batches = [] if self._is_compared else self.of_pass(step // self.length)
        self._open(rows, batches, step=step, part=part)

    def _open(
        self, rows: Sequence[int], batches: Sequence[Sequence[int]], *, step: int, part: int
    ) -> bool:
        places = self._name_rows()
        if not self._is_compared:
            self._compare(batches, places, start=step // self.length * self.length)
            self._is_compared = True
        return self._names.open(places[rows], step=step, part=part)

    def _compare(self, batches: Sequence[Sequence[int]], places: Ids, *, start: int) -> None:
        """Raise where the sampler of the caller now gives other rows than those on record, in the
        pass that began with step `start`."""
        release, length, parts = self._release, self.length, self._parts
        keeps_order = isinstance(self._plan.guarded, Epochs)
        if release.folder is None or (release.step == start and not (keeps_order and start)):
            return
        recorded: dict[int, list[Ids]] = {}

        def hear(step: int, units: Ids) -> None:
            if len(units) and (step >= start or (keeps_order and step < length)):
                recorded.setdefault(step, []).append(units)

        History.read(release.folder, on_step=hear)
        for step, known in recorded.items():
            first = step % length * parts
            rows = np.concatenate([*batches[first : first + parts], []]).astype(np.int64)
            if not np.isin(np.concatenate(known), places[rows]).all():
                is_open = isinstance(self._plan.participation, InEpochs) and not keeps_order
                way = "pass_over(to='epoch') gives up the rest of this epoch, or b"
                raise InvalidInput(
                    f"the sampler of the loader gives other rows for step {step} than those on "
                    f"record, so the order of this run is lost: {way if is_open else 'b'}egin a "
                    "new run that adds up with it (fork_of=)"
                )


class _WholePass(BatchSampler):
    """The batches of the pass that the run stands in, from its first one on."""

    def __init__(self, batches: PrivateBatches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        reader = self._batches
        return map(list, reader.of_pass(reader.steps_released // reader.length))

    def __len__(self) -> int:
        return len(self._batches)


def check_length(plan: Plan, steps: int) -> None:
    """Raise unless a pass of so many steps is an epoch of the plan, or the whole run."""
    planned = getattr(plan.participation.base, "steps_per_epoch", 0)
    if planned and steps not in (planned, plan.steps):
        raise InvalidInput(
            f"the plan has {planned} steps per epoch, the data has {steps} batches; leave out the "
            "incomplete last batch (drop_last=True), or fit the plan again"
        )

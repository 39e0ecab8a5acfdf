"""Batches with the names of their units, from tensors or from anything that can be iterated.

`PrivateBatches` reads a DataLoader from the next step of a run on, and names rows by their place.
`TensorBatches` cuts tensors by index arrays (natural order, or a secret sampler) and can start in
the middle. `Batch` carries ids through a loader of one's own; `with_ids` wraps a data set so that
every item brings its index; its `collate` makes batches of it, empty ones too (a secret draw may be
empty).

>>> import torch
>>> epoch = TensorBatches((torch.arange(6.0), torch.arange(6)), in_order(6, 3))
>>> [(batch.ids.tolist(), batch.data[0].tolist()) for batch in epoch.starting_at(1)]
[([3, 4, 5], [3.0, 4.0, 5.0])]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from noshuffle.clipping.objective import take
from noshuffle.errors import InvalidInput, whole
from noshuffle.participation import Epochs
from noshuffle.participation.base import InEpochs
from noshuffle.plan import Plan
from noshuffle.release.history import History
from noshuffle.release.sampler import Sampler
from noshuffle.release.sampler import in_order as in_order
from noshuffle.release.units import Ids
from noshuffle.training.named_loader import (
    NAME_THEM,
    OF_CALLER,
    NamedBatch,
    NamedLoader,
    RowOrder,
    named,
    turn_of,
    why_no_places,
)
from noshuffle.training.run import TrainingRun


@dataclass(frozen=True)
class Batch:
    """What goes into one step: the arguments of the loss, and the unit of every example."""

    data: tuple[Any, ...]
    ids: Any = None


@dataclass(frozen=True)
class TensorBatches:
    """Tensors cut by index arrays: one epoch of them, or a sampler for the whole run.

    `units` names the unit of every example (its user); by default an example is its own unit.
    """

    tensors: tuple[Tensor, ...]
    order: Sequence[Ids] | Sampler
    units: Ids | None = None

    def __len__(self) -> int:
        return self.order.steps if isinstance(self.order, Sampler) else len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        return self.starting_at(0)

    def starting_at(self, step: int) -> Iterator[Batch]:
        """Batches from this position on."""
        for i in range(step, len(self)):
            rows = self.order.hand_out(i) if isinstance(self.order, Sampler) else self.order[i]
            index = {place: _sent(rows, place) for place in {t.device for t in self.tensors}}
            data = tuple(t[index[t.device]] for t in self.tensors)
            yield Batch(data, rows if self.units is None else self.units[rows])


def _sent(rows: Ids, device: torch.device) -> Tensor:
    """An index where it is needed; the host does not wait for a GPU that is still at work."""
    index = torch.from_numpy(rows)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index


class with_ids(Dataset[Any]):
    """A map-style data set whose items come as (index, *item), for

    DataLoader(numbered, batch_size=250, collate_fn=numbered.collate)
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        item = self.dataset[index]
        return (index, *item) if isinstance(item, tuple | list) else (index, item)

    def collate(self, items: list[tuple[Any, ...]]) -> Batch:
        """A `Batch` of some items; of none, one without rows but with the right shapes."""
        ids, *data = default_collate(items or [self[0]])
        if not items:
            ids, data = take((ids, data), slice(0, 0))
        return Batch(tuple(data), ids)


def as_batch(item: Any) -> Batch:
    """A loader's item as a batch: a `Batch`, a tuple or list of loss arguments, or one argument."""
    if isinstance(item, Batch):
        return item
    return Batch(tuple(item)) if isinstance(item, tuple | list) else Batch((item,))


def repeats_rows(batches: Any) -> bool:
    """Whether every pass is known to bring the same rows again, in whatever order."""
    if isinstance(batches, TensorBatches):
        return not isinstance(batches.order, Sampler)
    if not isinstance(batches, DataLoader) or isinstance(batches.dataset, IterableDataset):
        return isinstance(batches, list | tuple)
    sampler = getattr(batches.batch_sampler, "sampler", None)
    if isinstance(sampler, RandomSampler):  # whoever leaves out a rest has others in every pass
        is_all = sampler.num_samples == len(sampler.data_source) and not sampler.replacement
        return is_all and not batches.drop_last
    return isinstance(sampler, SequentialSampler)


def check_length(plan: Plan, steps: int) -> None:
    """Raise unless a pass of so many steps is an epoch of the plan, or the whole run."""
    planned = getattr(plan.participation.base, "steps_per_epoch", 0)
    if planned and steps not in (planned, plan.steps):
        raise InvalidInput(
            f"the plan has {planned} steps per epoch, the data has {steps} batches; leave out the "
            "incomplete last batch (drop_last=True), or fit the plan again"
        )


def refuse_passes(plan: Plan, *, steps: int, per_pass: int, advice: str) -> None:
    """Raise, before anything is released, where the same rows come more often than the plan allows.

    Without this the guard refuses the first step of the pass that is too many, when those before it
    are paid for.
    """
    part = plan.participation
    passes = -(-min(steps, plan.steps) // per_pass) if per_pass else 0
    if not part.is_sampled and passes > part.most:
        raise InvalidInput(
            f"training goes through the same rows {passes} times, and by the plan "
            f"{part.words()}; {advice}"
        )


# -- rows named by their place -----------------------------------------------------------------


class PrivateBatches:
    """The batches of a loader, from the next step of a run on; see `Private.batches`.

    Iterating reads the rest of the pass that the run stands in, and nothing once its plan ends. A
    loader that gives `Batch` with ids keeps these names; the order is a function of the step all
    the same.

    Guarantees: with torch's own samplers, the batch of step t depends on t, on the loader and on a
    public seed of the run, however often the run was killed. The batches of another sampler are
    compared with those on record before the first step.
    """

    def __init__(self, private: TrainingRun, loader: Any, *, parts: int = 1) -> None:
        whole(parts=parts)
        self._private, self._release, plan = private, private._parts.release, private.plan
        self._plan, self._parts, self._names = plan, parts, private._parts.names
        if plan.participation.is_sampled:
            raise InvalidInput(
                "a sampled plan draws its batches in secret; give DataLoader(…, batch_sampler="
                "private.sampler(population)), and pass its indices on as ids="
            )
        if why := why_no_places(loader):
            raise InvalidInput(f"{why}; {NAME_THEM}")
        self._dataset, self._loader, self._plain = loader.dataset, NamedLoader(loader), loader
        self.order = RowOrder(loader, seed=self._release.order_seed)
        #: Steps in one pass.
        self.length = -(-self.order.batches // parts)
        check_length(plan, self.length)
        self._places: Ids | None = None
        self._is_compared = self.order.kind != OF_CALLER

    def named(self) -> Self:
        """The same, whose rows are named by place; raises where they cannot be."""
        if self._plan.unit == "user":
            raise InvalidInput(
                "the plan protects users, and the place of a row names an example; pass ids="
            )
        if self._places is None or not self._names.are_places:
            self._places = self._names.hold_to(self._dataset)
        return self

    def __len__(self) -> int:
        return self.order.batches

    def __iter__(self) -> Iterator[Any]:
        """What the loader would give, from the next step on."""
        release, parts = self._release, self._parts
        release.check_ready()
        first = release.step
        if first >= self._plan.steps:
            return
        number, behind = divmod(first, self.length)
        batches = self.of_pass(number)
        left = slice(behind * parts, (behind + self._plan.steps - first) * parts)
        for i, (rows, batch) in enumerate(self._loader.read(batches[left])):
            step, part = first + i // parts, i % parts
            if isinstance(batch, Batch) and batch.ids is not None:
                yield batch
                continue
            if self._places is None:
                self.named()
            assert self._places is not None
            if not self._is_compared:
                self._compare(batches, number)
                self._is_compared = True
            if self._names.open(self._places[rows], step=step, part=part):
                yield batch

    def loader(self, *, are_named: bool = True) -> DataLoader[NamedBatch]:
        """A DataLoader of whole passes, for a loop that counts batches itself; see `open`."""
        if are_named:
            self.named()
        return named(self._plain, _WholePass(self))

    def open(self, rows: Sequence[int], *, part: int = 0) -> None:
        """Name the rows of the batch that the next step, or part of it, takes."""
        assert self._places is not None
        step = self._release.step - (part > 0)
        if not self._is_compared:
            self._compare(self.of_pass(step // self.length), step // self.length)
            self._is_compared = True
        self._names.open(self._places[rows], step=step, part=part)

    def of_pass(self, number: int) -> Sequence[Sequence[int]]:
        """The batches of a pass; the run is held to where their order comes from."""
        batches = self.order.of_pass(
            number,
            turn=turn_of(self._plan, number),
            begin=lambda: self._private.return_to_epoch(number * self.length),
        )
        self._release.bind("order", self.order.kind)
        return batches

    def _compare(self, batches: Sequence[Sequence[int]], number: int) -> None:
        """Raise where the sampler of the caller now gives other rows than those on record."""
        release, length, parts = self._release, self.length, self._parts
        keeps_order = isinstance(self._plan.guarded, Epochs)
        begun = number * length
        if release.folder is None or (release.step == begun and not (keeps_order and begun)):
            return
        units: dict[int, list[Ids]] = {}

        def hear(step: int, own: Ids) -> None:
            if len(own) and (step >= begun or (keeps_order and step < length)):
                units.setdefault(step, []).append(own)

        History.read(release.folder, on_step=hear)
        for step, known in units.items():
            first = step % length * parts
            rows = np.concatenate([*batches[first : first + parts], []]).astype(np.int64)
            assert self._places is not None
            if not np.isin(np.concatenate(known), self._places[rows]).all():
                is_open = isinstance(self._plan.participation, InEpochs) and not keeps_order
                way = "private.pass_over(to='epoch') gives up the rest of this epoch, or b"
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
        of = self._batches
        return map(list, of.of_pass(of._release.step // of.length))

    def __len__(self) -> int:
        return self._batches.order.batches


def batches_of(private: TrainingRun, loader: Any, *, parts: int = 1) -> PrivateBatches:
    """What reads this loader for a run: the same object every time, which knows what a sampler of
    the caller's has drawn."""
    known = private._parts.names.readers
    found = known.get((id(loader), parts))
    if found is None:  # it holds the loader, whose number is not given again
        found = known[id(loader), parts] = PrivateBatches(private, loader, parts=parts)
    return found

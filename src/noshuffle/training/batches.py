"""Batches with the names of their units, from tensors or from anything that can be iterated.

`TensorBatches` cuts tensors by index arrays (natural order, or a secret sampler) and can start in
the middle. `with_ids` wraps a data set so that every item brings its index; its `collate` makes
batches of it, empty ones too (a secret draw may be empty). `batches_of` reads a DataLoader from the
next step of a run on, and names rows by their place (`release.batches`).

>>> import torch
>>> epoch = TensorBatches((torch.arange(6.0), torch.arange(6)), in_order(6, 3))
>>> [(batch.ids.tolist(), batch.data[0].tolist()) for batch in epoch.starting_at(1)]
[([3, 4, 5], [3.0, 4.0, 5.0])]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from noshuffle.clipping.objective import take
from noshuffle.errors import InvalidInput
from noshuffle.plan import Plan
from noshuffle.release.batches import Batch, PrivateBatches
from noshuffle.release.sampler import Sampler
from noshuffle.release.sampler import in_order as in_order
from noshuffle.release.units import Ids
from noshuffle.training.run import TrainingRun


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
            rows = self.order.draw(i) if isinstance(self.order, Sampler) else self.order[i]
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


def batches_of(private: TrainingRun, loader: Any, *, parts: int = 1) -> PrivateBatches:
    """What reads this loader for a run in training."""
    names = private._parts.names
    return names.batches(loader, parts=parts, begin_pass=private.return_to_epoch)

"""A DataLoader whose rows bring their place in the data set along, and an order that is ours.

    row i  →  (i, row)  →  workers, prefetching  →  (indices of the batch, what collate_fn makes)

The loader is built anew around (index, row), and the caller's `collate_fn` gets the rows alone: a
name comes with its row, and no sampler is listened to. `look_through` says which row of which data
set an index means. `RowOrder` gives the batches of a pass as a function of its number: the
permutation of a shuffled loader is drawn from a public seed. State: which passes a sampler of the
caller has drawn.

>>> draw_order(5, seed=1, turn=0).tolist(), draw_order(5, seed=1, turn=1).tolist()
([3, 2, 0, 1, 4], [0, 3, 4, 2, 1])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from noshuffle.errors import InvalidInput
from noshuffle.participation import AnyOrderEpochs, Epochs, Restarted
from noshuffle.plan import Plan
from noshuffle.release.units import Ids

#: Where the order of the data comes from: values of the fact "order".
DRAWN, IN_TURN, OF_CALLER = "drawn from a public seed", "that of the data set", "the caller's"
NAME_THEM = "name the unit of every row yourself (ids=)"


# -- which row it is -------------------------------------------------------------------------------


def look_through(dataset: Any) -> tuple[Any, Ids]:
    """The data set below subsets and concatenations, and the place in it of every row."""
    if isinstance(dataset, Subset):
        base, places = look_through(dataset.dataset)
        return base, places[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = list(map(look_through, dataset.datasets))
        for base, _ in parts:
            check_base(parts[0][0], base)
        return parts[0][0], np.concatenate([places for _, places in parts])
    try:
        places = np.arange(len(dataset), dtype=np.int64)
    except TypeError:
        raise InvalidInput(
            f"a {type(dataset).__name__} without a length has no places; {NAME_THEM}"
        ) from None
    if not _is_table(dataset):
        return dataset, places
    if dataset._indices is not None:
        places = np.asarray(dataset._indices.column(0).to_numpy(), dtype=np.int64)
    return getattr(dataset._data, "table", dataset._data), places


def check_base(known: Any, other: Any) -> None:
    """Raise where a run would name rows of two data sets by their places."""
    if known is not other:
        raise InvalidInput(
            "rows of two data sets would have the same places, and nobody could tell a row that "
            f"is in both; read one data set (Subset and ConcatDataset of it will do), or "
            f"{NAME_THEM}"
        )


def content_of(dataset: Any) -> str:
    """What tells a data set from one with other rows: its list of files, or its fingerprint."""
    if isinstance(dataset, Subset):
        return content_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return content_of(dataset.datasets[0])
    if _is_table(dataset):
        return str(dataset._fingerprint)
    listed = getattr(dataset, "samples", getattr(dataset, "imgs", None))
    if not isinstance(listed, list | tuple):
        return ""
    paths = [one[0] if isinstance(one, list | tuple) and one else one for one in listed]
    if not paths or not isinstance(paths[0], str | os.PathLike):  # rows themselves
        return ""
    root = str(getattr(dataset, "root", ""))  # the folder may have been moved
    return "\n".join(str(path).removeprefix(root) for path in paths)


def _is_table(dataset: Any) -> bool:
    """Whether this is a data set of Hugging Face, whose `select` keeps the table."""
    return all(hasattr(dataset, name) for name in ("_data", "_indices", "_fingerprint"))


# -- the loader built anew -------------------------------------------------------------------------


class NamedBatch(NamedTuple):
    """A batch, and the index of each of its rows in the data set of the loader."""

    rows: list[int]
    batch: Any


def named(loader: DataLoader[Any], batches: Any) -> DataLoader[NamedBatch]:
    """The loader built anew: it gives a `NamedBatch` for every list of indices in `batches`."""
    return DataLoader(
        _Rows(loader.dataset),
        batch_sampler=batches,
        collate_fn=_Collate(loader.collate_fn),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


class NamedLoader:
    """A loader that gives a `NamedBatch` for batches of indices."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._next = _NextBatches()
        self._loader = named(loader, self._next)

    def read(self, batches: Sequence[Sequence[int]]) -> Iterator[NamedBatch]:
        """These batches, in this order."""
        self._next.batches = batches
        return iter(self._loader)


class _NextBatches(BatchSampler):
    """The batches that are to be read next."""

    batches: Sequence[Sequence[int]] = ()

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        return map(list, self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Rows(Dataset[Any]):
    """Rows with their indices."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[int, Any]]:
        read = getattr(self.dataset, "__getitems__", None)
        rows = [self.dataset[i] for i in indices] if read is None else read(indices)
        if not isinstance(rows, list | tuple) or len(rows) != len(indices):
            raise InvalidInput(
                f"__getitems__ of the data set must give a list of {len(indices)} rows for as many "
                f"indices; {NAME_THEM}"
            )
        return list(zip(indices, rows))


class _Collate:
    """The caller's collate_fn for the rows; their indices go beside it."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, items: list[tuple[int, Any]]) -> NamedBatch:
        return NamedBatch([index for index, _ in items], self.collate([row for _, row in items]))


def why_no_places(loader: Any) -> str:
    """Why the rows of a loader have no places that could be told; "" where they have."""
    if not isinstance(loader, DataLoader):
        return f"batches takes a DataLoader, got a {type(loader).__name__}"
    if type(loader) is not DataLoader:
        return f"a {type(loader).__name__} may read its rows in a way of its own"
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset does not say which row it gives"
    if loader.batch_sampler is None:
        return "batch_size=None leaves it to the data set what a row is"
    return ""


# -- the order -------------------------------------------------------------------------------------


class RowOrder:
    """The batches of indices of every pass over a loader.

    Of torch's own samplers, whole and without replacement, they are a function of seed and pass. A
    sampler of the caller's is run through, each pass once.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        self._loader, self._seed = loader, seed
        cut: Any = loader.batch_sampler
        self.kind = OF_CALLER
        if type(cut) is BatchSampler:
            self.kind = _kind_of(cut.sampler, len(loader.dataset))  # type: ignore[arg-type]
        try:
            self.batches = len(cut)
        except TypeError:
            raise InvalidInput(
                "the sampler of the loader has no length, so nobody knows where a pass ends; "
                f"{NAME_THEM}"
            ) from None
        self._next, self._drawn = 0, list[Sequence[int]]()

    def of_pass(
        self, number: int, *, turn: int, begin: Callable[[], None]
    ) -> Sequence[Sequence[int]]:
        """The batches of a pass; `turn` numbers the orders that the plan allows.

        `begin` sets the random states that a sampler of the caller's may draw from.
        """
        cut: Any = self._loader.batch_sampler
        if self.kind == OF_CALLER:
            while self._next <= number:
                for own in (cut, getattr(cut, "sampler", cut)):
                    if hasattr(own, "set_epoch"):
                        own.set_epoch(self._next)
                if self._next == number:
                    begin()
                self._drawn = [list(batch) for batch in islice(cut, self.batches)]
                self._next += 1
            return self._drawn
        rows = len(self._loader.dataset)  # type: ignore[arg-type]
        if self.kind == DRAWN:
            order = draw_order(rows, seed=self._seed, turn=turn)
        else:
            order = np.arange(rows)
        size = cut.batch_size
        return _Cut(order[: self.batches * size], size)


class _Cut(Sequence[Any]):
    """An order in batches, made when they are asked for."""

    def __init__(self, order: Ids, size: int) -> None:
        self._order, self._size = order, size

    def __len__(self) -> int:
        return -(-len(self._order) // self._size)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            first, end, _ = i.indices(len(self))
            return _Cut(self._order[first * self._size : end * self._size], self._size)
        if i >= len(self):
            raise IndexError(i)
        return self._order[i * self._size : (i + 1) * self._size].tolist()


def draw_order(rows: int, *, seed: int, turn: int) -> Ids:
    """A permutation: rows in the order of one random word each (Philox under seed and turn)."""
    words = np.random.Philox(key=np.array([seed, turn], dtype=np.uint64)).random_raw(rows)
    return np.argsort(words, kind="stable").astype(np.int64)


def turn_of(plan: Plan, number: int) -> int:
    """Which order a pass has: another one only where the plan allows it."""
    rule, each = plan.guarded, getattr(plan.participation.base, "steps_per_epoch", 0)
    if isinstance(rule, AnyOrderEpochs):
        return number
    if isinstance(rule, Restarted) and isinstance(rule.base, Epochs) and rule.every % each == 0:
        return number * each // rule.every
    return 0


def _kind_of(sampler: Any, rows: int) -> str:
    if type(sampler) is RandomSampler and not sampler.replacement:
        return DRAWN if sampler.num_samples == rows == len(sampler.data_source) else OF_CALLER
    if type(sampler) is SequentialSampler and len(sampler) == rows:
        return IN_TURN
    return OF_CALLER

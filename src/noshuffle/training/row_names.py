"""RowNames: the names of the batch that came last from `private.batches`, for the next step.

Tensors carry no names. Each batch that is yielded opens a slot for its names, and the next step, or
part of a step, takes them: a second batch without a step between is refused, and so is a step
without a batch. State: the slot, and the data set whose places are the names.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from noshuffle.errors import InvalidInput
from noshuffle.release.release import Release
from noshuffle.release.units import Ids
from noshuffle.training.named_loader import check_base, content_of, look_through


class RowNames:
    """Places as names of rows, for one run.

    Guarantees: a run names rows of one data set, and a batch takes part under the names that were
    read together with its rows.
    """

    def __init__(self, release: Release) -> None:
        self._release = release
        #: Whether rows are named by place from here on.
        self.are_places = False
        #: What reads a loader for this run, by loader and number of parts.
        self.readers: dict[tuple[int, int], Any] = {}
        self._base: Any = None
        self._names: Ids = np.empty(0, dtype=np.int64)
        #: The step and part that the names are for.
        self._step, self._part, self._is_taken = -1, 0, True

    def hold_to(self, dataset: Any) -> Ids:
        """The place of every row; the run is held to this data set.

        On record: the number of rows, and under the secret of the run the list of files.
        """
        base, places = look_through(dataset)
        if self._base is not None:
            check_base(self._base, base)
        rows, whole = len(places), len(base)
        self._release.bind("rows", f"{rows}" if rows == whole else f"{rows} of {whole}")
        content = content_of(dataset).encode("utf-8", "surrogatepass")
        if content:
            key = hashlib.blake2b(self._release.secret, person=b"files").digest()
            self._release.bind("files", hashlib.blake2b(content, key=key).hexdigest()[:32])
        self._base, self.are_places = base, True
        return places

    def open(self, names: Ids, *, step: int, part: int) -> bool:
        """Keep the names of a batch that is about to be yielded.

        False where the step has been given up: its batch is not used.
        """
        now, due = self._release.step, step + (part > 0)
        if part == 0 and step < now:
            self._step, self._is_taken = -1, True
            return False
        if part and self._step != step:  # given up with the parts before
            return False
        is_other = self._is_waiting and (part > 0 or not np.array_equal(names, self._names))
        if due > now or is_other:
            raise InvalidInput(
                f"a second batch came before step {now - (part > 0 and due == now)} had taken the "
                "first; take one step with each batch of private.batches (parts= says how many "
                "batches one private.accumulate() takes), or give it up (private.skip())"
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
        return self._step >= 0 and self._release.step == self._step + (self._part > 0)

    @property
    def _is_waiting(self) -> bool:
        return self._is_due and not self._is_taken

    def take(self, ids: Any, *, rows: int) -> Ids:
        """The names of the batch that is waiting, for a step that came without `ids`.

        A step that was refused before its row was written may be taken again.
        """
        if ids is not None:
            raise InvalidInput(
                "private.batches names the rows of this run, and ids= would be a second way; leave "
                "ids= out"
            )
        if not self._is_due or (self._is_taken and self._part):
            raise InvalidInput(
                f"step {self._release.step} came without a batch of private.batches, which names "
                "the rows of this run; take the next batch first"
            )
        if rows != len(self._names):
            raise InvalidInput(
                f"{len(self._names)} rows were read and {rows} came into the step; collate_fn and "
                "loop must keep every row, or name them yourself (ids=)"
            )
        self._is_taken = True
        return self._names

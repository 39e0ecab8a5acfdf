"""A team of ranks that meet, agree, and fail together.

    meet(tag, work)   every rank works, all learn all results, and one failure is everybody's
    lead(tag, work)   rank 0 alone works (files, ledger), all learn its result or its failure

A rank that raised alone would leave the others waiting, so every meeting carries a value or an
error, and a tag: ranks that stand at different places refuse by name. Values travel pickled, raw
figures and the noise key among them: the network must be as trusted as the machines. State: none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from noshuffle import errors
from noshuffle.errors import InvalidInput, NoshuffleError, Unsupported

T = TypeVar("T")
TOGETHER = "(every rank stopped here)"


@dataclass(frozen=True)
class Failure:
    """An error of one rank, on its way to the others."""

    kind: str
    message: str

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Our own errors keep their class; others are named in the message."""
        if isinstance(error, NoshuffleError):
            return Failure(type(error).__name__, str(error))
        return Failure("NoshuffleError", f"{type(error).__name__}: {error}")


@dataclass(frozen=True)
class Team:
    """The ranks of one process group, numbered from 0."""

    group: Any
    rank: int
    size: int

    @staticmethod
    def of(group: Any = None) -> Team:
        """The team of a process group; None is the group of all ranks."""
        if not dist.is_available():
            raise Unsupported("this torch was built without torch.distributed; use privatize")
        if not dist.is_initialized():
            raise InvalidInput(
                "there is no process group; start the script with torchrun and call "
                "torch.distributed.init_process_group() first, or use privatize"
            )
        rank = dist.get_rank(group)
        if rank < 0:
            raise InvalidInput("this process is not a member of the group it was given")
        return Team(group, rank, dist.get_world_size(group))

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which holds the files."""
        return self.rank == 0

    def meet(self, tag: str, work: Callable[[], T]) -> list[T]:
        """The results of all ranks, in the order of ranks.

        Guarantees: returns on every rank or raises on every rank; the rank that failed raises its
        own error, with its traceback. Nothing was exchanged but the results.
        """
        mine: Any
        own: Exception | None = None
        try:
            mine = work()
        except Exception as error:  # whatever it is, the others have to know
            own, mine = error, Failure.of(error)
        told: list[Any] = [(tag, mine)] * self.size
        if self.size > 1:
            dist.all_gather_object(told, (tag, mine), group=self.group)
        wrong = own or _what_is_wrong(told)
        if wrong is not None:
            wrong.add_note(TOGETHER)
            raise wrong
        return [value for _, value in told]

    def lead(self, tag: str, work: Callable[[], T]) -> T:
        """The result of rank 0, on every rank; raises everywhere if it failed there."""
        return self.meet(tag, lambda: work() if self.is_lead else None)[0]  # type: ignore[return-value]

    def agree(self, tag: str, described: Callable[[], Mapping[str, Any]]) -> None:
        """Refuse, by name, anything that the ranks were given differently."""
        all_agree(self.meet(tag, described))


def _what_is_wrong(told: Sequence[tuple[str, Any]]) -> NoshuffleError | None:
    for rank, (_, value) in enumerate(told):
        if isinstance(value, Failure):  # the same error, of the same class if it is ours
            kind: type[NoshuffleError] = getattr(errors, value.kind, NoshuffleError)
            return kind(f"{value.message} (on rank {rank})")
    for rank, (tag, _) in enumerate(told):
        if tag != told[0][0]:
            return InvalidInput(
                f"rank 0 stands at {told[0][0]!r} and rank {rank} at {tag!r}; every rank must "
                "make the same calls in the same order (an empty part will do)"
            )
    return None


def is_known_to_all(error: BaseException) -> bool:
    """Whether an error came out of a meeting, so that every rank has it already."""
    return TOGETHER in getattr(error, "__notes__", ())


def all_agree(told: Sequence[Mapping[str, Any]]) -> None:
    """Compare what every rank said with what rank 0 said.

    >>> all_agree([{"plan": "a", "clip": 1}, {"plan": "b", "clip": 1}])
    Traceback (most recent call last):
        ...
    noshuffle.errors.InvalidInput: the ranks disagree on plan: rank 0 has a, rank 1 has b; give \
every rank the same
    """
    for rank, facts in enumerate(told):
        for name in sorted(told[0].keys() | facts.keys()):
            first, other = told[0].get(name), facts.get(name)
            if first != other:
                raise InvalidInput(
                    f"the ranks disagree on {name}: rank 0 has {first}, rank {rank} has {other}; "
                    "give every rank the same"
                )

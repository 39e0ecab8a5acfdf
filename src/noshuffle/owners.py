"""Examples with several owners: batches in which every owner stays within a participation.

A mail belongs to its sender and to all it went to, a photograph to everybody on it. Whoever
protects one *owner* must count every example that they have a part in (arXiv 2503.03622,
multi-attribution). Examples are taken greedily, in their order: one joins the step at hand if each
of its owners is in no other example of that step, has been in fewer steps than the participation
allows, and not too shortly before. Others wait, and may come in a later step; a step may stay short
of its batch.

    owner o:   steps of o ∈ participation,   one example of o a step,   ‖contribution of o‖ ≤ ζ

Guarantees: who owns what is fixed and public; had all examples of one owner been zero, the clipped
sums would differ as the participation says, by at most ζ a step. A plan of that participation
therefore holds for every owner as it does for one example, since the batches follow from the
ownership alone. An example without owners is protected as one of its own.

>>> from noshuffle.participation import MinSeparation
>>> mails = [("ann", "bob"), ("bob",), ("cem", "dua"), ("ann",)]
>>> rule = MinSeparation(steps=3, separation=1, max_participations=2)
>>> [rows.tolist() for rows in in_turns(mails, batch_size=2, participation=rule)]
[[0, 2], [1, 3], [2]]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.errors import InvalidInput, Unsupported, whole
from noshuffle.participation import Epochs, MinSeparation, Participation, SinglePass
from noshuffle.statement import PrivacyStatement

Rows = NDArray[np.int64]
Owners = Sequence[Collection[Hashable]]

OWNERS = (
    "One unit is an owner with all examples that it has a part in; who owns what is public, "
    "batches were made by noshuffle.owners.in_turns from that alone, under this participation, and "
    "trained on as they are."
)
_DIFFER = "Neighbouring data sets differ in one "
_KINDS: dict[str, Any] = {"integers": int | np.integer, "names": str, "bytes": bytes}


def in_turns(owners: Owners, *, batch_size: int, participation: Participation) -> list[Rows]:
    """Rows of every step, such that each owner takes part as `participation` allows.

    `owners[i]` are those of example i: all integers, or all names. Under `Epochs` the first pass is
    made and repeated.
    """
    whole(batch_size=batch_size)
    named = _named(owners)
    passes, length = 1, participation.steps
    if isinstance(participation, Epochs):
        passes, length = participation.epochs, participation.steps_per_epoch
    if isinstance(participation, SinglePass | Epochs):
        apart, most = 1, 1
    elif isinstance(participation, MinSeparation):
        apart, most = participation.separation, participation.max_participations or 2**62
    else:
        raise Unsupported(
            "owners are followed under SinglePass, Epochs and MinSeparation, not under "
            f"{participation.words()}"
        )
    count: dict[Hashable, int] = {}
    free_at: dict[Hashable, int] = {}
    waiting, steps = deque(range(len(named))), []
    for step in range(length):
        chosen: list[int] = []
        passed: list[int] = []
        while waiting and len(chosen) < batch_size:
            row = waiting.popleft()
            if all(free_at.get(o, 0) <= step and count.get(o, 0) < most for o in named[row]):
                chosen.append(row)
                for o in named[row]:
                    count[o], free_at[o] = count.get(o, 0) + 1, step + apart
            elif all(count.get(o, 0) < most for o in named[row]):
                passed.append(row)  # an owner that is used up never becomes free again
        waiting.extendleft(reversed(passed))
        waiting.extend(chosen)
        steps.append(np.array(chosen, dtype=np.int64))
    return steps * passes


def _named(owners: Owners) -> list[set[Hashable]]:
    """The owners of every example as they are counted; what could count as two is refused."""
    named: list[set[Hashable]] = []
    kinds: dict[str, Hashable] = {}
    for i, own in enumerate(owners):
        if isinstance(own, str | bytes):
            raise InvalidInput(
                f"owners of an example must be a collection of ids, got {own!r} for example {i}; "
                f"write ({own!r},)"
            )
        own = set(own)  # once: an iterator is empty behind it
        for one in own:
            kind = next((n for n, of in _KINDS.items() if isinstance(one, of)), "")
            kinds.setdefault(kind, one)
            if len(kinds) > 1 or not kind or isinstance(one, bool):
                got = " and ".join(repr(each) for each in {**kinds, kind: one}.values())
                raise InvalidInput(
                    f"owners must all be integers or all be names, got {got} (example {i}): the "
                    "same owner could count as two; use tolist() of a tensor or an array"
                )
        named.append(own or {("example", i)})
    return named


def for_owners(statement: PrivacyStatement) -> PrivacyStatement:
    """The statement of a run on the batches of `in_turns`, said of an owner."""
    if statement.unit != "example":
        raise InvalidInput(
            "a run on batches of in_turns protects examples, each clipped by itself; got a "
            f"statement per {statement.unit}"
        )
    if statement.mu is None:
        raise InvalidInput(
            "batches of in_turns are not drawn in secret, and this statement counts on a secret "
            "draw; fit a plan of the participation that in_turns was given"
        )
    said = tuple(s.replace(_DIFFER + "example", _DIFFER + "owner") for s in statement.assumptions)
    return replace(statement, unit="owner", assumptions=said).with_assumptions(OWNERS)

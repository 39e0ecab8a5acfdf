"""Looks at a model for examples that mix: when they come, and who is told what they found.

    trial    at the first batch of a kind (`isolation_check.tried`)
    full     the same questions again, and the whole batch beside another one (`batch_check`): at a
             call that is drawn from 2n + 1, …, 8n after the one at call n (the first one from
             17, …, 64), and losses alone at sizes of batches that are new
    quick    on a CPU, two examples alone against their losses in the batch of the step: at every
             call with probability 1/16; the losses of the whole batch beside another one with
             probability 1/64 where a model draws random numbers

All are drawn from the operating system, and so are the random numbers of each but the trial, so
that nothing in a model can know when it is looked at; one in sixteen finds mixing that lasts for a
hundred steps with probability 0.998. Whoever keeps the evidence of a run is told by `Listeners`.
State: who listens.

>>> all(16 < next_full(8) <= 64 for _ in range(50))
True
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

from torch import nn

#: A full look takes as long as some steps: after the trial, none is before twice this call.
FIRST = 8
#: The part of all calls at which a CPU takes a quick look.
SHARE = 1.0 / 16.0


def next_full(calls: int) -> int:
    """The call of the next full look after one at this call."""
    least = 2 * max(calls, FIRST)
    return least + 1 + secrets.randbelow(3 * least)


def next_quick(calls: int, *, rarely: int = 1) -> int:
    """The call of the next quick look: each with probability `SHARE` / `rarely`, independently."""
    chance = (1.0 + secrets.randbelow(2**53)) / 2.0**53
    return calls + 1 + int(math.log(chance) / math.log1p(-SHARE / rarely))


@dataclass(frozen=True)
class Look:
    """What was found for one kind of batch: why examples mix, or nothing where they are apart.

    `size`: of the batch that showed it; 0 where two examples did, as they stand in any batch.
    """

    kind: str
    mixes: str = ""
    size: int = 0


def kind_of(model: nn.Module, *parts: Any) -> str:
    """A name for batches and losses of one kind, the same in every process."""
    layers = [(type(m).__qualname__, m.training) for m in model.modules()]
    text = repr((layers, [_word(part) for part in parts]))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _word(part: Any) -> Any:
    if isinstance(part, tuple):
        return [_word(own) for own in part]
    name = getattr(part, "co_qualname", None) or getattr(part, "__qualname__", None)
    return name or str(part)


#: A bound method that is told of every look.
Heard = Callable[[nn.Module, Look], None]


class Listeners:
    """Whom an engine tells what it found; they are not kept alive."""

    def __init__(self) -> None:
        self._heard: list[WeakMethod[Heard]] = []

    def add(self, heard: Heard) -> None:
        """Have a bound method called with every look."""
        self._heard.append(WeakMethod(heard))

    def tell(self, model: nn.Module, look: Look) -> None:
        for reference in self._heard:
            if (heard := reference()) is not None:
                heard(model, look)

"""Looks at a model for examples that mix: when they come, and who is told what they found.

    trial    at the first batch of a kind (`isolation_check.tried`)
    full     the same questions again, and the whole batch beside another one (`apart_in`): at a
             call that is drawn from n + 1, …, 4n after the one at call n, and at sizes of batches
             that are new
    quick    on a CPU, two examples alone against their losses in the batch of the step (`alike`):
             at every call with probability 1/16

All are drawn from the operating system, so that nothing in a model can know when it is looked at;
one in sixteen finds mixing that lasts for a hundred steps with probability 0.998. Whoever keeps
the evidence of a run is told by `Listeners`. State: who listens.

>>> all(8 < next_full(8) <= 32 for _ in range(50))
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

#: The first full look is at most at this call.
FIRST = 8
#: The part of all calls at which a CPU takes a quick look.
SHARE = 1.0 / 16.0


def next_full(calls: int) -> int:
    """The call of the next full look after one at this call."""
    return calls + 1 + secrets.randbelow(max(3 * calls, FIRST - 1))


def next_quick(calls: int) -> int:
    """The call of the next quick look: each one with probability `SHARE`, whatever came before."""
    chance = (1.0 + secrets.randbelow(2**53)) / 2.0**53
    return calls + 1 + int(math.log(chance) / math.log1p(-SHARE))


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


class Listeners:
    """Whom an engine tells what it found; they are not kept alive."""

    def __init__(self) -> None:
        self._heard: list[WeakMethod[Callable[[nn.Module, Look], None]]] = []

    def add(self, heard: Callable[[nn.Module, Look], None]) -> None:
        """Have a bound method called with every look."""
        self._heard.append(WeakMethod(heard))

    def tell(self, model: nn.Module, look: Look) -> None:
        for reference in self._heard:
            if (heard := reference()) is not None:
                heard(model, look)

"""One owner: what draws noise is neither copied nor pickled, and stays in the process that made it.

    noise of step t = function of (key, t)

Two objects that stand at the same step under the same key would put the same noise on different
data, and the difference of what they release would be free of noise. A log in memory is copied
along and knows nothing of its twin. So the three ways by which an object becomes two are closed:
`copy`, `pickle` and `os.fork`. A forked process may hold such an object (workers of a DataLoader
do), but not use it. Threads may share one: methods that are `in_turn` wait for each other.

>>> import copy
>>> class Noise(OneOwner):
...     pass
>>> copy.deepcopy(Noise())
Traceback (most recent call last):
    ...
noshuffle.errors.Unsupported: a Noise is neither copied nor pickled: two of them would put the \
same noise on different data; keep what state_dict() gives, or build a new one with a new key
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn, Self, SupportsIndex, TypeVar

from noshuffle.errors import ReuseRefused, Unsupported

_Method = TypeVar("_Method", bound=Callable[..., Any])


def in_turn(method: _Method) -> _Method:
    """A method that belongs to one thread at a time; others wait for its end.

    Its object has a lock `_turn`, and where a fork may inherit that closed, `check_owner`.
    """

    @wraps(method)
    def alone(self: Any, *args: Any, **options: Any) -> Any:
        if hasattr(self, "check_owner"):
            self.check_owner()
        with self._turn:
            return method(self, *args, **options)

    return alone  # type: ignore[return-value]


class OneOwner:
    """Base of what holds a noise key and a place in its stream.

    Guarantees: `copy.copy`, `copy.deepcopy` and `pickle` raise, also from within an object that
    holds this one; `check_owner` raises in every process but the one that built the object.
    """

    _owner: int
    _turn: Any

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        made = super().__new__(cls)
        made._owner, made._turn = os.getpid(), threading.RLock()
        return made

    def check_owner(self) -> None:
        """Raise in a process that inherited the object by a fork."""
        if os.getpid() != self._owner:
            raise ReuseRefused(
                f"this process is a fork of the one that made the {type(self).__name__}, and both "
                "would use the same noise; build it in the process that trains"
            )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise Unsupported(
            f"a {type(self).__name__} is neither copied nor pickled: two of them would put the "
            "same noise on different data; keep what state_dict() gives, or build a new one with "
            "a new key"
        )

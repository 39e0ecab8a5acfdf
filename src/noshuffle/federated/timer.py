"""A client's own timer: where no server can recognise a device, the device limits itself.

    take part at time t   only if   t − t_last ≥ seconds   and   count < most

The separation in rounds is counted afterwards from how many rounds the server completed in any
period of that length (`separation_from_times`). This is how published keyboard models were limited.

State: one small file in the app's own storage, replaced atomically before any work is done, so that
a crash costs a participation and never gives one away. Reinstalling the app resets it.

>>> separation_from_times([0, 10, 20, 30, 70, 80], seconds=35)
1
>>> participation_from_times([0, 10, 20, 30, 70, 80], seconds=25, most=2)
MinSeparation(steps=6, separation=1, max_participations=2)
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from noshuffle.errors import InvalidInput, instance_of, non_negative, number_tuple, positive, whole
from noshuffle.participation import MinSeparation
from noshuffle.release.files import read_json, write_json

FORMAT = "noshuffle-timer/1"


class Timer:
    """Leave to take part, at most once per period and at most so often in all."""

    def __init__(self, path: str | Path, *, seconds: float, most: int) -> None:
        positive(seconds=seconds)
        whole(most=most)
        instance_of((str, os.PathLike), path=path)
        self._path = Path(path)
        self._seconds = float(seconds)
        self._most = most

    def claim(self, *, now: float | None = None) -> bool:
        """Take part now? If true, it is already written down.

        Guarantees: two true answers lie at least `seconds` apart by this device's clock, and there
        are at most `most`, over any number of restarts and of processes at once. A clock that was
        set back waits until it has caught up; a damaged file is refused rather than read as a
        fresh start.
        """
        try:
            moment = time.time() if now is None else float(now)
        except (TypeError, ValueError, OverflowError):
            moment = math.nan
        if not math.isfinite(moment):
            raise InvalidInput(f"now must be a finite time in seconds, got {now!r}")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._alone():
            last, count = self._read()
            if count >= self._most or (count and moment - last < self._seconds):
                return False
            write_json(self._path, {"format": FORMAT, "last": moment, "count": count + 1})
        return True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two apps on one device read and write one after the other; a lock dies with its owner."""
        name = self._path.with_name(f".{self._path.name}.lock")
        with closing(sqlite3.connect(name, isolation_level=None, timeout=60)) as lock:
            lock.execute("BEGIN EXCLUSIVE")  # let go of when the connection closes
            yield

    def _read(self) -> tuple[float, int]:
        try:
            record = read_json(self._path)
            if record["format"] != FORMAT or int(record["count"]) < 1:
                raise KeyError("format")
            return float(record["last"]), int(record["count"])
        except FileNotFoundError:
            return 0.0, 0
        except (KeyError, TypeError, ValueError, json.JSONDecodeError):
            raise InvalidInput(
                f"{self._path} is not a {FORMAT} file; this device must stay out of the run"
            ) from None


def separation_from_times(times: Sequence[float], *, seconds: float, delay: float = 0.0) -> int:
    """The separation in rounds that a timer guaranteed, from when each round was sent out.

    `times[t]` is when round t was sent, `delay` how long after that a device could still take part
    (the timeout of a round). A device that claimed at once in round i and late in round j was sent
    work only `seconds` − `delay` apart, so the separation is the smallest j − i with
    times[j] − times[i] ≥ seconds − delay, and the whole length of the log if there is no such pair
    (nobody can have come twice). A delay as long as the period guarantees one round.

    Guarantees: never above what any device with that timer did, if device and server clocks run
    at the same speed and no reply counted that came later than `delay`.
    """
    positive(seconds=seconds)
    non_negative(delay=delay)
    when = np.asarray(number_tuple(times=times))
    whole(rounds=len(when))
    if not np.isfinite(when).all() or (np.diff(when) < 0).any():
        raise InvalidInput("times must be finite and in order of the rounds")
    # The first round at least one period after round i; rounding must not lose a pair.
    apart = max(0.0, seconds - delay)
    after = np.searchsorted(when, when + apart * (1 - 1e-12), side="left")
    after = np.maximum(after, np.arange(len(when)) + 1)  # a round holds a device once
    gaps = (after - np.arange(len(when)))[after < len(when)]
    return int(gaps.min()) if len(gaps) else len(when)


def participation_from_times(
    times: Sequence[float], *, seconds: float, most: int, delay: float = 0.0
) -> MinSeparation:
    """What devices with `Timer(path, seconds=…, most=…)` did in these rounds at the most.

    For `account_afterwards`. A run folder holds no times: whoever runs the server notes when each
    round was begun.
    """
    apart = separation_from_times(times, seconds=seconds, delay=delay)
    return MinSeparation(steps=len(times), separation=apart, max_participations=most)

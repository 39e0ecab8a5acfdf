"""A client's own timer: where no server can recognise a device, the device limits itself.

    take part at time t   only if   t − t_last ≥ seconds   and   count < most

The server then knows nothing about who took part; the separation in rounds is counted afterwards
from how many rounds the server completed in any period of that length (`separation_from_times`),
and `most` is the number of participations. This is how the published keyboard models were limited.

State: one small file in the app's own storage, replaced atomically before any work is done, so that
a crash costs a participation and never gives one away. Reinstalling the app resets it.

>>> separation_from_times([0, 10, 20, 30, 70, 80], seconds=35)
1
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from noshuffle.errors import InvalidInput, positive, whole
from noshuffle.training.files import read_json, write_json

FORMAT = "noshuffle-timer/1"


class Timer:
    """Leave to take part, at most once per period and at most so often in all."""

    def __init__(self, path: str | Path, *, seconds: float, most: int) -> None:
        positive(seconds=seconds)
        whole(most=most)
        self._path = Path(path)
        self._seconds = float(seconds)
        self._most = most

    def claim(self, *, now: float | None = None) -> bool:
        """Take part now? If true, it is already written down.

        Guarantees: two true answers lie at least `seconds` apart by this device's clock, and there
        are at most `most`, over any number of restarts. A clock that was set back waits until it
        has caught up; a damaged file is refused rather than read as a fresh start.
        """
        moment = time.time() if now is None else float(now)
        if not math.isfinite(moment):
            raise InvalidInput(f"now must be a finite time in seconds, got {now!r}")
        last, count = self._read()
        if count >= self._most or (count and moment - last < self._seconds):
            return False
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {"format": FORMAT, "last": moment, "count": count + 1})
        return True

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


def separation_from_times(times: Sequence[float], *, seconds: float) -> int:
    """The separation in rounds that a timer guaranteed, from when each round was sent out.

    `times[t]` is when round t was sent. Two rounds of one device are at least `seconds` apart, so
    the separation is the smallest j − i with times[j] − times[i] ≥ seconds, and the whole length
    of the log if there is no such pair (nobody can have come twice).

    Guarantees: never above what any device with that timer did, if device and server clocks run
    at the same speed and a device claims when it is sent the work.
    """
    positive(seconds=seconds)
    when = np.asarray(times, dtype=np.float64)
    whole(rounds=len(when))
    if not np.isfinite(when).all() or (np.diff(when) < 0).any():
        raise InvalidInput("times must be finite and in order of the rounds")
    # The first round at least one period after round i; rounding must not lose a pair.
    after = np.searchsorted(when, when + seconds * (1 - 1e-12), side="left")
    gaps = (after - np.arange(len(when)))[after < len(when)]
    return int(gaps.min()) if len(gaps) else len(when)

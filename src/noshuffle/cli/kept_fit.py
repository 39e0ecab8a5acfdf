"""Fitted strategies kept between processes, in the user's cache folder.

    name = BLAKE2b(mechanism, participation, workload, options, text of strategies/, NumPy, SciPy)

A search takes seconds and gives the same strategy for the same question. No guarantee rests on the
file: a plan computes the sensitivity of whatever strategy it holds. A file that is not read (cut
short, of another version) is written again.

>>> from noshuffle.participation import SinglePass
>>> kept_fit("identity", SinglePass(8))
Identity(gains=(), normalized=0)
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from noshuffle import strategies
from noshuffle.participation import Participation
from noshuffle.release.files import write_json
from noshuffle.strategies import Strategy, from_dict
from noshuffle.strategies.fit import fit
from noshuffle.user_cache import user_cache


def kept_fit(mechanism: str, participation: Participation, **options: Any) -> Strategy:
    """`fit(…).strategy`, or what it gave before."""
    asked = json.dumps([mechanism, participation.to_dict(), repr(sorted(options.items()))])
    parts = [asked.encode(), np.__version__.encode(), scipy.__version__.encode()]
    parts += [file.read_bytes() for file in sorted(Path(strategies.__file__).parent.glob("*.py"))]
    name = hashlib.blake2b(b"\0".join(parts), digest_size=20).hexdigest()
    with suppress(Exception):  # whatever is wrong with a file: fit again
        return from_dict(json.loads((user_cache() / f"{name}.json").read_text(encoding="utf-8")))
    found = fit(mechanism, participation, **options).strategy
    with suppress(OSError, RuntimeError):  # read-only, or a user without a home
        user_cache().mkdir(parents=True, exist_ok=True)
        write_json(user_cache() / f"{name}.json", found.to_dict())
    return found

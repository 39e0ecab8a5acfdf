"""A quick start of a command that trains: threads that sleep, and imports without a collector.

torch's wheels for Linux run on libgomp, whose threads spin for 300,000 rounds (0.3 ms) before they
sleep, unless told otherwise. Between the short loops of a small model that is all the time: on two
cores half of the processor time of `noshuffle train` went there, and on a busy machine the spinning
thread takes the core from the one that works. Which thread computes what stays the same, and so do
the bits of every sum.

The collector of cycles walks through all modules again and again while they are imported, where it
finds nothing; what is there afterwards stays until the end.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

#: Rounds that a thread without work spins for before it sleeps: about 20 µs, as long as it takes
#: to wake one up.
SPINS = "20000"


def let_threads_sleep() -> None:
    """Tell libgomp so, before torch loads it, unless the user has said how threads wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


@contextmanager
def imports() -> Iterator[None]:
    """Import what a long job needs: no collections meanwhile, and none of it is looked at later."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()
            gc.enable()

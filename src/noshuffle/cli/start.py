"""Quick start and end of a command: threads that sleep, imports without a collector, no tidying up.

torch's wheels for Linux run on libgomp, whose threads spin for 300,000 rounds (0.3 ms) before they
sleep, unless told otherwise. Between the short loops of a small model that is all the time: on two
cores half of the processor time of `noshuffle train` went there, and on a busy machine the spinning
thread takes the core from the one that works. Which thread computes what stays the same, and so do
the bits of every sum.

The collector of cycles walks through all modules again and again while they are imported, where it
finds nothing; what is there afterwards stays until the end. And at the end Python and torch take
2,000 modules apart, 0.4 s of work for a process that is over: it ends without that.
"""

from __future__ import annotations

import atexit
import codecs
import gc
import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

#: Rounds that a thread without work spins for before it sleeps, some µs: the next loop comes later
#: as a rule. (20,000 rounds took 40 µs a loop longer, and found work no more often.)
SPINS = "2000"


def let_threads_sleep() -> None:
    """Tell libgomp so, before torch loads it, unless the user has said how threads wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


def steady_streams() -> None:
    """Streams that are there (`>&-` closes one) and take every character (ε on an old terminal).

    What standard output cannot write is escaped as on the error stream; bytes of file names that
    are no UTF-8 come out as they are.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


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


def leave(status: int) -> NoReturn:
    """End the process; at once where torch is loaded and all went well.

    What was registered for the end has run then, and output has been written. As usual where a
    thread is at work, somebody measures (a profiler, a debugger), or output cannot be written.
    """
    is_alone = all(t.daemon or t is threading.main_thread() for t in threading.enumerate())
    is_watched = sys.gettrace() is not None or sys.getprofile() is not None
    if status == 0 and "torch" in sys.modules and is_alone and not is_watched:
        atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(0)
    raise SystemExit(status)

"""Jobs in forks that are killed by a real SIGKILL, between any two calls of Python or C functions.

    said = child(job, None)         how many calls it makes, or its error
    said = child(job, said // 2)    "killed", or what it said if it ended before

Where nobody watches, a fork draws keys and looks by its name (`Entropy.go_on` of conftest):
the same calls in every run, so that a kill falls where it fell before. Everywhere else, and without
a name, they are the operating system's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from tests.conftest import ENTROPY


def child(
    job: Callable[[], None],
    kill_after: int | None,
    *,
    counts: Callable[[Any, str], bool] = lambda frame, event: True,
    name: str = "",
) -> int | str:
    """Run a job in a fork; the number of its calls, "killed", or its error.

    `counts` says which events of the profiler are calls to count; all of them by default. `name`
    is that of what it draws, and differs between forks whose keys are to differ.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        if name:
            ENTROPY.go_on(name)
        calls = 0

        def count(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += counts(frame, event)
            if calls == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.setprofile(count)
            job()
            sys.setprofile(None)
            os.write(write, json.dumps(calls).encode())
        except BaseException as error:
            sys.setprofile(None)
            os.write(write, json.dumps(f"{type(error).__name__}: {error}").encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return "killed"
    found: int | str = json.loads(said)
    return found

"""C text into a library for this very processor, and a team of threads to run it.

Torch runs one pass over memory per operation; some inner loops have fifty of them. Those are also
written in C, built when they are first needed into a private temporary folder, and never kept
(under a second, once a process). Whoever asks holds the result against its slow twin before using
it, and goes on without it where nothing could be built. NOSHUFFLE_NATIVE=off in the environment
switches all of it off.

`together` runs a C function on several threads. After a parallel operation torch's own OpenMP
threads keep their cores busy waiting for the next one, so a second set of threads would have to
fight them for the cores; asking the OpenMP library that torch has loaded for its team does not.
Where it is not found, ordinary threads do.

>>> build("int seven(void) { return 7; }", switch="off") is None
True
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

#: Every product and sum is rounded by itself: contraction would change bits.
EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")

_PROCESS = os.getpid()


def build(
    text: str, *, flags: tuple[str, ...] = EXACT, switch: str | None = None
) -> ctypes.CDLL | None:
    """The library of a C text, or None where it cannot be built or is switched off."""
    switch = os.environ.get("NOSHUFFLE_NATIVE", "") if switch is None else switch
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or switch.lower() in ("off", "0"):
        return None
    with tempfile.TemporaryDirectory(prefix="noshuffle-", ignore_cleanup_errors=True) as folder:
        source, target = Path(folder, "loops.c"), Path(folder, "loops.so")
        source.write_text(text, encoding="utf-8")
        files = ["-o", str(target), str(source), "-lm"]
        for native in ("-march=native", "-mcpu=native"):  # some compilers for ARM know the second
            command = [compiler, "-O3", "-shared", "-fPIC", native, *flags, *files]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=60)
                return ctypes.CDLL(str(target))
            except (OSError, subprocess.SubprocessError):
                continue
        return None


@lru_cache(maxsize=1)
def _openmp() -> Any:
    """`GOMP_parallel` of the OpenMP library that torch runs on, or None."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    found = set(re.findall(r"/\S*/lib(?:gomp|omp|iomp5)[^/\s]*\.so[^/\s]*", maps))
    found = {path for path in found if "/torch/" in path or "/torch.libs/" in path} or found
    if len(found) != 1:
        return None
    try:
        start = ctypes.CDLL(found.pop()).GOMP_parallel
    except (OSError, AttributeError):
        return None
    start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    start.restype = None
    return start


def together(worker: Any, job: ctypes.Structure, *, threads: int) -> None:
    """Call the C function worker(&job) on `threads` threads at once, and wait for all of them.

    The function itself hands out the work (an atomic counter in the job), so that it is done
    whether all threads come or only some. The interpreter lock is not held meanwhile.
    """
    place = ctypes.addressof(job)
    if threads <= 1:
        worker(place)
        return
    # The threads of a team do not survive a fork, and its library would wait for them for ever.
    start = _openmp() if os.getpid() == _PROCESS else None
    if start is not None:
        start(ctypes.cast(worker, ctypes.c_void_p), place, threads, 0)
        return
    others: list[threading.Thread] = []
    for _ in range(threads - 1):
        other = threading.Thread(target=worker, args=(place,))
        try:
            other.start()
        except RuntimeError:  # no more threads to be had; those that came do the work
            break
        others.append(other)
    worker(place)
    # The job lies in the caller's memory: nobody leaves while others work on it.
    stopped: BaseException | None = None
    while others:
        try:
            others[-1].join()
            others.pop()
        except KeyboardInterrupt as error:
            stopped = error
    if stopped is not None:
        raise stopped

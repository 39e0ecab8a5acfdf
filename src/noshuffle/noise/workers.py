"""A few threads that work through chunks side by side.

The torch operations on one chunk are too small for torch to split, and both torch and the cipher
release the interpreter lock, so plain threads with their own chunks and scratch scale well. What a
chunk computes does not depend on who computes it.

>>> seen = []
>>> share(lambda worker, item: seen.append(item), items=3, workers=1)
>>> seen
[0, 1, 2]
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_lock = threading.Lock()
_pool: tuple[int, int, ThreadPoolExecutor] | None = None


def _executor(threads: int) -> ThreadPoolExecutor:
    """One pool for the process; a forked child, or a wish for more threads, makes a new one."""
    global _pool
    with _lock:
        if _pool is None or _pool[0] != os.getpid() or _pool[1] < threads:
            _pool = (os.getpid(), threads, ThreadPoolExecutor(threads, "noshuffle-noise"))
        return _pool[2]


def share(do: Callable[[int, int], None], *, items: int, workers: int) -> None:
    """Call do(worker, item) once for every item; worker w takes items w, w + workers, …

    The caller is worker 0. All workers have ended when this returns or raises.
    """

    def run(worker: int) -> None:
        for item in range(worker, items, workers):
            do(worker, item)

    workers = max(1, min(workers, items))
    if workers == 1:
        run(0)
        return
    # Gradient mode belongs to a thread; the caller switched it off for itself only.
    other_fn = torch.no_grad()(run)
    pool = _executor(workers - 1)
    others = [pool.submit(other_fn, worker) for worker in range(1, workers)]
    try:
        run(0)
    finally:
        errors = [error for error in (other.exception() for other in others) if error]
    if errors:
        raise errors[0]

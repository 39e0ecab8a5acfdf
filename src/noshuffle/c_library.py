"""The C loop of the noise: built when the package is installed, loaded by name, run on threads.

Torch runs one pass over memory per operation; a step of noise has some hundred of them. The same
step is also written in C (`native/noise.c`). `setup.py` builds it: for this very processor where
the package is installed in place (`pip install -e`), for any recent one of its kind in a wheel.

    name = noise-BLAKE2b(text of native/).so         in native/built/

so a library of another text is not found. Where none is found, or NOSHUFFLE_NATIVE=off stands in
the environment, the same noise is computed by torch, only slower. After a change of the C text
`python -m noshuffle.c_library` builds it again. Whoever loads it compares it with its slow twin
before the first use in a process (`noise.c_step`).

`together` runs a C function on several threads: the team of the OpenMP library that torch has
loaded, whose threads keep their cores busy waiting and would have to be fought by others. Where it
is not found, ordinary threads do.

>>> library_name().startswith("noise-"), load(BUILT / "none") is None
(True, True)
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "native"
BUILT = SOURCES / "built"
#: Every product and sum is rounded by itself: contraction would change bits.
_FLAGS = ("-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
#: For this processor, or for all of some years; some compilers for ARM know the second ones only.
_NATIVE = ("-march=native", "-mcpu=native")
_PORTABLE = ("-march=x86-64-v3 -maes", "-march=armv8-a+crypto")
_PROCESS = os.getpid()


def library_name(sources: Path = SOURCES) -> str:
    """The file name of the library of these C files."""
    text = b"\0".join(file.read_bytes() for file in sorted(sources.glob("*.[ch]")))
    return f"noise-{hashlib.blake2b(text, digest_size=12).hexdigest()}.so"


def build(
    folder: Path = BUILT,
    *,
    sources: Path = SOURCES,
    is_portable: bool = False,
    flags: tuple[str, ...] = (),
) -> Path | None:
    """Build the library into a folder, in place of all others there; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / library_name(sources)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        made = Path(aside) / "noise.so"
        files = ["-o", str(made), str(sources / "noise.c"), "-lm"]
        for processor in (*(_PORTABLE if is_portable else _NATIVE), ""):
            command = [compiler, *_FLAGS, *processor.split(), *flags, *files]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=120)
            except (OSError, subprocess.SubprocessError):
                continue
            made.replace(target)  # a process that loads it sees the old one or the new one
            break
        else:
            return None
    for other in folder.glob("*.so"):
        if other != target:
            other.unlink()
    return target


def load(folder: Path = BUILT) -> ctypes.CDLL | None:
    """The library, or None where it was not built or is switched off."""
    if os.environ.get("NOSHUFFLE_NATIVE", "").lower() in ("off", "0"):
        return None
    try:
        return ctypes.CDLL(str(folder / library_name()))
    except OSError:
        return None


@lru_cache(maxsize=1)
def _openmp() -> Any:
    """`GOMP_parallel` of the OpenMP library that torch runs on, or None."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
    paths = set(re.findall(r"/\S*/lib(?:gomp|omp|iomp5)[^/\s]*\.so[^/\s]*", maps))
    paths = {path for path in paths if "/torch/" in path or "/torch.libs/" in path} or paths
    if len(paths) != 1:
        return None
    try:
        start = ctypes.CDLL(paths.pop()).GOMP_parallel
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
    address = ctypes.addressof(job)
    if threads <= 1:
        worker(address)
        return
    # The threads of a team do not survive a fork, and its library would wait for them for ever.
    start = _openmp() if os.getpid() == _PROCESS else None
    if start is not None:
        start(ctypes.cast(worker, ctypes.c_void_p), address, threads, 0)
        return
    others: list[threading.Thread] = []
    for _ in range(threads - 1):
        other = threading.Thread(target=worker, args=(address,))
        try:
            other.start()
        except RuntimeError:  # no more threads to be had; those that came do the work
            break
        others.append(other)
    worker(address)
    # The job lies in the caller's memory: nobody leaves while others work on it.
    interrupt: KeyboardInterrupt | None = None
    while others:
        try:
            others[-1].join()
            others.pop()
        except KeyboardInterrupt as error:
            interrupt = error
    if interrupt is not None:
        raise interrupt


if __name__ == "__main__":
    print(build() or "no C compiler (cc, gcc or clang): torch computes the same noise, slower")

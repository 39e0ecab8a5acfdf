"""C files into libraries for this very processor, kept for every process, and threads to run them.

Torch runs one pass over memory per operation; some inner loops have fifty of them. Those are also
written in C (`native/*.c`), built when they are first needed, and kept under a name that says all
that the result depends on:

    name = BLAKE2b(C text, compiler and its version, flags, model and features of the processor)

The folder is $NOSHUFFLE_CACHE, or noshuffle/ in the user's cache folder. A library runs with all
rights of the process that loads it, so the folder must belong to this user, and nobody else may
write there or exchange one of the folders above it; else libraries are built in a private temporary
folder and forgotten with the process. A file appears whole or not at all, so processes may build
the same one at the same time.

`python -m noshuffle.c_library` builds all of them, so that the first run need not.

Whoever asks for a library compares it with its slow twin before using it, in every process: what
lies on a disk may rot, and the torch that it was compared with may have been replaced. Where there
is no compiler, those that came with the package are used: a wheel that was built where there was
one holds them (`ship`), for any processor of its kind, so without the newest instructions. Else
there are only the slow forms; NOSHUFFLE_NATIVE=off in the environment asks for those.

`together` runs a C function on several threads: the team of the OpenMP library that torch has
loaded, whose threads keep their cores busy waiting and would have to be fought by others. Where it
is not found, ordinary threads do.

>>> build("int seven(void) { return 7; }", switch="off") is None
True
>>> "void aes_tile(" in text_of("aes.h")
True
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

#: Every product and sum is rounded by itself: contraction would change bits.
EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
#: The flag that asks for all that this processor has; some compilers for ARM know the second.
_PROCESSOR_FLAGS = ("-march=native", "-mcpu=native")
#: Functions of a library may be inlined into each other, although others can call them too.
_COMMON = ("-O3", "-shared", "-fPIC", "-fno-semantic-interposition")

_SOURCES = Path(__file__).parent / "native"
#: Libraries that came with the package, and the flags that each is asked for with.
_SHIPPED = _SOURCES / "built"
SHIPPED_FLAGS = {"noise.c": EXACT}
_PROCESS = os.getpid()


def text_of(name: str) -> str:
    """The text of a C file of this package, with its headers of this package written in."""
    text = (_SOURCES / name).read_text(encoding="utf-8")
    return re.sub(r'^#include "(.+)"$', lambda found: text_of(found[1]), text, flags=re.MULTILINE)


def build(
    text: str, *, flags: tuple[str, ...] = EXACT, switch: str | None = None
) -> ctypes.CDLL | None:
    """The library of a C text, or None where it cannot be built or is switched off."""
    switch = os.environ.get("NOSHUFFLE_NATIVE", "") if switch is None else switch
    if switch.lower() in ("off", "0"):
        return None
    compiler = _compiler()
    if compiler is None:
        return _shipped(text, flags)
    folder = cache_folder()
    if folder is not None:
        try:
            return _kept(text, compiler, flags, folder)
        except OSError:  # a full disk, a library of another system
            pass
    with tempfile.TemporaryDirectory(prefix="noshuffle-", ignore_cleanup_errors=True) as aside:
        made = _compiled(text, compiler, flags, Path(aside))
        return None if made is None else ctypes.CDLL(str(made))


def prepare() -> int:
    """Build all libraries of this package before they are asked for; returns how many there are."""
    return sum(build(text_of(name), flags=own) is not None for name, own in SHIPPED_FLAGS.items())


def _compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def shipped_name(text: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.blake2b("\0".join([text, *flags]).encode(), digest_size=20)
    return f"{digest.hexdigest()}.so"


def _shipped(text: str, flags: tuple[str, ...]) -> ctypes.CDLL | None:
    """The library of that text that came with the package, if it did and can be loaded here."""
    try:
        return ctypes.CDLL(str(_SHIPPED / shipped_name(text, flags)))
    except OSError:
        return None


def ship(folder: Path, texts: dict[str, tuple[str, ...]] | None = None) -> int:
    """Build libraries for any processor of this kind into a folder; returns how many there are.

    `texts` maps C texts to their flags: by default those of this package.
    """
    compiler, made = _compiler(), 0
    if compiler is None:
        return 0
    if texts is None:
        texts = {text_of(name): flags for name, flags in SHIPPED_FLAGS.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for text, flags in texts.items():
        with tempfile.TemporaryDirectory(prefix="noshuffle-") as aside:
            library = _compiled(text, compiler, flags, Path(aside), processors=("",))
            if library is not None:
                shutil.copyfile(library, folder / shipped_name(text, flags))
                made += 1
    return made


def _kept(text: str, compiler: str, flags: tuple[str, ...], folder: Path) -> ctypes.CDLL | None:
    """The library as it lies in the cache folder, built and put there if it does not."""
    parts = (text, compiler, _version(compiler), *_COMMON, *flags, *_PROCESSOR_FLAGS)
    name = hashlib.blake2b("\0".join([*parts, _processor()]).encode(), digest_size=20).hexdigest()
    kept = folder / f"{name}.so"
    if kept.exists() and _is_safe(kept):
        try:
            return ctypes.CDLL(str(kept))
        except OSError:
            kept.unlink(missing_ok=True)  # damaged: build it again
    with tempfile.TemporaryDirectory(
        prefix="build-", dir=folder, ignore_cleanup_errors=True
    ) as aside:
        made = _compiled(text, compiler, flags, Path(aside))
        if made is None:
            return None
        _flush(made)
        made.replace(kept)
        _flush(folder)
    return ctypes.CDLL(str(kept))


def _compiled(
    text: str,
    compiler: str,
    flags: tuple[str, ...],
    folder: Path,
    *,
    processors: tuple[str, ...] = _PROCESSOR_FLAGS,
) -> Path | None:
    source, target = folder / "loops.c", folder / "loops.so"
    source.write_text(text, encoding="utf-8")
    files = ["-o", str(target), str(source), "-lm"]
    for processor in processors:
        command = [compiler, *_COMMON, *processor.split(), *flags, *files]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            return target
        except (OSError, subprocess.SubprocessError):
            continue
    return None


def user_cache() -> Path:
    """noshuffle/ in the user's cache folder: of libraries, and of data and features, too."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "noshuffle"


def cache_folder() -> Path | None:
    """The folder of kept libraries, made if need be; None where none is safe from others."""
    named = os.environ.get("NOSHUFFLE_CACHE", "")
    try:
        folder = Path(named).expanduser() if named else user_cache()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        is_safe = _is_safe(folder) and all(
            _is_safe(above, is_above=True) for above in folder.parents
        )
    except (OSError, RuntimeError):  # read-only, or a user without a home
        return None
    return folder if is_safe else None


def _is_safe(path: Path, *, is_above: bool = False) -> bool:
    """Whether nobody but this user (or the administrator, above) can change or exchange it."""
    if not hasattr(os, "geteuid"):
        return False
    found, owners = path.lstat(), {os.geteuid()} | ({0} if is_above else set())
    is_shared = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if is_above and found.st_mode & stat.S_ISVTX:
        is_shared = False  # as in /tmp: others may add to it, but not rename what is ours
    return found.st_uid in owners and not is_shared and not stat.S_ISLNK(found.st_mode)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@lru_cache(maxsize=4)
def _version(compiler: str) -> str:
    """What the compiler says of itself."""
    try:
        said = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{Path(compiler).resolve()} {said.stdout!r}"


@lru_cache(maxsize=1)
def _processor() -> str:
    """Model and features of all processors here, which `native` code may use."""
    names = r"(vendor_id|cpu family|model|model name|stepping|flags|Features|CPU [a-z]+)\s*:.*"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return "\n".join(sorted({line for line in lines if re.fullmatch(names, line)}))
    except OSError:
        return repr(platform.uname())


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


if __name__ == "__main__":
    ready = prepare()
    print(f"{ready} of {len(SHIPPED_FLAGS)} C libraries are ready")
    if ready < len(SHIPPED_FLAGS):
        print(
            "Slower forms stand in for the others, which are built where there is a C compiler "
            "(cc, gcc or clang) and NOSHUFFLE_NATIVE is not off"
        )

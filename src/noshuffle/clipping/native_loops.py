"""The compiled loops of one C file, as the forms of clipping ask for them.

Every loop takes the address of a job. A library is built once a process, with the flags that wheels
ship it with, and handed out only after it agreed with torch; None where it cannot be built, does
not agree, or is switched off. Torch's side of that comparison is in full precision, whatever is
set around the step that asks first (autocast). State: what was built, until `cache_clear`.

>>> loops = NativeLoops("rows.c", "squares", agrees=lambda built: False)
>>> loops() is None
True
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from noshuffle.c_library import SHIPPED_FLAGS, build, text_of
from noshuffle.clipping.products import exactly


class NativeLoops:
    """A library of loops; call it for the library, or None."""

    def __init__(self, file: str, *names: str, agrees: Callable[[ctypes.CDLL], bool]) -> None:
        self._file, self._names, self._agrees = file, names, agrees
        self._built: list[ctypes.CDLL | None] = []

    def __call__(self) -> ctypes.CDLL | None:
        if not self._built:
            built = self.build(text_of(self._file))
            with exactly(torch.device("cpu")):
                is_good = built is not None and self._agrees(built)
            self._built.append(built if is_good else None)
        return self._built[0]

    def build(self, text: str) -> ctypes.CDLL | None:
        """The loops of a text, held against nothing."""
        built = build(text, flags=SHIPPED_FLAGS[self._file])
        for name in self._names if built is not None else ():
            loop = getattr(built, name)
            loop.argtypes, loop.restype = [ctypes.c_void_p], None
        return built

    def cache_clear(self) -> None:
        """Build it anew when next asked for."""
        self._built.clear()

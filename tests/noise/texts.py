"""The C loop built from an altered text, as a slip or another processor would have it."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

import pytest

from noshuffle import c_library

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or bool(os.environ.get("NOSHUFFLE_NATIVE")),
    reason="no C compiler, or switched off",
)


def text() -> str:
    """All that `add_noise` consists of, in one file."""
    own = (c_library.SOURCES / "noise.c").read_text(encoding="utf-8")
    aes = (c_library.SOURCES / "aes.h").read_text(encoding="utf-8")
    return own.replace('#include "aes.h"\n', aes)


def built(folder: Path, c_text: str, **options: object) -> ctypes.CDLL:
    """The library of this text, in a folder of its own."""
    folder.mkdir(exist_ok=True)
    shutil.copy(c_library.SOURCES / "noise_constants.h", folder)
    (folder / "noise.c").write_text(c_text, encoding="utf-8")
    made = c_library.build(folder / "built", sources=folder, **options)  # type: ignore[arg-type]
    assert made is not None
    return ctypes.CDLL(str(made))

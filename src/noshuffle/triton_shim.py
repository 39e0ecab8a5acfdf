"""Triton where it is, and a stand-in where it is not, so that kernel files can always be read.

    jit        triton.jit, or a decorator that leaves a function as it is
    constant   tl.constexpr, or the plain number
    tl         triton.language, or None: kernel texts name it, and only launched ones use it

State: none. Nothing of a kernel runs without Triton; whoever launches one asks HAS_TRITON first.

>>> callable(jit), constant(3) == 3
(True, True)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

jit: Callable[[Any], Any]
constant: Callable[[Any], Any]
tl: Any
try:
    import triton
    import triton.language

    jit, constant, tl, HAS_TRITON = triton.jit, triton.language.constexpr, triton.language, True
except ImportError:
    tl, HAS_TRITON = None, False

    def jit(function: Any) -> Any:
        """The text as it is."""
        return function

    def constant(value: Any) -> Any:
        """A plain number."""
        return value

"""Functions that compiled code runs as they are, without importing torch's compiler for that.

`torch.compiler.disable(fn)` keeps torch.compile from tracing `fn`, and imports all of
torch._dynamo, a second and more. Most processes have it from their first optimizer; `noshuffle
train` does without. There the function asks for it once code is traced that calls it: torch ends a
trace where `torch.compiler.disable` is called, and goes on behind it. No state.

>>> never_traced(len)([1, 2])
2
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def never_traced(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as compiled code has to call it."""
    disable: Any = torch.compiler.disable
    if "torch._dynamo" in sys.modules:
        untraced: Callable[..., Any] = disable(fn)
        return untraced

    @wraps(fn)
    def late(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return disable(fn)(*args, **options)
        return fn(*args, **options)

    return late

"""The inner loops of the noise: in C where that was built and found equal, in torch elsewhere.

    words of Philox  ──►  normals  ──►  one `StepPlan` on a chunk

Each of the three has two forms with the same bits. The torch form runs on every device and says
what is meant (`philox`, `gaussian`, `correlate`); the C form (`native`) is several times faster on
a CPU. Who draws noise calls the functions here and need not know which form it was. No state.

>>> from noshuffle.noise.gaussian import normals_in_torch_
>>> words = torch.arange(TILE, dtype=torch.int32).view(1, TILE)
>>> some, same = torch.empty(2, 1, TILE)
>>> normals_(some, words=words, weight=0.3)
>>> normals_in_torch_(same, words=words, weight=0.3)
>>> torch.equal(some, same)
True
"""

from __future__ import annotations

import ctypes

import torch  # noqa: F401  (the doctest uses it)
from torch import Tensor

from noshuffle.noise import native
from noshuffle.noise.constants import TILE  # noqa: F401  (the doctest uses it)
from noshuffle.noise.correlate import Buffers, correlate_in_c_, correlate_in_torch_
from noshuffle.noise.gaussian import normals_in_torch_
from noshuffle.noise.philox import words_in_torch_
from noshuffle.noise.step_plan import StepPlan


def _library(worked_on: Tensor) -> ctypes.CDLL | None:
    """The C loops, where they can work on this tensor."""
    return native.library() if worked_on.device.type == "cpu" else None


def philox_words_(words: Tensor, *, columns: Tensor, row: int) -> None:
    """Fill tiles with words; `columns` is (5, tiles, 1): first block, key and tag of each tile."""
    library = _library(words)
    if library is None:
        words_in_torch_(words, columns=columns, row=row)
    else:
        library.philox(words.data_ptr(), columns.data_ptr(), columns.shape[1], row)


def normals_(out: Tensor, *, words: Tensor, weight: float = 1.0, accumulate: bool = False) -> None:
    """out = weight·z, or out += weight·z, with z the normals of `words` (both tiles × 1024).

    Both tensors are contiguous.
    """
    library = _library(out)
    if library is None:
        normals_in_torch_(out, words=words, weight=weight, accumulate=accumulate)
    else:
        library.normals(words.data_ptr(), out.data_ptr(), out.shape[0], weight, accumulate)


def correlate_(y: Tensor, *, u: Tensor, plan: StepPlan, state: Buffers, scale: float) -> None:
    """Write scale times the noise of a step into `y` and bring the buffers forward.

    `u` holds the drawn sum. A buffer that is stored to is not among the outer ones.
    """
    library = _library(y)
    if library is None:
        correlate_in_torch_(y, u=u, plan=plan, state=state, scale=scale)
    else:
        correlate_in_c_(library, y, u=u, plan=plan, state=state, scale=scale)

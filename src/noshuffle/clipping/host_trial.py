"""The trial's rows that no GPU is shown, extreme ones and ignored labels, on a model that is lent
to the CPU.

A number that an operation refuses, such as an index outside its table, ends the process on a GPU.
So `trial_rows` makes no such rows there, and a model whose examples mix beside them only (places by
a running count, a mean over labels that count) would be taken at its word. Its tensors lie on the
CPU while it is asked there, and are then as they were, in the memory that they had. A model that
does not run there is not asked: it places tensors by itself, or its loss does. Nor is one that has,
with its loss, more than `MOST` numbers, for which that takes too long. Both are said. No state.

>>> model = nn.Linear(2, 2)
>>> with lent(model, move=lambda t: 0 * t):
...     bool(model.weight.any()), model.weight.requires_grad
(False, True)
>>> bool(model.weight.any())
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

from noshuffle.clipping.isolation_check import alone_still
from noshuffle.clipping.layers import NotByLayer, NotNow
from noshuffle.clipping.look_runs import FIXED
from noshuffle.clipping.objective import Batch, Loss, take
from noshuffle.clipping.row_check import FormsFn, pairs_in_place
from noshuffle.clipping.statefulness import kept_tensors, put_back_after
from noshuffle.clipping.trial_rows import first_rows, unlike_pair, usual
from noshuffle.errors import Unsupported

#: Numbers of a model and its loss that are tried on a CPU as well.
MOST = 2**24
THREADS = 4
NOT_ASKED = "extreme rows and ignored labels were not tried on a CPU"


@contextmanager
def lent(*owners: Any, move: Callable[[Tensor], Tensor] = Tensor.cpu) -> Iterator[None]:
    """Every tensor that modules keep is moved inside the block, and back in its memory after."""
    held = {id(t): t for m in owners if isinstance(m, nn.Module) for t in kept_tensors(m)}
    memory = {key: t.data for key, t in held.items()}
    try:
        for t in held.values():
            t.data = move(t.data)
        yield
    finally:
        for key, t in held.items():
            t.data = memory[key]


@contextmanager
def _by_few_threads() -> Iterator[None]:
    """Few rows are no work for many threads, which other processes of the machine may have, too."""
    many = torch.get_num_threads()
    torch.set_num_threads(min(many, THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(many)


class _OnHost(TorchFunctionMode):
    """New tensors lie on the CPU, whatever device is the default; `torch.device("cpu")` inside
    another such block does not do that in every version of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in _device_constructors() and given.get("device") is None:
            given["device"] = "cpu"
        return func(*args, **given)


def is_elsewhere(model: nn.Module, rows: Batch) -> bool:
    """Whether a model, or its rows, are on a GPU."""
    held = (*kept_tensors(model), *tree_leaves(rows))
    return any(isinstance(t, Tensor) and t.is_cuda for t in held)


def tried_on_host(
    model: nn.Module,
    loss_fn: Loss,
    batch: Batch,
    forms_of: FormsFn,
    *,
    is_asked: Callable[[nn.Module, Batch], bool] = is_elsewhere,
) -> str:
    """Raise NotByLayer if examples of a model on a GPU mix beside rows that only a CPU is shown.

    Returns why it was not asked, in words; mostly nothing.
    """
    if not is_asked(model, batch):
        return ""
    owners = [m for m in (model, loss_fn) if isinstance(m, nn.Module)]
    held = [t for m in owners for t in kept_tensors(m)]
    if sum(t.numel() for t in held) > MOST:
        return f"{NOT_ASKED} (more than {MOST:,} numbers)"
    if not all(type(t) in (Tensor, nn.Parameter) for t in held):
        return f"{NOT_ASKED} (its tensors are of a kind of their own)"
    few = first_rows(batch)
    rows = tree_map(_on_host, take(few, usual(few)))
    try:
        with ExitStack() as stack:
            for each in owners:
                stack.enter_context(put_back_after(each))
            for block in (lent(*owners), _by_few_threads(), _OnHost()):
                stack.enter_context(block)
            alone_still(model, loss_fn, rows, seed=FIXED[0])
            # What does not run here is said, and not taken for a row that is refused.
            forms_of(unlike_pair(rows))
            pairs_in_place(model, forms_of, rows, only_far=True)  # the GPU was shown the others
    except NotNow:
        return ""
    except (NotByLayer, Unsupported):
        raise
    except Exception as error:  # of whatever kind: kernels for a GPU alone have kinds of their own
        return f"{NOT_ASKED} ({' '.join(str(error).split())[:80]})"
    return ""


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value

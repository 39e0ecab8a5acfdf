"""The trial's rows that no GPU is shown, extreme ones and ignored labels, on a model that is lent
to the CPU.

A number that an operation refuses, such as an index outside its table, ends the process on a GPU.
So `trial_rows` makes no such rows there, and a model whose examples mix beside them only (places by
a running count, a mean over labels that count) would be taken at its word. Its tensors lie on the
CPU while it is asked there, and are then as they were, in the memory that they had. A model that
does not run there is not asked: it places tensors by itself, or its loss does. Nor is one with more
than `MOST` numbers, for which that takes too long. No state.

>>> model = nn.Linear(2, 2)
>>> with lent(model, move=torch.zeros_like):
...     bool(model.weight.any()), model.weight.requires_grad
(False, True)
>>> bool(model.weight.any())
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from noshuffle.clipping.isolation_check import REFUSALS, alone_still
from noshuffle.clipping.layers import NotByLayer, NotNow
from noshuffle.clipping.look_runs import FIXED
from noshuffle.clipping.objective import Batch, Loss, take
from noshuffle.clipping.row_check import FormsFn, pair_in_place
from noshuffle.clipping.statefulness import kept_tensors, put_back_after
from noshuffle.clipping.trial_rows import first_rows, unlike_pair, usual

#: Numbers of a model that is tried on a CPU as well.
MOST = 2**24


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


def can_be_lent(model: nn.Module, rows: Batch) -> bool:
    """Whether a model on a GPU is small enough to be asked on the CPU, and of plain tensors."""
    held = kept_tensors(model)
    is_plain = all(type(t) in (Tensor, nn.Parameter) for t in held)
    is_there = any(isinstance(t, Tensor) and t.is_cuda for t in (*held, *tree_leaves(rows)))
    return is_there and is_plain and sum(t.numel() for t in held) <= MOST


def tried_on_host(
    model: nn.Module,
    loss_fn: Loss,
    batch: Batch,
    forms_of: FormsFn,
    *,
    is_asked: Callable[[nn.Module, Batch], bool] = can_be_lent,
) -> None:
    """Raise NotByLayer if examples of a model on a GPU mix beside rows that only a CPU is shown."""
    if not is_asked(model, batch):
        return
    few = first_rows(batch)
    rows = tree_map(_on_host, take(few, usual(few)))
    try:
        with put_back_after(model), lent(model, loss_fn), torch.device("cpu"):
            alone_still(model, loss_fn, rows, seed=FIXED[0])
            pair_in_place(model, forms_of, unlike_pair(rows))
    except NotNow:
        return
    except NotByLayer:
        raise
    except (*REFUSALS, TypeError, NotImplementedError):
        return


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value

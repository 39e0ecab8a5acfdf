"""Which tensors of a loss have a row for every example, and which are constants of it.

A loss is called with outputs, inputs, labels, weights of classes, tables and parameters, and all of
them may be as long as the batch. Rows that are exchanged (`loss_replay`) are those of tensors of
that length, except

    parameters, and what layers and losses have beside their first argument (`weight=`)
    the numbers that are looked up by labels, and those that stand beside columns
    tensors that say which row is where (`torch.arange(len(out))`)

State: none.

>>> import torch
>>> [are_places(torch.tensor(one), torch.arange(3)) for one in ([2, 0, 1], [2, 2, 0])]
[True, False]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from noshuffle.clipping.layers import tensors
from noshuffle.training.loss_branches import CallSite

#: Functions whose arguments after the first are constants: of layers, and lengths of sequences.
LAYERS = (
    "linear", "bilinear", "conv1d", "conv2d", "conv3d", "batch_norm", "instance_norm", "group_norm",
    "layer_norm", "rms_norm", "embedding", "prelu", "ctc_loss", "matmul", "__matmul__", "mm", "mv",
)  # fmt: skip
#: Functions that look numbers up in their first argument, by their last.
TABLES = ("__getitem__", "index_select", "gather", "take")
#: Functions that take a part of their first argument.
PARTS = (*TABLES, "narrow", "split", "chunk", "tensor_split", "unbind")
#: Arguments that are constants of the classes.
CONSTANTS = ("weight", "pos_weight", "bias", "running_mean", "running_var")
#: Functions in which whole numbers are factors and terms, not sizes or axes.
ARITHMETIC = ("mul", "div", "truediv", "add", "sub", "pow", "multiply", "divide", "clamp")


class Call(NamedTuple):
    """One call of torch."""

    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    result: Any
    has_grad: bool
    cast: torch.dtype | None
    sites: Sequence[CallSite] = ()  # where it was made

    @property
    def name(self) -> str:
        return str(getattr(self.func, "__name__", ""))

    @property
    def is_arithmetic(self) -> bool:
        name = self.name.strip("_")
        return name in ARITHMETIC or name[1:] in ARITHMETIC  # radd, imul

    @property
    def given(self) -> list[Tensor]:
        """The tensors that it was given."""
        return tensors((self.args, self.kwargs))

    @property
    def made(self) -> list[Tensor]:
        """The tensors that it made, or wrote to."""
        made = tensors(self.result)
        return [*made, self.args[0]] if self.name == "__setitem__" else made


def memory(one: Tensor) -> int:
    """Where the numbers of a tensor lie."""
    return one.untyped_storage().data_ptr()


def has_rows(one: Tensor, size: int, fixed: Collection[int]) -> bool:
    """Whether a tensor from outside has a row for each of `size` examples."""
    is_long = one.dim() > 0 and len(one) == size
    return is_long and id(one) not in fixed and not isinstance(one, nn.Parameter)


def is_data(call: Call, one: Tensor, rows: Tensor, fixed: Collection[int]) -> bool:
    """Whether a tensor from outside that a call was given is of single examples, or of labels."""
    is_whole = not one.is_floating_point()
    if one.dim() and len(one) == len(rows) and (is_whole or has_rows(one, len(rows), fixed)):
        return True
    made = call.made[:1]
    if call.name in PARTS and one is call.args[0] and made and made[0].shape[:1] == rows.shape:
        index = call.args[-1]  # labels that look numbers up occur more than once
        is_lookup = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32)
        return not is_lookup or index.unique().numel() == index.numel()
    return is_whole and one.dim() > 0 and not call.is_arithmetic and call.name not in TABLES


def constant_tensors(
    calls: Sequence[Call], rows: Tensor, inputs: Collection[int], *, is_all: bool
) -> set[int]:
    """Tensors from outside that keep their rows, by id; `inputs` lie in this memory.

    `is_all` False: all that are not the model's inputs.
    """
    fixed, roots = set[int](), dict[int, int]()
    for call in calls:
        named = [v for k, v in call.kwargs.items() if call.name in LAYERS or k in CONSTANTS]
        after = call.args[1:] if call.name in LAYERS else ()
        fixed |= {id(one) for one in tree_leaves([after, named])}
        own = call.given
        is_table = call.name in TABLES and _is_table(call.args[0], call.args[-1], rows)
        for one in own:
            is_constant = (is_table and one is call.args[0]) or _is_along_columns(one, own)
            is_ours = is_constant or not is_all
            if (is_ours and memory(one) not in inputs) or are_places(one, rows):
                fixed.add(roots.get(id(one), id(one)))
        made = call.result
        if len(own) == 1 and isinstance(made, Tensor) and made.shape == own[0].shape:
            roots[id(made)] = roots.get(id(own[0]), id(own[0]))  # its logarithm, say
    return fixed


def are_places(one: Tensor, rows: Tensor) -> bool:
    """Whether a tensor says which row is where."""
    is_whole = one.dtype in (torch.int64, torch.int32) and one.shape == rows.shape
    return is_whole and torch.equal(one.detach().sort()[0].cpu().long(), rows)


def _is_table(table: Any, index: Any, rows: Tensor) -> bool:
    """Whether numbers of a table are looked up, as weights by their labels."""
    is_float = isinstance(table, Tensor) and table.is_floating_point()
    is_index = isinstance(index, Tensor) and not index.is_floating_point()
    is_by_chance = len(rows) < 16  # as labels of a small batch are
    return is_float and is_index and (is_by_chance or not are_places(index, rows))


def _is_along_columns(one: Tensor, beside: list[Tensor]) -> bool:
    """Whether a tensor has a number for every column of another, not for its rows."""
    is_row = one.dim() == 1 and one.is_floating_point()
    return is_row and any(o.dim() > 1 and o.shape[-1] == len(one) for o in beside)

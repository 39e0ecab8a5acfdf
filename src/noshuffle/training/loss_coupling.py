"""Operations of a loss in which the examples of a batch meet, as far as its graph shows them.

Clipping bounds what one term of Σ_i ℓ_i adds. A softmax along the batch, a product of outputs with
outputs, a selection of tokens under a mean or a factor below the reduction join examples: one of
them then moves the gradients of all. `coupled` looks at one node of torch's graph (2.11 to 2.13);
what was computed without gradients leaves none (`loss_replay` tries that). State: none.

>>> import torch
>>> outputs = torch.zeros(4, 3, requires_grad=True)
>>> goes_along(outputs.softmax(-1).grad_fn), goes_along(outputs.softmax(-2).grad_fn)
(False, True)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Nodes that join all rows if they go along the first axis, the last reduction apart.
ALONG = (
    "Logsumexp", "Softmax", "LogSoftmax", "Std", "Var", "Mean", "Sum", "Amax", "Amin", "Max", "Min",
    "Prod", "Cumsum", "Cumprod", "Cummax", "Cummin", "Logcumsumexp", "Sort", "Topk", "Norm",
    "LinalgVectorNorm", "Flip", "Roll", "Kthvalue", "Median", "Aminmax",
)  # fmt: skip
#: Nodes that join all rows wherever they stand.
JOINING = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "Cdist", "Pdist")
#: Nodes that pick rows or tokens: which belongs to whom cannot be seen behind them.
PICKING = ("Index", "IndexSelect", "MaskedSelect", "Take", "Gather", "TakeAlongDim", "Repeat")
#: Nodes that take a part of an axis: of the rows, some are then compared with others, or left out.
CUTTING = ("Slice", "Select", "Split", "SplitWithSizes", "Unbind")
#: Products of outputs with outputs.
PRODUCTS = ("Mm", "Bmm", "Baddbmm", "Dot")
#: A whole number up to this is a constant of the loss; a larger one may be a count of the batch.
CONSTANT = 16
COUPLED = (
    "the loss compares the examples of a batch with each other ({name}), so that one of them moves "
    "the gradients of all; use a loss that is a mean of terms of one example each"
)
SELECTED = (
    "the loss is a mean over the selected tokens (or rows) of the whole batch, so that one example "
    "moves the weight of all others; use private.step, which takes the mean inside each example"
)


def goes_along(node: Any) -> bool:
    """Whether an operation goes along the first axis, or along all."""
    along = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
    if along is None or along == ():
        return True
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    for name in ("_saved_self", "_saved_indices", "_saved_result"):
        held = getattr(node, name, None)
        sizes = held.shape if sizes is None and isinstance(held, Tensor) else sizes
    rank = 0 if sizes is None else len(sizes)
    for one in (along,) if isinstance(along, int) else along:
        axis = _axis(one)
        axis += rank if axis < 0 else 0
        if axis == 0 or (axis < -1 and not rank):
            return True
    return False


def coupled(node: Any, *, kind: str, is_uniform: bool, size: int = 0) -> str:
    """Why a loss is refused in which the examples of a batch meet at this node.

    `kind` is that of its reduction; `is_uniform`: all labels have the same weight; `size`: that of
    the batch, of which no part may be taken (0: it may).
    """
    name = node.name().rstrip("0123456789").removesuffix("Backward")
    used = [after for after, _ in node.next_functions if after is not None]
    if name in PRODUCTS and len(used) >= 2:
        return COUPLED.format(name="a product of outputs with outputs")
    if name in JOINING or (name in ALONG and goes_along(node)):
        return COUPLED.format(name=f"{name.lower()} along the batch")
    if name in CUTTING and _is_part_of_rows(node, size):
        return COUPLED.format(name="some of the rows of a batch by themselves")
    if name in ("Mul", "Div") and _is_count(node):
        return COUPLED.format(name="a factor on every term that may be of the whole batch")
    if name.endswith("Loss") and not name.startswith("Nll") and _is_broadcast(node):
        return COUPLED.format(name="outputs and targets of different shapes")
    if kind != "sum" and name in PICKING and not _is_everything(node):
        return SELECTED
    if not is_uniform and _moves_rows(name, node):
        return SELECTED  # whose labels have which weight cannot be told
    return ""


def _is_broadcast(node: Any) -> bool:
    held, wanted = (getattr(node, name, None) for name in ("_saved_self", "_saved_target"))
    return held is not None and wanted is not None and held.shape != wanted.shape


def _is_part_of_rows(node: Any, size: int) -> bool:
    """Whether less than all rows of a batch of this size are taken."""
    shape = getattr(node, "_saved_self_sym_sizes", None)
    if shape is None:  # unbind has none, and every part is without that axis
        shape = (len(node._input_metadata), *node._input_metadata[0].shape)
    if _axis(node._saved_dim) not in (0, -len(shape)) or shape[0] != size or size == 1:
        return False
    is_whole = getattr(node, "_saved_start", 1) == 0 and node._saved_end >= size
    return not is_whole or node._saved_step != 1


def _moves_rows(name: str, node: Any) -> bool:
    """Whether axes change their places, the first one among them."""
    if name == "Transpose":
        axes = (_axis(node._saved_dim0), _axis(node._saved_dim1))
        return any(axis == 0 or axis <= -3 for axis in axes)
    return name == "T" or (name == "Permute" and _axis(node._saved_dims[0]) != 0)


def _axis(shown: int) -> int:
    """An axis, which torch shows without its sign."""
    return shown - (1 << 64) if shown >= 1 << 63 else shown


def _is_count(node: Any) -> bool:
    """Whether terms are multiplied by one number that need not be a constant of the loss."""
    for held in (getattr(node, "_saved_self", None), getattr(node, "_saved_other", None)):
        if isinstance(held, Tensor) and held.numel() == 1 and held.dim() == 0:
            if not is_number(held):
                return True
            return not held.is_floating_point() and abs(int(held)) > CONSTANT
    return False


def is_number(factor: Any) -> bool:
    """Whether a factor that torch has kept was a number of Python, and not a tensor.

    A number follows the type of any tensor of its kind, which a tensor without axes does not.
    """
    if not isinstance(factor, Tensor):
        return True
    if factor.dim() or factor.dtype not in (torch.float64, torch.int64, torch.bool):
        return False
    narrow = torch.float16 if factor.is_floating_point() else torch.uint8
    return torch.result_type(factor, torch.zeros((), dtype=narrow, device="cpu")) is narrow


def _is_everything(node: Any) -> bool:
    """Whether a mask picks all there is, or every row a part of its own."""
    masks = [getattr(node, "_saved_mask", None), *(getattr(node, "_saved_indices", None) or ())]
    held = [mask for mask in masks if mask is not None]
    if held and all(m.dtype is torch.bool for m in held):
        return all(bool(m.all()) for m in held)
    if node.name().startswith("Gather"):
        return not goes_along(node)
    if not node.name().startswith("IndexBackward"):
        return False
    rows, sizes = node._saved_indices[0], node._saved_self_sym_sizes
    return rows is None or torch.equal(rows.cpu(), torch.arange(sizes[0], device="cpu"))

"""Whether the rows of a batch were mixed with each other before the model saw them.

    mixup    x_i = r_i + λ·(r_j − r_i)                    on the line between two rows
    cutmix   every entry of x_i is that of r_i or of r_j

A row that was made of two people's changes with each of them, and the guarantee counts one. Nobody
can see that in a tensor alone; but where `private.check(loader)` has seen the first batch of the
loader, the first step can be compared with it. A loop that reads other rows first, or mixes in
another way, is not noticed (docs/sharp-edges.md, 22). No state.

>>> import torch
>>> rows = torch.eye(4)
>>> are_mixed(rows, 0.7 * rows + 0.3 * rows.flip(0)), are_mixed(rows, 2 * rows + 0.1)
(True, False)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from noshuffle.clipping.objective import leaves

#: Rows that are compared, with all of the first batch.
TRIED = 16
#: Numbers an example must have: in fewer, everything lies on some line.
LEAST = 3
MIXED = (
    "inputs: rows of the first batch were mixed with each other (mixup, cutmix), so that one unit "
    "is in the examples of others, and the guarantee counts its own alone; mix within a unit only"
)


def first_rows(data: tuple[Any, ...]) -> Tensor | None:
    """The inputs of a batch that can be compared: its first tensor of numbers with a point."""
    for leaf in leaves(data):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1:
            if leaf.is_nested or leaf.layout is not torch.strided:
                return None  # the step refuses it
            return leaf.detach() if len(leaf) > 1 and leaf[0].numel() >= LEAST else None
    return None


def are_mixed(rows: Tensor, inputs: Tensor) -> bool:
    """Whether most of the inputs that are no rows lie between two of them, or are patched of two.

    Guarantees: none; floating-point rows that were turned, scaled or noised one by one do not lie
    so but by accident.
    """
    r = rows.reshape(len(rows), -1).double().cpu()
    x = inputs.reshape(len(inputs), -1)[: min(TRIED, len(r))].double().cpu()
    if x.shape[1:] != r.shape[1:]:
        return False
    moved = (x != r[: len(x)]).any(1).nonzero()[:, 0]
    found = 0
    for i in moved.tolist():
        step, ways = x[i] - r[i], r - r[i]
        sizes = ways.square().sum(1)
        on_line = (ways @ step).square() >= (1 - 1e-6) * sizes * step.square().sum()
        patched = ((x[i] == r[i]) | (x[i] == r)).all(1)
        is_other = (sizes > 0) & (r != 0).any(1)  # what lies on the way to 0 was scaled
        found += bool(((on_line | patched) & is_other).any())
    return 2 * found > len(moved) > 0

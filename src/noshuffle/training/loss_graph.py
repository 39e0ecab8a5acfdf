"""What a loss was multiplied by, and how it was reduced: read off its graph.

A loop that says `(loss / 4).backward()`, `scaler.scale(loss).backward()` or takes a mean over the
valid tokens of a batch sends back

    ∂L/∂output_i = s · r · ∂ℓ_i/∂output_i,       s: the factor on the whole loss, r: its reduction

and a clip norm means nothing until s·r is out again. s may be a function of the batch, which no
clip of single examples would bound, so it is taken out, whatever it is:

    mean over N numbers           r = 1/B                     (N a multiple of the batch size B)
    sum                           r = 1; divided by B, it is a mean
    negative log-likelihood       r_i = w_i / Σ_j w_j         (w_i: weight of the labels of row i)
    sum of such terms             means, each times a number of Python, which is the user's weight
                                  and stays; or sums with one factor; else refused

and anything else (the root of a mean, a norm of all outputs) is refused: its factor is not seen. A
sum divided by a number other than B is no mean: it may count the tokens of a batch. torch's own
cross entropy with probabilities divides by its rows in C++ (`DivBackward1`), and is a mean.

A backward pass frees what torch keeps on a node, so a loss is read before it (`heard_backward`;
torch 2.11 to 2.13). No state.

>>> import torch
>>> outputs = torch.zeros(4, 3, requires_grad=True)
>>> reading = read_loss(torch.nn.functional.mse_loss(outputs * 1, torch.ones(4, 3)) / 8)
>>> reading.factor, reading.multiplier(4)
(0.125, 32.0)
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from noshuffle.training.loss_reading import ODD_FACTOR, LossReading

#: Nodes that hand a number on as it is.
SAME = ("View", "ReshapeAlias", "UnsafeView", "Squeeze", "Unsqueeze", "Alias", "Clone", "ToCopy")
#: Nodes of a loss that are looked at, at most.
MOST_NODES = 10_000
LEARNED = (
    "a parameter is a term of this loss by itself (a learned weight of the loss, say), and would "
    "be trained on raw gradients; give a constant, or put it into the model and use a ModelLoss"
)


def read_loss(
    loss: Tensor, starts: Collection[int] = (), *, gradient: Tensor | None = None
) -> LossReading:
    """The reading of a loss; `starts` are sequence numbers of the outputs it may be made of, and
    `gradient` is what `loss.backward` was given."""
    reading = LossReading(refusal="loss.backward() needs one number; call loss.mean() first")
    if loss.numel() == 1 and loss.grad_fn is not None:
        reading = _read(loss.grad_fn)
        if gradient is not None:  # `loss.backward(gradient)`: one more factor on the whole loss
            reading = reading.scaled(float(gradient))
    return replace(reading, reached=frozenset(_nodes(loss.grad_fn, starts)[1]))


def _read(node: Any, *, is_term: bool = False) -> LossReading:
    """The reading from a node on that gives one number."""
    factor, divisor, is_plain, node = _peeled(node)
    if not math.isfinite(factor) or (factor <= 0.0 and not is_term):
        return LossReading(refusal=ODD_FACTOR.format(factor=factor))
    as_sum = LossReading(factor, "sum", divisor=abs(divisor.value), is_plain=is_plain)
    as_mean = LossReading(factor, "mean", is_plain=is_plain and divisor.is_plain)
    name, given = node.name(), [n for n, _ in node.next_functions if n is not None]
    if name.startswith("NllLoss"):
        return replace(as_mean, **_labels(node)) if node._saved_reduction == 1 else as_sum
    if hasattr(node, "_saved_reduction") and node._saved_reduction in (1, 2):
        return as_mean if node._saved_reduction == 1 else as_sum
    if name in ("AddBackward0", "SubBackward0") and len(given) == 2:
        terms = tuple(_read(n, is_term=True) for n in given)
        kind = "sum" if all(t.kind == "sum" for t in terms) else "mean"
        refusal = next((t.refusal for t in terms if t.refusal), "")
        return replace(as_mean, kind=kind, refusal=refusal, terms=terms)
    if name.endswith("AccumulateGrad"):
        return LossReading(refusal=LEARNED)
    sizes = getattr(node, "_saved_self_sym_sizes", ())
    is_last = name.endswith("Backward0") or len(sizes) == 1
    if name.startswith(("MeanBackward", "SumBackward")) and is_last and _is_once(given):
        if name.startswith("Mean"):
            return replace(as_mean, count=math.prod(sizes))
        if divisor.is_of_torch:
            return replace(as_sum._as_mean(), count=int(divisor.value))
        return as_sum
    return LossReading(
        refusal=f"how this loss is made of the losses of its examples cannot be seen ({name}); let "
        "it end with one .mean() or .sum() over them, or use private.step"
    )


def _is_once(given: list[Any]) -> bool:
    """Whether what is reduced was not put together, or reduced along the batch, just before."""
    for node in given:
        name = node.name()
        if name.startswith(("Stack", "Cat")):
            return False
        if name in ("MeanBackward1", "SumBackward1") and _goes_along(node):
            return False
    return True


def _goes_along(node: Any) -> bool:
    """Whether an operation goes along the first axis, or along all."""
    along = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
    if along is None or along == ():
        return True
    rank = len(getattr(node, "_saved_self_sym_sizes", None) or ())
    for one in (along,) if isinstance(along, int) else along:
        axis = one - (1 << 64) if one >= 1 << 63 else one  # torch shows it without its sign
        axis += rank if axis < 0 else 0
        if axis == 0 or (axis < -1 and not rank):
            return True
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


def _labels(node: Any) -> dict[str, Any]:
    """The weights of the labels of a mean, flat."""
    target, weight = node._saved_target, node._saved_weight
    ignored = node._saved_ignore_index
    ignored -= 1 << 64 if ignored >= 1 << 63 else 0  # torch shows it without its sign
    is_label = target != ignored
    if weight is None:
        weights = is_label.to(torch.float32)
    else:
        weights = torch.where(is_label, weight[target.clamp(0, len(weight) - 1)], 0.0)
    return {"kind": "labels", "weights": weights.detach().reshape(-1)}


class Divisor(NamedTuple):
    """What one number was divided by, and whether it is a number of Python, or of torch itself."""

    value: float = 0.0
    is_plain: bool = True
    is_of_torch: bool = False


def _peeled(node: Any) -> tuple[float, Divisor, bool, Any]:
    """The factors on one number, the divisor that was first, whether all others are numbers of
    Python, and the node that they stand before."""
    factor, divisor, is_plain = 1.0, Divisor(), True
    while True:
        name = node.name()
        inputs = [(i, n) for i, (n, _) in enumerate(node.next_functions) if n is not None]
        if len(inputs) != 1:
            return factor, divisor, is_plain, node
        (place, after), one = inputs[0], 1.0
        newest = divisor
        if name.startswith("MulBackward"):
            given = node._saved_self if place else node._saved_other
            one, newest = _number(given), Divisor(is_plain=is_number(given))
        elif name.startswith("DivBackward") and not place:
            given = node._saved_other
            newest = Divisor(_number(given), is_number(given), name == "DivBackward1")
            one = 1.0 / newest.value if newest.value else math.inf
        elif name.startswith(("AddBackward", "SubBackward", "RsubBackward")):
            one = float(node._saved_alpha) if place and hasattr(node, "_saved_alpha") else 1.0
        elif name in ("MeanBackward0", "SumBackward0"):
            one = 1.0 if math.prod(node._saved_self_sym_sizes) == 1 else math.nan
        elif name != "NegBackward0" and not name.startswith(SAME):
            return factor, divisor, is_plain, node
        if math.isnan(one):  # no number: the weights of many terms, or their reduction
            return factor, divisor, is_plain, node
        if newest is not divisor:
            divisor, is_plain = newest, is_plain and divisor.is_plain
        factor, node = factor * one, after


def _number(value: Any) -> float:
    """A constant as a number; NaN if it has several entries."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else math.nan
    return float(value)


def _nodes(root: Any, starts: Collection[int]) -> tuple[list[Any], set[int]]:
    """The nodes of a loss down to the outputs that it is made of, and which of these it reaches."""
    lowest, stack, seen, reached = min(starts, default=0), [root], dict[Any, None](), set[int]()
    while stack and starts and len(seen) < MOST_NODES:
        node = stack.pop()
        number = -1 if node is None or node in seen else node._sequence_nr()
        if number in starts:
            reached.add(number)
        elif number > lowest and node.next_functions:
            seen[node] = None
            stack += [after for after, _ in node.next_functions]
    return list(seen), reached


def reaches(loss: Tensor, starts: Collection[int]) -> bool:
    """Whether a loss is made of one of these outputs; reads nothing of any number."""
    return bool(_nodes(loss.grad_fn, starts)[1])


def trained_by(loss: Tensor, starts: Collection[int]) -> list[nn.Parameter]:
    """Parameters that a loss sends gradients to other than through the outputs it is made of."""
    nodes, _ = _nodes(loss.grad_fn, starts)
    ends = [after for node in nodes for after, _ in node.next_functions]
    found = [getattr(end, "variable", None) for end in ends]
    return [one for one in found if isinstance(one, nn.Parameter)]

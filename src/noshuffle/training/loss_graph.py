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

A backward pass frees what torch keeps on a node, so `heard_backward` stands in for
`torch.autograd.backward` while somebody listens (torch 2.11 to 2.13). State: who listens.

>>> import torch
>>> outputs = torch.zeros(4, 3, requires_grad=True)
>>> reading = read_loss(torch.nn.functional.mse_loss(outputs * 1, torch.ones(4, 3)) / 8)
>>> reading.factor, reading.multiplier(4)
(0.125, 32.0)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from noshuffle.training.loss_coupling import (
    CONSTANT,
    COUPLED,
    SELECTED,
    coupled,
    goes_along,
    is_number,
)

#: Nodes that hand a number on as it is.
SAME = ("View", "ReshapeAlias", "UnsafeView", "Squeeze", "Unsqueeze", "Alias", "Clone", "ToCopy")
#: Nodes of a loss that are looked at, at most.
MOST_NODES = 10_000
ODD_FACTOR = (
    "the loss is multiplied by {factor:g}, which tells of the whole batch or says nothing; leave "
    "the factor out (a batch that must not count: private.step with no rows)"
)
UNLIKE = (
    "the terms of this loss are divided by different numbers (labels are left out or weighted, one "
    "is a sum and one a mean), which reach the clip; use private.step, and weight_decay of the "
    "optimizer instead of a penalty on weights"
)

LEARNED = (
    "a parameter is a term of this loss by itself (a learned weight of the loss, say), and would "
    "be trained on raw gradients; give a constant, or put it into the model and use a ModelLoss"
)


@dataclass(frozen=True)
class LossReading:
    """What lies between a loss and the terms of its examples."""

    factor: float = 1.0
    kind: str = "sum"  # "mean", "labels" (a mean with the weights of labels)
    count: int = 0  # numbers under the mean
    weights: Tensor | None = field(default=None, repr=False)  # of the labels, flat
    refusal: str = ""
    reached: frozenset[int] = frozenset()  # the outputs that it uses, by sequence number
    divisor: float = 0.0  # of a sum: what it was divided by first, which is in the factor too
    is_plain: bool = True  # whether the factor (that divisor apart) is of numbers of Python
    terms: tuple[LossReading, ...] = ()

    @property
    def is_uniform(self) -> bool:
        """Whether all labels have the same weight."""
        if self.terms:
            return all(term.is_uniform for term in self.terms)
        return self.weights is None or bool((self.weights == self.weights[:1]).all())

    @property
    def numbers(self) -> int:
        """How many numbers are under the mean."""
        return self.count if self.weights is None else self.weights.numel()

    def settled(self, size: int) -> LossReading:
        """The same for a batch of this size: sums that were divided by it are means, and terms are
        added up, or refused."""
        if not self.terms:
            return self._as_mean() if self.divisor == size else self
        terms = [term.settled(size) for term in self.terms]
        counts = {term.numbers for term in terms if term.kind != "sum"} - {0}
        terms = [t._as_mean() if {t.divisor} == counts else t for t in terms]
        kind, factor, refusal = _added(terms)
        count = math.gcd(*(t.numbers for t in terms))
        return replace(
            self,
            factor=self.factor * factor,
            kind=kind,
            count=count,
            refusal=self.refusal or refusal or (UNLIKE if count % size else ""),
            terms=(),
        )

    def scaled(self, factor: float) -> LossReading:
        """The same with one more factor on the whole."""
        if not (math.isfinite(factor) and factor > 0.0):
            return replace(self, refusal=self.refusal or ODD_FACTOR.format(factor=factor))
        return replace(self, factor=self.factor * factor)

    def _as_mean(self) -> LossReading:
        return replace(self, kind="mean", factor=self.factor * self.divisor, divisor=0.0)

    def multiplier(self, size: int) -> float | Tensor:
        """What turns ∂L/∂output_i into ∂ℓ_i/∂output_i for a batch of this size: 1/(s·r_i)."""
        if self.kind == "labels" and self.weights is not None:
            own = self.weights.reshape(size, -1).sum(1)
            return torch.where(own > 0, own.sum() / own, 0.0) / self.factor
        return (size if self.kind == "mean" else 1) / self.factor

    def by_row(self, grad: Tensor) -> Tensor:
        """∂ℓ_i/∂output_i for every row, of ∂L/∂output."""
        by, wide = self.multiplier(len(grad)), grad.detach()
        wide = wide.float() if wide.dtype in (torch.float16, torch.bfloat16) else wide
        if isinstance(by, Tensor):
            by = by.to(wide).reshape(-1, *[1] * (wide.dim() - 1))
        return wide * by

    def refused(self, size: int) -> str:
        """Why the loss of a batch of this size is refused, if it is."""
        return self.refusal or (SELECTED if self.numbers % size else "")


def read_loss(
    loss: Tensor,
    starts: Collection[int] = (),
    *,
    gradient: Tensor | None = None,
    may_cut: bool = False,
) -> LossReading:
    """The reading of a loss; `starts` are sequence numbers of the outputs it may be made of.

    `gradient` is what `loss.backward` was given; `may_cut`: rows may be taken by themselves.
    """
    ends, reached = set[Any](), set[int]()
    shapes = list[tuple[int, ...]]()
    reading = LossReading(refusal="loss.backward() needs one number; call loss.mean() first")
    if loss.numel() == 1 and loss.grad_fn is not None:
        reading = _read(loss.grad_fn, ends)
        if gradient is not None:  # `loss.backward(gradient)`: one more factor on the whole loss
            reading = reading.scaled(float(gradient))
    nodes = list(_nodes(loss.grad_fn, starts, reached, shapes))
    below = [node for node in nodes if node not in ends]
    rows = [shape[0] for shape in shapes if shape]
    known: Any = {"kind": reading.kind, "is_uniform": reading.is_uniform}
    found = [coupled(node, **known, size=rows[0] if rows and not may_cut else 0) for node in below]
    leading = _leading(nodes, starts)
    if any(_numbers(node) > sum(map(math.prod, shapes)) for node in below if node in leading):
        found.append(COUPLED.format(name="there are more terms than outputs"))
    refusal = reading.refusal or next(filter(None, found), "")
    return replace(reading, refusal=refusal, reached=frozenset(reached))


def _read(node: Any, ends: set[Any], *, is_term: bool = False) -> LossReading:
    """The reading from a node on that gives one number; nodes that were understood are `ends`."""
    factor, divisor, is_plain, node = _peeled(node, ends)
    ends.add(node)
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
        terms = tuple(_read(n, ends, is_term=True) for n in given)
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
        if name in ("MeanBackward1", "SumBackward1") and goes_along(node):
            return False
    return True


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


def _added(terms: list[LossReading]) -> tuple[str, float, str]:
    """Kind and factor of a sum of terms, and why it is refused, if it is.

    The factor of a mean is a weight that the user gave it, and stays; as a tensor it may have been
    computed from the batch. That of a sum may be one over a count of the batch, and is taken out;
    beside another sum, a small whole number or one over it is a weight (the −½ of a VAE).
    """
    refusal, own = next((t.refusal for t in terms if t.refusal), ""), 1.0
    whole = all(t.is_uniform for t in terms)
    kinds = {"mean" if t.kind == "labels" else t.kind for t in terms}
    if "sum" in kinds:
        own = max(abs(t.factor) for t in terms)
        weights = [t.factor / own for t in terms]
        is_one = all(math.isclose(w, weights[0]) for w in weights) and weights[0] > 0.0
        is_plain = all(t.is_plain and t.divisor == terms[0].divisor for t in terms)
        whole = whole and (is_one or (is_plain and all(map(_is_constant, weights))))
    if not whole or len(kinds) > 1:
        refusal = refusal or UNLIKE
    elif "mean" in kinds and not all(t.is_plain for t in terms):
        refusal = refusal or (
            "a term of this loss is multiplied by a tensor, which may have been computed from the "
            "whole batch; give its weight as a number, float(weight), if it was not"
        )
    return kinds.pop(), own, refusal


def _is_constant(weight: float) -> bool:
    """Whether a weight of at most 1 is one over a small whole number."""
    turned = 1.0 / abs(weight) if weight else math.inf
    return turned <= CONSTANT and math.isclose(turned, round(turned))


class Divisor(NamedTuple):
    """What one number was divided by, and whether it is a number of Python, or of torch itself."""

    value: float = 0.0
    is_plain: bool = True
    is_of_torch: bool = False


def _peeled(node: Any, ends: set[Any]) -> tuple[float, Divisor, bool, Any]:
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
        ends.add(node)
        if newest is not divisor:
            divisor, is_plain = newest, is_plain and divisor.is_plain
        factor, node = factor * one, after


def _number(value: Any) -> float:
    """A constant as a number; NaN if it has several entries."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else math.nan
    return float(value)


def _shape(node: Any) -> tuple[int, ...]:
    """The shape of what an operation gave, of the largest if it gave several."""
    return max((tuple(one.shape) for one in node._input_metadata), key=math.prod, default=(0,))


def _numbers(node: Any) -> int:
    """How many numbers an operation gave."""
    return math.prod(_shape(node))


def _leading(nodes: list[Any], starts: Collection[int]) -> set[Any]:
    """Those that are made of outputs, and not of weights alone; what came earlier has less."""
    found: set[Any] = set()
    for node in sorted(nodes, key=lambda one: one._sequence_nr()):
        given = [after for after, _ in node.next_functions if after is not None]
        if any(after in found or after._sequence_nr() in starts for after in given):
            found.add(node)
    return found


def _nodes(
    root: Any, starts: Collection[int], reached: set[int], shapes: list[tuple[int, ...]]
) -> Iterator[Any]:
    """The nodes of a loss down to the outputs that it is made of, which are added to `reached`.

    `shapes` then has theirs.
    """
    lowest, stack, seen = min(starts, default=0), [root], set[Any]()
    while stack and starts and len(seen) < MOST_NODES:
        node = stack.pop()
        number = -1 if node is None or node in seen else node._sequence_nr()
        if number in starts:
            shapes += [] if number in reached else [_shape(node)]
            reached.add(number)
        elif number > lowest and node.next_functions:
            seen.add(node)
            yield node
            stack += [after for after, _ in node.next_functions]


def reaches(loss: Tensor, starts: Collection[int]) -> bool:
    """Whether a loss is made of one of these outputs; reads nothing of any number."""
    reached = set[int]()
    for _ in _nodes(loss.grad_fn, starts, reached, []):
        if reached:
            break
    return bool(reached)


def trained_by(loss: Tensor, starts: Collection[int]) -> list[nn.Parameter]:
    """Parameters that a loss sends gradients to other than through the outputs it is made of."""
    ends = [
        after
        for node in _nodes(loss.grad_fn, starts, set(), [])
        for after, _ in node.next_functions
    ]
    found = [getattr(end, "variable", None) for end in ends]
    return [one for one in found if isinstance(one, nn.Parameter)]


#: Who wants to know of backward passes: `passes.Listener`s.
_HEARING: WeakSet[Any] = WeakSet()
_plain_backward = torch.autograd.backward


@wraps(_plain_backward)
def heard_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
    """`torch.autograd.backward`, after everybody who listens has read the loss."""
    now = hearing()
    for one in now:
        one.begin_backward(tensors, grad_tensors)
    try:
        _plain_backward(tensors, grad_tensors, *args, **options)
    finally:
        for one in now:
            one.end_backward()
        _settle()


def hearing() -> list[Any]:
    """Who listens now."""
    return list(_HEARING)


def listen(one: Any, *, is_on: bool) -> None:
    """Begin or end to hear of backward passes; torch has its own function while nobody does."""
    (_HEARING.add if is_on else _HEARING.discard)(one)
    _settle()


def _settle() -> None:
    if _HEARING and torch.autograd.backward is _plain_backward:
        torch.autograd.backward = heard_backward
    elif not _HEARING and torch.autograd.backward is heard_backward:
        torch.autograd.backward = _plain_backward

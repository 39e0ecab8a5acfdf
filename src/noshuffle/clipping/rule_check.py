"""Whether layer rules give what autograd gives: the norms of two gradients, and their sum.

    per parameter     ‖g_i‖ by the rules  =  ‖g_i‖ by autograd, i = 0, 1        Σ g_i  =  Σ g_i

A weight used outside its layer, a hook that changes an output, a batch flattened the other way all
fail here. `isolation_check` asks, on two rows of the first batch. A rule that goes by a layer's
name is asked of the layer alone, too, on drawn inputs: what it computes may differ from what its
name says where the first rows are not (`names_fit`). No state.

>>> close(1.0, 1.0005, low=False), close(1.0, 1.2, low=False)
(True, False)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest

import torch
from torch import Tensor, nn

from noshuffle.clipping.forms import GradientForm, merge, squares
from noshuffle.clipping.layers import Layers, NotByLayer
from noshuffle.clipping.objective import Batch
from noshuffle.clipping.products import wide
from noshuffle.clipping.rules import Rule, find_rule

#: Root mean squares of the inputs that a layer with a rule by name is shown.
SIZES = (0.1, 1.0, 30.0, 1e3)
#: Numbers of a gradient that are compared at a time.
PIECE = 1 << 18


def close(found: float, truth: float, *, low: bool, whole: float = 0.0) -> bool:
    """Whether a norm agrees with the true one as far as the precision allows (`low`: half).

    `whole` is the norm of the whole gradient: a part that is pure rounding error has no digits to
    agree on. A norm that is somewhat too large (steps that nearly cancel, or products that may have
    vanished below the smallest float, beside a large input) is safe, one that is too small is not.
    """
    tolerance = 0.05 if low else 1e-3
    below = found >= truth * (1.0 - tolerance) - 1e-5 * whole - 1e-12
    return below and found <= truth * (1.0 + 10.0 * tolerance) + 0.1 * whole + 1e-6


def length(tree: Iterable[Tensor | None], *less: Iterable[Tensor | None]) -> float:
    """The length of gradients less the sum of other ones; None counts as zero.

    Taken piece by piece, so that differences take little memory; a device is waited for at the end.
    """
    lengths: list[Tensor] = []
    for first, *others in zip_longest(tree, *less):
        own = [_pieces(t) for t in (first, *others) if t is not None]
        for one, *more in zip(*own, strict=True):
            gap = wide(one)
            for other in more:
                gap = gap + other if first is None else gap - other
            lengths.append(torch.linalg.vector_norm(gap, dtype=torch.float64))
    return math.sqrt(sum(own * own for own in map(float, lengths)))


def joined(
    some: list[Tensor | None], others: list[Tensor | None], *, factor: float = 1.0
) -> list[Tensor | None]:
    """g₀ + k·g₁ of every parameter, None counting as zero; what was read is let go of."""
    found: list[Tensor | None] = []
    for i, (a, b) in enumerate(zip(some, others)):
        some[i] = others[i] = None
        more = None if b is None else wide(b)
        if a is not None and more is not None:
            found.append(torch.add(wide(a), more, alpha=factor))
        else:
            found.append(a if more is None else factor * more)
    return found


def _pieces(t: Tensor) -> Sequence[Tensor]:
    """A tensor cut along its first axis; nothing is copied, however it lies in memory."""
    while t.dim() > 1 and len(t) == 1:
        t = t[0]
    if t.numel() <= PIECE:
        return (t,)
    return torch.split(t, max(1, PIECE * len(t) // t.numel()))


def by_autograd(
    run: Callable[[Batch], Tensor], pair: Batch, params: Mapping[str, nn.Parameter]
) -> tuple[Tensor, list[list[Tensor | None]]]:
    """The losses of two examples, and the gradient of each."""
    with torch.enable_grad():
        losses = run(pair)
        each = losses.unbind() if losses.requires_grad else ()
    own = list(params.values())
    return losses, [
        list(torch.autograd.grad(loss, own, retain_graph=True, allow_unused=True)) for loss in each
    ]


def inexact(
    params: Iterable[str],
    forms: Mapping[str, list[GradientForm]],
    truth: Sequence[Sequence[Tensor | None]],
    *,
    low: bool,
) -> str:
    """Why rules do not agree with autograd, in words; empty if norms and sums of all parameters do.

    `truth`: the gradient of each of two examples, or nothing where losses have none.
    """
    whole = [length(t) for t in truth] or [0.0, 0.0]
    for i, name in enumerate(params):
        own = [t[i] for t in truth] or [None, None]
        if why := _inexact(name, merge(forms.get(name, [])), own, whole, low=low):
            return why
    return ""


def names_fit(layers: Layers) -> None:
    """Raise NotByLayer unless rules by a layer's name give what autograd gives of drawn inputs.

    Tables are not asked: gradients of their size take long.
    """
    for name, layer in layers.ruled.items():
        if find_rule(layer) is None and not isinstance(layer, nn.Embedding):
            for size in SIZES:
                with suppress(RuntimeError, TypeError, ValueError, LookupError):  # what it refuses
                    _fits(name, layer, layers.rules[name], size=size)


def _fits(name: str, layer: nn.Module, rule: Rule, *, size: float) -> None:
    """The same of one layer, for inputs of one size."""
    like = layer.weight
    assert isinstance(like, Tensor)
    x = size * torch.randn(4, 3, len(like), device=like.device, dtype=like.dtype)
    own = {key: p for key, p in layer.named_parameters() if p.requires_grad}
    with torch.enable_grad():
        out = layer.forward(x)
        g = torch.randn_like(out)
        truth = torch.autograd.grad((out * g).sum(), list(own.values()))
    forms = rule(layer, x, g, len(x))
    for key, exact in zip(own, truth):
        found = forms[key].total(torch.ones(len(x), device=g.device))
        gap, whole = length([found], [exact]), length([exact])
        if gap > 0.05 * whole + 1e-6 and math.isfinite(whole):
            raise NotByLayer(f"layer {name!r} does not compute what its name says")


def _inexact(
    name: str,
    forms: Sequence[GradientForm],
    rows: Sequence[Tensor | None],
    whole: Sequence[float],
    *,
    low: bool,
) -> str:
    """Why norms and sum of a parameter's forms are not those of its two `rows`, if they are not."""
    found = squares(forms).double().sqrt() if forms else torch.zeros(2, device="cpu")
    if len(found) != 2:
        return f"the layer of {name!r} sees more rows than examples"
    exact, summed = [length([row]) for row in rows], None
    for form in forms:
        total = form.total(torch.ones(2, device=found.device))
        summed = total if summed is None else summed + total
    gap = length([summed], *([row] for row in rows))
    fits = all(close(float(f), e, low=low, whole=w) for f, e, w in zip(found, exact, whole))
    if fits and not gap > (0.1 if low else 2e-3) * max(exact) + 1e-5 * sum(whole):
        return ""
    return (
        f"the gradient of {name!r} by layer rules differs from autograd's: it is used "
        "outside its own layer, or examples mix before it"
    )

"""Per-example gradients that are not written out.

    DenseGradient   d[b]                         kept as it is: biases, norm layers, small weights
    OuterGradient   Σ_t g[b,t] a[b,t]ᵀ           linear maps: output gradients times inputs
    RowGradient     row index[b,t] += g[b,t]     embeddings

For a linear map, ‖Σ_t g_t a_tᵀ‖² = Σ_{t,s} ⟨a_t, a_s⟩⟨g_t, g_s⟩ (two T×T Gram matrices) is cheaper
than the product of size o×i when T² is small; the cost decides (mixed ghost clipping: Bu, Mao, Xu
2022; ghost norms: Goodfellow 2015, Li et al. 2022). `merge` joins the forms of one parameter; cross
terms are exact.

Where steps nearly cancel, rounding moves the Gram sum by at most about κu·(Σ_t ‖g_t‖‖a_t‖)² with u
the unit roundoff and κ ≈ √i + √o, and that much is added: a squared norm here is never too small.
It is added to gradients that are written out as well, or one long example, which decides for all of
a batch what is cheaper, would change the norms of the others.
In half precision and TF32 entries are rounded once more when the factors go in, by at most v each
(`roundoff`); the norm is increased by v·√Σ_t ‖g_t‖²‖a_t‖², too (0.4 % for bfloat16).

>>> import torch
>>> a, g = torch.randn(5, 3, 4), torch.randn(5, 3, 2)
>>> form = OuterGradient(a, g, (2, 4))
>>> torch.allclose(form.squares().float(), form.dense().flatten(1).square().sum(1))
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from noshuffle.clipping import gpu_kernels, gram
from noshuffle.clipping.gram import SMALLEST, allowance, has_kernel
from noshuffle.clipping.products import (
    HALF,
    bmm,
    is_rescaled,
    mm,
    roundoff,
    scaled,
    weighted,
    wide,
    zeroed,
)


@dataclass(frozen=True)
class Units:
    """Which unit every example belongs to: example b is number `slot[b]` of unit `of[b]`."""

    of: Tensor
    slot: Tensor
    count: int
    widest: int

    def gather(self, rows: Tensor) -> Tensor:
        """[B, T, …] → [U, widest·T, …]: the rows of one unit side by side, zeros where none."""
        out = rows.new_zeros((self.count * self.widest, *rows.shape[1:]))
        out[self.of * self.widest + self.slot] = rows
        return out.reshape(self.count, -1, *rows.shape[2:])

    def total(self, rows: Tensor) -> Tensor:
        """[B, …] → [U, …]: the sum over the examples of each unit."""
        return rows.new_zeros((self.count, *rows.shape[1:])).index_add_(0, self.of, rows)


_norm: Callable[..., Tensor] = torch.linalg.vector_norm


def _norms(rows: Tensor, *, stretch: int = 128) -> Tensor:
    """Norms over the last axis, too small by at most stretch/16 roundings on a CPU.

    Torch adds the squares of a row up in eight lanes (a GPU in two thousand). Added to one that is
    large, each small one is lost, so a row of n numbers can lose n/16 roundings. Long rows are cut,
    and the squares of their pieces are added up in double precision.
    """
    kind = torch.float32 if rows.dtype in HALF else rows.dtype
    width = rows.shape[-1]
    stretch = 2**14 if rows.is_cuda else stretch
    if width <= stretch or kind == torch.float64:
        return _norm(rows, dim=-1, dtype=kind)
    whole = width // stretch * stretch
    pieces = rows[..., :whole].reshape(*rows.shape[:-1], whole // stretch, stretch)
    total = _norm(pieces, dim=-1, dtype=kind).double().square().sum(-1)
    rest = _norm(rows[..., whole:], dim=-1, dtype=kind).double()
    return (total + rest.square()).sqrt()


def _reach(t: Tensor) -> Tensor:
    """‖t[b, s]‖ for t [B, T, d] in double precision, never too small where squares vanish."""
    least = SMALLEST[t.dtype is torch.float64]
    # Two of them are multiplied: half the rounding each.
    return _norms(t, stretch=64).double() + math.sqrt(t.shape[2] * least)


class GradientForm:
    """Base of the three forms; B examples, one parameter."""

    def squares(self) -> Tensor:
        """Squared norm per example, [B]."""
        raise NotImplementedError

    @cached_property
    def square(self) -> Tensor:
        """`squares()`, computed once."""
        return self.squares()

    def total(self, factors: Tensor) -> Tensor:
        """Σ_b factors[b] · gradient[b], in the parameter's shape."""
        raise NotImplementedError

    def spent(self, factors: Tensor) -> Tensor:
        """`total` where an example of factor zero may hold anything; the form is used up."""
        return self.kept(factors != 0).total(factors)

    def dense(self) -> Tensor:
        """The gradients written out, [B, *shape]."""
        raise NotImplementedError

    def write_(self, out: Tensor) -> None:
        """The gradients written into out [B, numbers], rows of which may lie apart."""
        out.copy_(self.dense().reshape(out.shape))

    def kept(self, keep: Tensor) -> GradientForm:
        """The same with the examples outside `keep` replaced by zeros (NaN and ∞ included)."""
        raise NotImplementedError

    def scaled(self, factors: Tensor) -> GradientForm:
        """The same with example b multiplied by factors[b]."""
        raise NotImplementedError

    def by_unit(self, units: Units) -> GradientForm:
        """The gradients summed over the examples of each unit."""
        return DenseGradient(units.total(self.dense()))


@dataclass(frozen=True)
class DenseGradient(GradientForm):
    """Gradients written out: [B, *shape]."""

    grads: Tensor

    def squares(self) -> Tensor:
        if self.grads.dim() == 1:
            return self.grads.square()
        return _norms(self.grads.flatten(1)).square()

    def total(self, factors: Tensor) -> Tensor:
        grads, factors = self.grads, factors.to(self.grads.dtype)
        if grads.dim() == 2:
            return factors @ grads
        return (factors @ grads.reshape(grads.shape[0], -1)).reshape(grads.shape[1:])

    def spent(self, factors: Tensor) -> Tensor:
        if not is_rescaled(self.grads):
            return super().spent(factors)
        gpu_kernels.wipe_(self.grads, factors.float())
        return self.total(factors)

    def dense(self) -> Tensor:
        return self.grads

    def kept(self, keep: Tensor) -> GradientForm:
        return DenseGradient(zeroed(self.grads, keep))

    def scaled(self, factors: Tensor) -> GradientForm:
        return DenseGradient(scaled(self.grads, factors))


@dataclass(frozen=True)
class OuterGradient(GradientForm):
    """Σ_t g[b,t] a[b,t]ᵀ with a [B, T, i], g [B, T, o]; `shape` is the parameter's shape.

    `widths` are o and i without the zeros that `aligned` may have added.
    """

    a: Tensor
    g: Tensor
    shape: tuple[int, ...]
    widths: tuple[int, int] | None = None
    written: list[Tensor] = field(default_factory=list, compare=False, repr=False)

    def is_small(self) -> bool:
        """Whether writing the gradients out costs less than the two Gram matrices."""
        t, i, o = self.a.shape[1], self.a.shape[2], self.g.shape[2]
        cost = 4 if has_kernel(self.a, self.g) else 1
        return t > 1 and cost * i * o <= t * (i + o)

    @property
    def lost(self) -> float:
        """What may be rounded away when factors go into a gradient of one step."""
        return roundoff(self.g) if self.g.is_cuda or self.g.dtype in HALF else 0.0

    def squares(self) -> Tensor:
        if self.a.shape[1] == 1:
            size, lost = (_reach(self.a) * _reach(self.g))[:, 0], self.lost
            return (size if lost == 0.0 else size * (1.0 + lost)).square()
        if self.is_small():
            lengths = _norms(self.a, stretch=64), _norms(self.g, stretch=64)
            written = DenseGradient(self.dense()).squares()
            return gram.of_written(written, self.a, self.g, lengths)
        return gram.squares(self.a, self.g)

    def sizes(self) -> Tensor:
        """‖g_t‖‖a_t‖ per example and step: they add up to the norm if nothing cancelled."""
        return _reach(self.a) * _reach(self.g)

    def total(self, factors: Tensor) -> Tensor:
        if self.written:
            return DenseGradient(self.written[0]).total(factors)
        product = weighted(self.g, self.a, factors)
        return product if product.shape == self.shape else self._cut(product)

    def _cut(self, product: Tensor) -> Tensor:
        """The product without what `aligned` added, as the parameter lies."""
        if self.widths is not None and product.shape != self.widths:
            o, i = self.widths
            product = product[:o, :i]
        return product if product.shape == self.shape else product.reshape(self.shape)

    def spent(self, factors: Tensor) -> Tensor:
        if self.written or not is_rescaled(self.a, self.g):
            return super().spent(factors)
        # One reading of a, none of g: 0·NaN is not 0, so examples of factor zero leave both.
        factors = factors.float()
        gpu_kernels.wipe_(self.g, factors)
        a = gpu_kernels.rescale(self.a, factors)
        return self._cut(mm(self.g.flatten(0, 1).mT, a.flatten(0, 1)))

    def dense(self) -> Tensor:
        if not self.written:
            product = bmm(self.g.mT, self.a)
            if self.widths is not None and product.shape[1:] != self.widths:
                o, i = self.widths
                product = product[:, :o, :i]
            self.written.append(product.reshape(-1, *self.shape))
        return self.written[0]

    def write_(self, out: Tensor) -> None:
        o, i = self.g.shape[2], self.a.shape[2]
        both = self.a.dtype, self.g.dtype, out.dtype
        if self.written or o * i != out.shape[1] or set(both) != {torch.float32}:
            super().write_(out)
        else:  # a product goes where it belongs
            torch.bmm(self.g.mT, self.a, out=out.view(len(out), o, i))

    def kept(self, keep: Tensor) -> GradientForm:
        # what the norm was taken of is also what is added up, rounding included
        rest = [zeroed(grads, keep) for grads in self.written]
        return replace(self, a=zeroed(self.a, keep), g=zeroed(self.g, keep), written=rest)

    def scaled(self, factors: Tensor) -> GradientForm:
        return replace(self, g=scaled(self.g, factors), written=[])

    def by_unit(self, units: Units) -> GradientForm:
        return OuterGradient(units.gather(self.a), units.gather(self.g), self.shape, self.widths)


@dataclass(frozen=True)
class RowGradient(GradientForm):
    """Row index[b,t] receives g[b,t]: index [B, T], g [B, T, d], `shape` = (rows, d)."""

    index: Tensor
    g: Tensor
    shape: tuple[int, ...]

    def squares(self) -> Tensor:
        b, t, d = self.g.shape
        if t == 0 or b == 0:
            return self.g.new_zeros(b)
        if t <= max(64, d):
            same = self.index.unsqueeze(2) == self.index.unsqueeze(1)
            table = torch.where(same, gram.inner(self.g), 0.0)
            exact = table.sum((1, 2), dtype=torch.float64).clamp_min(0.0)
        else:
            g = wide(self.g).flatten(0, 1)
            rows = g.new_zeros(b * t, d).index_add_(0, self._numbered().reshape(-1), g)
            exact = rows.view(b, -1).square().sum(1, dtype=torch.float64)
        return exact + allowance(self.g.dtype, d) * self.reach().square()

    def _places(self) -> Tensor:
        """The row of every entry if the tables of all examples lay one behind the other."""
        owner = torch.arange(len(self.index), device=self.index.device).unsqueeze(1)
        return owner * self.shape[0] + self.index

    def _numbered(self) -> Tensor:
        """As `_places`, with the rows that an example uses numbered from 0: at most T of them.

        Their number is not asked for: a graph could not wait for the answer.
        """
        own, order = self.index.sort(dim=1)
        number = functional.pad((own[:, 1:] != own[:, :-1]).cumsum(1), (1, 0))
        owner = torch.arange(len(own), device=own.device).unsqueeze(1) * own.shape[1]
        return owner + torch.empty_like(number).scatter_(1, order, number)

    def reach(self) -> Tensor:
        """Σ_t ‖g_t‖ per example: the norm if nothing cancelled."""
        return _norms(self.g, stretch=64).sum(1, dtype=torch.float64)

    def total(self, factors: Tensor) -> Tensor:
        g = scaled(self.g, factors).reshape(-1, self.g.shape[2])
        return g.new_zeros(self.shape).index_add_(0, self.index.reshape(-1), g)

    def dense(self) -> Tensor:
        b, _, d = self.g.shape
        g = wide(self.g).reshape(-1, d)
        flat = g.new_zeros(b * self.shape[0], d).index_add_(0, self._places().reshape(-1), g)
        return flat.reshape(b, *self.shape)

    def kept(self, keep: Tensor) -> GradientForm:
        return replace(self, g=zeroed(self.g, keep))

    def scaled(self, factors: Tensor) -> GradientForm:
        return replace(self, g=scaled(self.g, factors))

    def by_unit(self, units: Units) -> GradientForm:
        return RowGradient(units.gather(self.index), units.gather(self.g), self.shape)


def merge(forms: Sequence[GradientForm]) -> list[GradientForm]:
    """The forms of one parameter joined: at most one of each, or one DenseGradient.

    Two uses of a linear map are one with the steps of both; so are two of an embedding. A tied
    embedding and output layer stay an OuterGradient beside a RowGradient. All else is written out.
    """
    if len(forms) <= 1:
        return list(forms)
    outer = [f for f in forms if isinstance(f, OuterGradient)]
    rows = [f for f in forms if isinstance(f, RowGradient)]
    if len(outer) + len(rows) < len(forms):
        return [DenseGradient(torch.stack([f.dense() for f in forms]).sum(0))]
    if len(outer) > 1:
        a, g = torch.cat([f.a for f in outer], 1), torch.cat([f.g for f in outer], 1)
        outer = [OuterGradient(a, g, outer[0].shape, outer[0].widths)]
    if len(rows) > 1:
        index, g = torch.cat([f.index for f in rows], 1), torch.cat([f.g for f in rows], 1)
        rows = [RowGradient(index, g, rows[0].shape)]
    return [*outer, *rows]


def squares(forms: Sequence[GradientForm]) -> Tensor:
    """Squared norm per example of the sum of merged forms, the cross term included."""
    if len(forms) == 1:
        return forms[0].square
    outer, rows = forms
    if not isinstance(outer, OuterGradient) or not isinstance(rows, RowGradient):
        raise TypeError("squares expects merged forms")
    # ⟨Σ_s g_s a_sᵀ, Σ_t e(index_t) h_tᵀ⟩ = Σ_{s,t} g_s[index_t] ⟨a_s, h_t⟩
    steps = outer.g.shape[1]
    picked = outer.g.gather(2, rows.index.unsqueeze(1).expand(-1, steps, -1))
    cross = (bmm(outer.a, rows.g.mT) * picked).sum((1, 2), dtype=torch.float64)
    sizes, alone = outer.sizes(), rows.square.double()
    room = allowance(outer.g.dtype, *outer.shape) * sizes.sum(1) * rows.reach()
    room += roundoff(outer.g) * (sizes.square().sum(1) * alone).sqrt()
    return (outer.square + alone + 2.0 * cross).clamp_min(0.0) + 2.0 * room

"""Per-example gradients of a small model as one matrix, clipped and summed in a few kernels.

    row b = [ written-out gradients | a of linear layers | g of linear layers ]
    ‖g_b‖² = Σ written-out² + Σ_layers ‖a‖²·‖g‖²           (an outer product has that norm)
    sum    = Σ_b f_b · written-out  and  Σ_b f_b · g aᵀ

A captured step is as fast as its kernels are few: the ordinary way takes about fifteen small ones a
parameter. Forms that fit neither kind (long sequences, embeddings) stay as they are: their squared
norms come in as `extra`, and their sums are taken beside. With one bound for the whole gradient
only (`Flat`). `_plain` is the twin of the kernels, which a CPU runs. No state but the tables.

>>> import torch
>>> from noshuffle.clipping.forms import OuterGradient
>>> a, g = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[2.0]]])
>>> flat = Flattened({"w": [OuterGradient(a, g, (1, 2))]}, {"w": torch.zeros(1, 2)}, aim=5.0)
>>> sums = flat({"w": [OuterGradient(a, g, (1, 2))]}, torch.ones(1), torch.tensor([True]))
>>> sums.norms.item(), sums.values["w"].tolist()
(10.0, [[3.0, 4.0]])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noshuffle.clipping.factor import clip_factor
from noshuffle.clipping.forms import (
    DenseGradient,
    GradientForm,
    OuterGradient,
    RowGradient,
    squares,
)
from noshuffle.clipping.graph_memory import hold
from noshuffle.errors import Unsupported
from noshuffle.training.compiled import kernels
from noshuffle.training.compiled.staged import StagedUsers

#: A gradient is written out up to this many numbers of one example; a whole matrix up to so many.
MOST_COLUMNS, MOST_NUMBERS = 2**16, 2**27
#: Rows × numbers of a linear layer from which on a product by itself is faster than the kernel,
#: which takes small ones of all layers at once.
MOST_PAIRED = 2**26
#: A program takes the norm of a row, so longer gradients that are written out stay by themselves.
MOST_WRITTEN = 2**17
#: Gradients of so many numbers are written where they lie in the matrix, the others side by side.
FEWEST_DIRECT = 2**10
ROWS, COLUMNS, OUTPUTS, INPUTS, BLOCK = 32, 64, 16, 64, 1024
#: What the square of a float32 may lose by underflow; the factor beside it may be large.
HIDDEN = 1.2e-38

Forms = Mapping[str, Sequence[GradientForm]]


@dataclass(frozen=True)
class Sums:
    """Values by name, and per row loss, norm, is-bad; `report` has the three rows in one tensor."""

    values: dict[str, Tensor]
    losses: Tensor
    norms: Tensor
    bad: Tensor
    report: Tensor | None = None


#: The clipped sum of the rows of a batch that a mask keeps.
TotalFn = Callable[[tuple[Any, ...], Tensor], Sums]


def _kind(forms: Sequence[GradientForm], size: int, most: int, *, by_user: bool) -> str:
    """How a parameter is kept: "pair", "dense", "other", or "none".

    What kernels would sum by row is written out where the rows of a user are added up first.
    """
    if len(forms) != 1:
        return "other" if forms else "none"
    form = forms[0]
    if isinstance(form, OuterGradient) and form.a.shape[1] == 1:
        return "pair" if by_user or len(form.a) * size <= MOST_PAIRED else "other"
    if getattr(form, "is_fused", False):
        return "dense" if by_user and size <= most else "other"
    written = isinstance(form, DenseGradient) or bool(getattr(form, "written", ()))
    if written and size > most:
        return "other"
    is_rows = isinstance(form, RowGradient)
    return "dense" if written or (size <= MOST_COLUMNS and not is_rows) else "other"


class Flattened:
    """The layout of one model's matrix, and the sum by it.

    Guarantees: as `sum.short` with one bound. The tables are made once, from a first set
    of forms; later ones must be of the same kinds and shapes.
    """

    def __init__(
        self,
        forms: Forms,
        like: Mapping[str, Tensor],
        *,
        aim: float,
        rows: int = 1,
        users: StagedUsers | None = None,
    ) -> None:
        if any(value.dtype == torch.float64 for value in like.values()):
            raise Unsupported("the matrix is in single precision")
        self._like = dict(like)
        device = next(iter(like.values())).device
        for most in (MOST_WRITTEN, MOST_NUMBERS):  # without users or smaller ones: long rows, too
            kinds = {
                name: _kind(forms.get(name, ()), value.numel(), most, by_user=users is not None)
                for name, value in like.items()
            }
            if users is None and {"dense", "pair"} & set(kinds.values()):
                break
        self._users = users
        if users is not None:  # a sum over rows is none of inputs and output gradients
            kinds = {name: "dense" if kind == "pair" else kind for name, kind in kinds.items()}
            if "other" in kinds.values():
                raise Unsupported("not every gradient can be written out for the sums of users")
        self._dense, self._pairs, self._others = (
            [name for name in like if kinds[name] == kind] for kind in ("dense", "pair", "other")
        )
        if not self._dense and not self._pairs:
            raise Unsupported("no parameter fits into the matrix")
        self._dense.sort(key=lambda name: like[name].numel() < FEWEST_DIRECT)
        self.columns = sum(like[name].numel() for name in self._dense)
        pairs: list[Any] = [forms[name][0] for name in self._pairs]
        inputs, outputs = [f.a.shape[2] for f in pairs], [f.g.shape[2] for f in pairs]
        at, behind, self._length = self.columns, self.columns + sum(inputs), self.columns
        #: Per linear layer: first input column, inputs, first output column, outputs, where its
        #: product begins in the sum.
        self._table: list[tuple[int, int, int, int, int]] = []
        for i, o in zip(inputs, outputs):
            self._table.append((at, i, behind, o, self._length))
            at, behind, self._length = at + i, behind + o, self._length + i * o
        self._width = behind
        if rows * behind > MOST_NUMBERS:
            raise Unsupported(f"a matrix of {rows} × {behind:,} is too large")
        # A lane of the kernel loses at most one rounding for every square that it adds up.
        room = 1.0 - 2.0**-24 * ((max([self.columns, *inputs, *outputs]) - 1) // BLOCK)
        self._aim = torch.full((1,), aim * room, dtype=torch.float64, device=device)
        self._zeros = torch.zeros(0, dtype=torch.float64, device=device)
        tiles = [
            (r, p, q)
            for r, (_, i, _, o, _) in enumerate(self._table)
            for p in range(-(-o // OUTPUTS))
            for q in range(-(-i // INPUTS))
        ]
        self._programs = len(tiles)
        self._where = torch.tensor(self._table or [(0,) * 5], dtype=torch.int64, device=device)
        self._tiles = torch.tensor(tiles or [(0,) * 3], dtype=torch.int32, device=device)

    def __call__(self, forms: Forms, losses: Tensor, keep: Tensor) -> Sums:
        """Clip every row and sum; the rows of a user are one."""
        size, single = len(losses), losses.float()
        matrix = self._matrix(forms, size)
        if len(self._zeros) != size:
            self._zeros = self._zeros.new_zeros(size)
        extra = hold(self._zeros)  # an eager batch of another size has others
        if self._others:
            extra = torch.stack([squares(forms[n]).double() for n in self._others]).sum(0)
        run = self._by_kernels if matrix.is_cuda and kernels.HAS_TRITON else self._plain
        if self._users is None:
            factor, report, flat = run(matrix, single, keep, extra)
        else:
            matrix, own, present = self._users.sums(matrix, single)
            factor, report, flat = run(matrix, own, present, extra)
            report = torch.cat([single[None], report[1:]])
        values, at = {}, 0
        for name in (*self._dense, *self._pairs):
            shape = self._like[name].shape
            values[name] = flat[at : at + math.prod(shape)].view(shape)
            at += math.prod(shape)
        for name in self._others:
            totals = [form.spent(factor) for form in forms[name]]
            values[name] = sum(totals[1:], start=totals[0]).float().reshape(self._like[name].shape)
        for name in self._like.keys() - values.keys():
            values[name] = torch.zeros_like(self._like[name], dtype=torch.float32)
        ordered = {name: values[name] for name in self._like}
        return Sums(ordered, losses, report[1], report[2] != 0, report)

    def _matrix(self, forms: Forms, size: int) -> Tensor:
        """Rows of all gradients; numbers behind a row, if there are, are nobody's."""
        direct = [name for name in self._dense if self._like[name].numel() >= FEWEST_DIRECT]
        pairs: list[Any] = [forms[n][0] for n in self._pairs]
        parts = [forms[n][0].dense() for n in self._dense[len(direct) :]]
        parts += [*(f.a for f in pairs), *(f.g for f in pairs)]
        rest = [part.reshape(size, -1).float() for part in parts]
        if not direct:
            return torch.cat(rest, dim=1)
        # Rows begin at multiples of 16 bytes, which products need to be fast.
        width = self._width + -self._width % 4
        matrix = torch.empty((size, width), dtype=torch.float32, device=self._aim.device)
        at = 0
        for name in direct:
            count = self._like[name].numel()
            forms[name][0].write_(matrix[:, at : at + count])
            at += count
        if rest:
            torch.cat(rest, dim=1, out=matrix[:, at : self._width])
        return matrix

    def _by_kernels(
        self, matrix: Tensor, losses: Tensor, keep: Tensor, extra: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, width = matrix.shape
        factor, report = matrix.new_empty(rows), matrix.new_empty((3, rows))
        out = matrix.new_empty(self._length)
        launch: Any = kernels
        given = (losses, keep.view(torch.uint8), extra, self._aim, factor, report, rows)
        shape = (self.columns, self._where, len(self._table))
        launch.row_factors[(rows,)](matrix, width, *shape, *given, BLOCK=BLOCK, num_warps=4)
        if self.columns:
            launch.dense_sum[(-(-self.columns // COLUMNS),)](
                matrix, width, self.columns, factor, rows, out, ROWS=ROWS, COLUMNS=COLUMNS
            )
        if self._programs:
            sizes = {"ROWS": ROWS, "OUTPUTS": OUTPUTS, "INPUTS": INPUTS}
            launch.pair_sum[(self._programs,)](
                matrix, width, self._tiles, self._where, factor, rows, out, **sizes
            )
        return factor, report, out

    def _plain(
        self, matrix: Tensor, losses: Tensor, keep: Tensor, extra: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The twin of the kernels."""
        total = matrix[:, : self.columns].square().sum(1).double() + extra
        for a, i, g, o, _ in self._table:
            own = matrix[:, a : a + i].square().sum(1).double() + i * HIDDEN
            total = total + own * (matrix[:, g : g + o].square().sum(1).double() + o * HIDDEN)
        is_fine = (total <= 1e300) & (losses.abs() <= 3.4e38)
        factor = clip_factor(total.sqrt(), self._aim, slack=0.0, keep=is_fine & keep).float()
        matrix = torch.where((factor != 0)[:, None], matrix, 0.0)
        pieces = [factor @ matrix[:, : self.columns]]
        for a, i, g, o, _ in self._table:
            scaled = matrix[:, g : g + o] * factor[:, None]
            pieces.append((scaled.mT @ matrix[:, a : a + i]).reshape(-1))
        norms = torch.where(keep, total.sqrt(), 0.0)
        report = torch.stack([losses, norms.float(), (keep & ~is_fine).float()])
        return factor, report, torch.cat(pieces)

"""Per-example gradients of a small model as one matrix, clipped and summed in a few kernels.

    row b = [ written-out gradients | a of linear layers | g of linear layers ]
    ‖g_b‖² = Σ written-out² + Σ_layers ‖a‖²·‖g‖²           (an outer product has that norm)
    sum    = Σ_b f_b · written-out  and  Σ_b f_b · g aᵀ

A captured step is as fast as its kernels are few: the ordinary way takes about fifteen small ones a
parameter. Forms that fit neither kind (long sequences, embeddings) stay as they are: their squared
norms come in as `extra`, and their sums are taken beside. With one bound for the whole gradient
only (`Flat`). `plain` is the twin by torch operations, which a CPU runs. No state but the tables.

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
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
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
from noshuffle.errors import Unsupported
from noshuffle.training.compiled import kernels
from noshuffle.training.compiled.result import Sums

#: A gradient is written out up to this many numbers of one example; a whole matrix up to so many.
MOST_COLUMNS, MOST_NUMBERS = 2**16, 2**27
ROWS, COLUMNS, OUTPUTS, INPUTS, BLOCK = 32, 64, 16, 64, 1024
#: What the square of a float32 may lose by underflow; the factor beside it may be large.
HIDDEN = 1.2e-38

_Forms = Mapping[str, Sequence[GradientForm]]


def _kind(forms: Sequence[GradientForm], size: int) -> str:
    """How a parameter is kept: "pair", "dense", or "other"."""
    if len(forms) != 1:
        return "other" if forms else "none"
    form = forms[0]
    if isinstance(form, OuterGradient) and form.a.shape[1] == 1:
        return "pair"
    written = isinstance(form, DenseGradient) or bool(getattr(form, "written", ()))
    is_rows = isinstance(form, RowGradient)
    return "dense" if written or (size <= MOST_COLUMNS and not is_rows) else "other"


class Flattened:
    """The layout of one model's matrix, and the sum by it.

    Guarantees: as `sum.short` with one bound. The tables are made once, from a first set
    of forms; later ones must be of the same kinds and shapes.
    """

    def __init__(
        self, forms: _Forms, like: Mapping[str, Tensor], *, aim: float, rows: int = 1
    ) -> None:
        self._like = dict(like)
        first = next(iter(like.values()))
        self._device = first.device
        kinds = {name: _kind(forms.get(name, ()), like[name].numel()) for name in like}
        if any(value.dtype == torch.float64 for value in like.values()):
            raise Unsupported("the matrix is in single precision")
        self._dense = [name for name in like if kinds[name] == "dense"]
        self._pairs = [name for name in like if kinds[name] == "pair"]
        self._others = [name for name in like if kinds[name] == "other"]
        if not self._dense and not self._pairs:
            raise Unsupported("no parameter fits into the matrix")
        self.columns = sum(like[name].numel() for name in self._dense)
        table: list[tuple[int, int, int, int, int]] = []
        inputs = [forms[name][0].a.shape[2] for name in self._pairs]  # type: ignore[attr-defined]
        outputs = [forms[name][0].g.shape[2] for name in self._pairs]  # type: ignore[attr-defined]
        at, place = self.columns, self.columns
        behind = self.columns + sum(inputs)
        for i, o in zip(inputs, outputs):
            table.append((at, i, behind, o, place))
            at, behind, place = at + i, behind + o, place + i * o
        if rows * behind > MOST_NUMBERS:
            raise Unsupported(f"a matrix of {rows} × {behind:,} is too large")
        self._table = table
        # A lane of the kernel loses at most one rounding for every square that it adds up.
        longest = max([self.columns, *inputs, *outputs])
        aim *= 1.0 - 2.0**-24 * ((longest - 1) // BLOCK)
        self._aim = torch.full((1,), aim, dtype=torch.float64, device=self._device)
        self._zeros = torch.zeros(0, dtype=torch.float64, device=self._device)
        self._tables()

    def _tables(self) -> None:
        tiles = [
            (r, p, q)
            for r, (_, i, _, o, _) in enumerate(self._table)
            for p in range(-(-o // OUTPUTS))
            for q in range(-(-i // INPUTS))
        ]
        shaped = np.array(self._table or [(0,) * 5], dtype=np.int64)
        self._where = torch.from_numpy(shaped).to(self._device)
        self._tiles = torch.from_numpy(np.array(tiles or [(0,) * 3], dtype=np.int32)).to(
            self._device
        )
        self._programs = len(tiles)

    def __call__(self, forms: _Forms, losses: Tensor, keep: Tensor) -> Sums:
        """Clip every row and sum."""
        size = len(losses)
        written = [forms[n][0].dense().reshape(size, -1) for n in self._dense]
        pairs: list[Any] = [forms[n][0] for n in self._pairs]
        parts = [*written, *(f.a.reshape(size, -1) for f in pairs)]
        parts += [f.g.reshape(size, -1) for f in pairs]
        matrix = torch.cat([part.float() for part in parts], dim=1)
        extra = self._nothing(size)
        if self._others:
            extra = torch.stack([squares(forms[n]).double() for n in self._others]).sum(0)
        run = self._by_kernels if matrix.is_cuda and kernels.HAS_TRITON else self._plain
        factor, report, flat = run(matrix, losses.float(), keep, extra)
        values = self._cut(flat)
        good = factor != 0
        for name in self._others:
            totals = [form.kept(good).total(factor) for form in forms[name]]
            values[name] = sum(totals[1:], start=totals[0]).float().reshape(self._like[name].shape)
        for name in self._like.keys() - values.keys():
            values[name] = torch.zeros_like(self._like[name], dtype=torch.float32)
        ordered = {name: values[name] for name in self._like}
        return Sums(ordered, losses, report[1], report[2] != 0, report)

    def _nothing(self, size: int) -> Tensor:
        """Zeros, made once."""
        if len(self._zeros) != size:
            self._zeros = torch.zeros(size, dtype=torch.float64, device=self._device)
        return self._zeros

    def _cut(self, flat: Tensor) -> dict[str, Tensor]:
        """The sum of every parameter, as a view in its own shape."""
        values, at = {}, 0
        for name in [*self._dense, *self._pairs]:
            shape = self._like[name].shape
            values[name] = flat[at : at + math.prod(shape)].view(shape)
            at += math.prod(shape)
        return values

    def _length(self) -> int:
        return self.columns + sum(int(i) * int(o) for _, i, _, o, _ in self._table)

    def _by_kernels(
        self, matrix: Tensor, losses: Tensor, keep: Tensor, extra: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, width = matrix.shape
        factor, report = matrix.new_empty(rows), matrix.new_empty((3, rows))
        out = matrix.new_empty(self._length())
        launch: Any = kernels
        launch.row_factors[(rows,)](
            matrix,
            width,
            self.columns,
            self._where,
            len(self._table),
            losses,
            keep.view(torch.uint8),
            extra,
            self._aim,
            factor,
            report,
            rows,
            BLOCK=BLOCK,
            num_warps=4,
        )
        if self.columns:
            launch.dense_sum[(-(-self.columns // COLUMNS),)](
                matrix, width, self.columns, factor, rows, out, ROWS=ROWS, COLUMNS=COLUMNS
            )
        if self._programs:
            launch.pair_sum[(self._programs,)](
                matrix,
                width,
                self._tiles,
                self._where,
                factor,
                rows,
                out,
                ROWS=ROWS,
                OUTPUTS=OUTPUTS,
                INPUTS=INPUTS,
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

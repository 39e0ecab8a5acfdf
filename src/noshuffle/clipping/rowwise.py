"""The gradients of a step in few operations: rows on a CPU, small ones side by side on a GPU.

    on a CPU                       norms, in one call     weighted sums, in another
    DenseGradient                  ‖d[b]‖²                Σ_b f_b d[b]
    OuterGradient with one step    ‖a[b]‖² · ‖g[b]‖²
    OuterGradient                  inner products         (f·g)ᵀ a or gᵀ (f·a): one ordinary product

`native_rows` and `native_steps` read the matrices where they lie; the bias of a linear layer has
the matrix g of its weight, read once for both. What is not float32 in ordinary memory, or too
small, is left to the forms themselves: the twins of these functions. On a GPU `bundled` puts
[B, n_1], [B, n_2], … into one [B, n_1 + n_2 + …], with one norm and one weighted sum. State: where
the matrices of a step lie.

>>> form = DenseGradient(torch.randn(64, 2048))
>>> Rowwise({"w": [form]}).take_squares()
>>> torch.allclose(form.square.double(), form.squares().double())
True
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from noshuffle.clipping import native_rows, native_steps
from noshuffle.clipping.forms import DenseGradient, GradientForm, OuterGradient
from noshuffle.clipping.native_rows import Matrix, Weighing, matrix
from noshuffle.clipping.native_steps import StepMap
from noshuffle.clipping.rules import StepSums

#: Weighted numbers that are held at a time: 4 MiB.
HELD = 1 << 20
#: Larger gradients are worth an operation of their own on a GPU.
LARGEST = 1 << 17

Job = tuple[str, Weighing, str]  # the weight whose product is wanted, and the rows that are summed


class Rowwise:
    """The forms of parameters by name; those of which a parameter has several are passed over."""

    def __init__(self, forms: dict[str, list[GradientForm]]) -> None:
        self._forms = forms
        self._dense: dict[str, tuple[DenseGradient, Matrix]] = {}
        self._outer: dict[str, tuple[OuterGradient, Matrix, Matrix]] = {}
        self._at: dict[int, str] = {}  # names by where their matrices lie
        self._steps: dict[str, OuterGradient] = {}  # that have several
        self._sums: dict[str, StepSums] = {}
        for name, own in forms.items():
            form = own[0] if len(own) == 1 else None
            if isinstance(form, StepSums) and "grads" not in form.__dict__:
                self._sums[name] = form
            elif isinstance(form, DenseGradient):
                d = matrix(form.grads, form.grads.shape[0])
                if d is not None:
                    self._dense[name] = (form, d)
                    self._at[d.place] = name
            elif type(form) is OuterGradient:
                rows = form.g.shape[0] * form.g.shape[1]
                g, a = matrix(form.g, rows), matrix(form.a, rows)
                if g is not None and a is not None:
                    self._outer[name] = (form, g, a)
                if form.a.shape[1] > 1 and native_steps.fits(form.a, form.g):
                    self._steps[name] = form

    def take_squares(self) -> None:
        """Find the `square` of every form that is rows, and leave it with the form.

        Guarantees: never too small by more than a few roundings in double precision; an example
        with a NaN or an infinity has a square that is one.
        """
        if self._steps or self._sums:
            self._take_steps()
        pairs: list[tuple[Matrix, Matrix | None]] = []
        owners: list[tuple[GradientForm | None, GradientForm | None]] = []
        alone = {name: form for name, (form, _) in self._dense.items()}
        size = 0
        for form, g, a in self._outer.values():
            if form.a.shape[1] == 1:
                pairs.append((g, a))
                # two layers whose outputs are added have one g: the first takes the bias along
                owners.append((alone.pop(self._shared(g), None), form))
                size += g.rows * (g.width + a.width)
        for name, rows in alone.items():
            if "square" in rows.__dict__:
                continue
            d = self._dense[name][1]
            pairs.append((d, None))
            owners.append((rows, None))
            size += d.rows * d.width
        if not native_rows.is_worth(size):
            return
        for own, found in zip(owners, native_rows.squares(pairs)):
            for owner, square in zip(own, found):
                if owner is not None:
                    owner.__dict__["square"] = square

    def _take_steps(self) -> None:
        """The same of maps with several steps, and of the sums of those."""
        size, owners, maps = 0, [], []
        for form in self._steps.values():
            if form.is_small():  # written out instead
                continue
            a, g = form.a, form.g
            own = [name for name, sums in self._sums.items() if sums.g is g or sums.g is a]
            if (
                own and self._sums[own[0]].g is a
            ):  # stored the other way round: the norm is the same
                a, g = g, a
            owners.append((form, own))
            maps.append(StepMap(a, g, bool(own)))
            size += form.a.numel() + form.g.numel()
        if native_steps.is_worth(size):
            for (form, own), found in zip(owners, native_steps.squares(maps)):
                form.__dict__["square"] = found.squares
                for name in own:
                    self._sums[name].__dict__.update(grads=found.sums, square=found.sum_squares)
        for name, sums in self._sums.items():  # torch sums up what is left
            d = matrix(sums.grads, len(sums.grads))
            if d is not None:
                self._dense[name] = (sums, d)
        self._sums = {}

    def _shared(self, g: Matrix) -> str:
        """The bias whose gradients are this very matrix, or no name."""
        name = self._at.get(g.place, "")
        return name if name in self._dense and self._dense[name][1] == g else ""

    def totals(self, names: Iterable[str], factors: Tensor) -> dict[str, Tensor]:
        """Σ_b factors[b]·gradient[b] of the parameters among `names` that are rows.

        Their forms are used up, so that memory is given back product by product.
        Guarantees: the product of a factor and a number is rounded once, and so is each sum of a
        DenseGradient; the bits are the same for any number of threads.
        """
        alone: dict[str, Matrix] = {}
        weights: list[str] = []
        size = 0
        for name in names:
            if name not in self._dense:
                self._find_written(name)
            if name in self._dense:
                d = self._dense[name][1]
                if d.width <= native_rows.WIDEST:
                    alone[name] = d
                    size += d.rows * d.width
            elif name in self._outer:
                form, g, a = self._outer[name]
                if form.widths in (None, (g.width, a.width)):
                    weights.append(name)
                    size += g.rows * (g.width + a.width)
        found: dict[str, Tensor] = {}
        if not native_rows.is_worth(size):
            return found
        jobs: list[Job] = []
        for name in weights:
            _, g, a = self._outer[name]
            bias = self._shared(g)
            if alone.pop(bias, None) is not None:  # the factors go into g, which the bias wants too
                jobs.append((name, Weighing(g, True, True), bias))
            else:
                jobs.append((name, Weighing(g if g.width <= a.width else a, True, False), ""))
        jobs += [("", Weighing(d, False, True), name) for name, d in alone.items()]
        start = held = 0
        for end, (_, (of, is_kept, _), _) in enumerate(jobs, 1):
            held += of.rows * of.width if is_kept else 0
            if held > HELD or end == len(jobs):
                self._do(jobs[start:end], factors, found)
                start, held = end, 0
        return found

    def _find_written(self, name: str) -> None:
        """Gradients that were written out for their norms are rows now."""
        own = self._forms.get(name, ())
        for grads in getattr(own[0], "written", []) if len(own) == 1 else []:
            self._outer.pop(name, None)
            d = matrix(grads, grads.shape[0])
            if d is not None:
                self._dense[name] = (DenseGradient(grads), d)

    def _do(self, jobs: Sequence[Job], factors: Tensor, found: dict[str, Tensor]) -> None:
        """The products of some weights, and the sums of some rows."""
        done = native_rows.weighted([weighing for _, weighing, _ in jobs], factors)
        for (name, weighing, rows), (kept, total) in zip(jobs, done):
            if kept is not None:
                form, g, a = self._outer.pop(name)
                if weighing.of is g:
                    product = torch.mm(kept.mT, form.a.view(a.rows, a.width))
                else:
                    product = torch.mm(form.g.view(g.rows, g.width).mT, kept)
                found[name] = product.view(form.shape)
                del self._forms[name], form
            if total is not None:
                found[rows] = total.view(self._dense.pop(rows)[0].grads.shape[1:])
                del self._forms[rows]


class Bundle(NamedTuple):
    """Small gradients of several parameters, and where each of them is."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    form: DenseGradient

    def totals(self, factors: Tensor, bad: Tensor | None) -> dict[str, Tensor]:
        """The weighted sums, views of one tensor; `bad` examples are replaced by zeros first."""
        form: GradientForm = self.form if bad is None else self.form.kept(~bad)
        parts = form.total(factors).split_with_sizes([shape.numel() for shape in self.shapes])
        each = zip(self.names, parts, self.shapes)
        return {n: p if len(s) == 1 else p.view(s) for n, p, s in each}


def bundled(forms: dict[str, list[GradientForm]], names: Sequence[str]) -> Bundle | None:
    """Take the small written-out gradients among `names` out of `forms`; None if there are none."""
    found: dict[str, Tensor] = {}
    for name in names:
        own = forms.get(name, [])
        if len(own) == 1 and isinstance(own[0], DenseGradient):
            grads = own[0].grads
            if grads.dtype == torch.float32 and grads.shape[1:].numel() <= LARGEST:
                found[name] = grads
    if len(found) < 2:
        return None
    for name in found:
        del forms[name]
    joined = torch.cat(
        [g if g.dim() == 2 else g.reshape(g.shape[0], -1) for g in found.values()], 1
    )
    return Bundle(tuple(found), tuple(g.shape[1:] for g in found.values()), DenseGradient(joined))

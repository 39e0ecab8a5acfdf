"""All forms of a step that are plain rows, on a CPU: norms in one call, weighted sums in another.

    DenseGradient                  ‖d[b]‖²                Σ_b f_b d[b]
    OuterGradient with one step    ‖a[b]‖² · ‖g[b]‖²
    OuterGradient                                         (f·g)ᵀ a or gᵀ (f·a): one ordinary product

`native_rows` reads the matrices where they lie. The bias of a linear layer has the matrix g that
the weight's gradient is made of, which is read once for both. What is not float32 in ordinary
memory, or too small to be worth it, is left to the forms themselves: they are the twins of these
functions. State: where the matrices of one step lie.

>>> import torch
>>> form = DenseGradient(torch.randn(64, 2048))
>>> Rowwise({"w": [form]}).take_squares()
>>> torch.allclose(form.square.double(), form.squares().double())
True
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from noshuffle.clipping.forms import DenseGradient, GradientForm, OuterGradient
from noshuffle.clipping.native_rows import (
    WIDEST,
    Matrix,
    Weighing,
    is_worth,
    matrix,
    squares,
    weighted,
)

#: Weighted numbers that are held at a time: 4 MiB.
HELD = 1 << 20


class Rowwise:
    """The forms of parameters by name; those of which a parameter has several are passed over."""

    def __init__(self, forms: dict[str, list[GradientForm]]) -> None:
        self._forms = forms
        self._dense: dict[str, tuple[DenseGradient, Matrix]] = {}
        self._outer: dict[str, tuple[OuterGradient, Matrix, Matrix]] = {}
        self._at: dict[int, str] = {}  # names by where their matrices lie
        for name, own in forms.items():
            form = own[0] if len(own) == 1 else None
            if isinstance(form, DenseGradient):
                d = matrix(form.grads, form.grads.shape[0])
                if d is not None:
                    self._dense[name] = (form, d)
                    self._at[d[0]] = name
            elif type(form) is OuterGradient:
                size, steps = form.g.shape[:2]
                g, a = matrix(form.g, size * steps), matrix(form.a, size * steps)
                if g is not None and a is not None:
                    self._outer[name] = (form, g, a)

    def take_squares(self) -> None:
        """Find the `square` of every form that is rows, and leave it with the form.

        Guarantees: never too small by more than a few roundings in double precision; an example
        with a NaN or an infinity has a square that is one.
        """
        pairs: list[tuple[Matrix, Matrix | None]] = []
        owners: list[tuple[DenseGradient | None, OuterGradient | None]] = []
        alone: dict[str, DenseGradient | None] = {name: own[0] for name, own in self._dense.items()}
        size = 0
        for form, g, a in self._outer.values():
            if form.a.shape[1] == 1:
                # two layers whose outputs are added have one g: the first takes the bias along
                bias = alone.pop(self._shared(g), None)
                pairs.append((g, a))
                owners.append((bias, form))
                size += g[1] * (g[2] + a[2])
        for name in alone:
            rows, d = self._dense[name]
            pairs.append((d, None))
            owners.append((rows, None))
            size += d[1] * d[2]
        if not is_worth(size):
            return
        for (rest, weight), found in zip(owners, squares(pairs)):
            if rest is not None:
                rest.__dict__["square"] = found[0]
            if weight is not None:
                weight.__dict__["square"] = found[1]

    def _shared(self, g: Matrix) -> str:
        """The bias whose gradients are this very matrix, or no name."""
        name = self._at.get(g[0], "")
        return name if name in self._dense and self._dense[name][1] == g else ""

    def totals(self, names: Iterable[str], factors: Tensor) -> dict[str, Tensor]:
        """Σ_b factors[b]·gradient[b] of the parameters among `names` that are rows.

        Their forms are used up, so that memory is given back product by product.
        Guarantees: the product of a factor and a number is rounded once, and so is each sum of a
        DenseGradient; the bits are the same for any number of threads.
        """
        alone: dict[str, Matrix] = {}
        wanted: list[str] = []
        size = 0
        for name in names:
            if name not in self._dense:
                self._find_written(name)
            if name in self._dense:
                d = self._dense[name][1]
                if d[2] <= WIDEST:
                    alone[name] = d
                    size += d[1] * d[2]
            elif name in self._outer:
                form, g, a = self._outer[name]
                if form.widths in (None, (g[2], a[2])):
                    wanted.append(name)
                    size += g[1] * (g[2] + a[2])
        if not is_worth(size):
            return {}
        found: dict[str, Tensor] = {}
        held: list[tuple[str, Weighing, str]] = []
        many = 0
        for name in wanted:
            _, g, a = self._outer[name]
            bias = self._shared(g)
            if alone.pop(bias, None) is not None:
                weighing = Weighing(
                    g, True, True
                )  # the factors go into g, which the bias wants too
            else:
                weighing = Weighing(g if g[2] <= a[2] else a, True, False)
            held.append((name, weighing, bias))
            many += weighing.of[1] * weighing.of[2]
            if many > HELD:
                self._multiply(held, factors, found)
                held, many = [], 0
        if held:
            self._multiply(held, factors, found)
        if alone:
            done = weighted([Weighing(d, False, True) for d in alone.values()], factors)
            for name, (_, total) in zip(alone, done):
                self._put(found, name, total)
        return found

    def _find_written(self, name: str) -> None:
        """Gradients that were written out for their norms are rows now."""
        own = self._forms.get(name, ())
        written: list[Tensor] = getattr(own[0], "written", []) if len(own) == 1 else []
        d = matrix(written[0], written[0].shape[0]) if written else None
        if written:
            self._outer.pop(name, None)
        if d is not None:
            self._dense[name] = (DenseGradient(written[0]), d)

    def _multiply(
        self,
        held: Sequence[tuple[str, Weighing, str]],
        factors: Tensor,
        found: dict[str, Tensor],
    ) -> None:
        """The products of some weights, and the sums that come along."""
        for (name, weighing, bias), (kept, total) in zip(
            held, weighted([w for _, w, _ in held], factors)
        ):
            assert kept is not None
            form, g, a = self._outer[name]
            if weighing.of is g:
                product = torch.mm(kept.mT, form.a.view(a[1], a[2]))
            else:
                product = torch.mm(form.g.view(g[1], g[2]).mT, kept)
            found[name] = product.view(form.shape)
            del self._outer[name], self._forms[name], form
            if weighing.is_summed:
                self._put(found, bias, total)

    def _put(self, found: dict[str, Tensor], name: str, total: Tensor | None) -> None:
        assert total is not None
        found[name] = total.view(self._dense.pop(name)[0].grads.shape[1:])
        del self._forms[name]

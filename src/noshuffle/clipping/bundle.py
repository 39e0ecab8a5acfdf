"""Many small gradients as one: biases and norm layers side by side, for devices that launch slowly.

    [B, n_1], [B, n_2], …   →   [B, n_1 + n_2 + …]      one norm, one weighted sum

A transformer has a hundred of them and a GPU takes as long to start an operation as to do one. The
sums of the parts are views of one tensor. On a CPU nothing is bundled: it would be a copy for
nothing. No state.

>>> import torch
>>> forms = {"a": [DenseGradient(torch.ones(2, 3))], "b": [DenseGradient(torch.ones(2, 1))]}
>>> pack = bundled(forms, ("a", "b"))
>>> forms, pack.names, pack.form.squares()
({}, ('a', 'b'), tensor([4., 4.]))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noshuffle.clipping.forms import DenseGradient, GradientForm

#: Larger gradients are worth an operation of their own.
LARGEST = 2**17


@dataclass(frozen=True)
class Bundle:
    """Small gradients of several parameters, and where each of them is."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    form: DenseGradient

    def totals(self, factors: Tensor, bad: Tensor | None) -> dict[str, Tensor]:
        """The weighted sums, by name; `bad` examples are replaced by zeros first."""
        form: GradientForm = self.form if bad is None else self.form.kept(~bad)
        parts = torch.split(form.total(factors), [shape.numel() for shape in self.shapes])
        return {n: p.view(s) for n, p, s in zip(self.names, parts, self.shapes)}


def bundled(forms: dict[str, list[GradientForm]], names: Sequence[str]) -> Bundle | None:
    """Take the small written-out gradients among `names` out of `forms`; None if there are none."""
    found: dict[str, Tensor] = {}
    for name in names:
        own = forms.get(name, [])
        if len(own) == 1 and isinstance(own[0], DenseGradient):
            grads = own[0].grads
            if grads.dtype == torch.float32 and grads[0].numel() <= LARGEST:
                found[name] = grads
    if len(found) < 2:
        return None
    for name in found:
        del forms[name]
    joined = torch.cat([grads.reshape(len(grads), -1) for grads in found.values()], 1)
    return Bundle(tuple(found), tuple(g.shape[1:] for g in found.values()), DenseGradient(joined))

"""Whether a weight is used outside the layers that account for it, by the graph of the losses.

    loss ── … ── tanh ── layer(x) ── weight          a path through the result of its layer
    loss ── … ── tanh ── x @ weightᵀ ── weight       a path around it: no rule knows that gradient

Numbers do not tell: where tanh is flat, or a gate is shut, the second path has no gradient in the
rows of the trial, and one in those behind them. The graph is the same for all rows of a batch.
Every path from the losses to a weight must go through a result of a layer that owns it, and none
may come in with what that layer is given. A path whose factor is the number 0 (`0.0 *
weight.sum()`) is none. The first batch is asked as a whole, too: a test of Python on the batch may
choose another way there. State: the calls of one run.

>>> from noshuffle.clipping.layers import read
>>> model, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.ones(3, 2)
>>> with noted(read(model)) as calls:
...     losses = model(x).sum(1) + (x @ model[0].weight.mT).tanh().sum(1)
>>> calls.refuse(losses, {"0.weight": model[0].weight, "0.bias": model[0].bias})
Traceback (most recent call last):
    ...
noshuffle.clipping.layers.NotByLayer: '0.weight' is used outside its own layer
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from noshuffle.clipping.check import as_written, trainable
from noshuffle.clipping.layers import Layers, NotByLayer, tensors
from noshuffle.clipping.objective import Batch, Loss, batch_losses, batch_size, take
from noshuffle.clipping.statefulness import put_back_after
from noshuffle.clipping.trial_runs import with_same_rng

Node = torch.autograd.graph.Node
_OF_PYTHON = (torch.float64, torch.int64, torch.bool)


def _nodes(tree: Any) -> Iterator[Node]:
    """Where tensors stand in the graph; of a view also what it is a view of, since a write in place
    (`out += x`) leads around the view."""
    for t in tensors(tree):
        for own in (t, t._base):
            if own is not None and own.grad_fn is not None:
                yield own.grad_fn


@dataclass
class Calls:
    """The results of the layers that own a parameter, and what these were given, by its id."""

    results: dict[int, set[Node]] = field(default_factory=dict)
    given: dict[int, set[Node]] = field(default_factory=dict)

    def note(
        self, own: Iterable[nn.Parameter], _: nn.Module, args: Any, kwargs: Any, out: Any
    ) -> None:
        """A layer that owns some parameters was called."""
        results, given = set(_nodes(out)), set(_nodes((args, kwargs)))
        for p in own:
            self.results.setdefault(id(p), set()).update(results)
            self.given.setdefault(id(p), set()).update(given)

    def refuse(self, losses: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise NotByLayer if a path leads from the losses around the layers of a parameter."""
        if losses.grad_fn is None:
            return
        names = {id(p): name for name, p in parameters.items()}
        users: dict[Node, list[Node]] = {losses.grad_fn: []}
        found: dict[str, Node] = {}
        stack = [losses.grad_fn]
        while stack:
            node = stack.pop()
            name = names.get(id(getattr(node, "variable", None)))
            if name is not None:
                found[name] = node
            for after, _ in () if _is_times_zero(node) else node.next_functions:
                if after is not None:
                    if after not in users:
                        stack.append(after)
                    users.setdefault(after, []).append(node)
        for name, leaf in found.items():
            own = id(parameters[name])
            ends = {losses.grad_fn} | self.given.get(own, set())
            if _leads_to(ends, leaf, users, around=self.results.get(own, set())):
                raise NotByLayer(f"{name!r} is used outside its own layer")


def _is_times_zero(node: Node) -> bool:
    """Whether a node multiplies by the number 0 of Python, which torch keeps in its widest type: a
    gate that is closed so far is a tensor of the model or of the data."""
    if node.name() != "MulBackward0" or any(after for after, _ in node.next_functions[1:]):
        return False
    factor = node._saved_other  # type: ignore[attr-defined]
    is_number = factor is not None and not factor.dim() and factor.dtype in _OF_PYTHON
    return is_number and not float(factor)


def _leads_to(
    ends: set[Node], start: Node, users: Mapping[Node, list[Node]], *, around: set[Node]
) -> bool:
    """Whether something of `ends` is made of `start` other than by way of `around`."""
    seen, stack = {start}, [start]
    while stack:
        node = stack.pop()
        if node in around:
            continue
        if node in ends:
            return True
        new = [user for user in users[node] if user not in seen]
        seen.update(new)
        stack += new
    return False


def used_inside(model: nn.Module, loss_fn: Loss, batch: Batch, layers: Layers) -> None:
    """Raise NotByLayer if a path of this batch leads around the layers of a parameter; the model is
    as before. A batch that does not fit the device a second time is halved until it does."""
    while True:
        try:
            with (
                put_back_after(model), as_written(model), with_same_rng(model),
                torch.enable_grad(), noted(layers) as calls,
            ):  # fmt: skip
                calls.refuse(batch_losses(model, loss_fn, batch), trainable(model))
            return
        except torch.OutOfMemoryError:
            if batch_size(batch) == 1:
                raise
            batch = take(batch, slice(batch_size(batch) // 2))


@contextmanager
def noted(layers: Layers) -> Iterator[Calls]:
    """Note the calls of all layers that account for parameters, for as long as the block lasts."""
    calls = Calls()
    with ExitStack() as stack:
        for name, layer in (*layers.watched.items(), *layers.rewritten.items()):
            is_unruled = name in layers.unruled_layers
            own = layers.unruled(name).values() if is_unruled else layer.parameters()
            note = partial(calls.note, list(own))
            handle = layer.register_forward_hook(note, with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
        yield calls

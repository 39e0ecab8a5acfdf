"""Which layers of a model to watch, and where their example axis is.

`read(model)` sorts the modules that hold trainable parameters into ruled (a registered rule),
rewritten (recurrent, attention) and unruled (neither: written out by vmap of the layer alone). A
layer with parameters beside layers that have rules (the patches, positions and class token of a
vision transformer) writes out those of its own alone (`split`).

The example axis of each call is found by running two and then three examples: it is the axis whose
length goes from 2 to 3 (or from 2k to 3k in front: a batch flattened with its positions). A call
without one, such as positions [T] shared by all examples, is given one for embeddings.

>>> from torch import nn
>>> sorted(read(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.PReLU())).unruled_layers)
['2']
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from noshuffle.clipping import rules_attention, rules_conv, rules_recurrent  # noqa: F401
from noshuffle.clipping.pooling import pools
from noshuffle.clipping.rules import Rule, find_rewrite, find_rule, named_rule
from noshuffle.clipping.tape import GradientTape, watching

Axes = tuple[int | None, ...]


class NotByLayer(Exception):
    """The model cannot be clipped layer by layer; the text says why. Never leaves the package."""


class Mixes(NotByLayer):
    """An example changes the loss or the gradient of another one."""


@dataclass
class Layers:
    """Modules by name, sorted by how their gradients are had."""

    ruled: dict[str, nn.Module] = field(default_factory=dict)
    rules: dict[str, Rule] = field(default_factory=dict)
    rewritten: dict[str, nn.Module] = field(default_factory=dict)
    unruled_layers: dict[str, nn.Module] = field(default_factory=dict)
    split: set[str] = field(default_factory=set)  # unruled ones whose parts go by their own rules
    pools: list[nn.MaxPool2d] = field(default_factory=list)  # nothing to train, but slow as is

    @cached_property
    def watched(self) -> dict[str, nn.Module]:
        """All that are watched; to be asked for when nothing is added any more."""
        return {**self.ruled, **self.unruled_layers}

    def unruled(self, name: str) -> dict[str, nn.Parameter]:
        """Parameters of a layer without a rule that are written out, by their names in it."""
        found = self.unruled_layers[name].named_parameters(recurse=name not in self.split)
        return {own: p for own, p in found if p.requires_grad}


def _trains(module: nn.Module, *, recurse: bool = True) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=recurse))


def read(model: nn.Module, *, is_isolated: bool = False) -> Layers:
    """Sort the layers of a model; raises NotByLayer if it cannot be clipped layer by layer.

    `is_isolated`: for a pass that keeps examples apart by vmap, which knows no such models.
    """
    layers = Layers(pools=pools(model))
    done: set[int] = set()

    def walk(module: nn.Module, name: str) -> None:
        if id(module) in done or not _trains(module):
            return
        done.add(id(module))
        found = find_rule(module) or named_rule(module)
        if find_rewrite(module) is not None:
            layers.rewritten[name] = module
        elif found is not None and not any(map(_trains, module.children())):
            layers.ruled[name], layers.rules[name] = module, found
        elif parametrize.is_parametrized(module) or _trains(module, recurse=False):
            if not name and not is_isolated:
                raise NotByLayer("the model holds parameters of its own, outside any layer")
            layers.unruled_layers[name] = module
            if parametrize.is_parametrized(module):
                done.update(id(child) for child in module.modules())
            elif any(map(_trains, module.children())):
                layers.split.add(name)
                walk_into(module, name)
        else:
            walk_into(module, name)

    def walk_into(module: nn.Module, name: str) -> None:
        for child_name, child in module.named_children():
            walk(child, f"{name}.{child_name}" if name else child_name)

    walk(model, "")
    for name, module in () if is_isolated else layers.unruled_layers.items():
        if any(_is_random(m) for m in module.modules()):
            raise NotByLayer(f"layer {name!r} has no rule and draws random numbers (dropout)")
    return layers


def _is_random(module: nn.Module) -> bool:
    rate = getattr(module, "p", getattr(module, "dropout", 0.0))
    return module.training and isinstance(rate, float) and rate > 0.0


class CallAxes(NamedTuple):
    """The example axis of every input and output tensor of one call, and the rows per example."""

    inputs: Axes
    outputs: Axes
    input_rows: int
    output_rows: int


@dataclass(frozen=True)
class ExampleAxes:
    """What the trial saw of every layer, call by call."""

    calls: dict[str, list[CallAxes]]
    shared: frozenset[str]  # embeddings whose index has no example axis and must be given one
    inner: tuple[torch.Size, ...] = ()  # shapes of one example in the trial

    def call_beyond(self, name: str) -> CallAxes:
        """A call more than in the trial, which is allowed to a layer that is always used alike."""
        known = self.calls.get(name, [])
        if len({own[:2] for own in known}) != 1:
            raise NotByLayer(f"layer {name!r} was called more often than in the trial")
        return known[-1]


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a nested structure, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def stamp(t: Tensor) -> int:
    """A number that an in-place change makes another one."""
    return -1 if t.is_inference() else t._version


def _rows(shapes: Sequence[torch.Size], axes: Axes) -> int:
    """How many rows of the first tensor belong to one example, in a run of two."""
    return shapes[0][axes[0] or 0] // 2 if shapes and shapes[0] else 1


def _axis(two: torch.Size, three: torch.Size, name: str) -> int | None:
    if len(two) != len(three):
        raise NotByLayer(f"layer {name!r} sees tensors whose rank depends on the batch size")
    moved = [d for d in range(len(two)) if two[d] != three[d]]
    if not moved:
        return None
    (d, *more) = moved
    if more or two[d] * 3 != three[d] * 2 or (d > 0 and two[d] != 2):
        raise NotByLayer(f"layer {name!r} mixes the example axis with another")
    return d


@contextmanager
def spread(layers: Layers, shared: frozenset[str], size: int) -> Iterator[None]:
    """Give the index of shared embeddings an example axis, for as long as the block lasts."""

    def expand(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        index = args[0]
        lead = index.shape[1:] if index.dim() > 1 and index.shape[0] == 1 else index.shape
        return (index.expand(size, *lead), *args[1:])

    with ExitStack() as stack:
        for name in shared:
            handle = layers.ruled[name].register_forward_pre_hook(expand)
            stack.callback(handle.remove)
        yield


Calls = dict[str, list[tuple[list[torch.Size], list[torch.Size]]]]  # inputs and outputs of each


@contextmanager
def without_gradient() -> Iterator[None]:
    """torch.no_grad() that leaves nothing behind.

    torch up to 2.9 keeps the weights that autocast cast meanwhile, without a gradient, for the next
    forward pass.
    """
    try:
        with torch.no_grad():
            yield
    finally:
        torch.clear_autocast_cache()


def _shapes_of_calls(
    model: nn.Module, layers: Layers, run: Callable[[int], Tensor], held: frozenset[str], size: int
) -> Calls:
    """The shapes that every layer sees in a run of `size` examples."""
    calls: Calls = {}

    def seen(name: str, layer: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        ins = [t.shape for t in tensors((args, kwargs))]
        calls.setdefault(name, []).append((ins, [t.shape for t in tensors(out)]))

    watch = watching(model, layers.watched, seen, GradientTape(size, is_on=False))
    try:
        with without_gradient(), watch, spread(layers, held, size):
            run(size)
    except (RuntimeError, ValueError, IndexError) as error:
        if not held:
            raise
        raise NotByLayer(
            f"embedding {min(held)!r} is looked up without an example axis, and the model does "
            "not run with one; freeze it, or give it one"
        ) from error
    return calls


def find_layout(
    model: nn.Module, layers: Layers, run: Callable[[int], Tensor], *, shared: Sequence[str] = ()
) -> ExampleAxes:
    """Run two and three examples (`run(n)` gives n losses) and compare the shapes of every call."""
    held = frozenset(shared)
    two, three = (_shapes_of_calls(model, layers, run, held, size) for size in (2, 3))
    found = ExampleAxes({}, held)
    lacking: set[str] = set()
    for name, calls_two in two.items():
        calls_three = three.get(name, [])
        if len(calls_two) != len(calls_three):
            raise NotByLayer(f"layer {name!r} is called a number of times that depends on the data")
        for (in2, out2), (in3, out3) in zip(calls_two, calls_three):
            ins = tuple(_axis(x, y, name) for x, y in zip(in2, in3))
            outs = tuple(_axis(x, y, name) for x, y in zip(out2, out3))
            call = CallAxes(ins, outs, _rows(in2, ins), _rows(out2, outs))
            found.calls.setdefault(name, []).append(call)
            if None in outs or (name in layers.ruled and None in ins):
                lacking.add(name)
            merged = any(s[0] != 2 for s, d in zip([*in2, *out2], [*ins, *outs]) if d == 0)
            if name in layers.unruled_layers and merged:
                raise NotByLayer(f"layer {name!r} has no rule and sees a flattened batch")
    for name in lacking:
        if name in held or not isinstance(layers.ruled.get(name), nn.Embedding):
            raise NotByLayer(f"layer {name!r} sees a tensor without an example axis")
    return find_layout(model, layers, run, shared=[*held, *lacking]) if lacking else found

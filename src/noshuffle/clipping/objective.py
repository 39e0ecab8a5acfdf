"""How a loss is written, what a batch may hold, and how a loss is read one example at a time.

The loss of example i is the criterion of a batch that holds only example i,

    ℓ_i(θ) = loss_fn(model(x_i[None]), *y_i[None]),

so a mean over tokens, an ignored index or a class weight never couples two examples, whatever the
reduction (a result with several entries is summed). A batch holds (`cuttable`)

    tensors                       example axis first; dictionaries, tuples and lists of them too
    None, bool, int, float, str   a setting, the same for every example
    other mappings                taken as dictionaries (the BatchEncoding of a tokenizer)

and nothing else: what cannot be cut by example every loss would see whole, and one changed row
would move the whole sum. No state.

>>> import torch
>>> outputs, targets = torch.zeros(2, 3), torch.tensor([0, -100])
>>> row_losses(torch.nn.CrossEntropyLoss(), outputs, (targets,))     # row 1 has no valid token
tensor([1.0986,    nan])
>>> alike = [lambda out, y: out * k for k in (1, 2)]
>>> identity_of(alike[0]) == identity_of(alike[1]), identity_of(alike[0]) == identity_of(len)
(True, False)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from noshuffle.clipping.criteria import ClassesLast, known_by_row
from noshuffle.errors import InvalidInput, callables

Criterion = Callable[..., Tensor]
Batch = tuple[Any, ...]
#: Values that are a setting by themselves, and of unknown meaning in a list.
PLAIN = (bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class ModelLoss:
    """A loss that calls the model itself, for several inputs or terms: `fn(model, *batch)`.

    By default `fn` returns one number and is evaluated on one example at a time. With
    `by_row=True` it returns one number per example and is evaluated on the whole batch at once,
    which the ghost engine needs; row i must then depend on example i alone.
    """

    fn: Callable[..., Tensor]
    by_row: bool = False

    def __post_init__(self) -> None:
        callables(fn=self.fn)


Loss = Criterion | ModelLoss


def cuttable(batch: Batch) -> Batch:
    """The batch with every mapping as a dictionary; raises if it holds what cannot be cut."""
    for part in batch if type(batch) is tuple else (None,):
        if not isinstance(part, Tensor):
            break
    else:
        return batch
    if not isinstance(batch, tuple | list):
        raise InvalidInput(
            f"a batch must be a tuple of tensors or of dictionaries, lists and tuples of tensors, "
            f"got {type(batch).__name__}; put it into one: (batch,)"
        )
    return tuple(_read(part, where=f"part {i} of the batch") for i, part in enumerate(batch))


def _read(part: Any, *, where: str) -> Any:
    if isinstance(part, Tensor) or part is None or type(part) in PLAIN:
        return part
    if isinstance(part, Mapping):
        return {key: _read(own, where=f"{where}[{key!r}]") for key, own in part.items()}
    if isinstance(part, tuple | list):
        if any(type(own) in PLAIN for own in part):
            raise InvalidInput(
                f"{where} is a {type(part).__name__} of plain values, which cannot be cut by "
                "example: make it a tensor with one row an example (settings go in one by one, or "
                "through the loss function)"
            )
        read = [_read(own, where=f"{where}[{i}]") for i, own in enumerate(part)]
        if hasattr(part, "_fields"):
            return type(part)(*read)
        return read if isinstance(part, list) else tuple(read)
    raise InvalidInput(
        f"{where} must be a tensor, or a dictionary, list or tuple of tensors, got "
        f"{type(part).__module__}.{type(part).__name__}, which cannot be cut by example; make it a "
        "tensor (torch.from_numpy), or give it through the loss function if it is a setting"
    )


def leaves(batch: Any) -> Sequence[Any]:
    """Everything in a batch that holds nothing else, in order."""
    for leaf in batch if type(batch) is tuple else (None,):
        if not isinstance(leaf, Tensor):
            found: list[Any] = tree_leaves(batch)
            return found
    return batch  # type: ignore[no-any-return]  # the usual one: to look inside takes long


class BatchShape(NamedTuple):
    """What is known of a batch without its numbers."""

    size: int  # examples
    kinds: tuple[Any, ...]  # axes and types of its leaves; settings
    entries: int  # numbers in all of it
    inner: tuple[torch.Size, ...]  # shapes of one example


def shape_of(batch: Batch) -> BatchShape:
    """The shape of a batch; raises where its tensors disagree or it cannot be cut by example."""
    sizes: set[int] = set()
    kinds: list[Any] = []
    entries, inner = 0, []
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            if leaf.is_nested or leaf.layout is not torch.strided or leaf.is_inference():
                _refuse_kind(leaf)
            shape = leaf.shape
            if not shape:
                raise InvalidInput(
                    "every tensor of a batch must have the example axis first, got one with no "
                    "axis at all; give constants through the loss function instead"
                )
            sizes.add(shape[0])
            entries += leaf.numel()
            kinds.append((len(shape), leaf.dtype))
            inner.append(shape[1:])
        elif leaf is None or type(leaf) in PLAIN:
            kinds.append(leaf if isinstance(leaf, bool | str) else type(leaf))
        else:
            raise InvalidInput(
                f"a batch must hold tensors and plain settings, got {type(leaf).__name__}, which "
                "cannot be cut by example; make it a tensor"
            )
    if len(sizes) != 1:
        raise InvalidInput(
            "the tensors of a batch must agree on the number of examples (first axis), got "
            f"{sorted(sizes) or 'no tensor'}"
        )
    return BatchShape(sizes.pop(), tuple(kinds), entries, tuple(inner))


def _refuse_kind(leaf: Tensor) -> None:
    """Raise for a tensor that cannot be cut by example, or that no gradient passes."""
    if leaf.is_inference():
        raise InvalidInput(
            "a batch holds a tensor that was made in torch.inference_mode(), which no gradient "
            "passes; make it outside, or clone() it"
        )
    kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
    raise InvalidInput(
        f"a batch must hold dense tensors, which can be cut by example, got a {kind} one; "
        "call to_dense(), or to_padded_tensor() and give a mask"
    )


def batch_size(batch: Batch) -> int:
    """The number of examples; raises what `shape_of` raises."""
    return shape_of(batch).size


def of_each(fn: Callable[[Tensor], Any], batch: Any) -> Any:
    """A batch with `fn` of every tensor in its place, and all else as it is."""
    if type(batch) is tuple and all(isinstance(leaf, Tensor) for leaf in batch):
        return tuple(map(fn, batch))  # the usual one: `tree_map` takes longer than most of these
    return tree_map(lambda t: fn(t) if isinstance(t, Tensor) else t, batch)


def take(batch: Batch, rows: Tensor | slice) -> Batch:
    """Some examples of a batch."""
    picked: Batch = of_each(lambda t: t[rows], batch)
    return picked


def batch_axes(batch: Batch) -> Any:
    """The `in_dims` of a batch for vmap: 0 for tensors, None for everything else."""
    return tree_map(lambda t: 0 if isinstance(t, Tensor) else None, batch)


def one(example: Any) -> Any:
    """An example as a batch of one."""
    return of_each(lambda t: t.unsqueeze(0), example)


def _number(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise InvalidInput(
            f"the loss must return a floating-point tensor, got {type(value).__name__}"
        )
    return value if value.dim() == 0 else value.sum()


def single_loss(call: Callable[..., Any], loss_fn: Loss, single: Batch) -> Tensor:
    """The loss of a batch that holds one example; `call` is the model."""
    if isinstance(loss_fn, ModelLoss):
        return _number(loss_fn.fn(call, *single))
    callables(loss_fn=loss_fn)
    return _number(loss_fn(call(single[0]), *single[1:]))


def must_depend(value: Tensor) -> None:
    """Raise if a loss has no gradient: noise alone would be released."""
    if not value.requires_grad:
        raise InvalidInput(
            "the loss must depend on the trainable parameters, got one without a gradient; it was "
            "detached, or computed under torch.no_grad or torch.inference_mode"
        )


def is_rowwise(loss_fn: Loss) -> bool:
    """Whether all losses of a batch can be had from one run of the model."""
    return not isinstance(loss_fn, ModelLoss) or loss_fn.by_row


def batch_losses(
    model: nn.Module, loss_fn: Loss, batch: Batch, *, size: int | None = None
) -> Tensor:
    """One loss per example from one run of the model on the whole batch of `size`, if known."""
    size = batch_size(batch) if size is None else size
    if isinstance(loss_fn, ModelLoss):
        losses = loss_fn.fn(model, *batch)
    else:
        given: Any = loss_fn
        if not callable(given):
            callables(loss_fn=given)
        outputs = model(batch[0])
        if isinstance(outputs, Tensor):
            got = {outputs.shape[:1]}
        else:
            got = {leaf.shape[:1] for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)}
        if got != {(size,)}:
            raise InvalidInput(
                f"the model must return tensors with the example axis ({size}) first, got first "
                f"axes {sorted(map(tuple, got))}; wrap the loss in ModelLoss if they differ"
            )
        losses = row_losses(loss_fn, outputs, batch[1:])
    if not isinstance(losses, Tensor) or losses.shape != (size,):
        came = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise InvalidInput(f"the loss must give one number per example ({size},), got {came}")
    return losses


def row_losses(loss_fn: Criterion, outputs: Any, targets: tuple[Any, ...]) -> Tensor:
    """The criterion of every row as a batch of one, without a Python loop where possible."""
    fast = known_by_row(loss_fn, outputs, targets)
    if fast is not None:
        return fast
    rows = (outputs, *targets)
    is_host = isinstance(outputs, Tensor) and outputs.device.type == "cpu"

    def of_one(*row: Any) -> Tensor:
        first, *rest = one(row)
        with ClassesLast() if is_host else nullcontext():
            return _number(loss_fn(first, *rest))

    try:
        mapped: Tensor = torch.vmap(of_one, in_dims=batch_axes(rows), randomness="different")(*rows)
        return mapped
    except RuntimeError as error:
        if not is_vmap_limit(error):
            raise
        size = batch_size(rows)
        each = (take(rows, slice(i, i + 1)) for i in range(size))
        return torch.stack([_number(loss_fn(*row)) for row in each])


def is_vmap_limit(error: RuntimeError) -> bool:
    """Whether an error says that vmap cannot do something, rather than that it went wrong.

    Two types beside each other may be either: torch 2.13 has no vmap of the backward pass of a
    layer norm, nor torch.func.grad of fused attention, behind an autocast inside the function.
    Without vmap, what went wrong is said again.
    """
    text = str(error).lower()
    limits = ("vmap", "functorch", "batchedtensor", "batching rule", "saved tensor hooks")
    memory = ("mutate a captured tensor", "doesn't have storage")  # the second of .numpy()
    types = ("expected scalar type", "the same dtype", "the broadcast shape")
    return any(word in text for word in (*limits, *memory, *types))


def identity_of(loss_fn: Loss) -> Any:
    """A key for losses that run the same code, which does not keep the loss alive.

    What an engine finds out about a model holds for one kind of loss. A fresh lambda in every step
    runs the code of the last one, so the code is compared: of the function, of what it wraps and of
    what it holds.
    """
    fn = loss_fn.fn if isinstance(loss_fn, ModelLoss) else loss_fn
    return _code(fn), isinstance(loss_fn, ModelLoss)


def _code(fn: Any, depth: int = 4) -> Any:
    """What a function runs: its code, and that of the functions it wraps or holds."""
    if isinstance(fn, bool | str):
        return fn
    if isinstance(fn, partial):
        given = (fn.func, *fn.args, *fn.keywords.values())
        return tuple(_code(each, depth - 1) for each in given) if depth else partial
    code, cells = getattr(fn, "__code__", type(fn)), getattr(fn, "__closure__", None) or ()
    if not depth or not cells:
        return code
    return (code, *(_code(_held(cell), depth - 1) for cell in cells))


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None

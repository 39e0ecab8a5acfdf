"""Whether what one example sends back changes with the others, tried on the loss that a loop made.

A loss Σ_i ℓ_i sends c_i = ∂ℓ_i/∂output_i back to row i, and c_i depends on row i alone. Weights of
a batch (its standard deviation, counts of its labels, one row that others are compared with) break
that, and leave no node in a graph where they were computed without gradients. So the calls between
a forward pass and `backward` are noted and repeated with other rows:

    row_i ← row_{i+1} for all i in a set S, in the outputs and in everything that has a row for each

and c_j, j ∉ S, must be what it was, factor and reduction taken out (`loss_graph`). The sets are the
bits of the row numbers and their complements, so that every pair (i ∈ S, j ∉ S) is tried: 2⌈log₂ B⌉
repetitions of the loss, without the model.

Guarantees: none beyond what was tried. Not seen: what was computed before the model was called, or
from numbers of Python (`1 / x.item()`, `if`; `x.item()` itself is known again), calls beyond
`MOST_CALLS`, and rows that change nothing today (a maximum that another row has). Parameters,
places of rows and the constants of layers and losses (`weight=`) are kept as they are. State: the
calls since the last forward pass.

>>> import torch
>>> outputs = torch.randn(4, 3).requires_grad_() * 1
>>> def mixes(loss_fn):
...     with LossTrace([outputs], []) as trace:
...         return bool(trace.coupling(loss_fn(outputs), None))
>>> mixes(lambda o: o.square().mean()), mixes(lambda o: (o - o.detach().mean(0)).square().mean())
(False, True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._pytree import tree_leaves, tree_map

from noshuffle.training.loss_coupling import COUPLED
from noshuffle.training.loss_graph import read_loss
from noshuffle.training.step import generators

_modes: Any = _get_current_function_mode_stack
#: Calls of a loss that are noted, and bytes of their results, at most.
MOST_CALLS, MOST_BYTES = 2_000, 1 << 30
#: Functions whose arguments after the first are constants: of layers, and lengths of sequences.
LAYERS = (
    "linear", "bilinear", "conv1d", "conv2d", "conv3d", "batch_norm", "instance_norm", "group_norm",
    "layer_norm", "rms_norm", "embedding", "prelu", "ctc_loss", "matmul", "__matmul__", "mm", "mv",
)  # fmt: skip
#: Functions that look numbers up in their first argument, by their last.
TABLES = ("__getitem__", "index_select", "gather", "take")
#: Arguments that are constants of the classes.
CONSTANTS = ("weight", "pos_weight", "bias", "running_mean", "running_var")
IS_CONSTANT = (
    "{found}. Only a tensor of {size} rows that the model was not given did this: if it is a "
    "constant, which has nothing to do with the batch, make it an nn.Parameter with "
    "requires_grad=False"
)


class Call(NamedTuple):
    """One call of torch."""

    func: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    result: Any
    has_grad: bool
    cast: torch.dtype | None


class LossTrace(TorchFunctionMode):
    """Notes what is called while it is on, to repeat it with other rows.

    `outputs` are those of a pass that gradients come back to, `inputs` what it was given.
    """

    def __init__(self, outputs: Sequence[Tensor], inputs: Any) -> None:
        super().__init__()
        self.is_on = True
        self._outputs, self._kind = list(outputs), outputs[0].device.type
        self.starts = {one.grad_fn._sequence_nr() for one in outputs if one.grad_fn is not None}
        self._given = {_memory(one) for one in tree_leaves(inputs) if isinstance(one, Tensor)}
        self._calls: list[Call] = []
        self._bytes = 0
        self._random = [(g, g.get_state()) for g in generators(outputs[0].device)]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_on:
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        leaves = tree_leaves(result)
        made = [one for one in leaves if isinstance(one, Tensor)]
        if not made and func is not Tensor.__setitem__ and not any(map(_is_seen, leaves)):
            return
        kept = [one for one in tree_leaves((args, kwargs)) if isinstance(one, nn.Parameter)]
        self._bytes += sum(one.nbytes for one in (*made, *kept))  # these are copied
        if len(self._calls) == MOST_CALLS or self._bytes > MOST_BYTES:
            self.drop()
            return
        is_cast = torch.is_autocast_enabled(self._kind)
        cast = torch.get_autocast_dtype(self._kind) if is_cast else None
        self._calls.append(Call(func, args, kwargs, result, torch.is_grad_enabled(), cast))

    def enter(self) -> None:
        """Begin, unless a mode of somebody else is on, which may end before this one."""
        default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
        above = _modes()
        self.is_on = all(isinstance(one, LossTrace) or one is default for one in above)
        if self.is_on:
            torch._C._push_on_torch_function_stack(self)

    def drop(self) -> None:
        """End, and forget the calls."""
        self.is_on, self._calls = False, []

    def leave(self) -> None:
        """The same, and off the stack of modes, whatever lies above."""
        self.drop()
        above = list[Any]()
        if any(one is self for one in _modes()):
            while (one := torch._C._pop_torch_function_stack()) is not self:
                above.append(one)
            for one in reversed(above):
                torch._C._push_on_torch_function_stack(one)

    def coupling(self, loss: Tensor, gradient: Tensor | None) -> str | None:
        """Why a loss is refused whose examples meet, "" if none did, None if nothing was tried."""
        size = len(self._outputs[0]) if self.is_on and self._outputs[0].dim() else 0
        if size < 2 or any(not one.dim() or len(one) != size for one in self._outputs):
            return None
        self.is_on = False
        try:
            found = self._is_coupled(loss, gradient, size, is_all=True)
            only = found and not self._is_coupled(loss, gradient, size, is_all=False)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return None  # no repetition
        finally:
            self.is_on = True
        if not found:
            return None if found is None else ""
        text = COUPLED.format(name="one changed row changes what the loss sends back to others")
        return IS_CONSTANT.format(found=text, size=size) if only else text

    def _is_coupled(
        self, loss: Tensor, gradient: Tensor | None, size: int, *, is_all: bool
    ) -> bool | None:
        rows = torch.arange(size)
        fixed = self._constants(rows, is_all=is_all)
        base = self._sent_back(loss, gradient, rows, fixed)
        if not base or not all(bool(c.isfinite().all()) for c in base):
            return None
        is_low = base[0].dtype not in (torch.float32, torch.float64)
        is_low = is_low or any(call.cast for call in self._calls)
        share, bits = 2e-2 if is_low else 1e-5, rows[:, None] >> torch.arange(size.bit_length())
        for changed in {tuple(s) for b in (bits & 1).bool().T for s in (b.tolist(), (~b).tolist())}:
            if not 0 < sum(changed) < size:
                continue
            at = torch.tensor(changed)
            now = self._sent_back(loss, gradient, torch.where(at, (rows + 1) % size, rows), fixed)
            if any(_differ(a, b, at, share) for a, b in zip(base, now)):
                return True
        return False

    def _sent_back(
        self, loss: Tensor, gradient: Tensor | None, rows: Tensor, fixed: set[int]
    ) -> list[Tensor]:
        """c of the examples with these rows; nothing if the loss cannot be read."""
        own = dict[Any, Any]()
        with self._same_random():
            ends = [_picked(one, rows).requires_grad_().clone() for one in self._outputs]
            own.update((id(one), end) for one, end in zip(self._outputs, ends))
            for call in self._calls:
                _again(call, own, rows, fixed, self._kind)
        again = own.get(id(loss))
        if again is None or again.grad_fn is None:
            return []
        starts = [end.grad_fn._sequence_nr() for end in ends if end.grad_fn is not None]
        reading = read_loss(again, starts, gradient=gradient, may_cut=True).settled(len(rows))
        if reading.refused(len(rows)):
            return []
        found = torch.autograd.grad(again, ends, gradient, allow_unused=True)
        return [
            reading.by_row(torch.zeros_like(e) if g is None else g) for g, e in zip(found, ends)
        ]

    def _constants(self, rows: Tensor, *, is_all: bool) -> set[int]:
        """Tensors from outside that keep their rows, by id."""
        fixed, roots = set[int](), dict[int, int]()
        for call in self._calls:
            name = getattr(call.func, "__name__", "")
            named = [v for k, v in call.kwargs.items() if name in LAYERS or k in CONSTANTS]
            after = call.args[1:] if name in LAYERS else ()
            fixed |= {id(one) for one in tree_leaves([after, named])}
            own = [one for one in tree_leaves([call.args, call.kwargs]) if isinstance(one, Tensor)]
            is_table = name in TABLES and _is_table(call.args[0], call.args[-1], rows)
            for one in own:
                is_given = _memory(one) in self._given
                is_constant = (is_table and one is call.args[0]) or _is_along_columns(one, own)
                if (not is_given and (is_constant or not is_all)) or _are_places(one, rows):
                    fixed.add(roots.get(id(one), id(one)))
            made = call.result
            if len(own) == 1 and isinstance(made, Tensor) and made.shape == own[0].shape:
                roots[id(made)] = roots.get(id(own[0]), id(own[0]))  # its logarithm, say
        return fixed

    @contextmanager
    def _same_random(self) -> Iterator[None]:
        now = [(g, g.get_state()) for g, _ in self._random]
        try:
            for generator, state in self._random:
                generator.set_state(state)
            yield
        finally:
            for generator, state in now:
                generator.set_state(state)


def _again(call: Call, own: dict[Any, Any], rows: Tensor, fixed: set[int], kind: str) -> None:
    """Repeat a call; `own` has the new tensors by the ids of the old ones, and new numbers."""

    def new(one: Any) -> Any:
        if _is_seen(one):
            return own.get(one, one)
        if not isinstance(one, Tensor):
            return one
        if id(one) not in own:  # from outside: a copy, which may be written to
            is_row = one.dim() and len(one) == len(rows) and id(one) not in fixed
            is_row = is_row and not isinstance(one, nn.Parameter)
            own[id(one)] = _picked(one, rows) if is_row else one.detach().clone()
        return own[id(one)]

    with (
        torch.set_grad_enabled(call.has_grad),
        torch.autocast(kind, dtype=call.cast, enabled=call.cast is not None),
    ):
        result = call.func(*tree_map(new, call.args), **tree_map(new, call.kwargs))
    for before, after in zip(tree_leaves(call.result), tree_leaves(result)):
        if isinstance(before, Tensor) and isinstance(after, Tensor):
            own[id(before)] = after
        elif _is_seen(before) and isinstance(after, float):
            own[before] = after


def _is_seen(number: Any) -> bool:
    """Whether a number of Python is known again where it is used: not a whole one."""
    return isinstance(number, float) and not number.is_integer()


def _picked(one: Tensor, rows: Tensor) -> Tensor:
    return one.detach()[rows.to(one.device)]


def _differ(a: Tensor, b: Tensor, changed: Tensor, share: float) -> bool:
    """Whether rows that were not changed came out otherwise."""
    a, b = (one.detach().double().reshape(len(one), -1).cpu() for one in (a, b))
    size = a.norm(dim=1)
    gap = (a - b).norm(dim=1)
    return bool((gap > share * (size + 1e-3 * size.max()))[~changed].any())


def _memory(one: Tensor) -> int:
    return one.untyped_storage().data_ptr()


def _are_places(one: Tensor, rows: Tensor) -> bool:
    """Whether a tensor says which row is where."""
    is_whole = one.dtype in (torch.int64, torch.int32) and one.shape == rows.shape
    return is_whole and torch.equal(one.detach().sort()[0].cpu().long(), rows)


def _is_table(table: Any, index: Any, rows: Tensor) -> bool:
    """Whether numbers of a table are looked up, as weights by their labels."""
    is_float = isinstance(table, Tensor) and table.is_floating_point()
    is_index = isinstance(index, Tensor) and not index.is_floating_point()
    is_by_chance = len(rows) < 16  # as labels of a small batch are
    return is_float and is_index and (is_by_chance or not _are_places(index, rows))


def _is_along_columns(one: Tensor, beside: list[Tensor]) -> bool:
    """Whether a tensor has a number for every column of another, not for its rows."""
    is_row = one.dim() == 1 and one.is_floating_point()
    return is_row and any(o.dim() > 1 and o.shape[-1] == len(one) for o in beside)

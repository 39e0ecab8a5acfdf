"""Whether what one example sends back changes with the others, tried on the loss that a loop made.

A loss Σ_i ℓ_i sends c_i = ∂ℓ_i/∂output_i back to row i, and c_i depends on row i alone. Weights of
a batch computed without gradients break that and leave no node in a graph. So the calls between a
forward pass and `backward` (`loss_trace`) are repeated with other rows:

    row_i ← row_{i+1} for all i in a set S, in the outputs and in everything that has a row for each

and c_j, j ∉ S, must be what it was, factor and reduction taken out (`loss_graph`). The sets are the
bits of the row numbers and their complements: every pair (i ∈ S, j ∉ S) is tried by 2⌈log₂ B⌉
repetitions, without the model; for two sets once more with S a thousand times as large. Tests
(`if x.max() > 3`) must go the same way; numbers that were read are known again (`loss_numbers`).
What cannot be decided is a doubt, and the loop is warned: a test on the batch that goes the same
way or on a number (`loss_branches`), a number of many digits that came up after a read or has
changed since, if c would be another without it, a loss that cannot be repeated.

Guarantees: none beyond what was tried. Not seen: rows that change nothing today (a maximum that
another row has), and tensors with a row for each example made before the model was called: these
are data. State: none.

>>> import torch
>>> outputs = torch.randn(4, 3).requires_grad_() * 1
>>> def mixes(loss_fn):
...     with LossTrace([outputs], []) as trace:
...         return bool(coupling(trace, loss_fn(outputs), None).refusal)
>>> mixes(lambda o: o.square().mean()), mixes(lambda o: (o - o.detach().mean(0)).square().mean())
(False, True)
>>> mixes(lambda o: (o * (1 / o.abs().max().item())).square().mean())
True
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from noshuffle.training.generators import seeded
from noshuffle.training.loss_branches import FINITE, branch_of
from noshuffle.training.loss_coupling import COUPLED
from noshuffle.training.loss_graph import read_loss
from noshuffle.training.loss_numbers import (
    STATISTICS,
    Constant,
    constants_of,
    explained,
    is_number,
    may_be_other,
    shaped,
    values,
)
from noshuffle.training.loss_rows import Call, constant_tensors, has_rows, is_data, memory
from noshuffle.training.loss_trace import LOGGING, LossTrace, call_sites

IS_CONSTANT = (
    "{found}. Only a tensor of {size} rows that the model was not given did this: if it is a "
    "constant, which has nothing to do with the batch, make it an nn.Parameter with "
    "requires_grad=False"
)
ROWS = "one changed row changes what the loss sends back to others"
BRANCH = "the test in {line} goes another way with other rows; if it is for a log, move it behind "
BRANCH += "loss.backward()"
NOT_TRIED = "it could not be tried with other rows ({why})"
#: What rows are multiplied by, besides.
EXTREME = 1e3
#: What makes factors of whole numbers and truth values; other calls take them for labels.
WEIGHING = ("float", "double", "half", "bfloat16", "to", "type", "type_as", "where", "masked_fill")
#: What a call raises that cannot be repeated: anything, with numbers that nobody had in mind.
FAILURES = Exception


class Coupling(NamedTuple):
    """Why a loss is refused whose examples meet ("" if none did, None: nothing was tried), and what
    could not be decided."""

    refusal: str | None
    doubts: tuple[str, ...] = ()


class Exchange(NamedTuple):
    """Which rows stand in the place of which, and what they are multiplied by."""

    rows: Tensor
    factors: Tensor | None = None

    def of(self, one: Tensor) -> Tensor:
        picked = one.detach()[self.rows.to(one.device)]
        if self.factors is None or not one.is_floating_point():
            return picked
        return picked * self.factors.to(picked).reshape(-1, *[1] * (picked.dim() - 1))


class Sent(NamedTuple):
    """What a repetition gave: c by output, and what was read, by number of the call."""

    back: list[Tensor]
    read: dict[int, Tensor]


def coupling(trace: LossTrace, loss: Tensor, gradient: Tensor | None) -> Coupling:
    """Whether the examples of a loss meet."""
    size = min(trace.sizes)
    if size < 2:
        return Coupling(None)
    if not trace.is_on or len(trace.sizes) > 1:
        why = (
            "outputs of different lengths"
            if trace.is_on
            else "too long, of odd tensors, or in a mode of torch"
        )
        return Coupling(None, (NOT_TRIED.format(why=why),))
    trace.is_on = False
    try:
        found = Repetition(trace, loss, gradient, is_all=True).coupling()
        is_of_rows = found.refusal == COUPLED.format(name=ROWS)
        if is_of_rows and not Repetition(trace, loss, gradient, is_all=False).is_coupled():
            return Coupling(IS_CONSTANT.format(found=found.refusal, size=size))
        return found
    except FAILURES as error:
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
        return Coupling(None, (NOT_TRIED.format(why=why),))
    finally:
        trace.is_on = True


class Repetition:
    """The calls of a loss, repeated with other rows (`is_all` False: of the inputs alone)."""

    def __init__(
        self, trace: LossTrace, loss: Tensor, gradient: Tensor | None, *, is_all: bool
    ) -> None:
        self._trace, self._loss, self._gradient = trace, loss, gradient
        self._rows = torch.arange(len(trace.outputs[0]), device="cpu")
        self._fixed = constant_tensors(trace.calls, self._rows, trace.inputs, is_all=is_all)
        self._tainted, self._finite = self._dependent()
        #: By number of a read: the constants that are functions of what was read.
        self._known: dict[int, list[tuple[Constant, Callable[[Tensor], Tensor]]]] = {}
        #: Constants that are functions of a statistic of the inputs, by number of both.
        self._early: list[tuple[Constant, int, int, Callable[[Tensor], Tensor]]] = []
        self._constants = list(self._constants_of(range(len(trace.calls))))
        for one in self._constants:
            self._explain(one)
        self._explain_early()
        self._base = self._sent(Exchange(self._rows))
        is_low = any(call.cast for call in trace.calls)
        for c in self._base.back[:1]:
            is_low = is_low or c.dtype not in (torch.float32, torch.float64)
        self._share = 2e-2 if is_low else 1e-5
        self._moved = set[int]()  # reads that came out otherwise

    def coupling(self) -> Coupling:
        if not self._made_of():
            return Coupling(None, (NOT_TRIED.format(why="its calls are not seen"),))
        if not self._base.back:  # refused by its graph
            return Coupling(None)
        if not all(bool(c.isfinite().all()) for c in self._base.back):
            return Coupling(None)
        if self.is_coupled():
            return Coupling(COUPLED.format(name=ROWS))
        doubts = list[str]()
        ends = call_sites(sys._getframe(), (*LOGGING, "noshuffle"), 8)
        for number, read in self._trace.reads.items():
            if number in self._finite or number not in self._tainted:
                continue
            line = branch_of(read.sites, ends, is_test=read.is_test)
            if line and read.is_test and number in self._moved:
                return Coupling(COUPLED.format(name=BRANCH.format(line=line)))
            if line and (read.is_test or number in self._moved):
                doubts.append(f"a test in {line} depends on the batch")
        late, changed = self._late(), self._changed()
        for one in {one.key: one for one in [*changed, *late]}.values():
            if self._matters(one):
                is_late = "came up after numbers of the batch were read"
                is_new = "is not what it was in an earlier step"
                doubts.append(f"{one} {is_late if one in late else is_new}")
        return Coupling("", tuple(dict.fromkeys(doubts)))

    def is_coupled(self) -> bool:
        """Whether c of a row changes with other rows."""
        size = len(self._rows)
        bits = ((self._rows[:, None] >> torch.arange(size.bit_length(), device="cpu")) & 1).bool().T
        sets = [at for bit in bits for at in (bit, ~bit) if 0 < int(at.sum()) < size]
        for at in sets:
            other = torch.where(at, (self._rows + 1) % size, self._rows)
            if self._differs(self._sent(Exchange(other)), at):
                return True
        for at in sets[:2]:  # what holds for these numbers need not hold for larger ones
            try:
                now = self._sent(Exchange(self._rows, torch.where(at, EXTREME, 1.0)))
            except FAILURES:  # no probabilities any more, say
                continue
            if self._differs(now, at):
                return True
        return False

    def _differs(self, now: Sent, changed: Tensor) -> bool:
        before = self._base.read
        self._moved |= {i for i, one in now.read.items() if not _is_same(one, before[i])}
        return any(_differ(a, b, changed, self._share) for a, b in zip(self._base.back, now.back))

    def _matters(self, one: Constant) -> bool:
        """Whether c would be another with another number in the place of a constant."""
        try:
            other = {one.key: shaped(may_be_other(one.values), one.what)}
            now = self._sent(Exchange(self._rows), other)
        except FAILURES:
            return True
        return self._differs(now, torch.zeros(len(self._rows), dtype=torch.bool, device="cpu"))

    def _late(self) -> list[Constant]:
        """Numbers of many digits, and arrays of NumPy, that came up after the first read."""
        first = min((i for i in self._moved if not self._trace.reads[i].is_test), default=-1)
        early = {one.key for one in self._constants if one.call < first}
        own = [one for one in self._constants_of(self._made_of()) if one.call > first >= 0]
        return [
            one
            for one in own
            if one.key not in early
            and (one.is_telling or self._is_as_long(one))
            and not self._is_known(one)
            and (not isinstance(one.what, Tensor) or is_of_numpy(one.what))
        ]

    def _changed(self) -> list[Constant]:
        """What the loss was given that it was not given before."""
        calls = self._made_of()
        own = [
            one
            for one in self._constants_of(calls)
            if not self._is_known(one) and not self._may_be_labels(one)
        ]
        names = tuple(self._trace.calls[i].name for i in calls)
        return self._trace.earlier.changed(names, own)

    def _is_as_long(self, one: Constant) -> bool:
        """Whether an array or a tensor has a row for each example."""
        return bool(getattr(one.what, "shape", ())[:1] == self._rows.shape)

    def _may_be_labels(self, one: Constant) -> bool:
        """Whole numbers by row, other ones in every batch; those made of a read are `_late`."""
        what = one.what
        is_whole = isinstance(what, Tensor) and not what.is_floating_point()
        return is_whole and self._is_as_long(one)

    def _is_known(self, one: Constant) -> bool:
        if any(one.key == early.key for early, *_ in self._early):
            return True
        return any(one.key == known.key for each in self._known.values() for known, _ in each)

    def _explain(self, one: Constant) -> None:
        """Find the read that a constant is a function of."""
        for number, read in self._trace.reads.items():
            if number < one.call and number in self._tainted and not self._is_known(one):
                found = None if read.is_test else explained(one.values, read.values)
                if found is not None:
                    self._known.setdefault(number, []).append((one, found))

    def _explain_early(self) -> None:
        """Find constants that were made of the inputs before the model was called."""
        own = [one for one in self._constants if one.is_telling and not self._is_known(one)]
        for number, given in enumerate(self._trace.examples if own else ()):
            for which, statistic in enumerate(STATISTICS):
                r = values(statistic(given.detach()))
                for one in own:
                    found = None if r is None else explained(one.values, r)
                    if found is not None and not self._is_known(one):
                        self._early.append((one, number, which, found))

    def _constants_of(self, calls: Iterable[int]) -> Iterator[Constant]:
        made = {id(one) for call in self._trace.calls for one in call.made}
        made |= {id(one) for one in self._trace.outputs}
        is_read = bool(self._trace.reads)

        def is_known(call: Call, one: Tensor) -> bool:
            if id(one) in made or memory(one) in self._trace.inputs:
                return True
            weighs = one.is_floating_point() or call.is_arithmetic or call.name in WEIGHING
            is_array = is_read and weighs and is_of_numpy(one)
            return not is_array and is_data(call, one, self._rows, self._fixed)

        for order, number in enumerate(calls):
            call = self._trace.calls[number]
            yield from constants_of(order, number, call, is_known)

    def _made_of(self) -> list[int]:
        """The calls that the loss is made of."""
        wanted, found = {id(self._loss)}, list[int]()
        for number in range(len(self._trace.calls) - 1, -1, -1):
            call = self._trace.calls[number]
            if any(id(one) in wanted for one in call.made):
                found.append(number)
                wanted |= {id(one) for one in call.given}
        return found[::-1]

    def _has_rows(self, one: Tensor) -> bool:
        return has_rows(one, len(self._rows), self._fixed)

    def _dependent(self) -> tuple[set[int], set[int]]:
        """Reads of what is made of rows, and those that ask whether numbers are finite."""
        tainted, finite = {id(one) for one in self._trace.outputs}, set[int]()
        own = set[int]()  # what calls made
        found: tuple[set[int], set[int]] = set(), set()
        for number, call in enumerate(self._trace.calls):
            given = call.given
            is_row = any(
                id(o) in tainted or (id(o) not in own and self._has_rows(o)) for o in given
            )
            is_check = call.name in FINITE or bool(given and all(id(o) in finite for o in given))
            made = {id(one) for one in call.made}
            own |= made
            for is_so, ids, reads in zip((is_row, is_check), (tainted, finite), found):
                ids |= made if is_so else set()
                reads |= {number} if is_so else set()
        return found

    def _sent(self, rows: Exchange, instead: dict[Any, Any] | None = None) -> Sent:
        """c of the examples with these rows; nothing if the loss cannot be read."""
        own, read = dict[Any, Any](instead or {}), dict[int, Tensor]()
        with seeded(0, self._trace.device):
            for generator, state in self._trace.random:
                generator.set_state(state)
            ends = [rows.of(one).requires_grad_().clone() for one in self._trace.outputs]
            own.update((id(one), end) for one, end in zip(self._trace.outputs, ends))
            for one, given, which, function in self._early:
                new = values(STATISTICS[which](rows.of(self._trace.examples[given])))
                if new is not None and one.key not in own:
                    own[one.key] = shaped(function(new), one.what)
            for number, call in enumerate(self._trace.calls):
                result = self._again(call, own, rows)
                if number in self._trace.reads:
                    found = values(result)
                    read[number] = self._trace.reads[number].values if found is None else found
                    for one, function in self._known.get(number, ()):
                        new = function(read[number])
                        if new.numel() == one.values.numel():
                            own[one.key] = shaped(new, one.what)
        again = own.get(id(self._loss))
        if again is None or again.grad_fn is None:
            return Sent([], read)
        starts = [end.grad_fn._sequence_nr() for end in ends if end.grad_fn is not None]
        reading = read_loss(again, starts, gradient=self._gradient, may_cut=True)
        reading = reading.settled(len(self._rows))
        if reading.refused(len(self._rows)):
            return Sent([], read)
        grads = torch.autograd.grad(again, ends, self._gradient, allow_unused=True)
        whole = (torch.zeros_like(e) if g is None else g for g, e in zip(grads, ends))
        return Sent([reading.by_row(one) for one in whole], read)

    def _again(self, call: Call, own: dict[Any, Any], rows: Exchange) -> Any:
        """Repeat a call; `own` has the new tensors by the ids of the old ones, and new numbers."""

        def new(one: Any) -> Any:
            if is_number(one):
                is_same = isinstance(one, int) and not call.is_arithmetic
                return one if is_same else own.get(float(one), one)
            if isinstance(one, Tensor) and id(one) not in own:  # a copy, which may be written to
                is_row = self._has_rows(one)
                own[id(one)] = rows.of(one) if is_row else one.detach().clone()
            return own.get(id(one), one)

        kind = self._trace.device.type
        with (
            torch.set_grad_enabled(call.has_grad),
            torch.autocast(kind, dtype=call.cast, enabled=call.cast is not None),
        ):
            result = call.func(*tree_map(new, call.args), **tree_map(new, call.kwargs))
        for before, after in zip(tree_leaves(call.result), tree_leaves(result)):
            if isinstance(before, Tensor) and isinstance(after, Tensor):
                own[id(before)] = after
        return result


def is_of_numpy(one: Tensor) -> bool:
    """Whether a tensor has the memory of an array of its own, as `torch.from_numpy` gives it."""
    held = one.untyped_storage()
    return not held.resizable() and held.nbytes() == one.nbytes


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.isclose(a, b, rtol=1e-6, equal_nan=True).all())


def _differ(a: Tensor, b: Tensor, changed: Tensor, share: float) -> bool:
    """Whether rows that were not changed came out otherwise."""
    a, b = (one.detach().double().reshape(len(one), -1).cpu() for one in (a, b))
    size = a.norm(dim=1)
    gap = (a - b).norm(dim=1)
    return bool((gap > share * (size + 1e-3 * size.max()))[~changed].any())

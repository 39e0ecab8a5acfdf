"""The loop people have: `loss = criterion(model(x), y); loss.backward(); private.optimizer.step()`.

    criterion = private.criterion(nn.CrossEntropyLoss())
    for x, y in private.batches(loader):
        loss = criterion(model(x), y)
        loss.backward()
        private.optimizer.step()

The criterion makes the backward pass itself. It computes the loss ℓ_i of every row as
`private.step` does, and returns their mean as a number that hangs on a token and on nothing else.
When a gradient comes back to the token, whatever its value,

    admit   the rows take part, and their row is written                        (`Step`)
    send    Σ_i ∂ℓ_i/∂h for every layer output h: 1 to each row                 (`RecordedPass`)
    clip    each unit, and sum: the clip-and-sum of `private.step`              (`clipping`)

and `step` adds noise, divides and updates. So no factor, reduction or coupling of the number
reaches the clip, and a second loss on a kept activation is in another gradient: `.grad`, which
stays None, or the step is refused. Several losses before one `step` are parts of one batch.
State: the step in the making, of `PrivateOptimizer`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from noshuffle.clipping import Clip, ClippedSum, ModelLoss
from noshuffle.clipping.factor import Groups
from noshuffle.clipping.layers import NotByLayer
from noshuffle.clipping.objective import (
    Criterion,
    Loss,
    batch_losses,
    cuttable,
    must_depend,
    row_losses,
    take,
)
from noshuffle.clipping.products import exactly
from noshuffle.clipping.state import restored
from noshuffle.clipping.units import by_unit, finish, members
from noshuffle.errors import InvalidInput, ProbablyNotMeant, Unsupported
from noshuffle.participation import Mask
from noshuffle.release.units import Ids
from noshuffle.training.hooks import at_work, untraced
from noshuffle.training.recorder import Autocast, ForwardPass, autocast_of
from noshuffle.training.step import Step, unit_numbers
from noshuffle.training.step_parts import Parts
from noshuffle.user_warnings import warn_user

#: What losses under float16 autocast are multiplied by, and their sums divided by: gradients below
#: 6e-8 would vanish on their way.
HALF_SCALE = 2.0**8
NOTHING_SENT = (
    "no loss of private.criterion came back since the last step; write criterion = "
    "private.criterion(loss_fn) before the loop, and loss = criterion(model(x), y); "
    "loss.backward() in it"
)
NO_RULES = (
    "the loop with loss.backward() needs layer rules ({why}); use private.step(loss_fn, x, y)"
)
UPSTREAM = (
    "an input of the private model has a gradient graph, and nothing is sent back into it: what "
    "made it is not trained by this loss; give detach() of it, or privatize both as one model"
)
RAW = (
    "parameter {name!r} has a gradient that did not come from private.criterion (a second loss, a "
    "penalty, a plain loss.backward()), and it would be raw; put all terms into the function of "
    "the criterion (a penalty on weights: weight_decay of the optimizer); model.zero_grad() "
    "forgets it"
)
SCALED = (
    "a GradScaler has no gradients to scale here; leave it out: loss.backward(); "
    "private.optimizer.step() (under float16 the criterion scales by itself)"
)
OPEN = (
    "loss.backward() has begun step {step}: its rows are admitted and summed; take it by "
    "private.optimizer.step()"
)

#: Where torch 2.6 to 2.13 keep the hooks of an optimizer.
HOOKS = (
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)  # fmt: skip


class PrivateCriterion:
    """A loss function of the private model's output; see `Private.criterion`."""

    def __init__(self, private: Any, fn: Criterion) -> None:
        self._private, self._fn = private, fn

    def __call__(self, output: Any, *targets: Any, ids: Any = None) -> Tensor:
        """The mean loss of the rows, whose backward pass is the private one.

        `ids` names the unit of each row, where `private.batches` does not. Without gradients
        (evaluation) it is the function itself.
        """
        if not torch.is_grad_enabled():
            return self._fn(output, *targets)
        self._private._parts.release.check_open()
        one, outputs, taken = self._private.recorder.pass_of(output)
        if one.has_criterion:
            raise Unsupported(
                "a second criterion on one forward pass; add the terms up in one function: "
                "private.criterion(lambda out, y: a(out, y) + b(out, y))"
            )
        one.has_criterion = True
        if one.has_upstream:
            warn_user(UPSTREAM, ProbablyNotMeant)
        size, targets, device = one.shape.size, cuttable(targets), self._private._parts.device
        rows = torch.zeros(0, device=device)
        if size:
            rows = batch_losses(lambda _: output, self._fn, (None, *targets), size=size)  # type: ignore[arg-type]
            must_depend(rows)
        autocast = autocast_of(device)
        loss_fn, batch = as_step(self._fn, one, taken, targets, autocast=autocast)
        sent = _Losses(one, outputs, rows, loss_fn, batch, ids, autocast)
        losses = rows.detach()
        finite = losses.isfinite()
        mean = torch.where(finite, losses, 0.0).sum() / finite.sum()
        token = torch.zeros((), device="cpu", requires_grad=True)
        zero: Tensor = _Token.apply(token, partial(self._private.optimizer.add, sent))  # type: ignore[no-untyped-call]
        return mean + zero.to(mean)


class _Token(torch.autograd.Function):
    """Zero, which calls `send` when a gradient comes back, whatever that is.

    It is on the host, whose part of a backward pass runs in the thread that called it.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, send: Callable[[], None]) -> Tensor:
        ctx.send = send
        return token.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.send()
        return None, None


@dataclass
class _Losses:
    """The losses of the rows of one pass, until they are sent back."""

    of: ForwardPass
    outputs: list[Tensor]
    rows: Tensor
    loss_fn: Loss  # what private.step would be given
    batch: tuple[Any, ...]
    ids: Any
    autocast: Autocast
    is_sent: bool = False


def as_step(
    fn: Criterion,
    one: ForwardPass,
    taken: Callable[[Any], Any],
    targets: tuple[Any, ...],
    *,
    autocast: Autocast,
) -> tuple[Loss, tuple[Any, ...]]:
    """The loss and the batch of `private.step` that are this pass and this criterion."""
    args, kwargs = one.inputs
    if one.is_plain and autocast == one.autocast:
        return fn, (args[0], *targets)
    cast = one.autocast

    def rows(model: Any, args: Any, kwargs: Any, *targets: Any) -> Tensor:
        with torch.autocast(*cast):
            output = model(*args, **kwargs)
        return row_losses(fn, taken(output), targets)

    return ModelLoss(rows, by_row=True), (args, kwargs, *targets)


@dataclass(frozen=True)
class _Times:
    """A clip norm times a power of two, for gradients that were multiplied by it."""

    clip: Clip
    factor: float

    def groups(self, names: Sequence[str]) -> Groups:
        return [(group, norm * self.factor) for group, norm in self.clip.groups(names)]

    def bound(self, names: Sequence[str]) -> float:
        return self.clip.bound(names) * self.factor


class PrivateOptimizer(torch.optim.Optimizer):
    """Stands in for the user's optimizer; `step` releases what criteria have sent."""

    #: A GradScaler then calls `step`, which refuses it by name.
    _step_supports_amp_scaling = True

    def __init__(self, private: Any) -> None:
        # Not calling Optimizer.__init__, which would give it groups of its own.
        self._private = private
        self._parts: Parts = private._parts
        self._inner: torch.optim.Optimizer = self._parts.optimizer
        self._step: Step | None = None
        for name in HOOKS:  # those of the optimizer inside, which runs them
            setattr(self, name, getattr(self._inner, name, OrderedDict()))

    # Groups, state and defaults are those of the optimizer inside; nobody sets them here.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._inner.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise Unsupported("parameters cannot join a private run; add them before privatize")

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that are none of the private run; it has none before `step`."""
        self.check_closed()
        self._inner.zero_grad(set_to_none=True)

    def check_closed(self) -> None:
        """Raise while a step is in the making."""
        if self._step is not None:
            raise InvalidInput(OPEN.format(step=self.next_part()[0]))

    def next_part(self) -> tuple[int, int]:
        """The step, and the part of it, that the next loss is for."""
        if self._step is None:
            return self._parts.release.step, 0
        return self._step.next_part

    def add(self, sent: _Losses) -> None:
        """The private backward pass of one criterion: admit its rows, clip and sum them."""
        if sent.is_sent:
            raise Unsupported(
                "a second backward pass of one loss, whose rows would count twice; call "
                "loss.backward() once"
            )
        sent.is_sent = True
        sent.of.numbers_of(sent.outputs)  # raises if something was done to them
        private = self._private
        private.check_owner()
        self._refuse_raw()
        if self._step is None:
            step = Step(self._parts)
            private._turn.__enter__()  # until `step` is over: nothing is saved half-way
            self._step = step
        try:
            with at_work(private.recorder), torch.enable_grad():
                size, is_recorded = sent.of.shape.size, self._is_recorded(sent)
                clipped_sum = partial(self._clipped_sum, sent, is_recorded)
                self._step.add_sum(size, clipped_sum, ids=sent.ids, seed=sent.of.seed)
        except BaseException as error:
            self._end(error)
            raise
        finally:
            sent.of.recorded, sent.outputs = None, []

    def _is_recorded(self, sent: _Losses) -> bool:
        """Whether the pass can be read as it was recorded; raises where rules do not hold.

        Otherwise this is the first batch of its kind, and the engine takes it as a step of its own.
        """
        one, parts = sent.of, self._parts
        if not one.shape.size:
            return False
        with torch.autocast(*sent.autocast):
            engine: Any = parts.engine  # a Ghost, as `Private.criterion` has seen
            try:
                reading = engine.layers_for(parts.model, sent.loss_fn, sent.batch)
            except NotByLayer as reason:
                raise Unsupported(NO_RULES.format(why=reason)) from None
        if reading is None:  # the trial decided nothing
            return False
        self._private.recorder.learn(one, reading)
        return one.is_recorded_by(reading)

    def _clipped_sum(
        self, sent: _Losses, is_recorded: bool, keep: Mask | None, ids: Ids | None
    ) -> ClippedSum:
        parts = self._parts
        clip, reduce, model = parts.threshold.clip, parts.reduce, parts.model
        if is_recorded:
            try:
                return self._recorded_sum(sent, keep, ids)
            except NotByLayer:  # the engine says what it is, and finds another way
                pass
        batch = sent.batch if keep is None else take(sent.batch, torch.from_numpy(keep))
        units = unit_numbers(ids if ids is None or keep is None else ids[keep])
        with torch.autocast(*sent.autocast):
            return parts.engine.clipped_sum(
                model, sent.loss_fn, batch, clip=clip, units=units, reduce=reduce
            )

    def _recorded_sum(self, sent: _Losses, keep: Mask | None, ids: Ids | None) -> ClippedSum:
        """That of the pass as it was recorded."""
        parts, one = self._parts, sent.of
        assert one.recorded is not None
        factor = HALF_SCALE if one.autocast[1:] == (torch.float16, True) else 1.0
        clip = parts.threshold.clip if factor == 1.0 else _Times(parts.threshold.clip, factor)
        with restored(parts.model), one.recorded.hooks():  # a checkpointed part runs again
            forms = one.recorded.forms(sent.rows if factor == 1.0 else sent.rows * factor)
        losses = sent.rows.detach()
        present = None if keep is None else torch.from_numpy(keep).to(torch.float32)
        who = members(unit_numbers(ids), present, size=len(losses), device=parts.device)
        with exactly(parts.device):
            for name, own in forms.items():
                if who.units is not None or len(own) > 1:
                    forms[name] = by_unit(own, who, reduce=parts.reduce)
            found = finish(forms, parts.parameters, losses, who, clip=clip)
        if factor == 1.0:
            return found
        for value in found.values.values():
            value.mul_(1.0 / factor)
        return replace(found, bound=found.bound / factor, norms=found.norms / factor)

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Release the step: noise, division, update."""
        private, parts = self._private, self._parts
        parts.release.check_open()
        if "grad_scale" in self.__dict__:  # set by a GradScaler
            del self.__dict__["grad_scale"]
            raise Unsupported(SCALED)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._step is None:
            raise InvalidInput(NOTHING_SENT)
        self._refuse_raw()
        error: BaseException | None = None
        try:
            with at_work(private.recorder, parts.optimizer):
                seen = self._step.release()
            private._finish(seen)
            self._inner.zero_grad(set_to_none=True)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._end(error)
        return loss

    def _end(self, error: BaseException | None) -> None:
        """The step is over."""
        self._step = None
        self._private._turn.__exit__(None if error is None else type(error), error, None)

    def _refuse_raw(self) -> None:
        for name, parameter in self._parts.parameters.items():
            if parameter.grad is not None:
                raise InvalidInput(RAW.format(name=name))

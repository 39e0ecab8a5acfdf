"""The unchanged loop: `loss = criterion(model(x), y); loss.backward(); optimizer.step()`.

By the chain rule the gradient of example i is a vector-Jacobian product with what the loss sends
back into the model's output,

    ∇_θ ℓ_i = (∂ model(x_i) / ∂θ)ᵀ c_i,      c_i = ∂ℓ_i/∂output_i = ∂L/∂output_i / (s·r_i),

so hooks keep the inputs and c (`passes`), and `step` runs the clipping engine on the linear loss
⟨model(x_i), c_i⟩, whose gradient is the same; s and r are the factor on L and its reduction
(`loss_graph`). A model that gives its loss itself is asked for it example by example. The raw
`.grad` is thrown away; this second pass has the dropout masks of the first.

Several backward passes before one `step` are parts of one batch. Terms of the loss must each depend
on one example: the statement says so, and nothing checks it. Gradients that do not come through the
model's output are not in c: the first step compares the raw gradient with that of the passes.
State: the factor of the last step, the number of steps, and kinds of passes that were tried.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from noshuffle.clipping import ModelLoss
from noshuffle.clipping.criteria import CriteriaByRow
from noshuffle.clipping.layers import NotByLayer
from noshuffle.clipping.objective import batch_size, shape_of
from noshuffle.clipping.products import roundoff
from noshuffle.clipping.state import restored
from noshuffle.clipping.trial import trial
from noshuffle.errors import InvalidInput, NoshuffleError, ProbablyNotMeant, Unsupported
from noshuffle.training.generators import seeded
from noshuffle.training.hooks import untraced
from noshuffle.training.loop_pass import Pass, check_factors, inputs_of, size_of, versions
from noshuffle.training.outputs import tensors_of
from noshuffle.training.passes import Listener, are_cleared
from noshuffle.training.step import Step
from noshuffle.training.step_parts import Parts
from noshuffle.user_warnings import warn_user

MASKS = (
    "the second pass of `loss.backward()` gives other outputs than the first: it draws other "
    "dropout masks (the batch is done in parts or one by one, see private.fallbacks) or other "
    "random numbers, mixes examples (is the batch axis first?), or the model or its hooks keep "
    "something between calls; use private.step"
)
BEYOND = (
    "loss.backward() gave gradients beyond those of the passes through the model (a penalty on "
    "weights, parts of it called by themselves, random numbers, something that the model keeps "
    "between calls), and they would be lost; use private.step with a ModelLoss, or weight_decay of "
    "the optimizer"
)
MOVED = (
    "weights were changed between a forward pass and step() (sharpness-aware steps, noise on "
    "weights), so its gradient cannot be had again; use private.step"
)
WRITTEN = (
    "an input of the model was written to between its forward pass and step(), so its gradient "
    "cannot be had again; give the model a tensor of its own (x.clone())"
)
CLEARED = (
    "the gradients of loss.backward() were cleared before step() (model.zero_grad()); clear them "
    "after it, or before backward()"
)
UNCUT = (
    "the model ran on the whole batch and fails on some of its rows ({why}): every tensor that it "
    "is given must have the example axis first; let the model hold masks and other constants"
)
SUMMED = (
    "the loss is a sum divided by {divisor:g}, which is not its number of examples ({size}): the "
    "divisor is taken out, and the sum of every example's own terms is clipped; for a mean inside "
    "each example use private.step"
)

#: Where torch 2.6 to 2.13 keep the hooks of an optimizer.
HOOKS = (
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)  # fmt: skip


def as_cast(cast: str) -> AbstractContextManager[Any]:
    """The autocast that a pass ran under, if it did."""
    if not cast:
        return nullcontext()
    device, dtype = cast.split()
    return torch.autocast(device, dtype=getattr(torch, dtype))


def linear_loss(
    model: Any, args: Any, kwargs: Any, cast: str, sent_back: dict[str, Tensor]
) -> Tensor:
    """⟨model(x_i), c_i⟩ for every row."""
    with as_cast(cast):
        out = tensors_of(model(*args, **kwargs))
    terms = [(out[int(k)] * c).reshape(c.shape[0], -1).sum(1) for k, c in sent_back.items()]
    return sum(terms[1:], start=terms[0])


def own_loss(number: int) -> ModelLoss:
    """The loss that a model computes itself, the `number`-th tensor of its output, by row."""

    def by_row(model: Any, args: Any, kwargs: Any, cast: str) -> Tensor:
        with as_cast(cast), CriteriaByRow(batch_size((args, kwargs))):
            return tensors_of(model(*args, **kwargs))[number]

    return ModelLoss(by_row, by_row=True)


class PrivateOptimizer(torch.optim.Optimizer):
    """Stands in for the user's optimizer; `step` makes the gradient private first.

    `accumulate` opens the next step of the run and releases it at the end of its block.
    """

    #: A GradScaler then leaves infinite gradients to it: a step that it would pass over tells of
    #: one example, and here that one contributes zero.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        parts: Parts,
        *,
        listener: Listener,
        accumulate: Callable[[], AbstractContextManager[Step]],
    ) -> None:
        # Not calling Optimizer.__init__, which would give it groups of its own.
        self._parts = parts
        self._listener = listener
        self._accumulate = accumulate
        self._inner = parts.optimizer
        self._steps = 0
        self._factor: float | None = None
        self._tried: set[Any] = set()
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
        """Forget raw gradients and the passes they came from."""
        self._listener.clear()
        self._inner.zero_grad(set_to_none)

    @untraced
    def step(self, closure: Callable[[], Any] | None = None, *, ids: Any = None) -> Any:
        """One private step from the backward passes since the last one."""
        self._parts.release.check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        heard, is_first = self._listener, not self._steps
        passes, refusal = list(heard.passes), heard.refusal
        heard.passes, heard.refusal = [], ""
        if refusal:
            raise Unsupported(refusal)
        if not passes:
            raise InvalidInput(heard.missed)
        is_power = not self._steps & (self._steps + 1)
        came = (grad for one in passes for grad in one.raw.values())
        if are_cleared(heard.own, by_value=is_power) and any(bool(grad.any()) for grad in came):
            raise InvalidInput(CLEARED)
        if any(one.is_overwritten for one in passes):
            raise InvalidInput(WRITTEN)
        factor = check_factors(passes, self._factor)
        if is_first:
            self._warn_of_divisors(passes)
        if heard.warning:
            warn_user(heard.warning, ProbablyNotMeant)
            heard.warning = ""
        given = ids if ids is None or hasattr(ids, "__getitem__") else list(ids)
        total = sum(map(size_of, passes))
        if given is not None and total != len(given):
            raise InvalidInput(f"ids must name each of the {total} examples, got {len(given)}")
        at, now = 0, versions(heard.own)
        with self._accumulate() as step:
            if is_first:
                _check_raw(self._parts, passes, factor, now)
                self._parts.release.bind("unchanged_loop", "yes")
            for one in passes:
                size, inputs = size_of(one), inputs_of(one)
                part = None if given is None else given[at : at + size]
                at += size
                batch: tuple[Any, ...] = (*inputs, one.cast, one.sent_back)
                loss_fn = ModelLoss(linear_loss, by_row=True)
                if one.own_loss is not None:
                    loss_fn, batch = own_loss(int(one.own_loss)), (*inputs, one.cast)
                try:
                    step.add(loss_fn, batch, ids=part, seed=one.seed)
                except (RuntimeError, IndexError) as error:
                    if not is_first or isinstance(error, NoshuffleError | torch.OutOfMemoryError):
                        raise
                    why = str(error).partition("\n")[0]
                    raise Unsupported(UNCUT.format(why=why)) from error
                _check_again(one, step.losses, now, is_due=one.is_random or is_power)
                if one.own_loss is None and size > 1:
                    self._check_apart(loss_fn, batch)
            self._steps, self._factor = self._steps + 1, factor
            heard.is_due = not self._steps & (self._steps + 1)
        return loss

    def _check_apart(self, loss_fn: ModelLoss, batch: tuple[Any, ...]) -> None:
        """At the first pass of a kind: raise if examples mix in the model, since c was made from
        outputs of the whole batch.

        An engine that takes examples one by one would be right by itself, and clip what c brings.
        """
        model = self._parts.model
        kind = (shape_of(batch).kinds, tuple(module.training for module in model.modules()))
        if kind in self._tried:
            return
        try:
            if trial(model, loss_fn, batch, least=2) is not None:
                self._tried.add(kind)
        except NotByLayer as error:
            raise Unsupported(
                "examples must not mix in the model, or what `loss.backward()` sends back into "
                f"one is another's too: {error}; use private.step, which takes them one by one"
            ) from None

    def _warn_of_divisors(self, passes: list[Pass]) -> None:
        """Warn of a sum over the batch that was divided by something else than its size."""
        total = sum(map(size_of, passes))
        for one in passes:
            by = 0.0 if one.reading is None or one.reading.kind != "sum" else one.reading.divisor
            if by not in (0.0, 1.0, size_of(one), total, self._parts.planned_batch):
                text = SUMMED.format(divisor=by, size=size_of(one))
                warn_user(text, ProbablyNotMeant)
                return


def _check_again(one: Pass, found: Tensor, now: list[int], *, is_due: bool) -> None:
    """Raise unless the second pass gave the outputs of the first: ⟨output_i, c_i⟩ is the same.

    On a GPU, which would have to be waited for, where masks were drawn or it `is_due`.
    """
    is_moved = one.weights_at != now
    if one.inner is None or len(found) != len(one.inner):  # some rows were left out
        return
    if not (is_due or is_moved) and one.inner.is_cuda:
        return
    first, again = one.inner.double(), found.double().to(one.inner.device)
    fine = first.isfinite()  # others contribute zero
    first, again = first[fine], again[fine]
    size = sum(c[fine].double().square().sum() for c in one.sent_back.values())
    is_low = one.cast or one.inner.dtype != torch.float32 or roundoff(one.inner) > 0.0
    share = 5e-2 if is_low else 1e-5 if is_moved else 1e-3
    gap, scale = (
        (first - again).norm(),
        first.norm() + 1e-3 * torch.as_tensor(size, device=first.device).sqrt(),
    )
    if bool((gap > share * scale) | gap.isnan()):
        raise Unsupported(MOVED if is_moved else MASKS)


def _check_raw(parts: Parts, passes: list[Pass], factor: float | None, now: list[int]) -> None:
    """Raise unless the passes give the raw gradient, up to a factor, and warn of a factor.

    A GradScaler's own (`unscale_` by `factor`) is none. Of a gradient that is zero or not finite
    nothing can be said.
    """
    own = list(parts.parameters.values())
    raw = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in own]
    found = [torch.zeros_like(p) for p in own]
    is_exact = all(not p.is_cuda and p.dtype in (torch.float32, torch.float64) for p in own)
    for one in passes:
        is_exact = is_exact and not one.cast
        with restored(parts.model):
            with torch.enable_grad(), seeded(one.seed, parts.device), as_cast(one.cast):
                out = tensors_of(parts.model(*one.args, **one.kwargs))
            ends = [out[int(k)] for k in one.raw]
            back = [grad.to(end.dtype) for end, grad in zip(ends, one.raw.values())]
            grads = torch.autograd.grad(ends, own, back, allow_unused=True)
        for total, g in zip(found, grads):
            if g is not None:
                total += g
    dot, size, other = (
        sum(float((a.double() * b.double()).sum()) for a, b in zip(left, right))
        for left, right in ((raw, found), (raw, raw), (found, found))
    )
    if size == 0.0 or not math.isfinite(size + other):
        return
    sine2 = 1.0 - dot * abs(dot) / (size * other) if other else 1.0
    if sine2 > (1e-8 if is_exact else 2.5e-3):
        is_moved = any(one.weights_at != now for one in passes)
        raise Unsupported(MOVED if is_moved else BEYOND)
    scaled = dot / other
    if min(abs(scaled - 1.0), abs(scaled * (factor or 1.0) - 1.0)) > (1e-3 if is_exact else 0.1):
        warn_user(
            f".grad was multiplied by {scaled:.3g} between loss.backward() and step() "
            "(clip_grad_norm_, or by hand), which has no effect: the private gradient takes its "
            "place; leave that line out (clip_norm of privatize bounds every example)",
            ProbablyNotMeant,
        )

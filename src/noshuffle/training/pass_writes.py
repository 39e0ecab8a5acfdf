"""What the user's own passes write into a model, outside of private steps.

A step tries the model (`clipping.statefulness`) and watches its tensors, but the pass of an
unchanged loop comes before it: a layer that initialises itself from the first batch it sees has
done so by then, keeps quiet in the trial, and publishes raw statistics.

    up to the first step   the state before the first pass is kept, and that of what is not trained
                           from the start (`model.forward(x)` is a pass that nobody hears); the
                           model is tried from there, in the modes that passes had. Values that are
                           loaded (`load_state_dict`) are a start of their own
    after it               tensors that the trial has not allowed are compared around every pass
                           that is heard, those that are not trained get their numbers back, and
                           the model is tried again: a cache that grows with the data may stay

State: the model at the start and before its first pass, until the first step; then a `Watch`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import nn

from noshuffle.clipping.check import validate
from noshuffle.clipping.per_example import PerExample
from noshuffle.clipping.snapshot import COPIED, Watch
from noshuffle.clipping.statefulness import Findings, ModelState, kept_tensors, put_back_after
from noshuffle.errors import Unsupported

#: Whether each module is in training mode.
_Modes = tuple[tuple[nn.Module, bool], ...]
EARLIER = (
    "a pass before this step ran with parts of the model in another mode, and what it kept of its "
    "data may be in the model now: build it and the run anew ({why})"
)


class PassWrites:
    """The writes of passes through one model that no private step has made."""

    def __init__(self, model: nn.Module) -> None:
        self._start: ModelState | None = None
        self._before: ModelState | None = None
        self._watch: Watch | None = None
        self._findings = Findings()
        self._modes: set[_Modes] = set()
        self.loaded(model)

    def loaded(self, model: nn.Module) -> None:
        """What is not trained has values of the caller's, not those of a pass."""
        if self._watch is None:
            untrained = (t for t in kept_tensors(model) if not (t.is_leaf and t.requires_grad))
            is_small = sum(t.numel() * t.element_size() for t in untrained) <= COPIED
            how = {"has_trained": False, "is_compared": False}
            self._start = ModelState(model, **how) if is_small else None

    def begin(self, model: nn.Module, *, is_heard: bool) -> None:
        """A pass begins; `is_heard` if a private step may be made of it."""
        if self._watch is None:
            self._before = self._before or ModelState(model, is_compared=False)
            self._modes.add(_modes(model))
        elif is_heard:
            self._watch.begin()

    def end(self) -> list[str]:
        """A pass that is heard has ended; what it wrote into, as far as the trial does not know."""
        return [] if self._watch is None else self._watch.end(self._findings)

    def judge(self, model: nn.Module, loss_fn: Any, batch: Any) -> None:
        """At a step: raise if a pass before the first one has kept something of its data.

        Guarantees: the model is as before, whatever the trial finds.
        """
        if self._watch is not None:
            return
        earlier = [one for one in (self._before, self._start) if one and one.has_changed()]
        if earlier:
            now = _modes(model)
            # what a caller set since the start by hand may be missing in a model as it was then
            missing = () if self._before in earlier else (AttributeError, LookupError)
            with put_back_after(model), suppress(*missing):
                for one in earlier:
                    one.put_back()
                try:
                    for modes in (now, *self._modes - {now}):
                        self._try(model, loss_fn, batch, modes=modes, is_now=modes is now)
                finally:
                    _set(now)
        self._start, self._before, self._watch = None, None, Watch(model)
        self._modes.clear()

    def _try(
        self, model: nn.Module, loss_fn: Any, batch: Any, *, modes: _Modes, is_now: bool
    ) -> None:
        """Try the model in the modes of now, or of a pass that may have kept something in them."""
        _set(modes)
        try:
            validate(model)
            findings = PerExample().check_state(model, loss_fn, batch)
        except Unsupported as error:
            raise error if is_now else Unsupported(EARLIER.format(why=error)) from error
        except Exception:  # a loss may not take what the model gives in eval mode
            if is_now:
                raise
            return
        self._findings = findings if is_now else self._findings

    def judge_again(self, model: nn.Module, loss_fn: Any, batch: Any, written: list[str]) -> None:
        """Raise unless what a pass of this batch wrote into is seen not to depend on the data."""
        if written:
            validate(model)
            PerExample().reconsider(model, loss_fn, batch, written)
            self._findings.may_change.update(written)


def _modes(model: nn.Module) -> _Modes:
    return tuple((module, module.training) for module in model.modules())


def _set(modes: _Modes) -> None:
    for module, training in modes:
        module.training = training

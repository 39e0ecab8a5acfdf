"""What the user's own passes write into a model, outside of private steps.

A step tries the model (`clipping.statefulness`) and watches its tensors, but the pass of an
unchanged loop comes before it: a layer that initialises itself from the first batch it sees has
done so by then, keeps quiet in the trial, and publishes raw statistics.

    up to the first step   the state before the first pass is kept; the model is tried from there
    after it               tensors that the trial has not allowed are compared around every pass
                           that is heard, those that are not trained get their numbers back, and
                           the model is tried again: a cache that grows with the data may stay

State: the model before its first pass, until the first step; then a `Watch`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from noshuffle.clipping.per_example import PerExample
from noshuffle.clipping.snapshot import Watch
from noshuffle.clipping.statefulness import Findings, ModelState, put_back_after


class PassWrites:
    """The writes of passes through one model that no private step has made."""

    def __init__(self) -> None:
        self._before: ModelState | None = None
        self._watch: Watch | None = None
        self._findings = Findings()

    def begin(self, model: nn.Module, *, is_heard: bool) -> None:
        """A pass begins; `is_heard` if a private step may be made of it."""
        if self._watch is None:
            self._before = self._before or ModelState(model, is_compared=False)
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
        if self._before is not None and self._before.has_changed():
            with put_back_after(model):
                self._before.put_back()
                self._findings = PerExample().check_state(model, loss_fn, batch)
        self._before, self._watch = None, Watch(model)

    def judge_again(self, model: nn.Module, loss_fn: Any, batch: Any, written: list[str]) -> None:
        """Raise unless what a pass of this batch wrote into is seen not to depend on the data."""
        if written:
            PerExample().reconsider(model, loss_fn, batch, written)
            self._findings.may_change.update(written)

"""What the user's own passes write into a model, outside of private steps.

A step tries the model (`clipping.statefulness`) and watches its tensors, but the pass of an
unchanged loop comes before it: a layer that initialises itself from the first batch it sees has
done so by then, keeps quiet in the trial, and publishes raw statistics.

    up to the first step   the state before the first pass is kept, and that of what is not trained
                           from the start (`model.forward(x)` is a pass that nobody hears); the
                           model is tried from each of both, in the modes that passes had, and from
                           the start in eval mode, if it had changed when a pass was first heard.
                           Values that are loaded (`load_state_dict`) are a start of their own, if
                           nothing had changed before
    after it               tensors that the trial has not allowed are compared around every pass
                           that is heard, those that are not trained get their numbers back, and
                           the model is tried again: a cache that grows with the data may stay

State: the model at the start and before its first pass, until the first step; then a `Watch`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from noshuffle.clipping.check import validate
from noshuffle.clipping.per_example import PerExample
from noshuffle.clipping.snapshot import COPIED, Watch
from noshuffle.clipping.statefulness import Findings, ModelState, kept_tensors, put_back_after
from noshuffle.errors import Unsupported

#: Whether each module is in training mode.
_Modes = tuple[tuple[nn.Module, bool], ...]
EARLIER = (
    "a pass before this step may have run with parts of the model in another mode, and what it "
    "kept of its data may be in the model now: build it and the run anew ({why})"
)


class PassWrites:
    """The writes of passes through one model that no private step has made."""

    def __init__(self, model: nn.Module) -> None:
        self._start: ModelState | None = None
        self._before: ModelState | None = None
        self._watch: Watch | None = None
        self._findings = Findings()
        self._modes: set[_Modes] = set()
        self._may_be_unheard = True  # whether passes in modes that nobody noted may have written
        self._is_as_begun = True  # when values were loaded last
        self.loaded(model)

    def loading(self) -> None:
        """Values are about to be loaded."""
        self._is_as_begun = self._start is None or not self._start.has_changed()

    def loaded(self, model: nn.Module) -> None:
        """What is not trained has values of the caller's, if it had none of a pass before: those
        may be where nothing was loaded (an attribute, with strict=False anything), or be loaded."""
        if self._watch is None and self._is_as_begun:
            untrained = (t for t in kept_tensors(model) if not (t.is_leaf and t.requires_grad))
            is_small = sum(t.numel() * t.element_size() for t in untrained) <= COPIED
            how = {"has_trained": False, "is_compared": False}
            self._start = ModelState(model, **how) if is_small else None

    def begin(self, model: nn.Module, *, is_heard: bool, is_hooked: bool = True) -> None:
        """A pass begins; `is_heard` if a private step may be made of it. Without `is_hooked` this
        is the only call: nobody says when passes begin."""
        if self._watch is None:
            if self._before is None:
                self._before = ModelState(model, is_compared=False)
                is_changed = self._start is not None and self._start.has_changed()
                self._may_be_unheard = is_changed or not is_hooked
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
        if self._before is not None and self._before.has_changed():
            self._judge_from(self._before, self._modes, model, loss_fn, batch)
        if self._start is not None and self._start.has_changed():
            evaluated = tuple((module, False) for module in model.modules())
            modes = self._modes | ({evaluated} if self._may_be_unheard else set())
            try:
                self._judge_from(self._start, modes, model, loss_fn, batch)
            except (Unsupported, torch.OutOfMemoryError):
                raise
            except Exception:  # it does not run as it was: a caller moved it, or set a part of it
                pass
        self._start, self._before, self._watch = None, None, Watch(model)
        self._modes.clear()

    def _judge_from(
        self, earlier: ModelState, modes: set[_Modes], model: nn.Module, loss_fn: Any, batch: Any
    ) -> None:
        """Try the model from an earlier state in the modes of now, and in those of passes."""
        now = _modes(model)
        with put_back_after(model):
            earlier.put_back()
            try:
                self._findings = _tried(model, loss_fn, batch)
                for other in modes - {now}:
                    _set(other)
                    try:
                        _tried(model, loss_fn, batch)
                    except Unsupported as error:
                        raise Unsupported(EARLIER.format(why=error)) from error
                    except Exception:  # a loss may not take what the model gives in eval mode
                        continue
            finally:
                _set(now)

    def judge_again(self, model: nn.Module, loss_fn: Any, batch: Any, written: list[str]) -> None:
        """Raise unless what a pass of this batch wrote into is seen not to depend on the data."""
        if written:
            validate(model)
            PerExample().reconsider(model, loss_fn, batch, written)
            self._findings.may_change.update(written)


def _tried(model: nn.Module, loss_fn: Any, batch: Any) -> Findings:
    validate(model)
    return PerExample().check_state(model, loss_fn, batch)


def _modes(model: nn.Module) -> _Modes:
    return tuple((module, module.training) for module in model.modules())


def _set(modes: _Modes) -> None:
    for module, training in modes:
        module.training = training

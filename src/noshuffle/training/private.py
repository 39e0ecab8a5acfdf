"""Private: a model in private training, and the changed lines around its loop.

    private = privatize(model, optimizer, plan, clip_norm=1.0, batch_size=250)
    loss = private.step(loss_fn, x, y)            # instead of zero_grad, backward, step
    print(private.statement())                    # ε so far, with all its assumptions

Kairouz et al. 2021 (arXiv 2103.00039), Algorithm 1, for any correlated noise and any optimizer;
DP-SGD is the same call with `identity()` and a sampled participation. A loop that calls
`loss.backward()` has a `criterion`. State: that of `run`, and the hooks of such a loop.

>>> import torch
>>> from noshuffle import Plan, SinglePass
>>> from noshuffle.noise import test_source
>>> from noshuffle.training import privatize
>>> plan = Plan.fit(SinglePass(steps=3), mechanism="tree", noise_multiplier=2.0)
>>> model = torch.nn.Linear(2, 1)
>>> private = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan,
...                     clip_norm=1.0, batch_size=4, source=test_source(seed=1))
>>> loss = private.step(torch.nn.MSELoss(), torch.randn(4, 2), torch.randn(4, 1))
>>> private.steps_released, 0 < private.epsilon < plan.epsilon()
(1, True)
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from noshuffle.clipping import Ghost, ModelLoss
from noshuffle.clipping.check import UNCOMPILED
from noshuffle.clipping.objective import Criterion, cuttable
from noshuffle.errors import Unsupported, callables
from noshuffle.plan import Plan
from noshuffle.release.batches import PrivateBatches
from noshuffle.training.augment import COPIES, Augment, CopiedBatches
from noshuffle.training.average import IterateAverage
from noshuffle.training.batches import batches_of
from noshuffle.training.check import LoaderCheck, check_loader, first_look
from noshuffle.training.compiled import Compiled
from noshuffle.training.criterion import NO_RULES, PrivateCriterion, PrivateOptimizer
from noshuffle.training.hooks import at_work, guard, untraced
from noshuffle.training.outcome import Outcome, Unread
from noshuffle.training.recorder import Recorder
from noshuffle.training.run import TrainingRun
from noshuffle.training.step import Step
from noshuffle.training.step_parts import Parts, check_call


class Private(TrainingRun):
    """A model in private training. Build it with `privatize`; see `TrainingRun` for the rest."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        parts: Parts,
        *,
        augment: Augment | None = None,
        average: float | None = None,
        save_every: float | None = None,
    ) -> None:
        super().__init__(model, plan, parts, save_every=save_every)
        self.compiled: Compiled | None = None
        self.not_compiled = ""
        self.augment = augment
        self._copies = None
        if augment is not None:
            self._copies = CopiedBatches(augment)
        #: The average of iterates, if one was asked for; see `training.average`.
        self.average: IterateAverage | None = None
        if average is not None:
            self.average = IterateAverage(model, decay=average)
            self.attach(average=self.average)
        self._optimizer: PrivateOptimizer | None = None
        #: Records the passes of a loop with a criterion; None where there is no such loop.
        self.recorder: Recorder | None = None
        self._let_go = guard(parts.optimizer, self)
        self._is_looked_at = False

    @property
    def why(self) -> str:
        """How a step is computed, and the reasons."""
        how = f"not compiled: {self.not_compiled}" if self.compiled is None else self.compiled.why
        every = (getattr(self._parts.engine, "why", ""), how)
        return "; ".join(part for part in every if part)

    @property
    def fallbacks(self) -> list[str]:
        """What could not be done the fast way, each said once."""
        notes = list(getattr(self._parts.engine, "fallbacks", ()))
        if self.model is not self._parts.model and UNCOMPILED not in notes:
            notes.append(UNCOMPILED)
        return notes + ([] if self.compiled is None else self.compiled.fallbacks)

    def step(self, loss_fn: Criterion | ModelLoss, *batch: Any, ids: Any = None) -> float:
        """One private step: admit, clip, sum, noise, divide, update.

        The model is called on the first part of the batch, `loss_fn` on its answer and the other
        parts. Batches of another form (dictionaries, models of several arguments) go with
        `ModelLoss(fn)`, whose `fn(model, *batch)` is the loss of a batch that holds one example.

        `ids` names the unit of every example. Without it every row counts as a new unit, and the
        statement says so. Returns the mean loss of the batch, which is raw data and not private:
        look at it, but publish only what the statement covers. Under torch.compile a step runs as
        it is; `privatize(compile=True)` is for that.
        """
        if os.getpid() != self._owner:  # before the lock: a fork may have inherited it closed
            self.check_owner()
        with self._turn:
            self.advance(loss_fn, batch, ids=ids)
            assert self._outcome is not None
            return self._outcome.loss

    @untraced
    def advance(
        self, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...], *, ids: Any = None
    ) -> None:
        """The same step without waiting for its loss, which `outcome` has until the next one."""
        if os.getpid() != self._owner:
            self.check_owner()
        with self._turn:
            if not batch or not callable(loss_fn):
                check_call(loss_fn, batch)
            self._advance(loss_fn, batch, ids)

    def _advance(self, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...], ids: Any) -> None:
        if self._optimizer is not None:
            self._optimizer.check_closed()
        self._outcome = None
        if self._copies is not None:
            seed = self._parts.release.seed(self.steps_released, COPIES)
            named = self._parts.names if ids is None and self._parts.names.are_places else ids
            loss_fn, batch = self._copies.of(loss_fn, batch, named, seed=seed)
        seen: Outcome | Unread | None = None
        if self.compiled is not None:
            with at_work(self.recorder, self._parts.optimizer):
                seen = self.compiled.step(loss_fn, cuttable(batch), ids)
        if seen is None:
            step = Step(self._parts)
            with at_work(self.recorder):  # a loss that steps the optimizer is refused
                step.add(loss_fn, batch, ids=ids, is_last=True)
            with at_work(self.recorder, self._parts.optimizer):
                seen = step.release()
        self._finish(seen)

    @contextmanager
    def accumulate(self) -> Iterator[Step]:
        """Several parts of one batch, one release at the end of the block:

        with private.accumulate() as step:
            for x, y in parts:
                step.add(loss_fn, (x, y))

        Parts must not overlap: an example in two of them counts twice, which is refused with `ids`
        and not seen without.
        """
        if self.augment is not None:
            raise Unsupported("augment= goes with private.step; a batch in parts is not copied")
        self.check_owner()
        if self._optimizer is not None:
            self._optimizer.check_closed()
        with self._turn:
            step = Step(self._parts)
            with at_work(self.recorder):
                yield step
            with at_work(self.recorder, self._parts.optimizer):
                seen = step.release()
            self._finish(seen)

    def _finish(self, seen: Outcome | Unread) -> None:
        self._outcome = seen
        # torch 2.6 to 2.13: a scheduler warns unless the `step` that it has wrapped was called.
        for own in (self._parts.optimizer, self._optimizer):
            if own is not None:
                own._opt_called = True  # type: ignore[attr-defined]
        if self.average is not None:
            self.average.update()
        if not self._is_looked_at and self.outcome is not None:
            self._is_looked_at = True
            first_look(self, len(self.outcome.losses))

    def batches(self, loader: Iterable[Any], *, parts: int = 1) -> PrivateBatches:
        """The batches of a DataLoader, each row of which is named by its place in the data set.

            for x, y in private.batches(loader):
                private.step(loss_fn, x, y)

        They go on at the next step of the run, also in a new process and in the middle of an epoch,
        and end with the pass. A run keeps to one loader. With `shuffle=True` the order is drawn
        from a public seed of the run: one for all epochs where the plan counts on that (`Epochs`),
        else one for each.
        `parts`: how many batches one step takes (`accumulate`).
        """
        return batches_of(self, loader, parts=parts).named()

    def check(
        self, loader: Iterable[Any], loss_fn: Criterion | ModelLoss | None = None
    ) -> LoaderCheck:
        """What a run over this loader will meet: order, sizes, ids, what is slow or refused.

        Reads its first batch twice, tries the loss on it, and releases nothing. Print
        the result; `is_fine` says whether nothing would be refused.
        """
        return check_loader(self, loader, loss_fn)

    def criterion(self, fn: Criterion) -> PrivateCriterion:
        """A loss function for a loop with `loss.backward(); private.optimizer.step()`:

            criterion = private.criterion(nn.CrossEntropyLoss())
            for x, y in private.batches(loader):
                loss = criterion(model(x), y)
                loss.backward()
                private.optimizer.step()

        `fn` takes what the model returned, or a structure of tensors of it, and the targets; it is
        evaluated for each row, as by `private.step`. Several losses before one step are parts of
        one batch. `.grad` has no raw gradient at any time.
        """
        if isinstance(fn, ModelLoss):
            raise Unsupported("a ModelLoss calls the model itself; use private.step(fn, *batch)")
        callables(fn=fn)
        if self.augment is not None:
            raise Unsupported("augment= goes with private.step, not with loss.backward()")
        if self.model is not self._parts.model:
            raise Unsupported(
                "torch.compile hides the layers of the model from loss.backward(); use "
                "private.step, or give privatize the model as it was before torch.compile"
            )
        if not isinstance(self._parts.engine, Ghost):
            why = getattr(self._parts.engine, "why", type(self._parts.engine).__name__)
            raise Unsupported(NO_RULES.format(why=why))
        if self.recorder is None:
            self.recorder = Recorder(self._parts, self.optimizer.next_part)
        return PrivateCriterion(self, fn)

    @property
    def optimizer(self) -> PrivateOptimizer:
        """For a loop with `private.criterion`: `loss.backward(); private.optimizer.step()`."""
        if self._optimizer is None:
            self._optimizer = PrivateOptimizer(self)
        return self._optimizer

    def close(self) -> None:
        super().close()
        self._let_go()
        if self.recorder is not None:
            self.recorder.stop()

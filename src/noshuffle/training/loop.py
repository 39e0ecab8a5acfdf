"""The loop over any batches, which can be killed at any instant and resumed.

    for every batch:  private step → callbacks → evaluation, metrics, checkpoint when due

Batches come from a DataLoader, a generator, a list or `TensorBatches`. With a run folder the loop
first loads the newest checkpoint and goes on behind it: released steps are replayed from the same
batches, and leave again only with the same sums; others get noise under fresh keys.

`metrics.jsonl` holds released values only. ε protects the training data; for the people in the data
that `evaluate` reads, its figures are covered only if that data is public. The loss of a batch is
raw: it goes to the callbacks alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from noshuffle.clipping import ModelLoss
from noshuffle.clipping.check import evaluated
from noshuffle.clipping.objective import Criterion
from noshuffle.errors import InvalidInput, ProbablyNotMeant, instance_of, whole
from noshuffle.participation import Epochs
from noshuffle.statement import PrivacyStatement
from noshuffle.training.batches import (
    TensorBatches,
    as_batch,
    refuse_passes,
    repeats_rows,
    starting_at,
)
from noshuffle.training.private import Private
from noshuffle.user_warnings import warn_user

PAST = (
    "this run has done {done} steps, and as many of these batches count as theirs and are read "
    "past; give first_step={done} if they are others (a further file), first_step=0 if not"
)
ENDED = (
    "pass {epoch} of {total} brought no batch (can they be read only once?), so training ended "
    "after {done} steps; give a list, a DataLoader or an iterable that begins anew each time"
)


@dataclass(frozen=True)
class StepProgress:
    """Where the loop stands after a step. `loss` is raw and not private."""

    step: int
    steps: int
    epoch: int
    loss: float = field(repr=False)
    is_replay: bool
    metrics: dict[str, float]
    private: Private = field(repr=False)

    @property
    def epsilon(self) -> float:
        """ε of the steps so far. Computed when asked for: some accountants take a while."""
        return self.private.epsilon_after(self.step)


Callback = Callable[[StepProgress], None]
Evaluate = Callable[[nn.Module], dict[str, float]]


def fit_model(
    private: Private,
    batches: Iterable[Any],
    loss_fn: Criterion | ModelLoss,
    *,
    epochs: int | None = None,
    steps_per_epoch: int | None = None,
    first_step: int | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    scheduler: Any = None,
    callbacks: Sequence[Callback] = (),
) -> PrivacyStatement:
    """Train until the batches or the plan end; returns the statement of what was released.

    `batches` are those of the whole run, from its first step on: a run that goes on reads past as
    many as it has done. Further files go into one iterable with those before (`itertools.chain`),
    or into a call of their own with `first_step`.

    Arguments:
        epochs: how often to go through `batches`; by default as the plan says (once if it is
            silent). More than once needs something that begins anew each time; a generator does
            not.
        steps_per_epoch: needed only to resume an iterable without a length in a later epoch.
        first_step: how many steps of the run lie before the first of these batches, 0 by default;
            those of all files before, where these are others than those of an earlier call. A
            number that is the same when the run is resumed: `private.steps_done` in the middle of
            a file would begin it anew.
        evaluate: measures the model on data that is public or held out; its figures are written
            to metrics.jsonl as they are, so let it return averages, nothing of single people.
        evaluate_every, checkpoint_every: in steps; by default at the end of every epoch.
        scheduler: stepped after every step, and saved along.
        callbacks: called after every step.
    """
    instance_of(Private, private=private)
    instance_of(Iterable, batches=batches)
    total = _planned(private)[0] if epochs is None else epochs
    whole(epochs=total)
    _check_readings(batches, epochs=epochs, is_cut=steps_per_epoch is not None)
    length = _length(private, batches, steps_per_epoch)
    if length and repeats_rows(batches) and not private._parts.drop:
        advice = f"fit the plan for Epochs(epochs={total}, steps_per_epoch={length})"
        advice += ", or give rows that are others, such as further files, as one pass of batches"
        refuse_passes(private.plan, steps=total * length, per_pass=length, advice=advice)
    if scheduler is not None:
        private.attach(scheduler=scheduler)
    if private.run is not None and not private.steps_done:
        private.resume()
        if not private.steps_released:  # killed before its first checkpoint, it begins alike
            private.save()
    first, known = _begin(private, batches, first_step)
    done = private.steps_done - first
    if not length and done and total > 1:
        raise InvalidInput(
            "to resume batches of unknown length over several epochs, give steps_per_epoch"
        )
    measured, begun = private.steps_done, done // length if length else 0
    for epoch in range(begun, total):
        if epoch:
            private.read_again()
        before = private.steps_done
        # The passes after it begin at their first batch, however long the one before was.
        behind = _skip(private, batches, known, done - epoch * length) if epoch == begun else 0
        # A loader that is iterated anew draws order and augmentations from the generators.
        private.return_to_epoch(private.steps_done - behind)
        for item in starting_at(batches, behind):
            if private.steps_done >= private.plan.steps:
                break
            batch = as_batch(item)
            is_replay = private.steps_done < private.steps_released
            private.advance(loss_fn, batch.data, ids=batch.ids)
            if scheduler is not None:
                scheduler.step()
            step = private.steps_done
            is_end = step == private.plan.steps or bool(length and (step - first) % length == 0)
            metrics = {}
            if is_end or (evaluate_every and step % evaluate_every == 0):
                metrics, measured = _measure(private, evaluate, epoch), step
            if private.run is not None and (
                step % checkpoint_every == 0 if checkpoint_every else is_end
            ):
                private.save()
            if callbacks:  # the loss is read, and waited for, only if somebody looks
                loss = private.outcome.loss if private.outcome is not None else math.nan
                where = StepProgress(
                    step, private.plan.steps, epoch, loss, is_replay, metrics, private
                )
                for callback in callbacks:
                    callback(where)
        if private.steps_done >= private.plan.steps:
            break
        is_short = not length or private.steps_done - first < total * length
        if epoch > begun and private.steps_done == before and is_short:
            warn_user(ENDED.format(epoch=epoch + 1, total=total, done=before), ProbablyNotMeant)
            break
    if private.steps_done > measured:  # batches that ended before the plan, at an odd step
        _measure(private, evaluate, epoch)
    if private.run is not None:
        private.save()
    return private.statement()


def _planned(private: Private) -> tuple[int, int]:
    """Epochs and steps per epoch, as far as the plan says: once, and 0."""
    rule = private.plan.participation.base
    return (rule.epochs, rule.steps_per_epoch) if isinstance(rule, Epochs) else (1, 0)


def _length(private: Private, batches: Iterable[Any], given: int | None) -> int:
    """Steps per epoch as far as they can be known, else 0."""
    if private.plan.participation.is_sampled:
        return private.plan.steps
    planned = _planned(private)[1]
    if given is not None:
        whole(steps_per_epoch=given)
    try:
        length = given or len(batches)  # type: ignore[arg-type]
    except TypeError:
        return planned
    if planned and length not in (planned, private.plan.steps):  # a pass, or all of them
        raise InvalidInput(
            f"the plan has {planned} steps per epoch, the data has {length} batches; leave out the "
            "incomplete last batch (drop_last=True), or fit the plan again"
        )
    return length


def _check_readings(batches: Iterable[Any], *, epochs: int | None, is_cut: bool) -> None:
    """Raise where several passes were asked for, and `batches` can be read but once.

    With steps_per_epoch (`is_cut`) a generator may bring the batches of all passes.
    """
    if epochs is not None and epochs > 1 and not is_cut and _ends_for_good(batches):
        raise InvalidInput(
            f"epochs={epochs} reads the batches {epochs} times, and a {type(batches).__name__} can "
            "be read once; give a list, a DataLoader or another iterable that begins anew each time"
        )


def _ends_for_good(batches: Iterable[Any]) -> bool:
    """Whether batches are surely read once: a generator, `zip`, `islice` and their like. Loaders
    of others may be iterators of themselves, and begin anew."""
    return isinstance(batches, Iterator) and type(batches).__module__ in ("builtins", "itertools")


def _begin(private: Private, batches: Iterable[Any], given: int | None) -> tuple[int, bool]:
    """The step of the first of these batches, and whether the call before had the same ones.

    Warns of batches that would be read past although they may be others than those before.
    """
    before, private.last_batches = private.last_batches, batches
    first, done = given or 0, private.steps_done
    whole(at_least=0, first_step=first)
    if first > done or (first and private.plan.participation.is_sampled):
        why = "a secret sampler counts the steps itself" if first <= done else "so many lie behind"
        raise InvalidInput(
            f"first_step is how many of the {done} steps that were done lie before these batches, "
            f"got {first}; leave it out where {why}"
        )
    is_other = before is not None and before is not batches
    if is_other and given is None and done and not private.plan.participation.is_sampled:
        warn_user(PAST.format(done=done), ProbablyNotMeant)
    return first, before is batches


def _skip(private: Private, batches: Iterable[Any], known: bool, done: int) -> int:
    """How many batches of this pass lie behind, where `done` steps are of it.

    An iterator that is `known` from an earlier call stands behind them by itself, and so does a
    loader over private.sampler.
    """
    if known and _ends_for_good(batches):
        return 0
    if private.plan.participation.is_sampled and not isinstance(batches, TensorBatches):
        return 0
    return done


def _measure(private: Private, evaluate: Evaluate | None, epoch: int) -> dict[str, float]:
    """Evaluate the model, and add a line to the metrics of the run."""
    metrics: dict[str, float] = {}
    if evaluate is not None:
        with evaluated(private.model), torch.no_grad():
            told = evaluate(private.model)
            instance_of(Mapping, **{"what evaluate returns": told})
            metrics = {name: float(value) for name, value in told.items()}
    metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
    if private.run is not None:
        grads = [p.grad for p in private._parts.parameters.values() if p.grad is not None]
        norm = float(torch.stack([g.double().norm() for g in grads]).norm()) if grads else None
        epsilon = private.epsilon_after(private.steps_done)
        released: dict[str, Any] = {
            "step": private.steps_done,
            "epoch": epoch,
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "learning_rate": float(private._parts.optimizer.param_groups[0]["lr"]),
            "private_gradient_norm": norm,
            "trained_parameters": sum(p.numel() for p in private._parts.parameters.values()),
        }
        if private._parts.threshold.is_adaptive:  # learned from noisy counts: released
            released["clip_norm"] = private._parts.threshold.clip.bound(())
        private.run.append_metrics({**released, **metrics})
    return metrics

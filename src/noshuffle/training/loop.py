"""The loop over any batches, which can be killed at any instant and resumed.

    for every batch:  private step → callbacks → evaluation, metrics, checkpoint when due

Batches come from a DataLoader (`PrivateBatches`), a generator, a list or `TensorBatches`. With a
run folder the loop first loads the newest checkpoint and goes on at the next step of the log.

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
from noshuffle.participation.base import InEpochs
from noshuffle.plan import Plan
from noshuffle.plan.statement import PrivacyStatement
from noshuffle.release.batches import PrivateBatches, check_length
from noshuffle.release.named_loader import why_no_places
from noshuffle.training.batches import (
    TensorBatches,
    as_batch,
    batches_of,
    refuse_passes,
    repeats_rows,
)
from noshuffle.training.private import Private
from noshuffle.user_warnings import warn_user

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
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    scheduler: Any = None,
    callbacks: Sequence[Callback] = (),
) -> PrivacyStatement:
    """Train until the batches or the plan end; returns the statement of what was released.

    `batches` are those of the whole run, from its first step on: a run that goes on begins at the
    next step of its log. An iterator (a generator) goes on where it stands; further files go into
    one of them (`itertools.chain`). The rows of a DataLoader are named by their place in the data
    set (`private.batches`) unless it gives `Batch` with ids.

    Arguments:
        epochs: how often to go through `batches`; by default as the plan says (once if it is
            silent). More than once needs something that begins anew each time.
        evaluate: measures the model on data that is public or held out; its figures are written
            to metrics.jsonl as they are, so let it return averages, nothing of single people.
        evaluate_every, checkpoint_every: in steps; by default at the end of every epoch.
        scheduler: stepped after every step, and saved along.
        callbacks: called after every step.
    """
    instance_of(Private, private=private)
    instance_of(Iterable, batches=batches)
    plan, total = private.plan, _epochs(private.plan) if epochs is None else epochs
    whole(epochs=total)
    if epochs is not None and epochs > 1 and _is_read_once(batches):
        raise InvalidInput(
            f"epochs={epochs} reads the batches {epochs} times, and a {type(batches).__name__} can "
            "be read once; give a list, a DataLoader or another iterable that begins anew each time"
        )
    source, length = _source(private, batches)
    if length and repeats_rows(batches) and not private._parts.drop:
        advice = f"fit the plan for Epochs(epochs={total}, steps_per_epoch={length})"
        advice += ", or give rows that are others, such as further files, as one pass of batches"
        refuse_passes(plan, steps=total * length, per_pass=length, advice=advice)
    if scheduler is not None:
        private.attach(scheduler=scheduler)
    is_known = private.steps_released and private._parts.release.is_restored
    if private.run is not None and not is_known:
        private.resume()
        if not private.steps_released:  # killed before its first checkpoint, it begins alike
            private.save()
    epoch, measured = 0, private.steps_released
    for epoch, item in _read(private, source, length, total):
        batch = as_batch(item)
        private.advance(loss_fn, batch.data, ids=batch.ids)
        if scheduler is not None:
            scheduler.step()
        step = private.steps_released
        is_end = step == plan.steps or bool(length and step % length == 0)
        metrics = {}
        if is_end or (evaluate_every and step % evaluate_every == 0):
            metrics, measured = _measure(private, evaluate, epoch), step
        is_due = step % checkpoint_every == 0 if checkpoint_every else is_end
        if private.run is not None and is_due:
            private.save()
        if callbacks:  # the loss is read, and waited for, only if somebody looks
            loss = private.outcome.loss if private.outcome is not None else math.nan
            where = StepProgress(step, plan.steps, epoch, loss, metrics, private)
            for callback in callbacks:
                callback(where)
    if private.steps_released > measured:  # batches that ended before the plan, at an odd step
        _measure(private, evaluate, epoch)
    if private.run is not None:
        private.save()
    return private.statement()


def _epochs(plan: Plan) -> int:
    """How often the plan goes through the data, as far as it says so."""
    rule = plan.participation.base
    return rule.epochs if isinstance(rule, InEpochs) and not rule.is_sampled else 1


def _source(private: Private, batches: Iterable[Any]) -> tuple[Iterable[Any], int]:
    """What is read, and how many steps one pass over it has (0: nobody knows)."""
    plan = private.plan
    if plan.participation.is_sampled:
        return batches, plan.steps
    if why_no_places(batches) == "":
        batches = batches_of(private, batches)
    if isinstance(batches, PrivateBatches):
        return batches, batches.length
    try:
        length = len(batches)  # type: ignore[arg-type]
    except TypeError:
        return batches, getattr(plan.participation.base, "steps_per_epoch", 0)
    check_length(plan, length)
    return batches, length


def _is_read_once(batches: Iterable[Any]) -> bool:
    """Whether batches are surely read once: a generator, `zip`, `islice` and their like. Loaders
    of others may be iterators of themselves, and begin anew."""
    return isinstance(batches, Iterator) and type(batches).__module__ in ("builtins", "itertools")


def _read(
    private: Private, source: Iterable[Any], length: int, total: int
) -> Iterator[tuple[int, Any]]:
    """The batches from the next step on, each with its epoch, until they or the plan end."""
    done, steps = private.steps_released, private.plan.steps
    first, behind = divmod(done, length) if length else (0, done)
    is_drawn = private.plan.participation.is_sampled and not isinstance(source, TensorBatches)
    if is_drawn or _is_read_once(source) or isinstance(source, PrivateBatches):
        behind = 0  # they stand there by themselves
    for number in range(first, total if done < steps else 0):
        items, is_empty = iter(source), True
        if isinstance(source, TensorBatches | Sequence):
            items, behind = _starting_at(source, behind), 0
        for item in items:
            is_empty = False
            if behind:
                behind -= 1
                continue
            yield private.steps_released // length if length else number, item
            if private.steps_released >= steps:
                return
        if is_empty and number > first:
            said = ENDED.format(epoch=number + 1, total=total, done=private.steps_released)
            warn_user(said, ProbablyNotMeant)
            return


def _starting_at(batches: TensorBatches | Sequence[Any], step: int) -> Iterator[Any]:
    if isinstance(batches, TensorBatches):
        return batches.starting_at(step)
    return (batches[i] for i in range(step, len(batches)))


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
        epsilon = private.epsilon_after(private.steps_released)
        released: dict[str, Any] = {
            "step": private.steps_released,
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

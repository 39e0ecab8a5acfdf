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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from noshuffle.clipping import ModelLoss
from noshuffle.clipping.check import evaluated
from noshuffle.clipping.objective import Criterion
from noshuffle.errors import InvalidInput, instance_of, whole
from noshuffle.participation import Epochs, Restarted
from noshuffle.statement import PrivacyStatement
from noshuffle.training.batches import (
    TensorBatches,
    as_batch,
    refuse_passes,
    repeats_rows,
    starting_at,
)
from noshuffle.training.private import Private


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
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    checkpoint_every: int | None = None,
    scheduler: Any = None,
    callbacks: Sequence[Callback] = (),
) -> PrivacyStatement:
    """Train until the batches or the plan end; returns the statement of what was released.

    Arguments:
        epochs: how often to go through `batches`; by default as the plan says (once if it is
            silent).
        steps_per_epoch: needed only to resume an iterable without a length in a later epoch.
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
    if not length and private.steps_done and total > 1:
        raise InvalidInput(
            "to resume batches of unknown length over several epochs, give steps_per_epoch"
        )
    measured = private.steps_done
    for epoch in range(private.steps_done // length if length else 0, total):
        if epoch:
            private.read_again()
        behind = _skip(private, batches, epoch * length)
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
            is_end = step == private.plan.steps or bool(length and step % length == 0)
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
    if private.steps_done > measured:  # batches that ended before the plan, at an odd step
        _measure(private, evaluate, epoch)
    if private.run is not None:
        private.save()
    return private.statement()


def _planned(private: Private) -> tuple[int, int]:
    """Epochs and steps per epoch, as far as the plan says: once, and 0."""
    rule = private.plan.participation
    rule = rule.participation if isinstance(rule, Restarted) else rule
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


def _skip(private: Private, batches: Iterable[Any], before: int) -> int:
    """How many batches of this epoch lie behind; `before` steps belong to earlier epochs."""
    if private.plan.participation.is_sampled and not isinstance(batches, TensorBatches):
        return 0  # a loader over private.sampler begins at the current step by itself
    return private.steps_done - before


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
        if private.norm_histogram is not None:
            released["norm_histogram"] = asdict(private.norm_histogram)
        private.run.append_metrics({**released, **metrics})
    return metrics

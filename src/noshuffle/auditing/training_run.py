"""A real training run with canaries in it, and what every attacker sees of it.

    white box    all iterates: T of every canary (see `canaries`), μ̂ beside the claimed μ
    one run      guesses about the coins: ε and μ that are proved without assumptions (`one_run`)
    final model  the same canaries by their last values; losses of people by coin (`membership`)

The run is `privatize` with its own keys, guard, clipping, ledger in memory and noise: nothing is
replaced. People are the rows of a data set, each in by a fair coin, in an order that the plan
allows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from noshuffle.auditing.answers import HOLDS, REFUTED, Finding
from noshuffle.auditing.canaries import Canaries, CanaryModel, canary_loss, estimate
from noshuffle.auditing.curve import MuEstimate, epsilon_of
from noshuffle.auditing.emitted import Array
from noshuffle.auditing.membership import attack
from noshuffle.auditing.one_run import Guesses, best_guesses
from noshuffle.clipping.check import evaluated
from noshuffle.errors import ProbablyNotMeant, whole
from noshuffle.plan import Plan
from noshuffle.rounding import up
from noshuffle.training import privatize

#: Coins that leave ten canaries on either side, six deviations below what is expected.
_LEAST = 80


@dataclass(frozen=True)
class CanaryAudit(Finding):
    """What canaries show of μ to one attacker ("iterates" or "final model")."""

    attacker: str
    canaries: int
    claimed_mu: float
    reachable_mu: float
    estimate: MuEstimate
    guesses: Guesses
    delta: float
    kind: ClassVar[str] = "canaries"

    @property
    def answer(self) -> str:
        """REFUTED where μ̂, or what guesses prove, is surely above the claim."""
        is_above = self.estimate.sure > self.claimed_mu or self.guesses.mu > self.claimed_mu
        return REFUTED if is_above else HOLDS

    def words(self) -> str:
        own, d, mu = self.estimate, self.delta, up(self.claimed_mu, places=4)
        claimed = up(epsilon_of(self.claimed_mu, delta=d), places=3)
        return (
            f"{self.answer}: {self.canaries:,} canaries, attacker sees the {self.attacker}\n"
            f"{own}, claimed {mu} ({own.mu / self.claimed_mu:.3f} of it; "
            f"{self.reachable_mu:.4f} is within reach)\nε at δ = {up(d)}: estimated "
            f"{own.epsilons(d)[0]:.3f}, claimed {claimed}; proved "
            f"by guesses alone: {self.guesses.words(d)}"
        )


def audit_training(
    plan: Plan,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    canaries: int = 40_000,
    examples: int = 1,
    clip_norm: float = 1.0,
    learning_rate: float = 0.5,
    progress: Callable[[int], None] | None = None,
) -> list[Finding]:
    """Train `model` on half of the rows of (x, y) with canaries among them; what attackers find."""
    whole(at_least=_LEAST, canaries=canaries)
    planted = Canaries.of(plan, count=canaries, examples=examples)
    is_member = np.random.default_rng().random(len(x)) < 0.5
    people = np.flatnonzero(is_member)
    batches = [people[rows] for rows in _batches(plan, len(people))]
    batch = max(1, *(len(rows) for rows in batches))
    whole_model = CanaryModel(model, canaries)
    groups = [
        {"params": list(model.parameters()), "lr": learning_rate},
        {"params": list(whole_model.canary.parameters()), "lr": float(batch)},
    ]
    form: dict[str, Any] = {"batch_size": batch, "clip_norm": clip_norm}
    private = privatize(whole_model, torch.optim.SGD(groups), plan, **form)
    released = np.empty((plan.steps, canaries))
    with warnings.catch_warnings():  # canaries make batches larger than those of people: meant
        warnings.filterwarnings("ignore", "batch size:", ProbablyNotMeant)
        rows = _steps(private, whole_model, (x, y, batches), planted, clip_norm)
        for step, row in enumerate(rows):
            released[step] = row
            if progress is not None:
                progress(step + 1)
    private.close()
    losses = losses_of(model, x, y)
    claim = plan.mu()
    assert claim is not None
    claim /= plan.multiplier_of_sensitivity  # canaries come or do not: zero-out neighbours
    coins, delta = planted.is_in, plan.delta
    found: list[Finding] = []
    for attacker, scores, reach in (
        ("iterates", planted.scores(released), planted.mu),
        ("final model", planted.final_scores(released), planted.final_mu()),
    ):
        proved = best_guesses(scores, coins, delta=delta)
        seen = estimate(scores, coins)
        found.append(CanaryAudit(attacker, canaries, claim, reach, seen, proved, delta))
    found.append(attack(losses, is_member, claimed_mu=claim))
    return found


def _batches(plan: Plan, count: int) -> list[NDArray[np.int64]]:
    """Which people come in each step: as many passes, with such a gap, as the plan allows."""
    record = plan.participation.to_dict()
    record = record.get("participation", record)
    gap = int(record.get("steps_per_epoch") or record.get("separation") or plan.steps)
    passes = int(record.get("epochs") or record.get("max_participations") or 1)
    nobody = np.empty(0, dtype=np.int64)
    return [
        np.arange(step % gap, count, gap) if step < gap * passes else nobody
        for step in range(plan.steps)
    ]


def _steps(
    private: Any,
    model: CanaryModel,
    data: tuple[Tensor, Tensor, list[NDArray[np.int64]]],
    planted: Canaries,
    clip_norm: float,
) -> Iterator[Array]:
    """What every step released of the canaries, from iterates, in units of the clip norm."""
    (x, y, batches), before = data, _values(model)
    loss = canary_loss(model.count, size=10 * clip_norm)
    for step, rows in enumerate(batches):
        own, birds = torch.from_numpy(rows), planted.rows(step)
        inputs = torch.cat([x[own], x.new_zeros((len(birds), *x.shape[1:]))])
        which = torch.cat([torch.full((len(own),), model.count, device="cpu"), birds])
        targets = torch.cat([y[own], y.new_zeros(len(birds))])
        ids = np.concatenate([rows, unit_ids(birds.numpy(), len(x))])
        private.advance(loss, (inputs, which, targets), ids=ids)
        after = _values(model)
        yield (before - after) / clip_norm
        before = after


def unit_ids(rows: NDArray[np.int64], first: int) -> NDArray[np.int64]:
    """Ids of canaries, after those of people: all examples of one canary have the same."""
    return first + rows


def _values(model: CanaryModel) -> Array:
    weight = model.canary.weight.detach()[: model.count, 0]
    return np.asarray(weight.double().numpy(), dtype=np.float64).copy()


@torch.no_grad()
def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Array:
    """Cross-entropy of every row under the model in eval mode."""
    with evaluated(model):
        parts = [
            F.cross_entropy(model(x[i : i + 512]), y[i : i + 512], reduction="none")
            for i in range(0, len(x), 512)
        ]
    return np.asarray(torch.cat(parts).double().numpy())

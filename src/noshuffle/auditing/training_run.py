"""A real training run with canaries in it, and what every attacker sees of it.

    white box    all iterates: T of every canary (see `canaries`), μ̂ beside the claimed μ
    one run      guesses about the coins: ε and μ that are proved without assumptions (`one_run`)
    final model  the same canaries by their last values; losses of people by coin (`membership`)

The run is `privatize` with its own keys, guard, clipping, log in memory and noise: nothing is
replaced. People are the rows of a data set, each in by a fair coin, in an order that the plan
allows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from noshuffle.auditing.answers import HOLDS, REFUTED, Finding
from noshuffle.auditing.canaries import Canaries, CanaryModel, canary_loss, estimate
from noshuffle.auditing.curve import MuEstimate, epsilon_of
from noshuffle.auditing.membership import attack, losses_of
from noshuffle.auditing.one_run import Guesses, best_guesses
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
        own, delta, mu = self.estimate, self.delta, up(self.claimed_mu, places=4)
        claimed = up(epsilon_of(self.claimed_mu, delta=delta), places=3)
        return (
            f"{self.answer}: {self.canaries:,} canaries, attacker sees the {self.attacker}\n"
            f"{own}, claimed {mu} ({own.mu / self.claimed_mu:.3f} of it; "
            f"{self.reachable_mu:.4f} is within reach)\nε at δ = {up(delta)}: estimated "
            f"{own.epsilons(delta)[0]:.3f}, claimed {claimed}; proved "
            f"by guesses alone: {self.guesses.words(delta)}"
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
    progress: Callable[[int], None] = lambda step: None,
) -> list[Finding]:
    """Train `model` on half of the rows of (x, y) with canaries among them; what attackers find."""
    whole(at_least=_LEAST, canaries=canaries)
    planted = Canaries.of(plan, count=canaries, examples=examples)
    is_member = np.random.default_rng().random(len(x)) < 0.5
    batches = _batches(plan, np.flatnonzero(is_member))
    size = max(1, *map(len, batches))
    whole_model = CanaryModel(model, canaries)
    weight = whole_model.canary.weight
    groups = [
        {"params": list(model.parameters()), "lr": learning_rate},
        {"params": [weight], "lr": float(size)},
    ]
    optimizer = torch.optim.SGD(groups)
    private = privatize(whole_model, optimizer, plan, batch_size=size, clip_norm=clip_norm)
    loss = canary_loss(canaries, size=10 * clip_norm)
    released, before = np.empty((plan.steps, canaries)), np.zeros(canaries)
    with warnings.catch_warnings():  # canaries make batches larger than those of people: meant
        warnings.filterwarnings("ignore", "batch size:", ProbablyNotMeant)
        for step, rows in enumerate(batches):
            people, birds = torch.from_numpy(rows), planted.rows(step)
            inputs = torch.cat([x[people], x.new_zeros((len(birds), *x.shape[1:]))])
            which = torch.cat([torch.full_like(people, canaries), birds])
            labels = torch.cat([y[people], y.new_zeros(len(birds))])
            ids = torch.cat([people, len(x) + birds])  # all examples of one canary have the same
            private.advance(loss, (inputs, which, labels), ids=ids)
            after = weight.detach()[:canaries, 0].numpy().astype(np.float64)
            released[step], before = (before - after) / clip_norm, after
            progress(step + 1)
    private.close()
    claim = plan.mu()
    assert claim is not None
    claim /= plan.multiplier_of_sensitivity  # canaries come or do not: zero-out neighbours
    coins, delta = planted.is_in, plan.delta
    found: list[Finding] = []
    for attacker, scores, reach in (
        ("iterates", planted.scores(released), planted.mu),
        ("final model", planted.final_scores(released), planted.final_mu()),
    ):
        seen, proved = estimate(scores, coins), best_guesses(scores, coins, delta=delta)
        found.append(CanaryAudit(attacker, canaries, claim, reach, seen, proved, delta))
    return [*found, attack(losses_of(model, x, y), is_member, claimed_mu=claim)]


def _batches(plan: Plan, people: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Who comes in each step: as many passes, with such a gap, as the plan allows."""
    part = plan.participation.base
    gap = getattr(part, "steps_per_epoch", getattr(part, "separation", plan.steps))
    passes = getattr(part, "epochs", getattr(part, "max_participations", 1))
    return [
        people[step % gap :: gap] if step < gap * passes else people[:0]
        for step in range(plan.steps)
    ]

"""ε of one user, from what that user really did.

A user who was asked c times is covered by the run's limits with at most c participations, which is
a smaller maximum than that of the run's statement:

    μ_user = S(separation b, at most c) / z ≤ S(b, k) / z = μ

Neighbours (zero-out) leave it as it is who was asked when, so the smaller number is a guarantee for
that user, as long as nobody steers check-ins by looking at released models (the run's own ε holds
even then). Others must not learn c, if the fact of taking part is itself sensitive.

>>> from noshuffle import MinSeparation, Plan
>>> plan = Plan.fit(MinSeparation(100, 20, 5), mechanism="blt", epsilon=8.0, unit="user")
>>> [round(epsilon_of(plan, participations=c), 2) for c in (0, 1, 5)]
[0.0, 2.89, 8.0]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from noshuffle.errors import instance_of, whole
from noshuffle.federated.cohort import UserId
from noshuffle.federated.server import ServerOptimizer
from noshuffle.participation import narrowed
from noshuffle.plan import Plan
from noshuffle.plan.statement import PrivacyStatement

NOT_STEERED = (
    "How often this user was asked did not depend on released models; the run's own ε holds "
    "even if it did."
)


@dataclass(frozen=True)
class Spending:
    """How many users were asked so many times, and the ε of each of them."""

    participations: int
    users: int
    epsilon: float


def epsilon_of(plan: Plan, *, participations: int, released: int | None = None) -> float:
    """ε, at the plan's δ, of a user who was asked this often in the first `released` rounds.

    Guarantees: never below the exact value for any pattern of that many steps that the plan
    admits, never above the ε of the whole run so far. Zero for a user who was never asked.
    """
    instance_of(Plan, plan=plan)
    rounds = plan.steps if released is None else released
    whole(at_least=0, participations=participations)
    if not participations or not rounds:
        return 0.0
    whole_run = plan.epsilon_after(rounds)
    narrow = narrowed(plan.participation, participations)
    if narrow is None:
        return whole_run
    return min(whole_run, plan.epsilon_after(rounds, participation=narrow))


def spending(server: ServerOptimizer) -> tuple[Spending, ...]:
    """The users of a run by how often they were asked, with the ε of each group."""
    _, seen = server.guard.table.all()
    counts, users = np.unique(seen.count, return_counts=True)
    return tuple(Spending(int(c), int(n), _own(server, int(c))) for c, n in zip(counts, users))


def _own(server: ServerOptimizer, count: int) -> float:
    """ε of a user asked so often. Where the clip norm is steered by noisy counts, the budget is
    shared between deltas and counts for k participations; where a fork adds up several runs we do
    not know who did what in the others; and where cohorts are secret draws, ε speaks of users who
    might have been drawn, whether they were or not. The run's own ε holds in all three cases.
    """
    run = server.statement().epsilon
    is_sampled = server.plan.participation.is_sampled
    if is_sampled or (server.needs_norms and count) or server.ancestors:
        return run
    return min(run, epsilon_of(server.plan, participations=count, released=server.round))


def participations_of(server: ServerOptimizer, user: UserId) -> int:
    ids, seen = server.guard.table.all()
    return int(seen.count[ids == server.units([user])].sum())


def statement_for(server: ServerOptimizer, user: UserId) -> PrivacyStatement:
    """What can be promised to one user, for the rounds so far.

    Where cohorts are secret draws it is the run's own, and says nothing of who was drawn.
    """
    instance_of(ServerOptimizer, server=server)
    run = server.statement()
    if server.plan.participation.is_sampled:
        return run
    count = participations_of(server, user)
    epsilon = _own(server, count)
    rounds = f"{count} round{'' if count == 1 else 's'}"
    words = f"This is the guarantee of one user, who was sent work in {rounds} so far."
    if epsilon >= run.epsilon:
        return run.with_assumptions(words)
    own = replace(run, epsilon=epsilon, mu=None, rho=None, exact=False)
    return own.with_assumptions(words, NOT_STEERED)

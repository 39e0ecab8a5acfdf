"""Federated training in one process: the same rounds, server and clients, without an engine.

    check_ins(t) → rounds.begin → local training of the invited → rounds.receive → rounds.finish

Clients are trained all at once where that is quicker (`vectorised`). On a CPU the arithmetic of
every client is that of a client on its own machine (`flower_client.task_client`), bit for bit.
Who checks in or fails to answer is a function of the round number, so a run that was stopped and
resumed is the run that was not.

>>> order = in_random_order(["ada", "bob", "eve"], seed=1)
>>> order(4) == order(4), sorted(order(4))
(True, ['ada', 'bob', 'eve'])
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from noshuffle.clipping.stateless import call_with
from noshuffle.errors import InvalidInput, ProbablyNotMeant, callables, instance_of, whole
from noshuffle.federated.clients import (
    NO_TARGET,
    LocalTraining,
    LossFn,
    check_classes,
    clip_delta,
    cross_entropy,
    moved,
    own_draws,
    training_of,
)
from noshuffle.federated.cohort import UserId
from noshuffle.federated.per_user import Spending, spending
from noshuffle.federated.recurrent import unrolled
from noshuffle.federated.rounds import RoundReport, Rounds
from noshuffle.federated.tasks import FederatedTask
from noshuffle.federated.vectorised import groups, pack, takes_together, trained_many
from noshuffle.plan.statement import PrivacyStatement
from noshuffle.release.spending import SIMULATED
from noshuffle.user_warnings import warn_user

#: Said of the first user whose update is no number.
_NOTHING = (
    "user {user!r} contributes nothing to round {step}: its update is NaN or infinite (a label "
    "that is no class, a feature that is no number, a learning rate that is too large); so do "
    "others of which this is true"
)
#: Round number → the users that check in, in the order in which they come.
CheckIns = Callable[[int], Sequence[UserId]]


@dataclass(frozen=True)
class RoundProgress:
    round: int
    of: int
    report: RoundReport
    epsilon: float
    seconds: float


@dataclass(frozen=True)
class Simulation:
    parameters: dict[str, Tensor]
    rounds: int
    is_complete: bool
    seconds: float
    statement: PrivacyStatement
    users: tuple[Spending, ...]

    @property
    def rounds_per_second(self) -> float:
        """Of the rounds that this call has run; what `noshuffle federated` prints."""
        return self.rounds / self.seconds if self.seconds else 0.0


def in_random_order(users: Sequence[UserId], *, seed: int) -> CheckIns:
    """Everybody checks in, in an order of its own every round."""
    instance_of(Sequence, users=users)
    whole(at_least=0, seed=seed)

    def order(step: int) -> list[UserId]:
        return [users[i] for i in np.random.default_rng((seed, step)).permutation(len(users))]

    return order


def in_stream_order(users: Sequence[UserId], *, rounds: int) -> CheckIns:
    """The population drifts by: round t asks those around place t/rounds of the list first."""
    instance_of(Sequence, users=users)
    whole(rounds=rounds)

    def order(step: int) -> list[UserId]:
        at = min(step, rounds - 1) * len(users) // rounds
        return [*users[at:], *users[:at]]

    return order


def simulate(
    rounds: Rounds,
    model: nn.Module,
    task: FederatedTask,
    *,
    local: LocalTraining,
    check_ins: CheckIns,
    until: int | None = None,
    loss_fn: LossFn = cross_entropy,
    answers: Callable[[int, UserId], bool] | None = None,
    vectorise: bool | None = None,
    at_once: int = 50,
    progress: Callable[[RoundProgress], None] | None = None,
) -> Simulation:
    """Run rounds up to number `until` (the plan's last, if not given).

    Arguments:
        model: the architecture; the server has the parameters.
        check_ins: who comes in which round; see `in_random_order`, `in_stream_order`.
        answers: whether a user's reply arrives; everybody's does by default.
        vectorise: train clients together; None does so where that is possible and quicker.
        at_once: how many clients are trained together.
        progress: called after every round.

    Where fewer users are free than `rounds` insists on, the simulation ends early: limits count
    rounds, so nobody gets free by waiting.
    """
    instance_of(Rounds, rounds=rounds)
    instance_of(nn.Module, model=model)
    instance_of(FederatedTask, task=task)
    instance_of(LocalTraining, local=local)
    callables(check_ins=check_ins, loss_fn=loss_fn)
    whole(at_once=at_once)
    for name, told in (("answers", answers), ("progress", progress)):
        if told is not None:
            callables(**{name: told})
    server = rounds.server
    last = server.plan.steps if until is None else until
    whole(at_least=0, at_most=server.plan.steps, until=last)
    server.user_identity = SIMULATED
    first, begin = server.round, time.perf_counter()
    is_together = takes_together(model, device=server.device, vectorise=vectorise)
    train = partial(_together, unrolled(model), at_once) if is_together else partial(_alone, model)
    is_warned = False
    while server.round < last:
        invitation = rounds.begin(check_ins(server.round))
        if invitation is None:
            break
        users = [u for u in invitation.users if answers is None or answers(invitation.step, u)]
        with own_draws(server.client_seed(invitation.step), server.device):
            for user, delta in train(invitation.parameters, users, task, local, loss_fn):
                sent = clip_delta(delta, clip_norm=invitation.clip_norm)
                if sent.is_nonfinite and not is_warned:
                    warn_user(_NOTHING.format(user=user, step=invitation.step), ProbablyNotMeant)
                    is_warned = True
                rounds.receive(user, sent.values, norm=sent.norm, step=invitation.step)
        report = rounds.finish()
        if progress is not None:
            epsilon, seconds = server.statement().epsilon, time.perf_counter() - begin
            progress(RoundProgress(server.round, last, report, epsilon, seconds))
    return Simulation(
        parameters=server.parameters(),
        rounds=server.round - first,
        is_complete=server.round >= last,
        seconds=time.perf_counter() - begin,
        statement=server.statement(),
        users=spending(server),
    )


Deltas = Iterator[tuple[UserId, dict[str, Tensor]]]


def _alone(
    model: nn.Module,
    parameters: dict[str, Tensor],
    users: Sequence[UserId],
    task: FederatedTask,
    local: LocalTraining,
    loss_fn: LossFn,
) -> Deltas:
    device = next(iter(parameters.values())).device
    train = training_of(model, parameters, local=local, loss_fn=loss_fn)
    for user in users:
        x, y = (part.to(device) for part in task.client(user))
        with _named([user]):
            now = train(x, y)
        yield user, moved(now, parameters)


def _together(
    model: nn.Module,
    at_once: int,
    parameters: dict[str, Tensor],
    users: Sequence[UserId],
    task: FederatedTask,
    local: LocalTraining,
    loss_fn: LossFn,
) -> Deltas:
    device = next(iter(parameters.values())).device
    places = task.places(users)
    first, end = task.starts[places], task.starts[places + 1]
    for some in groups(first, end, local=local, at_once=at_once):
        rows, weights = pack(first[some], end[some], local=local)
        steps = [(*task.batch(rows[:, s]), weights[:, s]) for s in range(rows.shape[1])]
        batches = [(x.to(device), y.to(device), w.to(device)) for x, y, w in steps]
        with _named([users[place] for place in some]):
            now = trained_many(
                model, parameters, batches, clients=len(some), local=local, loss_fn=loss_fn
            )
        deltas = moved(now, parameters)
        for i, place in enumerate(some):
            yield users[place], {name: own[i] for name, own in deltas.items()}


@contextmanager
def _named(users: Sequence[UserId]) -> Iterator[None]:
    """An index outside a table says whose it is."""
    whose = f"user {users[0]!r}"
    if len(users) > 1:
        whose = f"one of {len(users)} users that train together ({users[0]!r}, …)"
        whose += "; vectorise=False names it"
    with _in_data_of(whose):
        yield


@contextmanager
def _in_data_of(whose: str) -> Iterator[None]:
    """An index outside a table (a symbol that is none, a label under a loss of one's own) is one
    line."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if "out of bounds" not in str(error) and "out of range" not in str(error):
            raise
        why = str(error).partition("\n")[0]
        raise InvalidInput(f"{why}: in the data of {whose}") from error


@torch.no_grad()
def evaluate(
    model: nn.Module,
    parameters: dict[str, Tensor],
    task: FederatedTask,
    *,
    batch_size: int = 256,
    most: int | None = None,
    loss_fn: LossFn = cross_entropy,
) -> tuple[float, float]:
    """Mean loss and accuracy per target on the held-out users (on the first `most` rows).

    In eval mode, as the model will be used; the model itself stays as it is. With a `loss_fn` of
    one's own (one loss per example, as in `simulate`) the mean is over examples, and the accuracy
    NaN: a regression has none.
    """
    rows = len(task.x_test) if most is None else min(most, len(task.x_test))
    device = next(iter(parameters.values())).device
    twin = copy.deepcopy(model).eval()
    loss, hits, targets = 0.0, 0, 0
    for at in range(0, rows, batch_size):
        end = min(at + batch_size, rows)
        x, y = task.widen(task.x_test[at:end], task.y_test[at:end])
        x, y = x.to(device), y.to(device)
        with _in_data_of(f"the held-out users (rows {at} to {end - 1})"):
            scores = call_with(twin, parameters, (x,))
            if loss_fn is not cross_entropy:
                loss, targets = loss + float(loss_fn(scores, y).sum()), targets + len(y)
                continue
        check_classes(scores, y, first=at)
        is_target = y != NO_TARGET
        losses = nn.functional.cross_entropy(scores, y, reduction="sum", ignore_index=NO_TARGET)
        loss += float(losses)
        hits += int(((scores.argmax(1) == y) & is_target).sum())
        targets += int(is_target.sum())
    accuracy = hits / max(1, targets) if loss_fn is cross_entropy else math.nan
    return loss / max(1, targets), accuracy

"""Many federated runs at once, for studies: K settings of one small model in one program.

    slot (k, u)     θ_k → local steps of user u → Δ → clip to ζ_k           all slots side by side
    run k           θ_k ← momentum step on −(Σ_u clip(Δ_ku) + z_k ζ_k · row t of C⁻¹Z_k) / m

Slots of all runs are stacked, at most `at_once` together (`stack`). Runs have their own noise
(`training.many.release`), rates, clip norms, weights, mechanism and cohorts (`admitted_cohorts`, or
sampled). A study makes no statement. Under a test source run k equals a run of `ServerOptimizer`
with the same cohorts and tensors called "k/name", up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import vmap

from noshuffle.clipping.stateless import call_with
from noshuffle.errors import InvalidInput, non_negative, positive, whole
from noshuffle.federated import stacked_lstm
from noshuffle.federated.clients import NO_TARGET, LocalTraining
from noshuffle.federated.cohort import draw_cohort
from noshuffle.federated.recurrent import unrolled
from noshuffle.federated.simulate import CheckIns
from noshuffle.federated.stack import (
    FlatRows,
    Stack,
    UserRows,
    gradient_fn,
    slots_of,
    stack_size,
)
from noshuffle.federated.tasks import FederatedTask
from noshuffle.noise import Source
from noshuffle.participation import Participation, SinglePass
from noshuffle.plan import Plan
from noshuffle.release.ledger import Ledger
from noshuffle.strategies import Strategy
from noshuffle.training.many.release import StudyRelease
from noshuffle.training.many.setting import check_schedule, momentum_step, seeded

#: The places of a round's users, round by round.
Cohorts = Sequence[NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class FederatedSetting:
    """What one of the runs has for itself; `mechanism` and `cohorts` are names."""

    mechanism: str
    cohorts: str
    noise_multiplier: float
    server_rate: float
    client_rate: float
    clip_norm: float = 1.0
    momentum: float = 0.9
    seed: int = 0

    def __post_init__(self) -> None:
        non_negative(noise_multiplier=self.noise_multiplier, momentum=self.momentum)
        positive(
            server_rate=self.server_rate, client_rate=self.client_rate, clip_norm=self.clip_norm
        )


Setting = FederatedSetting  # its name in 0.1


def admitted_cohorts(
    participation: Participation, task: FederatedTask, *, size: int, check_ins: CheckIns
) -> list[NDArray[np.int64]]:
    """Who takes part in every round: the first `size` users of the check-ins that the guard admits.

    Places in increasing order of the user's number; nobody exceeds the participation.
    """
    ledger = Ledger(participation, unit="user")
    cohorts = []
    for step in range(participation.steps):
        places = task.places(check_ins(step))
        cohort = np.sort(places[draw_cohort(ledger, places, size=size)])
        ledger.record(ledger.admit(step, cohort, step.to_bytes(8, "little")))
        cohorts.append(cohort)
    ledger.close()
    return cohorts


def train_many(
    make_model: Callable[[], nn.Module],
    task: FederatedTask,
    settings: Sequence[FederatedSetting],
    *,
    cohorts: Mapping[str, Cohorts],
    strategies: Mapping[str, Strategy],
    rounds: int,
    cohort_size: int,
    local: LocalTraining,
    learning_rates: Sequence[float] = (),
    horizon: int | None = None,
    source: Source | None = None,
    device: torch.device | str = "cpu",
    at_once: int = 2048,
    on_round: Callable[[int, dict[str, Tensor]], None] | None = None,
) -> dict[str, Tensor]:
    """Train every setting; the parameters of all runs, stacked in the order of `settings`.

    Arguments:
        make_model: the architecture; called once per run after `torch.manual_seed(seed)`.
        cohorts, strategies: by the names that settings use.
        horizon: rounds that the strategies' noise is laid out for, if more than `rounds`.
        learning_rates: factors on the server rates, one a round (empty: constant).
        source: where noise comes from; fresh keys of the operating system by default.
        on_round: called with the number of rounds done and the stacked parameters.
    """
    whole(rounds=rounds, cohort_size=cohort_size, at_once=at_once)
    _check(settings, cohorts, rounds=rounds, learning_rates=learning_rates)
    models = [seeded(make_model, setting.seed) for setting in settings]
    flat = FlatRows.of(models[0])
    theta = torch.stack([flat.pack(dict(m.named_parameters())) for m in models]).to(device)
    columns = [[s.client_rate, s.clip_norm, s.server_rate, s.momentum] for s in settings]
    client_rate, clip, rate, momentum = torch.tensor(columns, device=device).unbind(1)
    stack = Stack(
        gradient_fn(models[0]),
        flat,
        UserRows.of(task, local=local, device=device),
        theta,
        client_rate=client_rate,
        clip_norm=clip,
        local=local,
        size=stack_size(
            [sum(slots_of(cohorts[s.cohorts][t]) for s in settings) for t in range(rounds)],
            at_most=at_once,
        ),
    )
    laid_out = {
        name: Plan(
            participation=SinglePass(horizon or rounds), strategy=strategies[name],
            noise_multiplier=1.0, unit="user",
        )
        for name in {s.mechanism for s in settings}
    }  # fmt: skip
    release = StudyRelease(
        [laid_out[s.mechanism] for s in settings],
        flat.shapes,
        multipliers=[s.noise_multiplier for s in settings],
        clip_norms=[s.clip_norm for s in settings],
        device=theta.device,
        source=source,
    )
    velocity = torch.zeros_like(theta)
    for t in range(rounds):
        slots = [(k, cohorts[s.cohorts][t]) for k, s in enumerate(settings)]
        total = stack.clipped_sums(slots)
        release.open(release.admit())
        release.add_(flat.views(total))
        momentum_step(
            {"theta": theta},
            {"theta": velocity},
            {"theta": total},
            rate=rate * (learning_rates[t] if learning_rates else 1.0),
            momentum=momentum,
            weight=-1.0 / cohort_size,
        )
        if on_round is not None:
            on_round(t + 1, flat.views(theta))
    return flat.views(theta)


@torch.no_grad()
def accuracies(
    model: nn.Module,
    params: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    *,
    at_once: int = 20_000,
) -> tuple[Tensor, Tensor]:
    """Mean loss and accuracy per target of every run on rows of text (rows, time) or features.

    Features in floating point are taken as they are (`FederatedTask.widen`), whole numbers are
    symbols. `at_once` is how many rows are scored together, over all runs.
    """
    some = next(iter(params.values()))
    runs, device = len(some), some.device
    found = torch.zeros(3, runs, dtype=torch.float64, device=device)
    size = max(1, at_once // runs)
    twin = unrolled(model)
    for at in range(0, len(x), size):
        rows = x[at : at + size].to(device)
        rows = rows if rows.is_floating_point() else rows.to(torch.int64)
        targets = y[at : at + size].to(device, torch.int64)
        given = rows.expand(runs, *rows.shape)
        if stacked_lstm.fits(model):
            scores = stacked_lstm.scores(params, given).permute(0, 2, 3, 1)
        else:
            scores = vmap(lambda p, r: call_with(twin, p, (r,)))(dict(params), given)
        is_target = targets != NO_TARGET
        right = (scores.argmax(2) == targets) & is_target
        # (runs, rows, classes, …) → the log-probability of each target
        logs = scores.log_softmax(2).gather(
            2, targets.clamp_min(0).expand(runs, *targets.shape)[:, :, None]
        )
        found[0] -= (logs.squeeze(2) * is_target).double().flatten(1).sum(1)
        found[1] += right.flatten(1).sum(1)
        found[2] += is_target.sum()
    return found[0] / found[2].clamp_min(1), found[1] / found[2].clamp_min(1)


def _check(
    settings: Sequence[FederatedSetting],
    cohorts: Mapping[str, Cohorts],
    *,
    rounds: int,
    learning_rates: Sequence[float],
) -> None:
    if not settings:
        raise InvalidInput("settings must hold at least one run, got none")
    check_schedule(learning_rates, steps=rounds)
    for name in {s.cohorts for s in settings}:
        if len(cohorts[name]) < rounds:
            raise InvalidInput(f"cohorts {name!r} hold {len(cohorts[name])} of {rounds} rounds")

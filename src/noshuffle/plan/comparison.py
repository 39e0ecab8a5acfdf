"""Mechanisms, and kinds of secret sampling, side by side at equal (ε, δ).

Everything gets the noise that its own accountant asks for; the error column is then what a model
would feel: z · ‖row t of A·C⁻¹‖, the standard deviation of the noise in the running sum after step
t, in units of the clip norm. It already holds what amplification is worth. Kinds of sampling:

    none       the same order in every epoch, the best mechanism
    poisson    coin flips in every step, independent noise (DP-SGD)
    cyclic     groups that take turns with coin flips, as many bands as groups, as many as are best
    bins       one secret position for every unit, under the strategies of "none" and "cyclic", and
               bands fitted to its own accountant (`plan.fit_bins`)

Batches have the same expected size everywhere. Draws from a population of known size are compared
with others by `compare(FixedSize(…), mechanism="identity", …)`. No state.

>>> from noshuffle.participation import Epochs, SinglePass
>>> [row.name for row in compare(SinglePass(16), mechanism="identity", epsilon=1.0, delta=1e-5)]
['identity']
>>> rows = compare_sampling(Epochs(4, 8), kinds=("poisson", "cyclic"), epsilon=4.0, delta=1e-5)
>>> [row.sampling for row in rows], rows[0].rms < rows[1].rms
(['cyclic', 'poisson'], True)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from noshuffle.errors import NoshuffleError, Unsupported, instance_of, one_of, whole
from noshuffle.participation import BallsInBins, CyclicPoisson, Epochs, Participation, Poisson
from noshuffle.plan.fit import Target, best_cyclic, best_in_bins
from noshuffle.plan.plan import Plan
from noshuffle.strategies import Strategy, Workload, error
from noshuffle.strategies.mechanisms import MECHANISMS, STAGED_STEPS
from noshuffle.strategies.workload import checked_workload

#: What the usual comparison of a long run leaves out.
LEFT_OUT = ("sqrt", "bsr", "bisr", "blt_tapped", "blt_gains")
KINDS = ("none", "poisson", "cyclic", "bins")


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A plan at its own noise; errors are in units of the clip norm.

    `name` is the mechanism as it was asked for, `sampling` the kind of sampling in a comparison of
    kinds, `seconds` the time that the fit took.
    """

    name: str
    plan: Plan
    rms: float
    max: float
    seconds: float
    sampling: str = ""

    @property
    def epsilon(self) -> float:
        return self.plan.epsilon()

    @property
    def noise_multiplier(self) -> float:
        return self.plan.noise_multiplier

    @property
    def buffers(self) -> int:
        """Copies of the model that are kept."""
        return self.plan.strategy.buffers(self.plan.steps)

    @property
    def words(self) -> str:
        """The row as a line of text."""
        part, name = self.plan.participation, self.name
        if isinstance(part, CyclicPoisson):
            name += f", {part.groups} group{'' if part.groups == 1 else 's'}"
        return f"{self.sampling or 'none'}: {name}, noise × rms {self.rms:.4g}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `normalized_*` are error × sensitivity (noise-free comparison)."""
        record = {
            "mechanism": self.name,
            "epsilon": self.epsilon,
            "delta": self.plan.delta,
            "noise_multiplier": self.noise_multiplier,
            "rms_error": self.rms,
            "plan_hash": self.plan.hash,
        }
        if self.sampling:
            part = self.plan.participation.to_dict()
            return {"sampling": self.sampling, "participation": part, **record}
        reach = self.plan.sensitivity
        scale = reach.value / self.noise_multiplier
        return {
            **record,
            "sensitivity": reach.value,
            "exact": reach.exact,
            "max_error": self.max,
            "normalized_rms_error": self.rms * scale,
            "normalized_max_error": self.max * scale,
            "buffers": self.buffers,
            "fit_seconds": self.seconds,
        }


def _row(fit: Callable[[], Plan], workload: Workload, *, name: str = "", kind: str = "") -> PlanRow:
    """The plan that `fit` makes, timed and measured."""
    began = time.perf_counter()
    plan = fit()
    seconds = time.perf_counter() - began
    felt, z = error(plan.strategy, plan.steps, workload=workload), plan.noise_multiplier
    return PlanRow(
        name=name or plan.strategy.name,
        plan=plan,
        rms=z * felt.rms,
        max=z * felt.max,
        seconds=seconds,
        sampling=kind,
    )


def compare(
    participation: Participation,
    *,
    mechanism: str = "all",
    workload: Workload | None = None,
    max_buffers: int | None = None,
    progress: Callable[[str], None] = lambda name: None,
    fit_fn: Callable[..., Strategy] | None = None,
    **terms: Any,
) -> list[PlanRow]:
    """Rows sorted by rms error, the best first; mechanisms that do not apply are left out.

    `mechanism` is a name, "all", or "usual": in long runs without the mechanisms that are special
    cases of gains on both sides, or between others (`LEFT_OUT`). `terms` are those of `Plan.fit`:
    epsilon or noise_multiplier, delta, neighbours, unit. `progress` is told the name of each, and
    "" at the end; `fit_fn` fits a strategy by name.
    """
    instance_of(Participation, participation=participation)
    workload = checked_workload(workload)
    if max_buffers is not None:
        whole(at_least=0, max_buffers=max_buffers)
    wanted = tuple(MECHANISMS) if mechanism in ("all", "usual") else (mechanism,)
    if mechanism == "usual" and participation.steps > STAGED_STEPS:
        wanted = tuple(name for name in wanted if name not in LEFT_OUT or workload.beta)

    def fitted(name: str) -> Plan:
        chosen: str | Strategy = name
        if fit_fn is not None and name in MECHANISMS and not participation.is_sampled:
            chosen = fit_fn(name, participation, workload=workload)
        return Plan.fit(participation, mechanism=chosen, workload=workload, **terms)

    rows: list[PlanRow] = []
    refusals: list[NoshuffleError] = []
    for name in wanted:
        progress(name)
        try:
            row = _row(partial(fitted, name), workload, name=name)
            if max_buffers is not None and row.buffers > max_buffers:
                raise Unsupported(f"{name} needs {row.buffers} buffers")
            rows.append(row)
        except Unsupported as refusal:
            refusals.append(refusal)
    progress("")
    if not rows:
        raise refusals[0]
    return sorted(rows, key=lambda row: row.rms)


def compare_sampling(
    order: Epochs,
    *,
    kinds: Sequence[str],
    epsilon: float,
    delta: float = 1e-5,
    neighbours: str = "",
    unit: str = "example",
    unsampled: str | Strategy = "best",
    workload: Workload | None = None,
    max_buffers: int | None = None,
) -> list[PlanRow]:
    """The same passes under these kinds of sampling, the least noise first.

    `unsampled` is the mechanism of "none". Secret positions have no proof for replace-one, and are
    left out there (refused if nothing remains).
    """
    instance_of(Epochs, order=order)
    for kind in kinds:
        one_of(KINDS, sampling=kind)
    if neighbours == "replace-one":
        kinds = [kind for kind in kinds if kind != "bins"]
        if not kinds:
            raise Unsupported(
                "secret positions are accounted for add-remove or zero-out neighbours, not "
                'replace-one; use sampling="poisson" or "cyclic"'
            )
    if max_buffers is not None:
        whole(at_least=0, max_buffers=max_buffers)
    workload = checked_workload(workload)
    target = Target(epsilon=epsilon, delta=delta, neighbours=neighbours, workload=workload)
    n, b = order.steps, order.steps_per_epoch
    rows: dict[str, PlanRow] = {}

    def add(kind: str, part: Participation, mechanism: str | Strategy) -> None:
        fit = partial(
            Plan.fit,
            part,
            mechanism=mechanism,
            epsilon=epsilon,
            delta=delta,
            neighbours=neighbours,
            unit=unit,
            workload=workload,
            max_buffers=max_buffers,
        )
        rows[kind] = _row(fit, workload, kind=kind)

    if "none" in kinds or "bins" in kinds:
        add("none", order, unsampled)
    if "poisson" in kinds:
        add("poisson", Poisson(n, 1 / b), "identity")
    if "cyclic" in kinds or "bins" in kinds:
        add("cyclic", *best_cyclic(order, target=target, max_buffers=max_buffers))
    if "bins" in kinds:
        bins = BallsInBins(order.epochs, b)
        tried = [rows[kind].plan.strategy for kind in ("none", "cyclic")]
        with suppress(Unsupported) if len(kinds) > 1 else nullcontext():
            add("bins", bins, best_in_bins(bins, tried, target=target, max_buffers=max_buffers))
    return sorted((rows[kind] for kind in kinds if kind in rows), key=lambda row: row.rms)

"""Mechanisms side by side at equal privacy: what `noshuffle plan` prints.

For one participation every mechanism gets the noise that its own sensitivity needs for the same
(ε, δ); the error column is then what a model would feel: z · ‖row t of A·C⁻¹‖, the standard
deviation of the noise in the running sum after step t, in units of the clip norm.

>>> from noshuffle.participation import SinglePass
>>> [row.name for row in compare(SinglePass(16), mechanism="identity", epsilon=1.0, delta=1e-5)]
['identity']
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from noshuffle.errors import InvalidInput, NoshuffleError, Unsupported, instance_of, whole
from noshuffle.participation import Participation
from noshuffle.plan import Plan
from noshuffle.strategies import Strategy, Workload, error
from noshuffle.strategies.mechanisms import MECHANISMS, STAGED_STEPS
from noshuffle.strategies.workload import checked_workload

#: What the usual comparison of a long run leaves out.
LEFT_OUT = ("sqrt", "bsr", "bisr", "blt_tapped", "blt_gains")


@dataclass(frozen=True)
class MechanismRow:
    """One mechanism at its own noise; errors are in units of the clip norm."""

    name: str
    plan: Plan
    epsilon: float
    rms: float
    max: float
    buffers: int
    seconds: float

    @property
    def noise_multiplier(self) -> float:
        return self.plan.noise_multiplier

    @property
    def sensitivity(self) -> float:
        return self.plan.sensitivity.value

    @property
    def exact(self) -> bool:
        return self.plan.sensitivity.exact

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `normalized_*` are error × sensitivity (noise-free comparison)."""
        scale = self.sensitivity / self.noise_multiplier
        return {
            "mechanism": self.name,
            "epsilon": self.epsilon,
            "delta": self.plan.delta,
            "noise_multiplier": self.noise_multiplier,
            "sensitivity": self.sensitivity,
            "exact": self.exact,
            "rms_error": self.rms,
            "max_error": self.max,
            "normalized_rms_error": self.rms * scale,
            "normalized_max_error": self.max * scale,
            "buffers": self.buffers,
            "fit_seconds": self.seconds,
            "plan_hash": self.plan.hash,
        }


def compare(
    participation: Participation,
    *,
    mechanism: str = "all",
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    delta: float = 1e-5,
    neighbours: str = "",
    unit: str = "example",
    workload: Workload | None = None,
    max_buffers: int | None = None,
    progress: Callable[[str], None] | None = None,
    fit_fn: Callable[..., Strategy] | None = None,
) -> list[MechanismRow]:
    """Rows sorted by rms error, the best first; mechanisms that do not apply are left out.

    `mechanism` is a name, "all", or "usual": in long runs without the mechanisms that are special
    cases of gains on both sides, or between others (`LEFT_OUT`). `fit_fn` fits a strategy by name.
    """
    instance_of(Participation, participation=participation)
    workload = checked_workload(workload)
    if max_buffers is not None:
        whole(at_least=0, max_buffers=max_buffers)
    wanted = tuple(MECHANISMS) if mechanism in ("all", "usual") else (mechanism,)
    if mechanism == "usual" and participation.steps > STAGED_STEPS:
        wanted = tuple(name for name in wanted if name not in LEFT_OUT or workload.beta)
    rows: list[MechanismRow] = []
    refusals: list[NoshuffleError] = []
    for name in wanted:
        if progress is not None:
            progress(name)
        started = time.perf_counter()
        try:
            chosen: str | Strategy = name
            if fit_fn is not None and name in MECHANISMS and not participation.is_sampled:
                chosen = fit_fn(name, participation, workload=workload)
            plan = Plan.fit(
                participation,
                mechanism=chosen,
                epsilon=epsilon,
                noise_multiplier=noise_multiplier,
                delta=delta,
                neighbours=neighbours,
                unit=unit,
                workload=workload,
            )
            seconds = time.perf_counter() - started
            buffers = plan.strategy.buffers(plan.steps)
            if max_buffers is not None and buffers > max_buffers:
                refusals.append(Unsupported(f"{name} needs {buffers} buffers"))
                continue
            felt = error(plan.strategy, plan.steps, workload=workload)
        except Unsupported as refusal:
            refusals.append(refusal)
            continue
        z = plan.noise_multiplier
        rows.append(
            MechanismRow(name, plan, plan.epsilon(), z * felt.rms, z * felt.max, buffers, seconds)
        )
    if progress is not None:
        progress("")
    if not rows:
        raise refusals[0] if refusals else InvalidInput(f"no mechanism is called {mechanism!r}")
    return sorted(rows, key=lambda row: row.rms)

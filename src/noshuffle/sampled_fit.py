"""What secret sampling buys: one run unsampled and under every kind of sampling, at equal (ε, δ).

    none      the same order in every epoch, the best mechanism
    poisson   coin flips in every step, independent noise (DP-SGD)
    cyclic    groups that take turns with coin flips, as many bands as groups, as many as are best
    bins      one secret position for every unit, under the strategies of "none" and "cyclic", and
              bands fitted to its own accountant (`bins_fit`)
    separated a fresh one in every epoch: independent noise, or an eighth of an epoch of bands

Batches have the same expected size everywhere. Compared is z · rms, the noise in the running sum,
which already holds what the amplification of each is worth. No state.

>>> from noshuffle.participation import Epochs
>>> from noshuffle.plan import Plan
>>> kinds = ("poisson", "cyclic")
>>> rows = alternatives(Plan.fit, Epochs(4, 8), epsilon=4.0, delta=1e-5, kinds=kinds)
>>> [row.kind for row in rows], rows[0].rms < rows[1].rms
(['cyclic', 'poisson'], True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from noshuffle.bins_fit import fit_bins
from noshuffle.errors import InvalidInput, Unsupported, instance_of, one_of, whole
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    Epochs,
    Participation,
    Poisson,
    SeparatedBins,
)
from noshuffle.strategies import Strategy, Workload, error

KINDS = ("none", "poisson", "cyclic", "bins")
#: Kinds of secret draws; "separated" is tried where it is asked for by name.
DRAWN = ("poisson", "cyclic", "separated", "bins")


@dataclass(frozen=True)
class SamplingRow:
    """One kind of sampling, its `Plan`, and the noise in the running sum in clip norms."""

    kind: str
    plan: Any
    rms: float

    @property
    def words(self) -> str:
        part, name = self.plan.participation, self.plan.strategy.name
        if isinstance(part, SeparatedBins):
            name += f", {part.separation} apart"
        groups = f", {part.groups} groups" if isinstance(part, CyclicPoisson) else ""
        return f"{self.kind}: {name}{groups}, noise × rms {self.rms:.4g}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "sampling": self.kind,
            "participation": self.plan.participation.to_dict(),
            "mechanism": self.plan.strategy.name,
            "epsilon": self.plan.epsilon(),
            "delta": self.plan.delta,
            "noise_multiplier": self.plan.noise_multiplier,
            "rms_error": self.rms,
            "plan_hash": self.plan.hash,
        }


def alternatives(
    fit_plan: Callable[..., Any],
    participation: Epochs,
    *,
    epsilon: float,
    delta: float,
    kinds: Sequence[str] = KINDS,
    unsampled: str | Strategy = "best",
    workload: Workload | None = None,
    neighbours: str = "",
    max_buffers: int | None = None,
    **options: Any,
) -> list[SamplingRow]:
    """Rows for the kinds that apply, the least noise first.

    `fit_plan` is `Plan.fit`, `unsampled` the mechanism of "none"; `options` are its own. Secret
    positions have no proof for replace-one, and are left out there (refused if nothing remains).
    """
    instance_of(Epochs, participation=participation)
    for kind in kinds:
        one_of(("none", *DRAWN), sampling=kind)
    if neighbours == "replace-one":
        kinds = [kind for kind in kinds if kind not in ("bins", "separated")]
        if not kinds:
            raise Unsupported(
                "secret positions are accounted for add-remove or zero-out neighbours, not "
                'replace-one; use sampling="poisson" or "cyclic"'
            )
    if max_buffers is not None:
        whole(at_least=0, max_buffers=max_buffers)
    common = {"epsilon": epsilon, "delta": delta, "workload": workload, **options}
    common |= {"neighbours": neighbours, "max_buffers": max_buffers}

    def row(kind: str, part: Participation, mechanism: str | Strategy) -> SamplingRow:
        plan = fit_plan(part, mechanism=mechanism, **common)
        felt = error(plan.strategy, plan.steps, workload=workload or Workload()).rms
        return SamplingRow(kind, plan, plan.noise_multiplier * felt)

    rows: dict[str, SamplingRow] = {}
    n, b = participation.steps, participation.steps_per_epoch
    if "none" in kinds or "bins" in kinds:
        rows["none"] = row("none", participation, unsampled)
    if "poisson" in kinds:
        rows["poisson"] = row("poisson", Poisson(n, 1 / b), "identity")
    if "cyclic" in kinds or "bins" in kinds:

        @cache
        def turns(groups: int) -> SamplingRow:
            return row("cyclic", CyclicPoisson(n, groups, groups / b), "best")

        most = b if max_buffers is None else min(b, max_buffers + 1)
        rows["cyclic"] = turns(_least(lambda groups: turns(groups).rms, most))
    if "separated" in kinds:
        widths = {1: "identity", max(1, b // 8): "best"}
        if max_buffers is not None and b // 8 > max_buffers + 1:
            widths = {1: "identity"}
        fresh = [row("separated", SeparatedBins(n // b, b, w), name) for w, name in widths.items()]
        rows["separated"] = min(fresh, key=lambda each: each.rms)
    if "bins" in kinds:
        part, found = BallsInBins(participation.epochs, b), []
        tried = [rows["none"].plan.strategy, rows["cyclic"].plan.strategy]
        own = fit_bins(part, epsilon=epsilon, delta=delta, workload=workload or Workload())
        for strategy in tried if own is None else [*tried, own]:
            if max_buffers is not None and strategy.buffers(n) > max_buffers:
                continue
            with suppress(Unsupported):  # trees
                found.append(row("bins", part, strategy))
        if found:
            rows["bins"] = min(found, key=lambda each: each.rms)
    wanted = [found for kind, found in rows.items() if kind in kinds]
    return sorted(wanted, key=lambda each: each.rms)


def _least(value: Any, most: int) -> int:
    """The number of groups with the least value, on a ladder of factors of about 1.3, downhill."""
    ladder = sorted({min(most, round(1.3**i)) for i in range(64)})
    place = min(len(ladder) - 1, sum(rung < most / 8 for rung in ladder))
    while True:
        near = [i for i in (place - 1, place, place + 1) if 0 <= i < len(ladder)]
        best = min(near, key=lambda i: float(value(ladder[i])))
        if best == place:
            return ladder[place]
        place = best


def fit_sampled(
    fit_plan: Callable[..., Any], participation: Participation, *, sampling: str, **options: Any
) -> Any:
    """The plan with the least noise among kinds of sampling: one of `KINDS`, or "any"."""
    one_of(("none", *DRAWN, "any"), sampling=sampling)
    if not isinstance(participation, Epochs) or options.get("epsilon") is None:
        raise InvalidInput('sampling= compares at one epsilon, for Epochs(…); give both, or "none"')
    kinds = KINDS if sampling == "any" else (sampling,)
    return alternatives(fit_plan, participation, kinds=kinds, **options)[0].plan

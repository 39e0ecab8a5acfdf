"""What secret sampling buys: one run unsampled and under every kind of sampling, at equal (ε, δ).

    none      the same order in every epoch, the best mechanism
    poisson   coin flips in every step, independent noise (DP-SGD)
    cyclic    groups that take turns with coin flips, as many bands as groups, as many as are best
    bins      one secret position for every unit, under the strategies of "none" and "cyclic", and
              bands fitted to its own accountant (`bins_fit`)
    fixed     as many units in every step, at random; independent noise (DP-SGD)
    truncated as poisson, and of a batch that came out too large a random part (DP-SGD)

Batches have the same expected size everywhere. Compared is z · rms, the noise in the running sum,
which already holds what the amplification of each is worth. No state.

>>> from noshuffle.participation import Epochs
>>> from noshuffle.plan import Plan
>>> kinds = ("poisson", "cyclic")
>>> rows = alternatives(Plan.fit, Epochs(4, 8), epsilon=4.0, delta=1e-5, kinds=kinds)
>>> [row.kind for row in rows], rows[0].rms < rows[1].rms
(['cyclic', 'poisson'], True)
>>> part = Epochs(4, 8)
>>> how = {"epsilon": 4.0, "delta": 1e-5, "batch_size": 25, "population": 200}
>>> alternatives(Plan.fit, part, kinds=("fixed",), **how)[0].plan.participation
FixedSize(steps=32, batch=25, population=200)
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
    FixedSize,
    Participation,
    Poisson,
    TruncatedPoisson,
)
from noshuffle.strategies import Strategy, Workload, error

KINDS = ("none", "poisson", "cyclic", "bins")
#: Kinds of secret draws; those that are drawn from a population of known size are tried where they
#: are asked for by name.
DRAWN = ("poisson", "fixed", "truncated", "cyclic", "bins")


@dataclass(frozen=True)
class SamplingRow:
    """One kind of sampling, its `Plan`, and the noise in the running sum in clip norms."""

    kind: str
    plan: Any
    rms: float

    @property
    def words(self) -> str:
        part, name = self.plan.participation, self.plan.strategy.name
        if isinstance(part, CyclicPoisson):
            name += f", {part.groups} group{'' if part.groups == 1 else 's'}"
        return f"{self.kind}: {name}, noise × rms {self.rms:.4g}"

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
    batch_size: int | None = None,
    population: int | None = None,
    **options: Any,
) -> list[SamplingRow]:
    """Rows for the kinds that apply, the least noise first.

    `fit_plan` is `Plan.fit`, `unsampled` the mechanism of "none"; `options` are its own. Secret
    positions have no proof for replace-one, and are left out there (refused if nothing remains).
    "fixed" and "truncated" draw `batch_size` of `population` units; like the others they are
    compared for add-remove neighbours unless `neighbours` says otherwise.
    """
    instance_of(Epochs, participation=participation)
    for kind in kinds:
        one_of(("none", *DRAWN), sampling=kind)
    if neighbours == "replace-one":
        kinds = [kind for kind in kinds if kind != "bins"]
        if not kinds:
            raise Unsupported(
                "secret positions are accounted for add-remove or zero-out neighbours, not "
                'replace-one; use sampling="poisson" or "cyclic"'
            )
    if max_buffers is not None:
        whole(at_least=0, max_buffers=max_buffers)
    common = {"epsilon": epsilon, "delta": delta, "workload": workload, **options}
    common |= {"neighbours": neighbours, "max_buffers": max_buffers}

    def row(kind: str, part: Participation, mechanism: str | Strategy, **more: Any) -> SamplingRow:
        plan = fit_plan(part, mechanism=mechanism, **{**common, **more})
        felt = error(plan.strategy, plan.steps, workload=workload or Workload()).rms
        return SamplingRow(kind, plan, plan.noise_multiplier * felt)

    rows: dict[str, SamplingRow] = {}
    n, b = participation.steps, participation.steps_per_epoch
    if "none" in kinds or "bins" in kinds:
        rows["none"] = row("none", participation, unsampled)
    if "poisson" in kinds:
        rows["poisson"] = row("poisson", Poisson(n, 1 / b), "identity")
    for kind in ("fixed", "truncated"):
        if kind in kinds:
            part = _of_population(kind, participation, batch_size, population)
            rows[kind] = row(kind, part, "identity", neighbours=neighbours or "add-remove")
    if "cyclic" in kinds or "bins" in kinds:

        @cache
        def turns(groups: int) -> SamplingRow:
            return row("cyclic", CyclicPoisson(n, groups, groups / b), "best")

        most = b if max_buffers is None else min(b, max_buffers + 1)
        rows["cyclic"] = turns(_least(lambda groups: turns(groups).rms, most))
    if "bins" in kinds:
        bins, found = BallsInBins(participation.epochs, b), []
        tried = [rows["none"].plan.strategy, rows["cyclic"].plan.strategy]
        own = fit_bins(bins, epsilon=epsilon, delta=delta, workload=workload or Workload())
        for strategy in tried if own is None else [*tried, own]:
            if max_buffers is not None and strategy.buffers(n) > max_buffers:
                continue
            with suppress(Unsupported):  # trees
                found.append(row("bins", bins, strategy))
        if found:
            rows["bins"] = min(found, key=lambda each: each.rms)
    wanted = [found for kind, found in rows.items() if kind in kinds]
    return sorted(wanted, key=lambda each: each.rms)


def _of_population(
    kind: str, order: Epochs, batch_size: int | None, population: int | None
) -> FixedSize | TruncatedPoisson:
    """Draws from a population of this size, in as many steps and of as many units as the others."""
    if batch_size is None or population is None:
        raise InvalidInput(
            f'sampling="{kind}" needs batch_size= and population=, to draw so many units out of '
            "so many"
        )
    whole(batch_size=batch_size, population=population)
    if population // batch_size != order.steps_per_epoch:
        raise InvalidInput(
            f"population={population} and batch_size={batch_size} must go with "
            f"{order.steps_per_epoch} steps in one pass, they make {population // batch_size}"
        )
    if kind == "fixed":
        return FixedSize(order.steps, batch_size, population)
    return TruncatedPoisson.of(steps=order.steps, batch=batch_size, population=population)


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
    if sampling in ("fixed", "truncated"):
        raise InvalidInput(
            f'sampling="{sampling}" needs to know the population: give '
            f"{'FixedSize(…)' if sampling == 'fixed' else 'TruncatedPoisson.of(…)'} in place of "
            'Epochs(…), with mechanism="identity"'
        )
    one_of(("none", *DRAWN, "any"), sampling=sampling)
    if not isinstance(participation, Epochs) or options.get("epsilon") is None:
        raise InvalidInput('sampling= compares at one epsilon, for Epochs(…); give both, or "none"')
    kinds = KINDS if sampling == "any" else (sampling,)
    return alternatives(fit_plan, participation, kinds=kinds, **options)[0].plan

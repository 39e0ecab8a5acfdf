"""The release of K runs, central or federated, through one door: `release.Release`.

    v = (sums_1/u_1, …, sums_K/u_K),   u_k = z_k·ζ_k;      released:   v + row t of C⁻¹Z

One unit moves part k by at most ζ_k/u_k = 1/z_k a step, hence v by √Σ 1/z_k² = 1/z_J. So the runs
of one strategy and one participation are together one run of their plan with the noise multiplier
z_J, μ² = Σ μ_k². Others have a `Release` of their own, and their μ² add up, which is a bound.

Noise of one element depends on its key, run, name and place alone (a tensor is called "k/name"), so
under a test source run k is, up to the rounding of noisy values, the run of `privatize` that has
tensors of these names. State: the releases, in memory; a study cannot be resumed.

>>> [round(joint_multiplier(z), 12) for z in ([2.0], [2.0] * 4)]
[2.0, 1.0]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from noshuffle import accounting
from noshuffle.clipping import Flat
from noshuffle.errors import InvalidInput, ParticipationViolation, Unsupported
from noshuffle.noise import Source
from noshuffle.plan import Plan
from noshuffle.release.account import Account
from noshuffle.release.facts import INITIAL
from noshuffle.release.guard import Mask
from noshuffle.release.ledger import Admission
from noshuffle.release.release import Release
from noshuffle.release.sampler import Sampler
from noshuffle.release.spending import gaussian_sum
from noshuffle.statement import PrivacyStatement
from noshuffle.training.generators import seeded
from noshuffle.training.many.setting import wide

TOGETHER = (
    "This is the guarantee of showing {} runs on the same data, all of them together; clip norms "
    "and divisors are those of their settings, and clip and noise above are of the release of them "
    "all, in units of its own."
)


def joint_multiplier(multipliers: Sequence[float]) -> float:
    """z_J of runs with these noise multipliers, all above zero."""
    return 1.0 / math.sqrt(math.fsum(1.0 / (z * z) for z in multipliers))


def _unit_noise(multiplier: float) -> tuple[float, float]:
    """A noise multiplier, at most an ulp or two smaller, and a bound: their product is one."""
    z = multiplier
    while True:
        for bound in (1.0 / z, math.nextafter(1.0 / z, math.inf)):
            if z * bound == 1.0:
                return z, bound
        z = math.nextafter(z, 0.0)


@dataclass(frozen=True)
class _Group:
    """Runs with one strategy and one participation."""

    release: Release
    tensors: tuple[tuple[str, int, str], ...]

    def values(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Their part of stacked sums, by the names of their noise; views."""
        return {full: sums[name][run] for full, run, name in self.tensors}


class StudyRelease:
    """Adds to every run's sums the noise of its own setting.

    Arguments:
        plans: what each run is laid out by; of the noise multiplier in them nothing is used.
        multipliers, clip_norms: z_k and ζ_k; a run whose z_k is 0 gets no noise.
        shapes: of one run's sums, by name.

    Guarantees: those of `Release`; runs share no draw. u_k is kept in the precision of the sums.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        shapes: Mapping[str, Sequence[int]],
        *,
        multipliers: Sequence[float],
        clip_norms: Sequence[float],
        device: torch.device,
        source: Source | None = None,
        budget: Account | None = None,
    ) -> None:
        scales = [z * clip or 1.0 for z, clip in zip(multipliers, clip_norms)]
        self._scale = torch.tensor(scales, dtype=torch.float64, device=device)
        self._runs = len(plans)
        self._without_noise = [run for run, z in enumerate(multipliers) if not z]
        together: list[tuple[Plan, list[int]]] = []
        for run in (k for k, z in enumerate(multipliers) if z > 0):
            found = next((runs for plan, runs in together if _alike(plan, plans[run])), None)
            if found is None:
                together.append((plans[run], [run]))
            else:
                found.append(run)
        if budget is not None and self._without_noise:
            bare = replace(plans[self._without_noise[0]], noise_multiplier=0.0)
            budget.open("run of a study without noise", bare.statement())
        self._needs_ids = budget is not None
        self._groups: list[_Group] = []
        for plan, runs in together:
            tensors = tuple((f"{run}/{name}", run, name) for run in runs for name in shapes)
            z, bound = _unit_noise(joint_multiplier([multipliers[run] for run in runs]))
            release = Release.begin(
                replace(plan, noise_multiplier=z),
                {full: tuple(shapes[name]) for full, _, name in tensors},
                clip=Flat(bound),
                device=device,
                source=source,
                facts={"initial": INITIAL, "isolation": "tried once"},
                budget=budget,
            )
            self._groups.append(_Group(release, tensors))
        self._admitted = False
        self._has_ids: bool | None = None  # whether steps come with ids; unknown before the first

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph can hold the noise."""
        return all(group.release.noise._fused is not None for group in self._groups)

    def sampler(self, population: int | None = None) -> Sampler:
        """The secret draws of runs that share a sampled plan: their one batch must be its draw."""
        if len(self._groups) != 1 or self._without_noise:
            raise Unsupported(
                "runs share their batches, and secret draws are those of one participation and "
                "strategy, with noise in every run; make a study for each"
            )
        return self._groups[0].release.sampler(population)

    def admit(self, ids: Any = None, *, keep: Mask | None = None) -> list[Admission]:
        """Leave to sum a batch of these units in every run, before anything is computed.

        `ids` has one unit for every row, `keep` says which rows are used. Without ids nobody is
        checked, no row is written, and there is no statement.
        """
        has_ids = ids is not None
        if self._needs_ids and not has_ids:
            raise InvalidInput("a study that draws on a budget must know its units; give ids=")
        if self._has_ids not in (None, has_ids):
            raise InvalidInput("give the ids of a study in every step, or in none")
        found: list[Admission] = []
        for group in self._groups if has_ids else ():
            release = group.release
            units = release.identify(ids, rows=None if keep is None else len(keep))
            admission = release.admit(release.step, units if keep is None else units[keep])
            if admission.keep is not None:
                raise ParticipationViolation(
                    "units that have used up the budget of this data are in the batch; leave them "
                    "out (budget.used_up)"
                )
            found.append(admission)
        self._admitted = has_ids
        return found

    def masks(self, step: int, device: torch.device) -> AbstractContextManager[None]:
        """Inside, random layers draw by a secret seed of the step (without a plan: by torch's)."""
        for group in self._groups:
            if group.release.mask_key(step):
                return seeded(group.release.seed(step), device)
        return nullcontext()

    def open(self, admissions: Sequence[Admission]) -> None:
        """Write the row of this step; only then is its noise used."""
        for group, admission in zip(self._groups, admissions):
            group.release.open(admission)
        self._has_ids = self._admitted

    @torch.no_grad()
    def add_(self, sums: Mapping[str, Tensor]) -> None:
        """Add the noise of this step to stacked sums, in place."""
        if not self._groups:
            return
        for value in sums.values():
            value.div_(wide(self._scale, value))
        for group in self._groups:
            group.release.add_noise_(group.values(sums))
        for value in sums.values():
            value.mul_(wide(self._scale, value))

    def prepare(self, sums: Mapping[str, Tensor]) -> None:
        """Make ready to capture `add_` on sums like these."""
        for group in self._groups:
            group.release.noise.prepare(group.values(sums), counts_itself=True)

    def announce(self) -> None:
        """Count the step of the next replay as released."""
        for group in self._groups:
            group.release.noise.announce(counts_itself=True)

    def statement(self) -> PrivacyStatement:
        """What showing all runs costs together, for the steps so far.

        Guarantees: exact for one strategy and participation, a bound for several.
        """
        if self._without_noise:
            raise Unsupported(f"run {self._without_noise[0]} has no noise, and so no guarantee")
        if not self._has_ids:
            raise InvalidInput("a study states ε only if every step was given ids=")
        parts = [group.release.statement() for group in self._groups]
        first, words = parts[0], TOGETHER.format(self._runs)
        if len(parts) == 1:
            return first.with_assumptions(words)
        if len({(p.delta, p.unit, p.neighbours, p.accountant) for p in parts}) > 1:
            raise Unsupported("the plans of the runs differ in δ, unit, neighbours or accountant")
        if any(part.mu is None for part in parts):
            raise Unsupported("a sampled plan has no μ; add up the ε of such runs instead")
        mu = gaussian_sum([part.mu for part in parts if part.mu is not None])
        shift = mu * first.noise_multiplier  # S of all of them, in units of the first one's noise
        joint = replace(
            first,
            epsilon=accounting.gdp.epsilon(mu=mu, slack=0.0, delta=first.delta),
            mu=mu,
            rho=mu * mu / 2,
            sensitivity=shift,
            squared_sensitivity=shift * shift,
            mechanism="; and ".join(dict.fromkeys(part.mechanism for part in parts)),
            participation="; and ".join(dict.fromkeys(part.participation for part in parts)),
            exact=False,
        )
        others = [said for part in parts[1:] for said in part.assumptions]
        return joint.with_assumptions(*others, words)


def _alike(a: Plan, b: Plan) -> bool:
    """Whether two plans differ in their noise multiplier at most."""
    names = ("participation", "strategy", "delta", "neighbours", "unit", "accountant")
    return all(getattr(a, name) == getattr(b, name) for name in names)

"""What the runs of a study have for themselves, checked and put into columns.

    column[k] = value of run k,   shaped to multiply tensors stacked over runs

A setting has a plan, or a noise multiplier that goes with the strategy of the study. The μ of
showing several runs on the same data is √Σ μ_k² (Dong, Roth and Su 2022, arXiv 1905.02383), since
each is one Gaussian mechanism and their noise is independent. No state.

>>> from noshuffle.participation import SinglePass
>>> from noshuffle.strategies import identity
>>> plans = [Plan(participation=SinglePass(8), strategy=identity(), noise_multiplier=2.0)] * 4
>>> joint_mu(plans[:1]), joint_mu(plans)
(0.5, 1.0)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noshuffle.clipping import Flat
from noshuffle.clipping.check import trainable
from noshuffle.errors import InvalidInput, Unsupported, instance_of, non_negative, positive, whole
from noshuffle.plan import Plan
from noshuffle.release.spending import gaussian_sum
from noshuffle.strategies import Strategy


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one of the runs has for itself; a noise multiplier of 0 is not private."""

    noise_multiplier: float | None = None
    plan: Plan | None = None
    learning_rate: float
    momentum: float = 0.9
    clip_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.plan is None) == (self.noise_multiplier is None):
            raise InvalidInput("give each setting exactly one of plan and noise_multiplier")
        if self.plan is not None:
            instance_of(Plan, plan=self.plan)
        else:
            non_negative(noise_multiplier=self.noise_multiplier)
        whole(at_least=0, at_most=2**63 - 1, seed=self.seed)
        non_negative(momentum=self.momentum)
        positive(learning_rate=self.learning_rate)
        Flat(self.clip_norm)  # refuses what cannot be clipped to
        if self.plan is not None and self.plan.unit != "example":
            raise Unsupported(f"a study protects one example, the plan one {self.plan.unit}")

    @property
    def noise(self) -> float:
        """z of this run."""
        return float(self.plan.noise_multiplier if self.plan else self.noise_multiplier or 0.0)


def joint_mu(plans: Iterable[Plan]) -> float:
    """μ of showing the runs of all these plans on the same data: √Σ μ_k².

    Guarantees: exact for plans without sampling under one neighbour relation, since the runs' noise
    is independent and each is one Gaussian mechanism; others are refused.
    """
    instance_of(Iterable, plans=plans)
    plans = tuple(plans)
    for place, plan in enumerate(plans):
        instance_of(Plan, **{f"plan {place}": plan})
    if len({plan.neighbours for plan in plans}) > 1:
        raise Unsupported("the plans have different neighbour relations; fit them for one")
    found = [plan.mu() for plan in plans]
    if None in found:
        raise Unsupported("a sampled plan has no μ; add up the ε of such runs instead")
    return gaussian_sum([mu for mu in found if mu is not None])


def check_settings(
    settings: Sequence[Setting],
    *,
    steps: int,
    strategy: Strategy | None,
    learning_rates: Sequence[float],
) -> None:
    """Refuse settings that do not make a study of so many steps."""
    if not settings:
        raise InvalidInput("settings must hold at least one run, got none")
    if strategy is not None:
        instance_of(Strategy, strategy=strategy)
    check_schedule(learning_rates, steps=steps)
    for run, setting in enumerate(settings):
        instance_of(Setting, **{f"the setting of run {run}": setting})
        if setting.plan is not None and setting.plan.steps < steps:
            raise InvalidInput(
                f"the plan of run {run} is for {setting.plan.steps} steps, the study has {steps}"
            )
        if setting.plan is None and strategy is None and setting.noise > 0:
            raise InvalidInput(f"run {run} has noise but no plan; give the study a strategy=")


def check_schedule(learning_rates: Sequence[float], *, steps: int) -> None:
    """Refuse a schedule of factors (empty: constant) that ends before the last step."""
    if learning_rates and len(learning_rates) < steps:
        raise InvalidInput(f"the schedule has {len(learning_rates)} factors for {steps} steps")


def column(values: Iterable[float], device: torch.device) -> Tensor:
    """One value a run, in double precision."""
    return torch.tensor(list(values), dtype=torch.float64, device=device)


def wide(column: Tensor, like: Tensor) -> Tensor:
    """One value a run, shaped and typed to multiply a stacked tensor."""
    return column.to(like.dtype).reshape(-1, *([1] * (like.dim() - 1)))


@torch.no_grad()
def momentum_step(
    params: Mapping[str, Tensor],
    velocity: Mapping[str, Tensor],
    noisy: Mapping[str, Tensor],
    *,
    rate: Tensor,
    momentum: Tensor,
    weight: float,
) -> None:
    """v ← momentum·v + weight·noisy sum, θ ← θ − rate·v for every run, in place."""
    for name, value in params.items():
        v = velocity[name]
        v.mul_(wide(momentum, v)).add_(noisy[name], alpha=weight)
        value.addcmul_(wide(rate, v), v, value=-1.0)


def seeded(make_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A model made under a seed of its own, which leaves torch's generators as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = make_model()
    instance_of(nn.Module, **{"what make_model returns": made})
    return made


def stack(models: Sequence[nn.Module], device: torch.device) -> dict[str, Tensor]:
    """The trainable parameters of all runs by name, runs first."""
    shapes = [{n: (p.shape, p.dtype) for n, p in trainable(m).items()} for m in models]
    for run, own in enumerate(shapes):
        if own != shapes[0]:
            raise InvalidInput(f"all runs must have the same parameters, run {run} has others")
    kinds = {dtype for _, dtype in shapes[0].values()}
    if not kinds <= {torch.float32, torch.float64}:
        raise Unsupported(
            f"a study trains models of float32 or float64, got {sorted(map(str, kinds))}"
        )
    return {
        name: torch.stack([model.get_parameter(name).detach() for model in models]).to(device)
        for name in shapes[0]
    }

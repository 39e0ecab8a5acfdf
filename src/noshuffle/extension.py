"""Plans that go on: a run is extended, or changed from some step on, under one guarantee.

    plan.extended(epochs=5)                              five more epochs, a fresh phase of noise
    plan.extended(epochs=5, mechanism="continue")        the same noise goes on
    plan.extended(epochs=5, steps_per_epoch=120)         with batches of twice the size
    plan.extended(steps=1000, after=600)                 what follows step 600 is planned anew

The first `after` rows of noise are those of the old plan, so what was released stays what it was,
and S is that of all rows in use, old and new, along the worst pattern of one unit
(`strategies.phases`; docs/proofs.md, "Phases"). μ of all is then the μ of one Gaussian mechanism.

    continue    C of more steps; needs the keys of the run, and a strategy that has no end
                (Toeplitz without gains)
    a phase     C = diag(C_old, C_new/f); needs nothing of the run before, a sealed one goes on too

Correlated noise under secret draws (`CyclicPoisson`, `BallsInBins`, `SeparatedBins`) goes on, after
the last planned step, by a stage: draws made anew and a phase of noise. Its loss distributions are
composed with those of the stages before (docs/proofs.md, "Stages of secret draws").

Functions take the `Plan` that asks. No state.

>>> from noshuffle import Epochs, Plan
>>> plan = Plan.fit(Epochs(4, 25), mechanism="blt", epsilon=4.0)
>>> more = plan.extended(epochs=2, epsilon=6.0)
>>> more.steps, round(more.epsilon_after(100), 3), round(more.epsilon(), 3)
(150, 4.0, 6.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from noshuffle import accounting
from noshuffle.errors import InvalidInput, Unsupported, positive, whole
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    DrawnStages,
    Epochs,
    FixedSize,
    MinSeparation,
    Participation,
    Poisson,
    SeparatedBins,
    SinglePass,
    Stages,
    TruncatedPoisson,
    stages_of,
)
from noshuffle.plan_strategy import chosen
from noshuffle.rounding import down, up
from noshuffle.strategies.base import Strategy, ToeplitzStrategy
from noshuffle.strategies.fit import best as best_fit
from noshuffle.strategies.fit import fit as fit_strategy
from noshuffle.strategies.phases import Phases, StrategyPhase
from noshuffle.strategies.sensitivity import prefix_sensitivity
from noshuffle.strategies.workload import Workload

CONTINUE = "continue"


def extended(
    plan: Any,
    *,
    epochs: int = 0,
    steps: int = 0,
    steps_per_epoch: int | None = None,
    max_participations: int = 0,
    after: int | None = None,
    mechanism: str | Strategy = "blt",
    epsilon: float | None = None,
    **options: Any,
) -> Any:
    """See `Plan.extended`."""
    kept = plan.steps if after is None else after
    whole(at_most=plan.steps, after=kept)
    if _is_staged(plan, mechanism, epsilon):
        stage = _stage(plan, kept, epochs, steps, steps_per_epoch, max_participations)
        return _with_stage(plan, stage, mechanism, epsilon, options)
    part = _longer(plan.participation, kept, epochs, steps, steps_per_epoch, max_participations)
    is_same = mechanism == CONTINUE or part.is_sampled
    if is_same and epsilon is not None:
        raise InvalidInput(
            "noise that goes on keeps its size, so epsilon= needs a phase of its own: give a "
            "mechanism by name (and not sampling)"
        )
    if is_same:
        return replace(plan, participation=part, strategy=_continued(plan, kept, part))
    local = _local(part, kept)
    fitted = mechanism if isinstance(mechanism, Strategy) else _fit(mechanism, local, options)
    with_factor = _followed(plan, kept, part, fitted, local.steps)
    if epsilon is None:
        if not isinstance(part, SinglePass):
            return with_factor(1.0)
        # A unit lies in one phase: with its S the same as before, so is ε.
        own = prefix_sensitivity(fitted, local, local.steps).squared
        return with_factor(math.sqrt(own / plan.sensitivity.squared))
    return _calibrated(plan, kept, epsilon, with_factor, tolerance=1e-9)


def _is_staged(plan: Any, mechanism: str | Strategy, epsilon: float | None) -> bool:
    """Whether draws are made anew: always for positions, for turns where noise does not go on."""
    part = stages_of(plan.participation)[0]
    if isinstance(plan.participation, DrawnStages) or isinstance(part, BallsInBins | SeparatedBins):
        return True
    if not isinstance(part, CyclicPoisson) or mechanism == CONTINUE:
        return False
    last = plan.strategy
    goes_on = isinstance(last, ToeplitzStrategy) and not last.has_gains
    return epsilon is not None or mechanism != "blt" or not goes_on


def _stage(
    plan: Any, kept: int, epochs: int, steps: int, per_epoch: int | None, most: int
) -> Participation:
    """The stage that follows the last step of a plan with secret draws."""
    last = stages_of(plan.participation)[-1]
    if kept != plan.steps:
        raise Unsupported(
            f"secret draws of {last.kind} are made for all {plan.steps} steps, and others follow "
            f"after the last of them, not after {kept}; finish the run, or start another one"
        )
    if isinstance(last, CyclicPoisson):
        if epochs or per_epoch or most:
            raise InvalidInput(f"epochs= extends a plan of epochs, this one has {last.kind}")
        whole(steps=steps)
        return replace(last, steps=steps)
    if steps or most:
        raise InvalidInput(f"a plan of {last.kind} is extended by epochs=, not by steps")
    whole(epochs=epochs)
    assert isinstance(last, BallsInBins | SeparatedBins)
    return replace(last, epochs=epochs, steps_per_epoch=per_epoch or last.steps_per_epoch)


def _with_stage(
    plan: Any,
    stage: Participation,
    mechanism: str | Strategy,
    epsilon: float | None,
    options: dict[str, Any],
) -> Any:
    """The plan with one more stage of secret draws, and noise for it."""
    if mechanism == CONTINUE:
        raise Unsupported(
            "noise does not go on where positions are drawn anew; leave out mechanism=, or give "
            "that of the new stage by name"
        )
    if mechanism == "blt" and not isinstance(stage, BallsInBins):
        mechanism = "best"  # the bands that turns and separated positions allow
    fitted = chosen(mechanism, stage, workload=Workload(), options=options)
    part = DrawnStages((*stages_of(plan.participation), stage))
    with_factor = _followed(plan, plan.steps, part, fitted, stage.steps)
    if epsilon is None:
        return with_factor(1.0)
    return _calibrated(plan, plan.steps, epsilon, with_factor, tolerance=1e-3)


def _followed(
    plan: Any, kept: int, part: Participation, fitted: Strategy, steps: int
) -> Callable[[float], Any]:
    """By its factor, the plan whose first `kept` steps are followed by a phase of its own."""
    before = _phases(plan, kept)

    def with_factor(factor: float) -> Any:
        last = StrategyPhase(fitted, steps, steps, factor)
        return replace(plan, participation=part, strategy=Phases(parts=(*before, last)))

    return with_factor


def _calibrated(
    plan: Any,
    kept: int,
    epsilon: float,
    with_factor: Callable[[float], Any],
    *,
    tolerance: float,
) -> Any:
    """The longer plan with the least noise in its last phase that keeps all steps within ε."""
    positive(epsilon=epsilon)
    spent = plan.epsilon_after(kept)
    # A unit of a stage is always in the next one, too: that one cannot cost nothing.
    if spent > epsilon or (spent == epsilon and plan.participation.is_sampled):
        raise InvalidInput(
            f"the first {kept} steps have ε = {up(spent)} already, so all of them cannot have "
            f"{down(epsilon)}; give a larger epsilon"
        )
    factor = accounting.calibrate.smallest(
        lambda f: with_factor(f).epsilon(), target=epsilon, tolerance=tolerance, most=1e6
    )
    return with_factor(factor)


def _longer(
    part: Participation, kept: int, epochs: int, steps: int, per_epoch: int | None, most: int
) -> Participation:
    """The participation of the first `kept` steps and of those that are to come."""
    if isinstance(part, Epochs | Stages):
        if steps or most:
            raise InvalidInput("a plan of epochs is extended by epochs=, not by steps")
        whole(epochs=epochs)
        stages = _cut(part, kept)
        last = stages[-1]
        if per_epoch in (None, last.steps_per_epoch):
            stages[-1] = Epochs(last.epochs + epochs, last.steps_per_epoch)
        else:
            if sum(own.steps for own in stages) != kept:
                raise InvalidInput(
                    f"the number of steps per epoch can change after whole epochs of "
                    f"{last.steps_per_epoch} steps, not after {kept}"
                )
            whole(steps_per_epoch=per_epoch)
            assert per_epoch is not None
            stages.append(Epochs(epochs, per_epoch))
        return stages[0] if len(stages) == 1 else Stages(tuple(stages))
    drawn = (SinglePass, Poisson, FixedSize, TruncatedPoisson, CyclicPoisson)
    if not isinstance(part, (*drawn, MinSeparation)):
        raise Unsupported(
            f"a run of {part.kind} is not extended: its draws or restarts cover the whole run; "
            "start another run, and count both in a Budget"
        )
    if epochs or per_epoch:
        raise InvalidInput(
            f"epochs= extends a plan of epochs, this one has {part.kind}; use steps="
        )
    whole(steps=steps)
    if isinstance(part, MinSeparation):
        whole(at_least=0, max_participations=most)
        return MinSeparation(kept + steps, part.separation, part.max_participations + most)
    if most:
        raise InvalidInput("max_participations= extends a plan of MinSeparation")
    assert isinstance(part, drawn)
    return replace(part, steps=kept + steps)


def _cut(part: Epochs | Stages, kept: int) -> list[Epochs]:
    """The stages of the first `kept` steps; an epoch that was begun is brought to its end."""
    stages = [part] if isinstance(part, Epochs) else list(part.stages)
    out: list[Epochs] = []
    for own in stages:
        left = kept - sum(one.steps for one in out)
        if left <= 0:
            break
        out.append(Epochs(min(own.epochs, -(-left // own.steps_per_epoch)), own.steps_per_epoch))
    return out


def _continued(plan: Any, kept: int, part: Participation) -> Strategy:
    """The same strategy over more steps."""
    if isinstance(part, Stages) and len(part.stages) > len(_cut(plan.participation, kept)):
        raise Unsupported(
            "noise does not go on across a change of the batch size; give a mechanism by name"
        )
    *before, end = _phases(plan, kept)
    last = end.strategy
    if not isinstance(last, ToeplitzStrategy) or last.has_gains:
        advice = "give the mechanism of a new phase by name"
        if part.is_sampled and not isinstance(part, CyclicPoisson):  # its noise is independent
            advice = "start another run, and count both in a Budget"
        raise Unsupported(
            f"the noise of {last.name!r} was planned for its number of steps and does not go on; "
            + advice
        )
    if not isinstance(plan.strategy, Phases):
        return last
    length = part.steps - sum(own.used for own in before)
    return Phases(parts=(*before, end._replace(planned=length, used=length)))


def _phases(plan: Any, kept: int) -> list[StrategyPhase]:
    """The noise of the first `kept` steps as phases."""
    if isinstance(plan.strategy, Phases):
        return [own for _, own in plan.strategy.within(kept)]
    return [StrategyPhase(plan.strategy, plan.steps, kept)]


def _local(part: Participation, kept: int) -> Participation:
    """What a unit may do in the steps after `kept`, for the fit of their noise."""
    rest = part.steps - kept
    if isinstance(part, MinSeparation):
        most = min(part.max_participations, -(-rest // part.separation))
        return MinSeparation(rest, part.separation, most)
    if isinstance(part, Epochs | Stages):
        per_epoch = (part if isinstance(part, Epochs) else part.stages[-1]).steps_per_epoch
        if rest % per_epoch:
            return MinSeparation(rest, per_epoch, -(-rest // per_epoch))
        return Epochs(rest // per_epoch, per_epoch)
    return SinglePass(rest)


def _fit(mechanism: str, part: Participation, options: dict[str, Any]) -> Strategy:
    if mechanism == "best":
        return best_fit(part, **options).strategy
    return fit_strategy(mechanism, part, **options).strategy

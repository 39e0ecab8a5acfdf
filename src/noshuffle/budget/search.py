"""tune: the best of many settings, by a score, at the price of a bound on repetitions.

    K ~ geometric of mean `repeats`;  K times: setting at random, train, score;  the best leaves

One run, its score included, is held to μ; the search then costs what `accounting.selection` says
(Papernot and Steinke 2022; Liu and Talwar 2019): with a mean of 20, two to three times the ε of one
run. `law="all"` trains every setting once and takes the best noisy score: the Gaussian
composition of all of them, exactly. The number of runs, the settings and the noise of the scores
are drawn by the operating system; how many runs there were and how the others did stays secret.

A run of a search draws on a `Trial`, which lets in what costs no more than its share. It counts in
memory, in one process: threads wait for each other, and a copy in another process (of a pool of
workers) lets nothing in, as nobody would add up what it counts.

>>> import pickle
>>> trial = Trial(1.0, 1e-6, "zero-out", "example")
>>> trial.owner == os.getpid(), pickle.loads(pickle.dumps(trial)).owner
(True, 0)
"""

from __future__ import annotations

import math
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.accounting import gaussian
from noshuffle.accounting.selection import check_mean, draw_number, largest_mu, of_gaussian
from noshuffle.budget.budget import Budget
from noshuffle.budget.cost import Cost, cost_of, total
from noshuffle.errors import (
    BudgetExceeded,
    InvalidInput,
    NoshuffleError,
    Unsupported,
    callables,
    instance_of,
    one_of,
    open_unit,
    positive,
)
from noshuffle.noise import Source, new_key
from noshuffle.noise.laws import KeyedDraws
from noshuffle.plan import PrivacyStatement
from noshuffle.release.spending import OTHER_RUNS
from noshuffle.rounding import down, up
from noshuffle.user_warnings import warn_user

#: Called with a setting and a trial; gives back a result and its scores.
RunFn = Callable[[Any, "Trial"], tuple[Any, Any]]
INSIDE = "This run is one of a search; the statement of the search covers it, not this one."
_SECRET = (
    "Only the best run was released: its setting, its result and its {score}. {secret}, and "
    "everything of the others stays secret."
)


@dataclass
class Trial:
    """What one run of a search draws on: give it as `budget=`, and plan for its `epsilon`.

    Guarantees: what it lets in costs no more than its share, however many threads ask at once. A
    forked process is refused, and so is what was pickled.
    """

    epsilon: float
    delta: float
    neighbours: str
    unit: str
    costs: list[Cost] = field(default_factory=list)
    origin: str = "search"
    #: The process that counts; 0 in what was pickled.
    owner: int = field(default_factory=os.getpid, repr=False)
    _turn: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Trial:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "owner": 0, "_turn": None}

    @property
    def name(self) -> str:
        return self.origin

    def reserve(
        self,
        what: str,
        statement: PrivacyStatement,
        *,
        run: Path | None = None,
        **more: Any,
    ) -> Trial:
        """Let a run in if the runs of this trial stay within its share."""
        if run is not None:
            raise Unsupported("runs of a search leave no trace: leave out run=, keep the best")
        if self.owner != os.getpid():
            raise Unsupported(
                "this is a copy of what a run of a search draws on, and what it lets in would not "
                "be counted; train in the process of the search (threads may), n_jobs=1"
            )
        self._refuse_others(statement, what)
        cost = cost_of(statement, delta=self.delta, neighbours=self.neighbours)
        with self._turn:
            if not total([*self.costs, cost]).epsilon(self.delta) <= self.epsilon:
                raise BudgetExceeded(
                    f"one run of this search may cost ε = {down(self.epsilon)} at "
                    f"δ = {up(self.delta)}, {what} would cost {up(cost.epsilon(self.delta))}; "
                    "fit plans for trial.epsilon"
                )
            self.costs.append(cost)
        return self

    def settle(self, statement: PrivacyStatement, **more: Any) -> None:
        """Nothing is given back: the bound is on a run as it was planned. One that turned out to be
        no Gaussian mechanism (a solver reserves its place before it knows) does not leave."""
        if statement.epsilon > 0:
            self._refuse_others(statement, statement.mechanism)

    def words(self) -> str:
        """For the statement of the run itself."""
        return INSIDE

    def _refuse_others(self, statement: PrivacyStatement, what: str) -> None:
        if statement.unit != self.unit or statement.mu is None or statement.not_private:
            raise Unsupported(
                f"runs of this search must be Gaussian (no sampling, no pure ε, no test seed) and "
                f"protect one {self.unit}; {what} does not"
            )


@dataclass(frozen=True)
class Tuned:
    """The best run of a search. All of it is released, and covered by `statement`."""

    setting: Any
    result: Any
    score: float
    statement: PrivacyStatement


def tune(
    run: RunFn,
    settings: Sequence[Any],
    *,
    epsilon: float,
    delta: float | None = None,
    repeats: float = 20.0,
    law: str = "geometric",
    score_share: float = 0.1,
    unit: str = "example",
    neighbours: str = "zero-out",
    budget: Budget | None = None,
) -> Tuned:
    """Search for the best of some settings. Arguments:

        run: called as run(setting, trial); trains one model with `budget=trial` under plans for
            `trial.epsilon` at `trial.delta`, and returns (result, scores): one score between 0 and
            1 per unit of the validation data, or one number where `score_share` is 0.
        epsilon, delta: what the whole search may cost; with a budget δ defaults to a tenth of its.
        repeats: how many runs there are on average.
        law: "geometric" (a random number of runs), or "all" (every setting once).
        score_share: the part of μ² of one run that pays for its noisy score; 0 for scores from
            public data.
        budget: what the search draws on. A search has a proof of (ε, δ) and none of μ, so it
            should fit into what was set aside by `pure=`; elsewhere it costs several times ε.

    Guarantees: what is returned is (ε, δ)-private if every release of `run` draws on its trial and
    its scores depend on nothing else of the data than the validation units (whose scores, each
    clamped to [0, 1], may be of training units too).
    """
    callables(run=run)
    one_of(("geometric", "all"), law=law)
    positive(epsilon=epsilon)
    if not settings:
        raise InvalidInput("settings must hold at least one, got none")
    if not 0 <= score_share < 1:
        raise InvalidInput(f"score_share must lie in [0, 1), got {score_share!r}")
    if budget is not None:
        instance_of(Budget, budget=budget)
        delta = budget.delta / 10 if delta is None else delta
    delta = 1e-5 if delta is None else delta
    open_unit(delta=delta)
    choices = list(settings)
    mean = None if law == "all" else float(repeats)
    if mean is None:
        mu = gaussian.mu(epsilon=epsilon, delta=delta) / math.sqrt(len(choices))
    else:
        check_mean(mean)
        mu = largest_mu(mean=mean, epsilon=epsilon, delta=delta)
    share = gaussian.epsilon(mu=mu * math.sqrt(1 - score_share), delta=delta)
    if not share > 0:  # then every run of (0, δ) would pass, whatever its μ
        raise InvalidInput(
            f"one run of this search may cost (0, δ) only, since delta = {delta:g} is large beside "
            f"epsilon = {epsilon:g}; choose a smaller delta"
        )
    statement = _statement(mean, mu, len(choices), delta, unit, neighbours, score_share)
    charge = None
    if budget is None:
        statement = statement.with_assumptions(OTHER_RUNS)
    else:
        charge = budget.reserve(f"search over {len(choices)} settings", statement)
    random = secrets.SystemRandom()
    runs = choices
    if mean is not None:
        runs = [random.choice(choices) for _ in range(draw_number(random.random(), mean=mean))]
    draws = KeyedDraws(Source(new_key()), name="scores")
    best: tuple[float, Any, Any] = (-math.inf, None, None)
    for setting in runs:
        trial = Trial(share, delta, neighbours, unit)
        result, scores = run(setting, trial)
        if not trial.costs:
            raise InvalidInput("run must give budget=trial to everything that it releases")
        score = _noisy(scores, mu * math.sqrt(score_share), draws)
        if score > best[0]:
            best = score, setting, result
    if charge is not None:
        try:
            charge.settle(statement)
            statement = statement.with_assumptions(charge.words())
        except (OSError, NoshuffleError) as error:  # a full disk: what was paid for is not lost
            warn_user(
                f"{budget} could not be written ({error}): the search stays charged as it was "
                "reserved, which is what it costs; what it found is returned",
                RuntimeWarning,
            )
            statement = statement.with_assumptions(OTHER_RUNS)
    return Tuned(best[1], best[2], best[0], statement)


def _noisy(scores: Any, mu: float, draws: KeyedDraws) -> float:
    """The mean score with noise for one unit's part of the sum; a public score as it is."""
    if mu == 0:
        return float(scores)
    own = np.asarray(scores, dtype=np.float64)
    if own.ndim != 1 or not len(own):
        raise InvalidInput(
            f"run must return one score per validation unit, got an array of shape {own.shape}; "
            "score_share=0 is for scores from public data"
        )
    value = np.array([np.clip(np.nan_to_num(own, nan=0.0), 0.0, 1.0).sum()])
    noise = draws.standard_normal(1) / mu
    return float(draws.release(value, noise, scale=1 / mu)[0]) / len(own)


def _statement(
    mean: float | None,
    mu: float,
    settings: int,
    delta: float,
    unit: str,
    neighbours: str,
    score_share: float,
) -> PrivacyStatement:
    """What the search promises; the bound is in it."""
    one = gaussian.epsilon(mu=mu, delta=delta)
    scored = "a noisy score" if score_share else "a score from public data"
    if mean is None:
        joint = mu * math.sqrt(settings)
        epsilon, kind = gaussian.epsilon(mu=joint, delta=delta), "exact"
        chosen = f"the best of {settings} runs, one for each setting, by {scored}"
        secret = "How long runs took"  # how many there were, everybody knows
        bound = (
            f"ε is that of all {settings} runs together: μ = {up(joint)} = √{settings} × μ of one."
        )
    else:
        joint, epsilon, kind = None, of_gaussian(mu, mean=mean, delta=delta), "rdp"
        chosen = (
            f"the best of K runs by {scored}, each with one of {settings} settings at random, K "
            f"drawn from a geometric law of mean {mean:g}"
        )
        secret = "How many runs there were, how long they took"
        bound = (
            "ε is the bound of Papernot and Steinke (2022) for a geometric number of runs of mean "
            f"{mean:g}, each of ε = {up(one, digits=4)} with its score: the search is inside."
        )
    return PrivacyStatement(
        epsilon=epsilon,
        delta=delta,
        mu=joint,
        rho=None if joint is None else joint**2 / 2,
        sensitivity=1.0,
        squared_sensitivity=1.0,
        noise_multiplier=1 / mu,
        unit=unit,
        neighbours=neighbours,
        participation="as the plan of each run says",
        mechanism=chosen,
        accountant=kind,
        exact=mean is None,
        assumptions=(
            bound,
            _SECRET.format(score="noisy score" if score_share else "score", secret=secret),
            "Settings, their number, the law and its mean were chosen without the data.",
            "Every release of a run was made under its own statement, whose assumptions hold here.",
        ),
    )

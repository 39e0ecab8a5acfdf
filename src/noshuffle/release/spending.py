"""What a run has spent, from its plan, its released steps and the runs it was forked from.

    one run                   the plan's own statement for the steps released so far
    a fork (no sampling)      μ² = Σ μ_i² over the run and its ancestors, still Gaussian
    a fork (sampled)          ε and δ add up (basic composition)

A fact is what the log holds; a sentence is what somebody who reads the statement has to know of it.
Everything that goes into a statement is derived here from recorded facts, so that `verify` can
derive it again and compare.

>>> round(gaussian_sum([3.0, 4.0]), 3)
5.0
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from noshuffle import accounting
from noshuffle.errors import InvalidInput, whole
from noshuffle.plan import Plan
from noshuffle.plan.statement import PrivacyStatement, of_stops, so_far

ADAPTIVE_CLIP = (
    "The clip norm follows a quantile of the gradient norms; the noisy counts it is steered by are "
    "part of the stated ε, paid for by more noise on the gradients."
)
TEST_SEED = (
    "NOT PRIVATE: the noise comes from a named test seed, which anybody can use to remove it."
)
PUBLIC_ORDER = (
    "Which user takes part at which step is public: the participation was read off the order of "
    "the user ids."
)
#: The value of the fact "ids" in a run whose units nobody names.
NO_IDS = "none"
#: The same in a stream whose rows are known by their place in it; they may be in it twice.
PLACES = "places"
UNNAMED = (NO_IDS, PLACES)
CALLERS_ORDER = (
    "The order of the data was that of the caller's sampler; it does not look at the content of "
    "rows."
)
OWN_LOG = (
    "The steps are those of this log: a copy or a backup of the run that went on elsewhere, and "
    "steps that a power cut took from the log, are further releases that add up."
)
OTHER_RUNS = (
    "Other runs, searches and baselines on the same data add up with this one and are not counted "
    "here."
)
INITIAL = "as the caller built them"
#: Values of the fact "isolation": whether examples could meet in the model or the loss.
TRIED, APART = "tried", "by construction"
ISOLATION = {
    TRIED: "Only the first batch of each kind was tested for examples that influence each other.",
    APART: "Examples were kept apart by construction: model and loss ran on one at a time.",
}


#: How users were told apart: the name of the fact, and its values.
USER_IDENTITY = "user_identity"

GIVEN = "given by the caller"
SIMULATED = "simulation"
CLAIMED = "claimed by the device (handshake)"
REGISTERED = "registered public keys"
UNREGISTERED = "public keys that nobody registered"

_USERS = {
    GIVEN: (
        "Users were told apart by the ids that the caller gave: a person with several ids is "
        "counted as several users."
    ),
    SIMULATED: "Users are those of a simulation, told apart by the ids in its data.",
    CLAIMED: (
        "Users were told apart by names that their devices claimed: a device that names itself "
        "anew each time is counted as several users."
    ),
    REGISTERED: (
        "Users were told apart by registered public keys: a person who registered several keys is "
        "counted as several users."
    ),
    UNREGISTERED: (
        "Users were told apart by public keys that nobody registered: a device that was restarted "
        "has a new key and is counted as another user."
    ),
}


def user_note(identity: str) -> str:
    """Whether one id is one person cannot be computed; it can be said who said so.

    >>> user_note("badge numbers")
    'Users were told apart by badge numbers; whoever has several ids is counted as several users.'
    """
    other = f"Users were told apart by {identity}; whoever has several ids is counted as several "
    return _USERS.get(identity, other + "users.")


@dataclass(frozen=True)
class Ancestor:
    """A run that this one was forked from: its plan and how many steps it had released.

    `notes` are the sentences that its facts add to a statement: what it rested on, the fork does.
    `budget`: by what it is known in the budget that it draws on, if any.
    """

    plan: Plan
    released: int
    is_adaptive: bool = False
    has_names: bool = True
    notes: tuple[str, ...] = ()
    budget: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "plan": self.plan.to_json(), "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Ancestor:
        whole(at_least=0, released=record["released"])
        plan = Plan.from_json(record["plan"])
        return cls(**{**record, "plan": plan, "notes": tuple(record["notes"])})


def gaussian_sum(mus: Sequence[float]) -> float:
    """GDP parameter of several Gaussian mechanisms on the same data."""
    return math.sqrt(math.fsum(mu * mu for mu in mus))


def spent(
    plan: Plan,
    released: int,
    *,
    ancestors: Sequence[Ancestor] = (),
    notes: tuple[str, ...] = (),
    participation_checked: bool = True,
) -> PrivacyStatement:
    """The guarantee of what was released so far, with everything it rests on."""
    if released > plan.steps:
        raise InvalidInput(f"{released} steps were released, the plan covers {plan.steps}")
    own = _statement(plan, released, notes, participation_checked)
    before = [
        _statement(a.plan, a.released, (ADAPTIVE_CLIP,) if a.is_adaptive else (), a.has_names)
        for a in ancestors
        if a.released
    ]
    if not before:
        return own
    words = f"This run is a fork; it adds up with {len(before)} earlier run(s) on the same data."
    parts = [*before, own]
    if any(part.unit != own.unit or part.neighbours != own.neighbours for part in parts):
        raise InvalidInput("a fork must keep the unit and the neighbours of the run it came from")
    mus = [part.mu for part in parts if part.mu is not None]
    inherited = [note for one in ancestors if one.released for note in one.notes]
    inherited += [sentence for part in before for sentence in of_stops(part.assumptions)]
    own = own.with_assumptions(words, *map(_inherited, inherited))
    own = replace(own, participation_checked=all(part.participation_checked for part in parts))
    if len(mus) == len(parts) and own.accountant == "exact":
        mu = gaussian_sum(mus)
        epsilon = accounting.gdp.epsilon(mu=mu, slack=0.0, delta=own.delta)
        shift = mu * own.noise_multiplier  # S of all of them, in units of this run's noise
        if not math.isfinite(shift):  # a run without noise: no sensitivity says so
            shift = own.sensitivity
        return replace(
            own,
            epsilon=epsilon,
            mu=mu,
            rho=mu * mu / 2,
            sensitivity=shift,
            squared_sensitivity=shift * shift,
            exact=all(part.exact for part in parts),
        )
    return replace(
        own,
        epsilon=math.fsum(part.epsilon for part in parts),
        delta=math.fsum(part.delta for part in parts),
        mu=None,
        rho=None,
        exact=False,
    )


def _inherited(sentence: str) -> str:
    return f"Of an earlier run: {sentence}"


def _statement(
    plan: Plan, released: int, notes: tuple[str, ...], is_checked: bool
) -> PrivacyStatement:
    """The plan's statement for its first `released` steps."""
    steps = released
    if 0 < released < plan.steps and ADAPTIVE_CLIP in notes:
        # The budget was split between counts and gradients for the participations of the whole
        # run; over a part of them the same split can cost more than the part of the plan does.
        notes, steps = (*notes, so_far(released, plan.steps)), plan.steps
    return plan.statement(steps=steps, notes=notes, participation_checked=is_checked)


#: (fact, value, what it adds to a statement)
_SENTENCES = (
    ("test_key", "yes", TEST_SEED),
    ("adaptive_clip", "yes", ADAPTIVE_CLIP),
    ("public_order", "yes", PUBLIC_ORDER),
    *(("isolation", value, said) for value, said in ISOLATION.items()),
    ("order", "the caller's", CALLERS_ORDER),
)


def notes_of(facts: Mapping[str, str | None]) -> tuple[str, ...]:
    """The sentences that recorded facts add to a statement."""
    notes = [sentence for name, value, sentence in _SENTENCES if facts.get(name) == value]
    identity = facts.get(USER_IDENTITY)
    if identity is not None:
        notes.append(user_note(identity))
    elif facts.get("rows"):
        notes.append(
            "Units were told apart by their place in the data set: an example that stands at two "
            "places is counted as two."
        )
    elif facts.get("ids", NO_IDS) not in UNNAMED:
        notes.append(f"Units were told apart by {facts['ids']}, as the caller gave them.")
    if facts.get("initial"):
        notes.append(
            "The initial weights do not depend on the protected data; nobody checked where they "
            f"came from ({facts['initial']})."
        )
    notes.append(facts.get("budget_words") or OTHER_RUNS)
    if int(facts.get("starts") or 1) > 1:
        notes.append(f"{facts['starts']} processes went on with this run, one after the other.")
    notes.append(OWN_LOG)
    if facts.get("first") and facts.get("last"):
        notes.append(_made(facts))
    return tuple(notes)


def _made(facts: Mapping[str, str | None]) -> str:
    first, last = facts["first"], facts["last"]
    when = f"on {first}" if first == last else f"from {first} to {last}"
    who = f" from {facts['records']} units" if facts.get("records") else ""
    clip, divisor, scale = (facts.get(name) for name in ("clip", "divisor", "noise_scale"))
    return (
        f"Released {when} by noshuffle {facts.get('version')} with torch {facts.get('torch')}"
        f"{who}; clip {clip}, divided by {divisor}, noise of deviation {scale} a draw."
    )

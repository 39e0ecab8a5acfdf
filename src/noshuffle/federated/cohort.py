"""Who is asked in a round: users that the guard admits, in whatever order they check in.

Nobody is sampled. Users are named by a stable id (a string or an integer; never the connection they
came by), the log knows when each was asked, and a cohort is the first `size` distinct users of
the check-in list that the participation still admits. Whoever decides about check-ins, an adversary
included, decides about utility and not about privacy.

Where no server-side record can exist (devices that only keep a timer of their own), the limits are
counted afterwards from the log of rounds: with the steps t_1 < t_2 < … of each user,

    separation = min (t_{i+1} − t_i),      max_participations = max #steps     over all users,

which is the index difference b of `MinSeparation`; b − 1 rounds lie strictly in between.

>>> observed_participation([["ada", "bob"], ["eve"], ["bob"], [], ["bob", "eve"]])
MinSeparation(steps=5, separation=2, max_participations=3)
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, ParticipationViolation, instance_of, whole
from noshuffle.participation import MinSeparation, Participation
from noshuffle.plan import Plan
from noshuffle.plan.statement import PrivacyStatement
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History
from noshuffle.release.spending import ADAPTIVE_CLIP, NO_IDS
from noshuffle.release.threshold import joint_multiplier
from noshuffle.release.units import Guard, Ids, as_ids, kind_of_ids

UserId = str | int
Users = Sequence[UserId] | Ids

OBSERVED = (
    "Participation was not enforced but counted afterwards from the log of rounds; the log is "
    "complete, and who checked in when did not depend on the data of the protected user."
)
SELF_LIMITED = (
    "Participation was not enforced by the server: every device kept these limits by a timer of "
    "its own that was never reset, and no answer counted that came later than was allowed for; who "
    "checked in when did not depend on the data of the protected user."
)

CONSTANT_CLIP = "The clip norm of the run was constant: no noisy counts of norms steered it."


@dataclass(frozen=True)
class Cohort:
    """An opened round: who was charged for it, in order of id. `step` is also its noise row."""

    step: int
    users: tuple[UserId, ...]
    units: Ids


def read_log(run: str | Path) -> list[Ids]:
    """Who was sent work in each round of a run folder, those that were passed over included.

    Nothing is written, and the run may be going on. Names of users are not in there, only numbers
    that are the same in every round.
    """
    rounds: list[Ids] = []

    def hear(step: int, units: Ids) -> None:
        before = rounds.pop() if step < len(rounds) else units[:0]  # a step may have several rows
        rounds.append(np.concatenate([before, units]))

    history = History.read(RunFolder(run), on_step=hear)
    if history.plan.participation.is_sampled or history.facts().get("ids") == NO_IDS:
        raise InvalidInput(f"the log of {run} does not say who took part in which step")
    return rounds


def plain(user: object) -> UserId:
    return user if isinstance(user, str) else int(user)  # type: ignore[call-overload]


def checked_users(users: Users) -> Users:
    """Refuse what is not a list of ids, such as one name alone."""
    is_list = isinstance(users, Collection) and not isinstance(users, str | bytes | Mapping)
    if not is_list or (isinstance(users, np.ndarray) and users.ndim != 1):
        raise InvalidInput(f"users must be a list of ids, got {reprlib.repr(users)}")
    kinds: set[type] = set() if isinstance(users, np.ndarray) else set(map(type, users))
    odd = {kind for kind in kinds if kind is bool or not issubclass(kind, str | int | np.integer)}
    if odd or (kinds and "" in users):
        wrong = next(user for user in users if type(user) in odd or user == "")
        raise InvalidInput(f"a user id must be a non-empty string or an integer, got {wrong!r}")
    return users


def draw_cohort(guard: Guard, checked_in: Ids, *, size: int) -> NDArray[np.intp]:
    """Places in the check-in list of the users to ask in the next step, in that order.

    Guarantees: the users are distinct, at most `size`, and each admitted by the participation at
    this step. A user who checks in many times has one place. Nothing is charged here. Fewer than
    `size` (or none) come back where too few are free.
    """
    whole(size=size)
    _, places = np.unique(checked_in, return_index=True)
    places.sort()
    return places[guard.admits(checked_in[places])][:size]


def observed_participation(history: Iterable[Users], *, steps: int | None = None) -> MinSeparation:
    """The limits that held in a log of rounds: entry t lists the users who were sent work then.

    `steps` is the number of rounds that noise was released for, if the log is shorter.

    Guarantees: every user's steps are a pattern of the result. A user who stands twice in one
    round is refused, since no separation covers two contributions to one step.
    """
    if not isinstance(history, Iterable) or isinstance(history, str | bytes | Mapping):
        raise InvalidInput(f"give one list of users for every round, got {reprlib.repr(history)}")
    listed = [checked_users(users) for users in history]
    if len({kind_of_ids(users) for users in listed} - {""}) > 1:
        raise InvalidInput(
            "the log names users by integers and by strings; 5 and '5' are two users"
        )
    rounds = [as_ids(users) for users in listed]
    horizon = len(rounds) if steps is None else steps
    whole(at_least=max(1, len(rounds)), steps=horizon)
    units = np.concatenate([np.empty(0, np.int64), *rounds])
    when = np.repeat(np.arange(len(rounds)), [len(users) for users in rounds])
    order = np.lexsort((when, units))
    units, when = units[order], when[order]
    is_same = units[1:] == units[:-1]
    gaps = (when[1:] - when[:-1])[is_same]
    if not len(gaps):
        return MinSeparation(steps=horizon, separation=horizon, max_participations=1)
    if gaps.min() == 0:
        step = int(when[1:][is_same][gaps == 0][0])
        raise ParticipationViolation(
            f"a user stands twice in round {step} of the log; mend the log"
        )
    most = int(np.unique(units, return_counts=True)[1].max())
    return MinSeparation(steps=horizon, separation=int(gaps.min()), max_participations=most)


def account_afterwards(
    plan: Plan, seen: MinSeparation | Iterable[Users], *, clip: QuantileClip | None = None
) -> PrivacyStatement:
    """The guarantee of a run whose participation is known only after it.

    `seen` is the log of rounds, who was sent work in each (see `read_log`); or, where nobody can be
    recognised, the limits that devices kept by themselves (see `timer.participation_from_times`).
    `clip` is that of the server, where its clip norm followed a quantile.

    Guarantees: strategy and noise are those of the plan, and the sensitivity is that of the
    pattern that happened, over the planned number of steps; it may be better or worse than the
    plan's own. Noisy counts of a `clip` cost what they cost under that pattern, which is another
    share than planned. The statement says in words that nothing was enforced.
    """
    instance_of(Plan, plan=plan)
    if isinstance(seen, Participation):
        if not isinstance(seen, MinSeparation) or seen.steps > plan.steps:
            raise InvalidInput(
                f"limits counted afterwards are a MinSeparation of at most the {plan.steps} rounds "
                f"of the plan, got {seen}"
            )
        held, note = replace(seen, steps=plan.steps), SELF_LIMITED
    elif isinstance(seen, Iterable):
        held, note = observed_participation(seen, steps=plan.steps), OBSERVED
    else:
        raise InvalidInput(
            "give the log of rounds, or MinSeparation(steps, separation, max_participations); got "
            f"{seen!r}"
        )
    own = replace(plan, participation=held)
    if clip is None:
        return own.statement(notes=(note, CONSTANT_CLIP))
    instance_of(QuantileClip, clip=clip)
    own = replace(own, noise_multiplier=joint_multiplier(clip, plan, own))
    return own.statement(notes=(note, ADAPTIVE_CLIP))

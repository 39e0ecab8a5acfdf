"""What a run is tied to from its first step on, and what its facts add to a statement.

Central, federated and convex runs bind the same facts by the same functions, so that
one `verify` reads every run folder, and one refusal says the same thing everywhere. A fact is what
the ledger holds in its hash chain; a sentence is what somebody who reads the statement has to know
of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import nn

from noshuffle.clipping import Clip
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, Unsupported, instance_of
from noshuffle.noise.stream import VERSION
from noshuffle.plan import Plan
from noshuffle.release.fingerprint import FORM, of_batch
from noshuffle.release.folder import RunFolder
from noshuffle.release.keys import KeyRing
from noshuffle.release.ledger import Ledger
from noshuffle.release.spending import ADAPTIVE_CLIP, spent
from noshuffle.release.unit_ids import Ids
from noshuffle.statement import PrivacyStatement, voids

#: The fact, and its value, that the rounds of a ledger have prints of this form.
ROUND_PRINTS = ("round_prints", "of the units in order")

TEST_SEED = (
    "NOT PRIVATE: the noise comes from a named test seed, which anybody can use to remove it."
)
FINGERPRINTS_ONLY = (
    "Participation was checked by batch fingerprints only: that no unit sits in two different "
    "batches is the word of whoever built them."
)
IN_PARTS = (
    "Steps came in several parts without ids: that no unit sits in two of them is the word of "
    "whoever cut them; only parts that are the same as a whole were refused."
)
UNCHANGED_LOOP = (
    "In every step, the loss of a batch is a mean (or sum) of terms that each depend on one "
    "example alone; this was not checked."
)
PUBLIC_ORDER = (
    "Which user takes part at which step is public: the participation was read off the order of "
    "the user ids."
)
OTHER_RUNS = (
    "Other runs, searches and baselines on the same data add up with this one and are not counted "
    "here."
)
INITIAL = "as the caller built them"
ISOLATION = (
    "Model and loss treat examples apart, write into no trained parameter and keep nothing of an "
    "example outside the model's own tensors; this was tried on the first batch of each kind, and "
    "what is not trained is watched in every step, but it is not proved for later ones."
)


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


def check_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> None:
    """The optimizer moves exactly the parameters that are clipped and noised."""
    instance_of(torch.optim.Optimizer, optimizer=optimizer)
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Unsupported(
            f"{kind} asks for the loss several times a step, and every answer would need noise of "
            "its own; use another optimizer"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise Unsupported(f"{kind} takes sparse gradients, and private ones are dense; use Adam")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise Unsupported(
            f"{kind}(differentiable=True) moves no parameters in place; leave the option out"
        )
    given = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    missing = [name for name, p in parameters.items() if id(p) not in given]
    if missing:
        raise InvalidInput(
            f"parameter {missing[0]!r} is trainable but not in the optimizer; add it, or freeze it "
            "with requires_grad_(False)"
        )
    if len(given) > len(parameters):
        raise InvalidInput(
            "the optimizer has trainable parameters that do not belong to the model; their "
            "gradients would not be private"
        )


def one_device(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    devices = {p.device for p in parameters.values()}
    if len(devices) != 1:
        raise Unsupported(f"all parameters must be on one device, got {sorted(map(str, devices))}")
    return devices.pop()


def bind_facts(
    ledger: Ledger,
    plan: Plan,
    ring: KeyRing,
    *,
    clip: Clip | QuantileClip,
    divisor: float,
    noise_scale: float,
    more: Mapping[str, str],
) -> None:
    """What may not change while a run lives. `divisor` is the planned batch or cohort size."""
    if ledger.meta("forked"):
        raise InvalidInput(
            f"this run was forked after {ledger.meta('forked')} steps and may not go on itself; "
            "continue the fork"
        )
    if ledger.released and ledger.meta("prints") != FORM:
        raise InvalidInput(
            "the fingerprints of this run were written by another version of noshuffle and cannot "
            "be compared with those of this one; go on with that version, or fork the run"
        )
    if ledger.released and ledger.meta("noise") != str(VERSION):
        # A step on record would be repeated with other numbers: the same sum under a second noise.
        raise InvalidInput(
            "this run was begun by another version of noshuffle, whose noise has other numbers "
            f"({ledger.meta('noise') or 'not written down'} there, {VERSION} here); go on with "
            "that version, or fork the run"
        )
    facts = {
        "prints": FORM,
        "noise": str(VERSION),
        "plan": plan.hash,
        "key": ring.name,
        "test_key": "yes" if ring.is_test else "no",
        "clip": repr(clip),
        "batch_size": str(divisor),
        "noise_scale": repr(float(noise_scale)),
        "adaptive_clip": "yes" if isinstance(clip, QuantileClip) else "no",
        **more,
    }
    for name, value in facts.items():
        ledger.bind(name, value)


#: (fact, value, what it adds to a statement)
_SENTENCES = (
    ("test_key", "yes", TEST_SEED),
    ("identified_by", "fingerprints", FINGERPRINTS_ONLY),
    ("in_parts", "yes", IN_PARTS),
    ("unchanged_loop", "yes", UNCHANGED_LOOP),
    ("adaptive_clip", "yes", ADAPTIVE_CLIP),
    ("public_order", "yes", PUBLIC_ORDER),
    ("isolation", "tried", ISOLATION),
)


def notes_of(facts: Mapping[str, str | None]) -> tuple[str, ...]:
    """The sentences that recorded facts add to a statement."""
    notes = [said for name, value, said in _SENTENCES if facts.get(name) == value]
    identity = facts.get(USER_IDENTITY)
    if identity is not None:
        notes.append(user_note(identity))
    elif facts.get("ids"):
        notes.append(f"Units were told apart by {facts['ids']}, as the caller gave them.")
    if facts.get("initial"):
        notes.append(
            "The initial weights do not depend on the protected data; nobody checked where they "
            f"came from ({facts['initial']})."
        )
    notes.append(facts.get("budget_words") or OTHER_RUNS)
    if int(facts.get("lives") or 1) > 1:
        notes.append(
            f"{facts['lives']} processes went on with this run, each under keys of its own; a copy "
            "of it that went on elsewhere is a further release, which adds up."
        )
    if facts.get("first") and facts.get("last"):
        notes.append(_made(facts))
    return tuple(notes)


def void_notes(facts: Mapping[str, str | None]) -> tuple[str, ...]:
    """Those of them that say that no ε holds."""
    return voids(notes_of(facts))


def _made(facts: Mapping[str, str | None]) -> str:
    ends = (datetime.fromtimestamp(float(facts[name] or 0), UTC) for name in ("first", "last"))
    first, last = (f"{end:%Y-%m-%d}" for end in ends)
    when = f"on {first}" if first == last else f"from {first} to {last}"
    who = f" from {facts['records']} units" if facts.get("records") else ""
    clip, divisor, scale = (facts.get(name) for name in ("clip", "batch_size", "noise_scale"))
    return (
        f"Released {when} by noshuffle {facts.get('version')} with torch {facts.get('torch')}"
        f"{who}; clip {clip}, divided by {divisor}, noise of deviation {scale} a draw."
    )


def round_print(step: int, units: Ids, *, secret: bytes) -> bytes:
    """What stands for the data of a federated round, which its server never sees: who was asked.

    In order of their numbers, as the ledger lists them, so that `verify` can work it out again.
    """
    return of_batch(("federated", step), np.sort(units), secret=secret)


def statement_record(plan: Plan, ledger: Ledger, statement: PrivacyStatement) -> dict[str, Any]:
    """statement.json: the statement, and which rows of which ledger it is about."""
    seq, link = ledger.head
    return {
        **statement.to_dict(),
        "plan_hash": plan.hash,
        "planned_steps": plan.steps,
        "released_steps": ledger.released,
        "ledger_rows": seq,
        "ledger_link": link.hex(),
    }


def write_statement(folder: RunFolder, plan: Plan, ledger: Ledger) -> None:
    """statement.json from plan, ledger and ancestors alone."""
    notes = notes_of(ledger.facts())
    said = spent(plan, ledger.released, ancestors=folder.ancestors(), notes=notes)
    folder.write_statement(statement_record(plan, ledger, said))

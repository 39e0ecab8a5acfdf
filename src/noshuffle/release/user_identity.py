"""How users were told apart: a fact of a ledger, and the sentence that it adds to a statement.

A guarantee for a user counts participations by id. Whether one id is one person cannot be computed;
it can be recorded who said so. State: none.

>>> user_note("simulation")
'Users are those of a simulation, told apart by the ids in its data.'
>>> user_note("badge numbers")
'Users were told apart by badge numbers; whoever has several ids is counted as several users.'
"""

from __future__ import annotations

#: The name of the fact.
USER_IDENTITY = "user_identity"

GIVEN = "given by the caller"
SIMULATED = "simulation"
CLAIMED = "claimed by the device (handshake)"
REGISTERED = "registered public keys"
UNREGISTERED = "public keys that nobody registered"

_NOTES = {
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
    """The sentence of a statement for this value of the fact."""
    return _NOTES.get(
        identity,
        f"Users were told apart by {identity}; whoever has several ids is counted as several "
        "users.",
    )

"""plan.json: a plan as canonical text, and the plan that a text is of.

Equal plans have equal text, by which they are known (`Plan.hash`); what was left out of the text
before there was a choice is left out still. Functions take the `Plan` that asks, or its class
(`noshuffle.plan`). No state.

>>> from noshuffle.participation import SinglePass
>>> from noshuffle.plan import Plan
>>> plan = Plan.fit(SinglePass(steps=8), mechanism="tree", noise_multiplier=2.0)
>>> from_json(Plan, to_json(plan)) == plan, to_dict(plan)["format"]
(True, 'noshuffle-plan/1')
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from noshuffle import participation as participations
from noshuffle import strategies
from noshuffle.errors import InvalidInput
from noshuffle.strategies.tree import Tree

FORMAT = "noshuffle-plan/1"


def to_dict(plan: Any) -> dict[str, Any]:
    """Every decision, as plain values."""
    record = {field.name: getattr(plan, field.name) for field in fields(plan)}
    record["participation"] = plan.participation.to_dict()
    record["strategy"] = plan.strategy.to_dict()
    if not isinstance(plan.strategy, Tree) or plan.tree_accounting == "nodes":
        del record["tree_accounting"]  # as before there was a choice: same text, same hash
    return {"format": FORMAT, **record}


def to_json(plan: Any) -> str:
    """Canonical JSON: sorted keys, no spaces, shortest floats; equal plans, equal text."""
    return json.dumps(plan.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)


def from_json(kind: Any, text: str) -> Any:
    """The plan of this kind that `to_json` wrote; anything else is refused."""
    try:
        record = json.loads(text)
        if not isinstance(record, dict) or record.pop("format", None) != FORMAT:
            raise InvalidInput(f"not a {FORMAT} document; write one with Plan.to_json")
        record["participation"] = participations.from_dict(record["participation"])
        record["strategy"] = strategies.from_dict(record["strategy"])
        return kind(**{"tree_accounting": "nodes", **record})
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(
            f"not a {FORMAT} document ({error}); write one with Plan.to_json"
        ) from None

"""What a statement says of bounds, and who is warned that none were given.

Bounds of columns and of targets are given with an estimator, found in private, or nobody gave
any: then columns are clipped row by row, and targets clamped to the default.

>>> class Regression:
...     target_bounds = (-1.0, 1.0)
>>> model = Regression()
>>> words_of_bounds(model, given=("bounds",))
'bounds were given, not measured, and are taken to have been chosen without the data. \
target_bounds is (-1.0, 1.0), its default.'
>>> model.target_bounds = (0.0, 100.0)
>>> words_of_bounds(model, given=("bounds",)).partition(" were ")[0]
'bounds and target_bounds'
"""

from __future__ import annotations

from collections.abc import Sequence

from noshuffle.convex.ranges import FOUND
from noshuffle.user_warnings import warn_user

_GIVEN = "{} were given, not measured, and are taken to have been chosen without the data."
_UNBOUNDED = "No bounds of columns were given: rows count as they come, clipped one by one."


class NoBounds(UserWarning):
    """A table was learned without bounds of its columns or targets: legal, and rarely meant."""


def words_of_bounds(model: object, *, given: Sequence[str], is_found: bool = False) -> str:
    """The sentences of a statement; `given` names the parameters that hold bounds of columns."""
    default, names = _default_targets(model), list(given)
    said = [FOUND] if is_found else [] if names else [_UNBOUNDED]
    if default is None and hasattr(model, "target_bounds"):
        names.append("target_bounds")
    if names:
        said.append(_GIVEN.format(" and ".join(names)))
    if default is not None:
        said.append(f"target_bounds is {default}, its default.")
    return " ".join(said)


def warn_of_targets(model: object) -> None:
    """Warn of a regression whose targets nobody bounded."""
    if default := _default_targets(model):
        warn_user(
            f"target_bounds is {default}, its default: targets are clamped to it, and no "
            "prediction leaves it; give target_bounds=(low, high), known beforehand",
            NoBounds,
        )


def warn_of_columns() -> None:
    warn_user(
        "no bounds of columns were given: rows are clipped as they come, and columns of "
        "large numbers hide all others; give bounds=(low, high), one pair for all columns "
        "or one for each, or bounds='private'",
        NoBounds,
    )


def _default_targets(model: object) -> str | None:
    """The bounds of targets, where nobody gave any. `clone` makes them anew: no `is`."""
    default = repr(getattr(type(model), "target_bounds", None))
    return default if default == repr(getattr(model, "target_bounds", 0)) else None

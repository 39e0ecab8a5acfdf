"""Warnings that point at the line of the user that led to them, however deep they are found.

A fixed `stacklevel` is right for one way in: what `private.step` finds is three calls deeper under
`fit_model` and under a Trainer. So the stack is walked from the warning to the first line that
belongs neither to this package nor to one that calls it or is called by it.

>>> import warnings
>>> with warnings.catch_warnings(record=True) as told:
...     warnings.simplefilter("always")
...     warn_user("look here", UserWarning)
>>> str(told[0].message), told[0].category.__name__
('look here', 'UserWarning')
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

#: Packages whose lines are nobody's mistake: this one, and those between it and the user.
_BETWEEN = (
    "noshuffle torch contextlib functools threading concurrent "
    "sklearn joblib transformers accelerate lightning lightning_fabric pytorch_lightning flwr"
)


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the nearest line of the user; at the outermost line where there is none."""
    frame = _line_of_user(sys._getframe(1))
    own = frame.f_globals
    warnings.warn_explicit(
        text,
        category,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=own.get("__name__") or "<unknown>",
        registry=own.setdefault("__warningregistry__", {}),
    )


def _line_of_user(frame: FrameType) -> FrameType:
    while frame.f_back is not None and _package(frame) in _BETWEEN.split():
        frame = frame.f_back
    return frame


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]

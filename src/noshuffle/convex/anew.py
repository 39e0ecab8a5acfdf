"""anew: a fit begins with nothing of an earlier one, and a fit that does not end changes nothing.

A fit that left an attribute of an earlier one behind would state the ε of that one, or clip for its
weights. What a model has learned are attributes that end with "_", and those that its last fit set
(`_learned`); parameters stay, and so does what scikit-learn keeps with a model. State: that list.

>>> class Model:
...     @anew
...     def fit(self, y):
...         self.first_ = y
...         self.second_ = 1 / y
>>> model = Model()
>>> model.fit(2)
>>> model.fit(0)
Traceback (most recent call last):
    ...
ZeroDivisionError: division by zero
>>> model.first_, model.second_
(2, 0.5)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., Any])


def forget(model: Any) -> frozenset[str]:
    """Drop what was learned; the names of what stays."""
    learned = vars(model).get("_learned", frozenset())
    model.__dict__ = {
        name: value
        for name, value in vars(model).items()
        if name not in learned and not name.endswith("_")
    }
    return frozenset(vars(model))


def note_learned(model: Any, kept: frozenset[str]) -> None:
    """A fit has ended that began with the attributes `kept`."""
    model._learned = frozenset({*vars(model), "_learned"}) - kept


def anew(fit: _Method) -> _Method:
    """A method that learns from the beginning, wholly or not at all.

    Guarantees: where it raises, or is interrupted, the model has the attributes that it had.
    """

    @wraps(fit)
    def learned(self: Any, *args: Any, **options: Any) -> Any:
        before = vars(self).copy()
        kept = forget(self)
        try:
            out = fit(self, *args, **options)
            note_learned(self, kept)
            return out
        except BaseException:
            self.__dict__ = before
            raise

    return learned  # type: ignore[return-value]

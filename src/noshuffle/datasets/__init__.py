"""Data sets by name, in their natural order, looked up in $NOSHUFFLE_DATA or downloaded.

>>> data = load("digits")
>>> len(data), data.shape, data.classes
(1437, (1, 8, 8), 10)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from noshuffle.datasets.images import cifar10, digits, emnist_bymerge, fashion_mnist, mnist
from noshuffle.datasets.record import DataSet
from noshuffle.datasets.tables import adult, bank_marketing
from noshuffle.datasets.text import shakespeare
from noshuffle.errors import InvalidInput, imported

__all__ = ["NAMES", "DataSet", "load"]

_LOADERS: dict[str, Callable[[], DataSet]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "emnist_bymerge": emnist_bymerge,
    "cifar10": cifar10,
    "shakespeare": shakespeare,
    "adult": adult,
    "bank_marketing": bank_marketing,
}
NAMES = tuple(_LOADERS)


def load(name: str) -> DataSet:
    """A data set by name, or your own by `module:function` (a function that returns a DataSet)."""
    if name in _LOADERS:
        return replace(_LOADERS[name](), is_test_public=True)
    if ":" in name:
        return _own(name)
    raise InvalidInput(
        f"data must be one of {', '.join(NAMES)}, or module:function of your own; got {name!r}"
    )


def _own(name: str) -> DataSet:
    data = imported(data=name)()
    if not isinstance(data, DataSet):
        raise InvalidInput(
            f"{name} must return a noshuffle.datasets.DataSet, got {type(data).__name__}"
        )
    return data

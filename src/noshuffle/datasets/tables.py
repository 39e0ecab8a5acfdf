"""Tables: Adult (census income) and Bank Marketing (a stream of phone calls in time order).

Numeric columns are scaled by fixed, public bounds and clamped, categories become indicators, and
each row is scaled to norm at most one: no statistic of the data enters the features.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noshuffle.datasets.record import DataSet
from noshuffle.datasets.store import needed

Array = NDArray[np.float64]

# age, final weight, years of education, capital gain, capital loss, hours a week
_ADULT_BOUNDS = ((17, 90), (0, 1_500_000), (1, 16), (0, 99_999), (0, 4_356), (1, 99))


def adult() -> DataSet:
    """48,842 people of the 1994 census; the official split; does income exceed 50,000?"""
    with np.load(needed("adult.npz")) as file:
        num, cat, y, is_test = file["num"], file["cat"], file["y"], file["is_test"] == 1
        sizes = _sizes(file)
    scaled = [_scale(num[:, i], *bounds) for i, bounds in enumerate(_ADULT_BOUNDS)]
    features = _assemble(scaled, cat, sizes)
    return _table("adult", features, y, ~is_test, is_test)


def bank_marketing() -> DataSet:
    """41,188 calls in time order; the last fifth is held out; was a deposit sold?

    The length of the call is left out: it is known only afterwards.
    """
    with np.load(needed("bank_marketing.npz")) as file:
        num, cat, y = file["num"], file["cat"], file["y"]
        sizes = _sizes(file)
    # age, duration, campaign, days since, previous, employment variation, price index,
    # confidence, euribor, employees
    bounds = (
        (17, 98),
        None,
        (1, 56),
        (0, 999),
        (0, 7),
        (-4, 2),
        (92, 95),
        (-51, -26),
        (0, 6),
        (4900, 5300),
    )
    scaled = [
        _scale(num[:, i], *limits)
        for i, limits in enumerate(bounds[: num.shape[1]])
        if limits is not None
    ]
    features = _assemble(scaled, cat, sizes)
    late = np.arange(len(y)) >= int(0.8 * len(y))
    return _table("bank_marketing", features, y, ~late, late)


def _scale(column: Array, low: float, high: float) -> Array:
    return np.clip((column - low) / (high - low), 0.0, 1.0)


def _sizes(file: Mapping[str, Any]) -> list[int]:
    """How many values each category has: the published code book, not what occurs in the rows."""
    book = json.loads(str(file["cat_values"]))
    return [len(values) for values in (book.values() if isinstance(book, dict) else book)]


def _assemble(numeric: list[Array], categories: NDArray[np.int64], sizes: list[int]) -> Array:
    columns = list(numeric)
    for column, size in zip(np.asarray(categories).T, sizes):
        for value in range(size):
            columns.append((column == value).astype(np.float64))
    columns.append(np.ones(len(categories)))
    features = np.stack(columns, axis=1)
    norms = np.linalg.norm(features, axis=1, keepdims=True)
    return np.asarray(features / np.maximum(norms, 1.0), dtype=np.float64)


def _table(
    name: str, x: Array, y: NDArray[np.int64], train: NDArray[np.bool_], test: NDArray[np.bool_]
) -> DataSet:
    features = torch.tensor(x, dtype=torch.float32)
    labels = torch.tensor(np.asarray(y, dtype=np.int64))
    keep, held = torch.from_numpy(train), torch.from_numpy(test)
    return DataSet(name, "table", features[keep], labels[keep], features[held], labels[held], 2)

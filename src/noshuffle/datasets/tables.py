"""Tables: Adult (census income) and Bank Marketing (a stream of phone calls in time order).

Numeric columns are scaled by fixed, public bounds and clamped, categories become indicators, and
each row is scaled to norm at most one: no statistic of the data enters the features.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noshuffle.datasets.record import DataSet
from noshuffle.datasets.store import needed

_ADULT = {
    "age": (17, 90),
    "final weight": (0, 1_500_000),
    "years of education": (1, 16),
    "capital gain": (0, 99_999),
    "capital loss": (0, 4_356),
    "hours a week": (1, 99),
}
_BANK = {
    "age": (17, 98),
    "duration": None,  # left out: the length of a call is known only afterwards
    "campaign": (1, 56),
    "days since": (0, 999),
    "previous": (0, 7),
    "employment variation": (-4, 2),
    "price index": (92, 95),
    "confidence": (-51, -26),
    "euribor": (0, 6),
    "employees": (4900, 5300),
}


def adult() -> DataSet:
    """48,842 people of the 1994 census; the official split; does income exceed 50,000?"""
    return _read("adult", _ADULT, lambda file: file["is_test"] == 1)


def bank_marketing() -> DataSet:
    """41,188 calls in time order; the last fifth is held out; was a deposit sold?"""
    return _read(
        "bank_marketing", _BANK, lambda file: np.arange(n := len(file["y"])) >= int(0.8 * n)
    )


def _read(
    name: str,
    bounds: Mapping[str, tuple[int, int] | None],
    is_test_fn: Callable[[Any], NDArray[np.bool_]],
) -> DataSet:
    with np.load(needed(f"{name}.npz")) as file:
        numbers, categories, y, is_test = file["num"], file["cat"], file["y"], is_test_fn(file)
        book = json.loads(str(file["cat_values"]))
    columns = [
        np.clip((column - limits[0]) / (limits[1] - limits[0]), 0.0, 1.0)[:, None]
        for column, limits in zip(numbers.T, bounds.values())
        if limits is not None
    ]
    # Every value of the published code book has a column, whether it occurs in the rows or not.
    for column, values in zip(categories.T, book.values() if isinstance(book, dict) else book):
        columns.append((column[:, None] == np.arange(len(values))).astype(np.float64))
    table = np.concatenate([*columns, np.ones((len(y), 1))], axis=1)
    table = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1.0)
    x, labels = (
        torch.tensor(table, dtype=torch.float32, device="cpu"),
        torch.tensor(y.astype(np.int64), device="cpu"),
    )
    held = torch.from_numpy(is_test)
    return DataSet(name, "table", x[~held], labels[~held], x[held], labels[held], 2)

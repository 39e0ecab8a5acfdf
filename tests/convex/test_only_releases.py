"""Whole fits on two neighbours: what leaves moves by the clip norm, and nothing else reads rows.

What was released is overwritten by numbers that know nothing of the data. Then both fits go the
same way: every sum may differ by what one unit adds, and the models must be equal to the last bit.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import sparse

from noshuffle import convex
from noshuffle.release.release import Release

ROWS, COLUMNS = 45, 3
WEIGHTED: list[dict[str, Any]] = [
    {"class_weight": {0: 3.0}, "max_weight": 2.5},
    {"max_weight": 2.5, "rows_per_unit": 3, "bounds": "private"},
    {"class_weight": {1: 4.0}, "rows_per_unit": 3, "fit_intercept": False},
    {"max_weight": 2.5, "penalty": "l2", "epsilon": math.inf},
    {"solver": "ftrl", "penalty": "l1", "batch_size": 7, "passes": 2, "class_weight": {1: 4.0}},
    {"solver": "ftrl", "constraint": "l1_ball", "fit_intercept": False},
    {"solver": "sums", "max_weight": 2.5},
]
PLAIN: list[dict[str, Any]] = [
    {"epsilon": 4.0},
    {"bounds": "private", "neighbours": "replace-one"},
    {"bounds": [(-1, 2), (0, 1), (-3, 3)], "epsilon": 0.3},
    {"feature_bound": 2.0, "clip_norm": 0.3, "epsilon": math.inf},
]
KINDS = sorted(convex.__all__)


class Outside:
    """In the place of what leaves: keeps the sums, and gives back numbers of its own."""

    def __init__(self) -> None:
        self.sums: list[Any] = []

    def fitted(self, model: Any, x: Any, y: Any, told: dict[str, Any], kind: int) -> Any:
        close = Release.close

        def closed(release: Any, ticket: Any, values: dict[str, Any]) -> None:
            rng, clip = np.random.default_rng([kind, ticket.step]), release.threshold.clip.norm
            for name in values:
                self.sums.append(values[name].numpy().copy() / clip)
            close(release, ticket, values)
            unit = clip / release.divisor
            for value in values.values():
                drawn = rng.normal(size=value.shape)  # of noise alone, or of many rows
                drawn = drawn if kind else np.abs(drawn) * release.divisor * 0.3
                value.copy_(torch.from_numpy(drawn * unit))

        with mock.patch.object(Release, "close", closed):
            return model.fit(x, y, **told)


def learned(model: Any) -> dict[str, str]:
    hidden = ("_stream", "_progress", "_finished", "_said", "_turn", "_ranges")
    with np.printoptions(threshold=10**6, precision=17):
        return {n: repr(v) for n, v in vars(model).items() if not n.startswith(hidden)}


def seen(
    make: Any, made: Any, ids: Any, way: int, is_sparse: bool, x: Any, y: Any, weight: Any
) -> tuple[list[Any], dict[str, str]]:
    """The sums of a fit, and what it learned."""
    told = {"ids": ids} if weight is None else {"ids": ids, "sample_weight": weight}
    outside, rows = Outside(), sparse.csr_array(x) if is_sparse else x
    model = outside.fitted(make(**made), rows, y, told, way)
    return outside.sums, learned(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_moves_each_release_by_its_clip_norm_and_nothing_else(kind: str) -> None:
    rng, known = np.random.default_rng(KINDS.index(kind)), getattr(convex, kind)().get_params()
    is_classifier, tried, most = "classes" in known, 0, 0.0
    for index, settings in enumerate([*PLAIN, *(WEIGHTED if "max_weight" in known else ())]):
        classes = 2 + index % 2 if is_classifier else 2
        made = {"epsilon": 2.0, "bounds": (-1, 1), **settings, "classes": list(range(classes))}
        made |= {"target_bounds": (0.01, 2.0), "test_seed": 0}
        if settings.get("solver") == "sums" and kind != "PrivateLinearRegression":
            continue
        made = {name: value for name, value in made.items() if name in known}
        ids = np.arange(ROWS) // 3 if "rows_per_unit" in made else np.arange(ROWS)
        unit = np.flatnonzero(ids == ids[rng.integers(ROWS)])
        x = rng.normal(size=(ROWS, COLUMNS)) * [0.1, 1.0, 5.0]
        y: Any = np.abs(rng.normal(size=ROWS))
        y = rng.integers(classes, size=ROWS) if is_classifier else y
        weight = np.abs(rng.normal(size=ROWS)) if "max_weight" in made else None
        way, is_sparse = int(rng.integers(2)), "solver" in known and index == 0
        fit = partial(seen, getattr(convex, kind), made, ids.tolist(), way, is_sparse)
        sums, model = fit(x, y, weight)
        for hostile in (0.0, 1e3) if index % 2 else (1.0, 1e308):
            other, label, heavy = x.copy(), y.copy(), None if weight is None else weight.copy()
            other[unit] = hostile * np.sign(rng.normal(size=(len(unit), COLUMNS)))
            label[unit] = rng.integers(classes) if is_classifier else min(10 * hostile, 1e9) + 0.5
            if heavy is not None:
                heavy[unit] = 1e6
            sums_of_other, same = fit(other, label, heavy)
            assert model == same
            assert len(sums) == len(sums_of_other)
            moved = max(float(np.linalg.norm(a - b)) for a, b in zip(sums, sums_of_other))
            assert moved <= 2.0 + 1e-9
            tried, most = tried + 1, max(most, moved)
    assert tried >= 8
    assert most > 0.5

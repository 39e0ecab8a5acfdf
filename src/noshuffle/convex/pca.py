"""PrivatePCA: principal components from one noisy matrix of second moments (Analyze Gauss).

    z = (x, 1) with x inside its bounds, shortened to norm C           S = Σ svec(z zᵀ) + noise

‖svec(z zᵀ)‖ = ‖z‖² ≤ C², so one Gaussian release of norm C² (scaled to 1) has it all: its last row
is the mean m̂, and the eigenvectors of M̂ − m̂m̂ᵀ are the components; everything after the release is
post-processing (Dwork, Talwar, Thakurta, Zhang 2014: Analyze Gauss). Exactly μ-GDP. C² = 1 + p/3,
the mean of a row that fills [−1, 1]^p evenly: longer rows are shortened, which tilts what is rare.
The noise moves an eigenvector by about z·C²√(2p)/n over its gap (`moments.noise_norm`).

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> x = rng.normal(size=(20_000, 1)) @ [[0.3, 0.3, 0.0]] + 0.05 * rng.normal(size=(20_000, 3))
>>> found = PrivatePCA(n_components=1, bounds=(-1, 1), test_seed=0).fit(x)
>>> np.abs(found.components_ @ [0.5**0.5, 0.5**0.5, 0.0]).round(2)
array([1.])
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import validate_data

from noshuffle.clipping.factor import clip_factor
from noshuffle.convex.anew import anew
from noshuffle.convex.arrays import CLIP_SLACK, Array, Targets, refuse_complex
from noshuffle.convex.moments import pack, unpack_square
from noshuffle.convex.phases import Phase
from noshuffle.convex.readings import PrivateTable
from noshuffle.convex.rows import squared_norms
from noshuffle.convex.rule import Rule
from noshuffle.errors import InvalidInput, whole


class SecondMoments(Rule):
    """One reading: the sum of svec(z zᵀ)/C² over rows beside their constant.

    Guarantees: a row's part has norm at most 1; a row that is not finite adds nothing.
    """

    def __init__(self, columns: int) -> None:
        self.columns, self.length = columns, math.sqrt(1.0 + columns / 3.0)
        self.size, self.clip_norm = (columns + 1) * (columns + 2) // 2, 1.0
        self.learning_rate, self.matrix = 1.0, np.zeros((columns + 1, columns + 1))

    def start(self, phase: Phase) -> None:
        """One reading has nothing to prepare."""

    def clipped_sum(self, x: Any, y: Targets, weight: Array | None = None) -> Array:
        rows = np.hstack([x, np.ones((len(x), 1))])
        factor = clip_factor(np.sqrt(squared_norms(rows)), self.length, slack=CLIP_SLACK)
        short = rows * (factor / self.length)[:, None]
        return pack(short.T @ short)

    def update(self, mean: Array, *, step: int) -> None:
        self.matrix = unpack_square(mean[: self.size], self.columns + 1) * self.length**2


@dataclass(kw_only=True, eq=False, repr=False)
class PrivatePCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, PrivateTable):  # type: ignore[misc]
    """Principal components. See `PrivateTable` for the other parameters.

    Parameters
    ----------
    n_components : how many; None keeps all.

    `components_` and `explained_variance_` are of columns scaled to [−1, 1] by their bounds,
    `mean_` in the units of the data.
    """

    n_components: int | None = None

    @anew
    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        ids: Iterable[Hashable] | None = None,
        run: str | Path | None = None,
    ) -> Self:
        """Release the second moments of a table, and take them apart."""
        refuse_complex(X=X)
        X = validate_data(self, X, dtype=np.float64)
        p = X.shape[1]
        kept = p if self.n_components is None else self.n_components
        whole(n_components=kept)
        if kept > p:
            raise InvalidInput(f"n_components must be at most the {p} columns, got {kept}")
        rule = SecondMoments(p)
        self._read(rule, X, np.zeros(len(X)), readings=1, ids=ids, run=run)
        share = min(max(float(rule.matrix[-1, -1]), 0.1), 1.0)  # of rows that were not shortened
        mean = rule.matrix[-1, :-1] / share
        values, basis = np.linalg.eigh(rule.matrix[:-1, :-1] / share - np.outer(mean, mean))
        self._mean, self.components_ = mean, basis[:, ::-1][:, :kept].T
        scale = self._rows.scale
        self.mean_ = self._rows.shift + mean / scale
        self.explained_variance_ = np.maximum(values[::-1][:kept], 0.0)
        total = max(float(np.maximum(values, 0.0).sum()), 1e-300)
        self.explained_variance_ratio_ = self.explained_variance_ / total
        return self

    def transform(self, X: Any) -> Array:
        """Rows, inside their bounds, along the components."""
        rows = self._prepare(self._fitted_rows(X), self._rows)
        return np.asarray((rows - self._mean) @ self.components_.T)

    def inverse_transform(self, X: Any) -> Array:
        """Rows in the units of the data, from `transform`."""
        rows = np.asarray(X, dtype=np.float64) @ self.components_ + self._mean
        return np.asarray(rows / self._rows.scale + self._rows.shift)

    @property
    def _n_features_out(self) -> int:
        return len(self.components_)

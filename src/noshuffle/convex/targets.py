"""What y may be: classes that are known or read from it, or numbers between public bounds.

Classes become their numbers in `classes_`; a class that is not among them is refused before a row
is learned. Numbers are clamped to `target_bounds` and scaled to [−1, 1]. No state of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from noshuffle.convex.arrays import Array, check_ranges, real_targets
from noshuffle.convex.margins import told
from noshuffle.errors import InvalidInput

READ_CLASSES = (
    "The set of classes was read from y; that these classes occur is taken to be public knowledge."
)


def check_labels(y: Any) -> None:
    """Refuse what cannot be classes: numbers between integers, labels without an order."""
    try:
        check_classification_targets(y)
    except TypeError:  # of np.unique, for None or NaN beside text
        kinds = ", ".join(sorted({type(label).__name__ for label in np.ravel(y)}))
        raise InvalidInput(
            f"y must hold labels of one kind, got {kinds}; leave rows without a label out"
        ) from None


class ClassTargets:
    """Of classifiers: `classes` are all that may come, known beforehand (None: read from y)."""

    classes: Any
    classes_: NDArray[Any]

    if TYPE_CHECKING:  # of the estimator

        def _margins(self, x: Any, /) -> Array: ...

    def _take_classes(self, y: Any) -> tuple[str, ...]:
        if self.classes is not None and np.ndim(self.classes) != 1:
            raise InvalidInput(f"classes must be a list of all classes, got {self.classes!r}")
        self._set_classes(y if self.classes is None else self.classes)
        return () if self.classes is not None else (READ_CLASSES,)

    def _set_classes(self, labels: Any) -> None:
        self.classes_ = np.unique(column_or_1d(labels))
        if len(self.classes_) < 2:
            raise InvalidInput(
                f"a classifier needs at least 2 classes, got {len(self.classes_)} class"
            )

    def _targets(self, y: Any) -> NDArray[np.int64]:
        codes = np.searchsorted(self.classes_, y)
        codes = np.minimum(codes, len(self.classes_) - 1)
        wrong = np.flatnonzero(self.classes_[codes] != y)
        if len(wrong):
            raise InvalidInput(
                f"y holds {y[wrong[:1]].tolist()[0]!r}, which is none of the {len(self.classes_)} "
                "classes; name every class that may come in classes="
            )
        return np.asarray(codes, dtype=np.int64)

    def decision_function(self, X: Any) -> Array:
        """Margins: one number per row for two classes, one per class for more."""
        margins = self._margins(X)
        return margins[:, 0] if margins.shape[1] == 1 else margins

    def predict(self, X: Any) -> NDArray[Any]:
        """The class of every row."""
        codes = told(self._margins(X)).astype(np.int64)
        return np.asarray(self.classes_[codes])


class NumberTargets:
    """Of regressions: y is clamped to `target_bounds`, (low, high) known beforehand."""

    target_bounds: Any
    #: Of the fit: predictions stay in its units when the parameter is set anew.
    _fitted_limits: tuple[float, float] | None = None

    def _targets(self, y: Any) -> Array:
        self._fitted_limits = low, high = self._limits()
        clamped = np.clip(real_targets(y), low, high)
        return np.asarray((clamped - (low + high) / 2) / ((high - low) / 2))

    def _limits(self) -> tuple[float, float]:
        if self._fitted_limits is not None:
            return self._fitted_limits
        try:
            low, high = (float(v) for v in self.target_bounds)
        except (TypeError, ValueError):
            raise InvalidInput(
                f"target_bounds must be a pair (low, high), got {self.target_bounds!r}"
            ) from None
        check_ranges(target_bounds=[(low, high)])
        return low, high

    def _told(self, margins: Array) -> Array:
        """Margins in the units of y."""
        low, high = self._limits()
        return np.asarray((low + high) / 2 + margins * (high - low) / 2)

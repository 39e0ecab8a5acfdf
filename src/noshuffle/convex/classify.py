"""PrivateLogisticRegression and PrivateSVC: classifiers of a table or a stream.

Two classes have one margin. More have one margin each: softmax for logistic regression, one against
the rest for the SVC, and in both a row is clipped once, over all its margins together.

The set of classes is public: give `classes`. Without it `fit` reads them from y as scikit-learn
does, and the statement says that this was assumed to be public knowledge.

>>> import numpy as np
>>> rng = np.random.default_rng(0)
>>> x = rng.normal(size=(2000, 3)); y = (x[:, 0] > x[:, 1]).astype(int)
>>> model = PrivateLogisticRegression(epsilon=2.0, bounds=(-4, 4), classes=[0, 1], test_seed=1,
...                                   mechanism="tree").fit(x, y)
>>> bool(model.score(x, y) > 0.9), round(model.privacy_.epsilon, 6)
(True, 2.0)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import ClassifierMixin

from noshuffle.convex.arrays import Array
from noshuffle.convex.base import PrivateLinearModel
from noshuffle.convex.losses import Loss, hinge, logistic, smoothed_hinge
from noshuffle.convex.margins import MarginLoss, PerMargin, chances, logistic_loss
from noshuffle.convex.schedule import LOGISTIC_RATE
from noshuffle.convex.targets import ClassTargets, check_labels
from noshuffle.errors import InvalidInput, one_of


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLinearClassifier(ClassTargets, ClassifierMixin, PrivateLinearModel):  # type: ignore[misc]
    """Classes and predictions. See `PrivateLinearModel` for the other parameters.

    Parameters
    ----------
    classes : all classes that may come, known beforehand.
    class_weight : {class: weight}, 1 where it names none (see `weighting`).
    """

    classes: Any = None
    class_weight: Any = None

    def partial_fit(
        self,
        X: Any,
        y: Any,
        classes: Any = None,
        *,
        sample_weight: Any = None,
        ids: Iterable[Hashable] | None = None,
        run: str | Path | None = None,
    ) -> Self:
        """Predict these rows, then learn from them; the first call names the classes."""
        return self._partial_fit(X, y, classes, sample_weight, ids, run)

    def _checked(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Any]:
        if not reset and self._is_plain(X, y):
            return X, y
        X, y = super()._checked(X, y, reset=reset)
        check_labels(y)
        return X, y

    def _name_classes(self, classes: Any, *, goes_on: bool) -> None:
        known = classes if classes is not None else self.classes
        if not goes_on and known is None:
            raise InvalidInput("the first partial_fit needs classes=: all that may ever come")
        if not goes_on:
            self._set_classes(known)
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise InvalidInput("classes= differs from that of the first call; leave it out")


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateLogisticRegression(PrivateLinearClassifier):
    """Logistic (two classes) or softmax regression, with probabilities."""

    _RATE: ClassVar[float | None] = LOGISTIC_RATE
    _VERTICES: ClassVar[bool] = True

    def _record(self, **bounds: Any) -> Loss:
        return logistic(**bounds)

    def _loss(self, classes: int) -> MarginLoss:
        return logistic_loss(classes)

    def predict_proba(self, X: Any) -> Array:
        """Probability of every class, in the order of classes_."""
        return chances(self._margins(X))

    def predict_log_proba(self, X: Any) -> Array:
        """Logarithm of `predict_proba`."""
        with np.errstate(divide="ignore"):
            return np.log(self.predict_proba(X))


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateSVC(PrivateLinearClassifier):
    """A linear support vector classifier: "huber" rounds the hinge's kink, "hinge" keeps it."""

    loss: str = "huber"

    def _record(self, **bounds: Any) -> Loss:
        return smoothed_hinge(**bounds) if self.loss == "huber" else hinge(**bounds)

    def _loss(self, classes: int) -> MarginLoss:
        one_of(("huber", "hinge"), loss=self.loss)
        return PerMargin(smoothed_hinge() if self.loss == "huber" else hinge())

"""StreamFit: the stream behind an estimator: its rule, how rows are fed to it, what it has to say.

What `fit` (by steps) and `partial_fit` share: a `LearningStream` is made from the settings, rows
come inside their bounds block by block, and when they are through the released weights, counts and
the statement are written to the estimator. State: the stream, and the progressive score.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from noshuffle.convex.arrays import Array, Targets
from noshuffle.convex.linear_rule import LinearRule
from noshuffle.convex.margins import MarginLoss
from noshuffle.convex.phases import UNKNOWN_HORIZON, PhaseBudget, statement_of
from noshuffle.convex.progress import NOT_COVERED, Accuracy, RSquared
from noshuffle.convex.ranges import RangeRule
from noshuffle.convex.rule import Rule
from noshuffle.convex.shape import composite_of, groups_of, makes_zeros
from noshuffle.convex.step_line import StepLine
from noshuffle.convex.stream import LearningStream
from noshuffle.convex.table_fit import IDS, MANY_ROWS, NO_IDS, ONE_SHOT, SETTINGS, TableFit
from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    Unsupported,
    fits_float32,
    instance_of,
    positive,
)
from noshuffle.noise import test_source
from noshuffle.release.spending import OTHER_RUNS, TEST_SEED
from noshuffle.strategies import identity

#: Rows that are brought inside their bounds together; all memory beyond the model's is this.
BLOCK = 4096
#: Tables of up to this many numbers are brought inside their bounds once for all readings.
_KEPT = 20_000_000


class StreamFit(TableFit):
    """What estimators need to learn from rows in steps."""

    #: The progressive score.
    _SCORE: ClassVar[type[Accuracy] | type[RSquared]] = Accuracy

    if TYPE_CHECKING:  # of the estimator
        n_features_in_: int
        l1_ratio: float
        groups: Any
        clip_norm: float | None
        verbose: bool
        _stream: LearningStream
        _progress: Any
        _notes: tuple[str, ...]
        _fixed: dict[str, Any]

        def _loss(self, classes: int) -> MarginLoss: ...
        def _fixed_settings(self) -> dict[str, Any]: ...
        def _check_fixed(self) -> None: ...

    def _rule(self, features: int, classes: int) -> Rule:
        """The rule of `solver_`, one of those that read rows in steps."""
        loss, outputs = self._loss(classes), 1 if classes <= 2 else classes
        clip_norm = self._clip(loss, outputs)
        if self.solver_ == "gd":
            rule = self._gradient_rule(loss, features, outputs, clip_norm)
            if not (repeats := self._repeats()):
                return rule
            share = None if self.rows_per_unit is None else self._most_weight
            sizes: dict[str, Any] = {"columns": features, "clip_norm": clip_norm, "share": share}
            return RangeRule(rule, **sizes, repeats=repeats)
        composite = composite_of(self.penalty, alpha=self.alpha, l1_ratio=self.l1_ratio)
        averaging = "last" if makes_zeros(composite) else "linear"
        return LinearRule(
            loss=loss,
            features=features,
            outputs=outputs,
            clip_norm=clip_norm,
            radius=self.radius,
            fixed_rate=self.learning_rate,
            fit_intercept=self.fit_intercept,
            averaging=averaging if self.averaging is None else self.averaging,
            composite=composite,
            constraint=self._constraint(),
            groups=groups_of(
                self.groups, features=features, names=getattr(self, "feature_names_in_", None)
            ),
            most_weight=self._most_weight,
            watch=self._watch,
        )

    def _clip(self, loss: MarginLoss, outputs: int) -> float:
        """The bound on what a row adds: its weight, times the given clip norm or the bound that
        follows from a Lipschitz loss and bounded rows."""
        slope = loss.lipschitz(outputs)
        if self.clip_norm is not None:
            positive(clip_norm=self.clip_norm)
            return self._weighted_clip(float(self.clip_norm))
        if self.feature_bound is None or not np.isfinite(slope):
            raise InvalidInput(
                "clip_norm=None needs a feature_bound and a loss of bounded slope; give clip_norm"
            )
        reach = float(np.sqrt(self.feature_bound**2 + float(self.fit_intercept)))
        return self._weighted_clip(slope * reach)

    def _weighted_clip(self, clip_norm: float) -> float:
        """The same of the heaviest row."""
        found = clip_norm * self._most_weight
        if self._most_weight != 1.0:
            fits_float32(**{"clip_norm times the largest weight": found})
        return found

    @property
    def _unit(self) -> str:
        return "example" if self.rows_per_unit is None else "user"

    def _watch(self, margins: Array, y: Targets) -> None:
        self._progress(margins, y)

    def _begin(self, features: int, *, rows: int | None, run: str | Path | None) -> None:
        """A new stream; `rows` is the length of a table, None when rows come piece by piece."""
        # A number would be read as the square of the constant column, and half of one bounds less.
        instance_of((bool, np.bool_), fit_intercept=self.fit_intercept)
        is_batch = rows is not None and self._is_batch()
        horizon = self.horizon if self.horizon is not None else rows
        if self.passes != 1 and horizon != rows:
            raise Unsupported(
                f"{self.passes} passes are made by fit over all {horizon} rows of the horizon, got "
                f"{'a stream' if rows is None else rows}; use passes=1, or leave horizon out"
            )
        self._rows, self._fixed = self._row_map(features), self._fixed_settings()
        self._progress = self._SCORE()
        self._stream = self._new_stream(
            features,
            horizon=horizon,
            passes=self._passes if is_batch else self.passes,
            run=run,
            account=self.budget,
            is_table=rows is not None,
        )

    def _new_stream(
        self,
        features: int,
        *,
        horizon: int | None,
        passes: int,
        **more: Any,
    ) -> LearningStream:
        if self.neighbours == "add-remove":
            raise Unsupported(
                "rows behind one that is added or removed would move to other batches, which no "
                "bound covers; use neighbours='zero-out' or 'replace-one'"
            )
        source = None  # keys of the operating system
        if self.test_seed is not None:
            source = test_source(seed=f"{type(self).__name__} {self.test_seed}")
        rule = self._rule(features, len(getattr(self, "classes_", ())))
        is_batch = horizon is not None and self._is_batch()
        mechanism = "blt" if self.mechanism is None else self.mechanism
        if is_batch:
            mechanism = identity()  # nobody named another: `_choose` refuses that
        return LearningStream(
            rule,
            PhaseBudget(self.epsilon, self.delta, mechanism, self.neighbours, self._unit),
            source=source,
            horizon=horizon,
            passes=passes,
            batch_size=horizon if is_batch else self.batch_size,
            **more,
        )

    def _learn(
        self,
        x: Any,
        y: Targets,
        ids: Iterable[Hashable] | None,
        weight: Array | None = None,
        *,
        passes: int = 1,
    ) -> None:
        """Admit, then feed block by block; later passes bring the same rows in the same order."""
        stream = self._stream
        stream.show_fn = StepLine(stream.phase.plan.steps) if self.verbose else None
        if stream.is_closed:
            stream.extend()
        stream.admit(x.shape[0], ids)
        given, ranges = x, stream.rule if isinstance(stream.rule, RangeRule) else None
        for index in range(passes):
            if index == 0 or (ranges is not None and index == ranges.lead):
                if ranges is not None and index:
                    self._rows = ranges.row_map(self.feature_bound)
                stream.row_map_fn = self._rows.apply
                if passes > 1 and x.shape[0] * x.shape[1] <= _KEPT:
                    x, stream.row_map_fn = self._rows.apply(given), None
            # A second look at a row is no validation.
            if self.solver_ != "gd":
                stream.rule.watch = None if index else self._watch
            for first in range(0, x.shape[0], BLOCK):
                block = slice(first, first + BLOCK)
                stream.feed(x[block], y[block], None if weight is None else weight[block])

    @property
    def progressive_score_(self) -> float:
        """Score of every row before it was learned from. From raw targets: NOT private."""
        if "_progress" not in self.__dict__:
            raise AttributeError("there is no progressive score before fit, nor in a copied model")
        progress = self._progress
        if "_stream" in self.__dict__:
            progress = copy(progress)
            self._stream.show_waiting(progress)
        return float(progress.value)

    def _finish(self, *notes: str) -> None:
        stream = self._stream
        self.n_rows_ = stream.rows
        now = (stream.phase, stream.steps, stream.is_closed, notes)
        if now == getattr(self, "_finished", None):  # nothing was released since the last call
            return
        self._weights = stream.rule.weights.copy()
        self.n_steps_ = stream.steps
        self.learning_rate_ = stream.rule.learning_rate
        self.batch_size_ = stream.phase.batch_size
        self._publish()
        self._notes = notes
        self.plan_ = stream.phase.plan
        stream.release.flush()  # from here on the model may be stored or sent
        if stream.folder is None:
            if stream.is_closed or (stream.is_observed and stream.is_full):
                stream.end_run()
            elif stream.is_observed:
                stream.release.write_statement()
        others = OTHER_RUNS if stream.charge is None else stream.charge.words()
        is_checked = stream.participation_checked
        said = (stream.phase, stream.horizon, stream.has_ids, is_checked, others, notes)
        if said != getattr(self, "_said", None):  # nothing else changes while a stream goes on
            self.privacy_ = statement_of(
                stream.phases, notes=self._assumed(others, notes), participation_checked=is_checked
            )
            self._said = said
        self._finished = now

    def _assumed(self, others: str, notes: tuple[str, ...]) -> tuple[str, ...]:
        """What the statement rests on; `others`: what is known of other runs on the same rows."""
        stream = self._stream
        said = [self._words_of_bounds(), SETTINGS, others, *notes]
        if self.rows_per_unit is not None:
            said.insert(0, MANY_ROWS.format(self.rows_per_unit))
        elif stream.participation_checked:
            said.insert(0, IDS if stream.has_ids else NO_IDS)
        if self.solver_ != "gd":
            said.insert(1, NOT_COVERED)
        if stream.horizon is None:
            said.append(UNKNOWN_HORIZON)
        if stream.is_test:
            said.insert(0, TEST_SEED)
        return tuple(said)

    def _continued(self) -> bool:
        """Whether partial_fit goes on with an earlier stream."""
        if not hasattr(self, "privacy_"):
            return False
        if self.solver_ in ("gd", *ONE_SHOT):
            raise InvalidInput(
                f"fit learned this model from a whole table (solver {self.solver_}); for a stream "
                "call partial_fit from the first row on, or fit with solver='ftrl'"
            )
        if not hasattr(self, "_stream"):
            raise InvalidInput(
                "this model was pickled or copied, which leaves its noise key behind; to go on "
                "elsewhere use save(folder) and load(folder), or a fresh model on new rows"
            )
        if self._stream.is_closed and self.horizon is not None:
            raise HorizonExceeded(
                "fit has used its plan up; for a stream call partial_fit from the first row on"
            )
        self._check_fixed()
        return True

    def _revive(self, path: Path, state: dict[str, Any]) -> None:
        horizon, passes = state["phases"][0]
        stream = self._new_stream(self.n_features_in_, horizon=horizon, passes=passes)
        stream.load(state, path, account=self.budget)
        self._stream, self._progress = stream, self._SCORE()
        self._fixed = getattr(self, "_fixed", self._fixed_settings())
        vars(self._progress).update(state["progress"])
        self._finish(*self._notes)

"""LearningStream: rows in, private sums out. Clip, sum, add noise, divide, update, in that order.

Rows arrive in pieces of any size. Every piece is handed to a rule at the current iterate; the rule
predicts it, and returns the sum of its clipped contributions. When the planned number of rows has
come, the sum receives row t of C⁻¹Z (scaled by z·clip) on the public grid of the noise stream, is
divided by the planned batch size and goes to the rule, which makes the next iterate. Between
batches the iterate does not move, so it does not matter how a batch was cut into pieces.

State kept: the unfinished sum, the noise stream of the current phase, counts, and keyed hashes of
the ids that were seen (if ids are given). The unfinished sum and the key are secrets: they leave
here only by `state`, which goes into a file for the owner alone (see `saved`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

import torch

from noshuffle.convex.arrays import Array, Targets
from noshuffle.convex.phases import Budget, Phase, make_phase, next_phase
from noshuffle.convex.saved import ReleaseLog
from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    ParticipationViolation,
    Unsupported,
    instance_of,
)
from noshuffle.noise import NoiseStream, Source
from noshuffle.one_owner import OneOwner
from noshuffle.plan import Plan

#: Bytes by which an id is known again.
_MARK = 16
#: Is shown the margins and targets of rows before they are learned from.
Watch = Callable[[Array, Targets], None]


class Rule(Protocol):
    """What is summed about a row, and what a noisy mean does to the iterate."""

    size: int
    clip_norm: float
    watch: Watch | None

    @property
    def learning_rate(self) -> float:
        """The step size in use."""
        ...

    @property
    def weights(self) -> Array:
        """The released answer, outputs × (features + 1)."""
        ...

    def start(self, phase: Phase) -> None:
        """A phase begins: set the learning rate."""

    def clipped_sum(self, x: Any, y: Targets) -> Array:
        """Predict these rows, then the sum of contributions, each of norm ≤ clip_norm."""
        ...

    def update(self, mean: Array, *, step: int) -> None:
        """Take in the released mean of a step of the current phase."""

    def state(self) -> dict[str, Any]:
        """Everything that changes as rows come, as tensors and plain values."""
        ...

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""


class Observer(Protocol):
    """Somebody who keeps evidence; `before` returns once the record is durable."""

    def start(self, plan: Plan, source: Source) -> None:
        """Rows are about to be learned under this plan and this key."""

    def before(self, step: int, first: int, last: int) -> None:
        """Step `step` is about to be released from rows first … last − 1, counted per pass."""

    def after(self, step: int) -> None:
        """The step was released and the iterate has moved."""


class LearningStream(OneOwner):
    """One pass (or several in the same order) of rows through a rule.

    Guarantees: what the rule's `update` receives in a phase is the sequence of clipped sums plus
    z·clip·C⁻¹Z, divided by a constant of the plan, as stated by the phase's plan. A row beyond the
    horizon, an id seen before, and a step after a failure half-way are refused before anything is
    learned from them. Short last batches are divided by the planned size and get the full noise.
    """

    def __init__(
        self,
        rule: Rule,
        budget: Budget,
        *,
        source: Source,
        horizon: int | None,
        passes: int = 1,
        batch_size: int | None = None,
    ) -> None:
        if horizon is None and passes > 1:
            raise Unsupported(
                f"{passes} passes need a known horizon, got None; give horizon= or call fit"
            )
        self.rule, self.budget, self.source = rule, budget, source
        self.horizon, self.passes, self.batch_size = horizon, passes, batch_size
        self._observer: Observer | None = None
        self.log: ReleaseLog | None = None
        self._pid = os.getpid()
        self.is_closed = False
        self.phases: list[Phase] = []
        self.rows = 0
        self.steps = 0
        self._in_phase = 0
        self._phase_steps = 0
        self._held = 0
        self._sum = torch.zeros(rule.size, dtype=torch.float64)
        self._ids: set[bytes] = set()
        self.has_ids: bool | None = None
        self._is_broken = False
        self._begin()

    @property
    def phase(self) -> Phase:
        """The phase that the next row belongs to."""
        return self.phases[-1]

    def _begin(self) -> None:
        if self.horizon is None:
            phase = next_phase(self.budget, self.phases, batch_size=self.batch_size)
        else:
            phase = make_phase(
                self.budget, rows=self.horizon, passes=self.passes, batch_size=self.batch_size
            )
        self.phases.append(phase)
        self._in_phase = self._phase_steps = 0
        # Every phase has a name, hence a stream, of its own under the one key.
        self._noise_name = f"phase {len(self.phases)}"
        self._noise = NoiseStream(
            phase.plan.strategy.recipe(phase.plan.steps),
            self.source,
            {self._noise_name: (self.rule.size,)},
            scale=phase.plan.noise_multiplier * self.rule.clip_norm,
            steps=phase.plan.steps,
        )
        self.rule.start(phase)

    @property
    def is_observed(self) -> bool:
        """Whether somebody else keeps evidence of the releases."""
        return self._observer is not None

    def admit(self, rows: int, ids: Iterable[Hashable] | None) -> None:
        """Refuse rows that the plan has no room for, and ids that were here before."""
        if self._is_broken:
            raise InvalidInput("an earlier call failed half-way; fit again from the start")
        if os.getpid() != self._pid:
            raise InvalidInput(
                "this process is a fork of the one that owns the stream, and both would use the "
                "same noise; save() in the owner and load() here"
            )
        if self.horizon is not None and self.rows + rows > self.horizon:
            raise HorizonExceeded(
                f"{self.rows} rows of a horizon of {self.horizon} were learned, {rows} more came; "
                "plan a longer horizon for a new model, or horizon=None"
            )
        if self.has_ids not in (None, ids is not None):
            raise InvalidInput("rows came with ids in one call and without in another; do the same")
        if ids is None:
            self.has_ids = False
            return
        instance_of(Iterable, ids=ids)
        given = list(ids)
        if len(given) != rows:
            raise InvalidInput(f"ids must hold one id for each of {rows} rows, got {len(given)}")
        fresh: set[bytes] = set()
        for one in given:
            mark = _mark(one, key=self.source.key)
            if mark in self._ids or mark in fresh:
                raise ParticipationViolation(
                    f"id {one!r} came twice and the plan allows one row each; drop the second one"
                )
            fresh.add(mark)
        self._ids |= fresh
        self.has_ids = True

    def watch(self, observer: Observer | None) -> None:
        """Let somebody see every release from here on; evidence is kept of one plan only."""
        self._observer = observer
        if observer is not None:
            if self.horizon is None or self.rows:
                raise Unsupported(
                    "evidence is kept of a run with one plan from its first row on; use fit, or "
                    "give a horizon and the observer to the first partial_fit"
                )
            observer.start(self.phase.plan, self.source)

    def feed(self, x: Any, y: Targets) -> None:
        """Learn from rows that were admitted, in order."""
        self._is_broken = True
        at, total = 0, x.shape[0]
        while at < total:
            if self.horizon is None and self._in_phase == self.phase.rows * self.phase.passes:
                self._begin()
            room = min(self._until_release(), total - at)
            piece = slice(at, at + room)
            if self.log is not None:
                self.log.saw(x[piece], y[piece])
            self._sum += torch.from_numpy(self.rule.clipped_sum(x[piece], y[piece]))
            at += room
            self.rows += room
            self._held += room
            self._in_phase += room
            if self._until_release() == 0:
                self._release()
        self._is_broken = False

    def _until_release(self) -> int:
        """Rows that still fit into the batch; a pass and a phase end a batch early."""
        left_in_pass = self.phase.rows - (self._in_phase - self._held) % self.phase.rows
        return min(self.phase.batch_size, left_in_pass) - self._held

    def close(self) -> None:
        """The table ends: release the unfinished batch, whatever its size."""
        if self._held:
            self._release()
        self.is_closed = True

    def extend(self) -> None:
        """After `close`, more rows came: new ones, which form phases of their own."""
        self.horizon, self.passes, self.is_closed = None, 1, False

    def _release(self) -> None:
        last = (self._in_phase - 1) % self.phase.rows + 1 + self._before_phase()
        if self._observer is not None:
            self._observer.before(self.steps, last - self._held, last)
        if self.log is not None:
            self.log.before(self.steps)
        self._noise.add_({self._noise_name: self._sum})
        mean = (self._sum / self.phase.batch_size).numpy()
        self.rule.update(mean, step=self._phase_steps)
        self._sum = torch.zeros_like(self._sum)
        self._held = 0
        self.steps += 1
        self._phase_steps += 1
        if self._observer is not None:
            self._observer.after(self.steps)

    def _before_phase(self) -> int:
        return sum(phase.rows for phase in self.phases[:-1])

    _COUNTS = ("horizon", "passes", "is_closed", "rows", "steps", "has_ids")
    _INNER_COUNTS = ("_in_phase", "_phase_steps", "_held")

    def state(self) -> dict[str, Any]:
        """All of it, secrets included, as tensors and plain values; for the owner's eyes only."""
        if self._is_broken:
            raise InvalidInput("an earlier call failed half-way; there is nothing whole to save")
        return {
            **{name: getattr(self, name) for name in (*self._COUNTS, *self._INNER_COUNTS)},
            "key": self.source.key.hex(),
            "kind": self.source.kind,
            "is_test": self.source.is_test,
            "phases": [(phase.rows, phase.passes) for phase in self.phases],
            "sum": self._sum.clone(),
            "ids": b"".join(sorted(self._ids)).hex(),
            "noise": self._noise.state_dict(),
            "rule": self.rule.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become the stream that wrote `state`; plans and key must come out the same.

        Guarantees: the noise goes on at the row after the last one saved, under the same recipe,
        scale and key, or the state is refused.
        """
        self.phases = []
        for rows, passes in state["phases"]:
            self.horizon, self.passes = rows, passes
            self._begin()
        for name in (*self._COUNTS, *self._INNER_COUNTS):
            setattr(self, name, state[name])
        self._sum = state["sum"].clone()
        marks = bytes.fromhex(state["ids"])
        self._ids = {marks[i : i + _MARK] for i in range(0, len(marks), _MARK)}
        self._noise.load_state_dict(state["noise"])
        self.rule.load(state["rule"])


def _mark(one: Hashable, *, key: bytes) -> bytes:
    """A keyed hash by which an id is known again, whatever process it comes to; 1 and 1.0 agree."""
    value = one.item() if hasattr(one, "item") else one
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        value = int(value)
    text = f"{type(value).__name__}:{value!r}".encode()
    return hashlib.blake2b(text, key=key, digest_size=_MARK, person=b"ns-stream-id").digest()

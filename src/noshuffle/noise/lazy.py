"""Lazy noise for sparse tables: a row gets the noise of the steps it sat out when it is touched.

Eager noise adds y_t, row t of scale·C⁻¹Z, to every row of an embedding at every step. Here a row
keeps its d buffers S and the number of steps it is up to date with; touching it at step t returns
Σ y_τ over the steps since then, up to and including t, from one draw of dimension d + 1 an element:

    (S', acc) = F (S, 0) + L ζ,   L Lᵀ = Q,   F and L of the stretch as in `skip`.

Work is proportional to the rows touched. State kept: d float32 numbers an element and one integer a
row, as much as eager buffered noise. This is the lazy update of sparse tables (compare Cocoon,
arXiv 2510.07304) without anything computed ahead, because a buffered filter is a state space.

Why the law is that of eager noise. Let a run read and write a row at touches only, through sums of
its gradients and noise (plain SGD). Fix the history up to step t: all batches, all values read and,
of every row, the state S at its last touch s. In the eager run the history depends on the row's
draws z_τ with τ <= s only, since nothing that involved later ones was read. So given the history
z_{s+1} … z_t are still independent standard normals, also when private data or earlier values
decide which rows are touched; (S_t, Σ y_τ) given the history is N(F (S_s, 0), Q), independently for
each element, which is what `touch_` samples. By induction over touches the joint law of all values
read, and of the whole table after `flush_`, is the eager one; the guarantee is then the same too.

It is valid exactly when
  1. nobody sees a row between its touches: `flush_` before every release of the table, be it a
     checkpoint given away or an evaluation that reads all rows. A table with stale rows tells which
     rows were touched, and so do the state kept here and the time of a step: treat them as data;
  2. a row is brought up to date to step t − 1 before step t reads it (`SparseSGD.read_`). Without
     that the run is still private, what it reads is an earlier private value, but it is not the
     eager run;
  3. on the row only weighted sums matter: w − Σ_τ rate_τ·(g_τ + y_τ), with weights fixed before the
     run. Momentum, weight decay and Adam move a row between touches by more than such a sum: the
     law is another one, `SparseSGD` has none of them, and they need eager noise;
  4. steps that are repeated after a crash repeat their touches and flushes too. Then every number
     is the same again; a flush left out, or one more, would give a released sum a second noise. So
     flush at steps fixed beforehand, or save the state between a flush and what it releases.

>>> from noshuffle.noise.source import test_source
>>> recipe = Buffered(decays=(0.9, 0.5), scales=(-0.1, -0.3))
>>> noise = LazyNoise(recipe, test_source(seed=1), (1000, 16), scale=2.0, steps=50, name="emb")
>>> noise.touch_(torch.tensor([3, 8]), 4).shape, noise.touch_(torch.tensor([8]), 9).shape
(torch.Size([2, 16]), torch.Size([1, 16]))
>>> noise.flush_(49).shape                           # what is still missing, for every row
torch.Size([1000, 16])
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    NoshuffleError,
    non_negative,
    positive,
    whole,
)
from noshuffle.noise.moves import fingerprint
from noshuffle.noise.row_draws import RowDraws
from noshuffle.noise.skip import Skips
from noshuffle.noise.source import Source
from noshuffle.strategies.recipe import Buffered, Recipe  # noqa: F401  (the doctest uses Buffered)

VERSION = 1
#: Numbers of a flush that are worked on together.
_CHUNK = 2**20


class LazyNoise:
    """The noise of one table, drawn for a row when it is touched.

    `shape` is (rows, …) of the table, or of a shard whose first row is row `start` of the whole.
    `rates` weigh the noise of each step in the sum that is returned (a learning-rate schedule).

    Guarantees: what a touch of a row at step t returns is a function of (key, name, recipe, scale,
    rates, row, the steps of its touches) only: not of other rows, their order, the sharding or
    restarts. The normals of (row, step) are used once: a row that already has the noise of a step
    is refused, as are rows named twice. A touch that fails half-way leaves noise that refuses to go
    on. Buffers are float32; the arithmetic of a touch is float64, rounded once.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: Source,
        shape: Sequence[int],
        *,
        scale: float,
        steps: int,
        name: str,
        rates: Sequence[float] = (),
        start: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        non_negative(scale=scale)
        whole(at_least=0, at_most=2**62, start=start)
        self.shape = tuple(int(size) for size in shape)
        if not self.shape or min(self.shape) < 1:
            raise InvalidInput(f"shape must be (rows, …) with sizes >= 1, got {self.shape}")
        self._skips = Skips.of(recipe, steps=steps, rates=rates)
        self.scale, self.horizon, self.start = float(scale), int(steps), int(start)
        self.rates = tuple(float(rate) for rate in rates)
        self._device = torch.device(device)
        self._width = math.prod(self.shape[1:])
        d = self._skips.buffers
        self._draws = RowDraws(
            source,
            name=name,
            count=(d + 1) * self._width,
            rows=self.start + self.shape[0],
            device=self._device,
        )
        self._identity = {
            "version": VERSION,
            "recipe": fingerprint(recipe),
            "source": self._draws.source.kind,
            "key": self._draws.source.fingerprint,
            "name": name,
            "scale": self.scale,
            "horizon": self.horizon,
            "shape": list(self.shape),
            "start": self.start,
            "rates": list(self.rates),
        }
        # A row's buffers lie together: touching it reads one stretch of memory.
        self._state = torch.zeros((self.shape[0], d, self._width), device=self._device)
        self._done = torch.zeros(self.shape[0], dtype=torch.int32, device=self._device)
        self._is_broken = False

    @property
    def is_test(self) -> bool:
        """Whether the noise comes from a named test seed, which protects nobody."""
        return self._draws.source.is_test

    @property
    def buffers(self) -> int:
        """Table-sized float32 tensors kept between steps."""
        return self._skips.buffers

    def done(self, rows: Tensor) -> Tensor:
        """How many steps' noise each of the rows has received; a secret like the data."""
        return self._done[self._checked(rows)].to(torch.int64)

    @torch.no_grad()
    def touch_(self, rows: Tensor, step: int) -> Tensor:
        """The noise of the rows since their last touch, up to and including `step` (from 0)."""
        self._check(step)
        rows = self._checked(rows)
        done = self._done[rows]
        if bool((done > step).any()):
            row = int(rows[done > step][0])
            raise InvalidInput(
                f"row {row} already has the noise of step {step}; touch a row once a step, with "
                "all its gradients summed"
            )
        return self._advance_(rows, done, step).view(len(rows), *self.shape[1:])

    @torch.no_grad()
    def flush_(self, step: int, *, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        """Bring every row up to date with `step`; adds factor·noise to `out` (zeros if None)."""
        self._check(step)
        if bool((self._done > step + 1).any()):
            raise InvalidInput(f"some rows are already past step {step}; flush at the newest step")
        if out is None:
            out = torch.zeros(self.shape, device=self._device)
        self.check_table(out)
        behind = (self._done <= step).nonzero().view(-1)
        per_chunk = max(1, _CHUNK // ((2 * self.buffers + 1) * self._width))
        with self.to_the_end():
            for at in range(0, len(behind), per_chunk):
                rows = behind[at : at + per_chunk]
                noise = self._advance_(rows, self._done[rows], step).view(-1, *self.shape[1:])
                add_rows_(out, rows, noise.mul_(factor))
        return out

    @contextmanager
    def to_the_end(self) -> Iterator[None]:
        """Work that loses noise if it stops half-way; the noise then refuses to go on."""
        try:
            yield
        except BaseException:
            self._is_broken = True
            raise

    def _advance_(self, rows: Tensor, done: Tensor, step: int) -> Tensor:
        d = self.buffers
        starts, which = torch.unique(done, return_inverse=True)
        maps = torch.from_numpy(self._skips.between(starts.cpu().numpy(), stop=step + 1))
        maps = maps.to(self._device)
        maps = maps.index_select(0, which) if len(starts) > 1 else maps  # of each row, or of all
        # A stretch of m steps has m fresh normals: factors of short ones have m columns only.
        columns = min(step + 1 - int(starts[0]), d + 1) if len(starts) else 0
        fresh = self._draws.normals(rows + self.start, step=step, first=columns * self._width)
        fresh = fresh.view(len(rows), columns, self._width).double()
        state = self._state.index_select(0, rows).double()
        # F is diagonal but for its last row, L is lower triangular. Sums go term by term, not as a
        # matrix product: no bit may depend on the company of a row.
        decays = torch.diagonal(maps, dim1=1, dim2=2)[:, :d].unsqueeze(2)
        moved = state.new_zeros((len(rows), d + 1, self._width))
        torch.mul(state, decays, out=moved[:, :d])
        for j in range(d):
            moved[:, d].add_(state[:, j] * maps[:, d, j : j + 1])
        for j in range(columns):
            moved[:, j:].add_(fresh[:, j : j + 1] * maps[:, j:, d + j : d + j + 1])
        self._is_broken = True
        self._state.index_copy_(0, rows, moved[:, :d].float())
        self._done.index_fill_(0, rows, step + 1)
        self._is_broken = False
        return moved[:, d].mul_(self.scale).float()

    def check_table(self, table: Tensor) -> None:
        """Refuse a tensor that cannot be the table of this noise."""
        if tuple(table.shape) != self.shape or not table.is_floating_point():
            raise InvalidInput(
                f"the table must be floating point of shape {self.shape}, got {table.dtype} of "
                f"{tuple(table.shape)}"
            )
        if table.device.type != self._device.type:
            raise InvalidInput(f"the table must be on {self._device}, got {table.device}")

    def _check(self, step: int) -> None:
        if self._is_broken:
            raise NoshuffleError("an earlier touch failed half-way; go on from the last checkpoint")
        whole(at_least=0, step=step)
        if step >= self.horizon:
            raise HorizonExceeded(
                f"the noise was planned for {self.horizon} steps, the last is step "
                f"{self.horizon - 1}, got step {step}; plan again"
            )

    def _checked(self, rows: Tensor) -> Tensor:
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
            raise InvalidInput("rows must be a one-dimensional tensor of int64 row numbers")
        rows = rows.to(self._device)
        if len(rows):
            ordered = rows.sort().values
            low, high = int(ordered[0]), int(ordered[-1])
            if low < 0 or high >= self.shape[0]:
                raise InvalidInput(
                    f"rows must be from 0 to {self.shape[0] - 1}, got {low} to {high}"
                )
            if bool((ordered[1:] == ordered[:-1]).any()):
                raise InvalidInput("rows must be named once; sum the gradients of equal rows first")
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Everything but the key. As secret as the data: it tells which rows were touched when."""
        if self._is_broken:
            raise NoshuffleError("an earlier touch failed half-way; go on from the last checkpoint")
        kept = {"buffers": self._state.cpu().clone(), "done": self._done.cpu().clone()}
        return {**self._identity, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the noise that wrote `state` stopped; refuses another noise's."""
        for key, own in self._identity.items():
            if key not in state or state[key] != own:
                raise InvalidInput(
                    f"the saved lazy noise has another {key} than this one; resume with the plan, "
                    "key and table of the run that was saved"
                )
        for key, own in (("buffers", self._state), ("done", self._done)):
            saved = state.get(key)
            if not isinstance(saved, Tensor) or saved.dtype != own.dtype:
                raise InvalidInput(f"the saved {key} must be a tensor of {own.dtype}")
            if saved.shape != own.shape:
                raise InvalidInput(
                    f"the saved {key} must have shape {tuple(own.shape)}, got {tuple(saved.shape)}"
                )
        saved = state["done"]
        if int(saved.min()) < 0 or int(saved.max()) > self.horizon:
            raise InvalidInput(f"the saved steps must be from 0 to {self.horizon}")
        self._state.copy_(state["buffers"])
        self._done.copy_(saved)
        self._is_broken = False


@dataclass(frozen=True, kw_only=True)
class SparseSGD:
    """Plain SGD on one table with lazy noise: w ← w − lr·rate_t·(Σ clipped g + y_t) / divisor.

    The learning rate is part of the record, and a schedule is `rates` of the noise, because the
    noise of skipped steps must be weighed by their own rates. `divisor` is the planned batch size.
    One step is `read_` (before the forward pass), then `apply_`; `release_` before anyone sees the
    table. With `is_stale`, `apply_` also takes rows that were not read: private, but not the law of
    eager training, since the gradients were taken at a value without the skipped noise.

    Guarantees: the gradient rows must already be clipped and summed, scale = z·clip norm in the
    noise. Each row of `rows` gets its noise whatever the gradient is; NaN stays NaN.
    """

    noise: LazyNoise
    lr: float
    divisor: float
    is_stale: bool = False

    def __post_init__(self) -> None:
        positive(lr=self.lr, divisor=self.divisor)

    @torch.no_grad()
    def read_(self, table: Tensor, rows: Tensor, step: int) -> None:
        """Bring rows up to date with step − 1, so that step `step` reads what eager SGD would."""
        self.noise.check_table(table)
        whole(at_least=0, step=step)
        rows = rows.to(table.device)
        behind = rows[self.noise.done(rows) < step]
        if len(behind):
            noise = self.noise.touch_(behind, step - 1)
            with self.noise.to_the_end():
                add_rows_(table, behind, noise.mul_(-self.lr / self.divisor))

    @torch.no_grad()
    def apply_(self, table: Tensor, rows: Tensor, gradients: Tensor, step: int) -> None:
        """Update rows with their clipped gradient sums of this step, and with their noise."""
        self.noise.check_table(table)
        rows = rows.to(table.device)
        if gradients.shape != (len(rows), *table.shape[1:]) or not gradients.is_floating_point():
            raise InvalidInput(
                f"gradients must be floating point of shape {(len(rows), *table.shape[1:])}, got "
                f"{gradients.dtype} of {tuple(gradients.shape)}"
            )
        if not self.is_stale and bool((self.noise.done(rows) < step).any()):
            raise InvalidInput(
                f"some rows lack noise of steps before {step}; call read_ before the forward pass"
            )
        noise = self.noise.touch_(rows, step)
        rate = self.noise.rates[step] if self.noise.rates else 1.0
        with self.noise.to_the_end():
            change = noise.add_(gradients.to(noise), alpha=rate).mul_(-self.lr / self.divisor)
            add_rows_(table, rows, change)

    @torch.no_grad()
    def release_(self, table: Tensor, step: int) -> None:
        """Bring the whole table up to date with `step`; only then may it be shown."""
        self.noise.flush_(step, out=table, factor=-self.lr / self.divisor)


def add_rows_(table: Tensor, rows: Tensor, change: Tensor) -> None:
    """table[rows] += change for distinct rows; low precision is raised and rounded once."""
    new = table.index_select(0, rows).to(change.dtype).add_(change)
    table.index_copy_(0, rows, new.to(table.dtype))

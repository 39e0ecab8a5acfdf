"""Lazy noise for sparse tables: a row gets the noise of the steps it sat out when it is touched.

Eager noise adds y_t, row t of scale·C⁻¹Z, to every row of an embedding at every step. Here a row
keeps its d buffers S and the number of steps it is up to date with; touching it at step t returns
Σ y_τ over the steps since then, up to and including t, from one draw of dimension d + 1 an element:

    (S', acc) = F (S, 0) + L ζ,   L Lᵀ = Q,   F and L of the stretch as in `skip`,

and rounds it at random, with the gradient of the row if there is one, to a grid of 2⁻¹⁰ of the
noise of one step (`grid`). Work is proportional to the rows touched. State kept: d float32 numbers
an element and one integer a row, as much as eager buffered noise. This is the lazy update of sparse
tables (compare Cocoon, arXiv 2510.07304) without anything computed ahead, because a buffered filter
is a state space.

The joint law of all values read, and of the whole table after `flush_`, is that of eager noise,
also when private data or earlier values decide which rows are touched (docs/proofs.md): what is
still to be drawn for a row is independent of everything that was read.

It is valid exactly when nobody sees a row between its touches (`flush_` before every release of the
table), a row is up to date to step t − 1 before step t reads it (`SparseSGD.read_`), only sums with
weights fixed before the run reach a row, and repeated steps repeat their touches and flushes; why,
and what follows, is in docs/lazy-noise.md, "When it is valid".

A process that goes on with a saved table draws the numbers of all steps that no released step has
reached under a fresh key: `source.rekeyed(released steps, new_key())`.

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
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from noshuffle.errors import HorizonExceeded, InvalidInput, NoshuffleError, non_negative, whole
from noshuffle.noise.grid import add_on_grid_, grid_step, grids_so_far
from noshuffle.noise.row_draws import RowDraws
from noshuffle.noise.skip import Skips
from noshuffle.noise.source import Source, check_ring
from noshuffle.noise.step_plan import fingerprint
from noshuffle.noise.table_rows import add_rows_, check_shape, checked_rows
from noshuffle.one_owner import OneOwner
from noshuffle.strategies.recipe import Buffered, Recipe

VERSION = 2
#: Numbers of a flush that are worked on together.
_CHUNK = 2**20


class LazyNoise(OneOwner):
    """The noise of one table, drawn for a row when it is touched.

    `shape` is (rows, …) of the table, or of a shard whose first row is row `start` of the whole.
    `rates` weigh the noise of each step in the sum that is returned (a learning-rate schedule).

    Guarantees: what a touch of a row at step t returns is a function of (key, name, recipe, scale,
    rates, row, the steps of its touches) only: not of other rows, their order, the sharding or
    restarts. The normals of (row, step) are used once: a row that already has the noise of a step
    is refused, as are rows named twice. A touch that fails half-way leaves noise that refuses to go
    on; threads touch one after the other. Buffers are float32; the arithmetic of a touch is
    float64, rounded once. What is given out lies on one grid, with gradients or without, which gets
    finer where rates or gains get small: the last bits of a table do not tell which rows were
    touched.
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
            coins=self._width,
            rows=self.start + self.shape[0],
            device=self._device,
        )
        self._identity = {
            "version": VERSION,
            "recipe": fingerprint(recipe),
            "source": self._draws.source.kind,
            "key": self._draws.source.ring[0][1],
            "name": name,
            "scale": self.scale,
            "horizon": self.horizon,
            "shape": list(self.shape),
            "start": self.start,
            "rates": list(self.rates),
        }
        self._grids = self._grids_of(self._skips.recipe)
        # A row's buffers lie together: touching it reads one stretch of memory.
        self._state = self._zeros(self.shape[0], d, self._width)
        self._done = torch.zeros(self.shape[0], dtype=torch.int32, device=self._device)
        self._is_broken = False
        self._lock = threading.Lock()

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

    def _grids_of(self, recipe: Buffered) -> list[float]:
        """The grid of every step, or of all.

        Never coarser than before, so that rows with an early touch end on the grid of the others.
        """
        gains = [g for g in (recipe.scale, recipe.draw_scale, self.rates) if g]
        if not gains:
            return [grid_step(self.scale)]
        factors = (math.prod(abs(g) for g in step) for step in zip(*gains))
        return grids_so_far(self.scale * factor for _, factor in zip(range(self.horizon), factors))

    def _grid_at(self, step: int) -> float:
        return self._grids[step] if len(self._grids) > 1 else self._grids[0]

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self._device)

    @torch.no_grad()
    def touch_(
        self, rows: Tensor, step: int, *, onto: Tensor | None = None, is_read: bool = False
    ) -> Tensor:
        """The noise of the rows since their last touch, up to and including `step` (from 0).

        With `onto`, the clipped gradient sums of the rows: rate·onto + noise, rounded together.
        Gradients must come this way; added to the noise later, they would be bare below its grid.
        `is_read` refuses rows that lack noise of earlier steps.
        """
        with self._one_at_a_time(step):
            rows = self._checked(rows)
            done = self._done[rows]
            if len(rows):
                first, last = torch.stack(torch.aminmax(done)).tolist()
                if last > step:
                    row = int(rows[done > step][0])
                    raise InvalidInput(
                        f"row {row} already has the noise of step {step}; touch a row once a "
                        "step, with all its gradients summed"
                    )
                if is_read and first < step:
                    raise InvalidInput(
                        f"some rows lack noise of steps before {step}; call read_ before the "
                        "forward pass"
                    )
            values = self._zeros(len(rows), self._width)
            if onto is not None:
                self.check_gradients(onto, rows=len(rows))
                rate = self.rates[step] if self.rates else 1.0
                values.copy_(onto.reshape(values.shape)).mul_(rate)
            return self._shaped(self._advance_(rows, done, step, onto=values))

    @torch.no_grad()
    def catch_up_(self, rows: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Those of the rows that lack noise of steps up to `step`, and that noise (−1: none)."""
        with self._one_at_a_time(max(step, 0)):
            rows = self._checked(rows)
            done = self._done[rows]
            behind = (done <= step).nonzero().view(-1)
            rows, values = rows[behind], self._zeros(len(behind), self._width)
            return rows, self._shaped(self._advance_(rows, done[behind], step, onto=values))

    def _shaped(self, values: Tensor) -> Tensor:
        return values.view(len(values), *self.shape[1:])

    @torch.no_grad()
    def flush_(self, step: int, *, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        """Bring every row up to date with `step`; adds factor·noise to `out` (zeros if None)."""
        with self._one_at_a_time(step):
            return self._flush_(step, out=out, factor=factor)

    def _flush_(self, step: int, *, out: Tensor | None, factor: float) -> Tensor:
        if bool((self._done > step + 1).any()):
            raise InvalidInput(f"some rows are already past step {step}; flush at the newest step")
        if out is None:
            out = self._zeros(*self.shape)
        self.check_table(out)
        behind = (self._done <= step).nonzero().view(-1)
        count = self._rows_at_once()
        with self.to_the_end():
            for at in range(0, len(behind), count):
                rows = behind[at : at + count]
                onto = self._zeros(len(rows), self._width)
                noise = self._advance_(rows, self._done[rows], step, onto=onto)
                add_rows_(out, rows, self._shaped(noise).mul_(factor))
        return out

    def _rows_at_once(self) -> int:
        """Rows of a flush that are worked on together."""
        return max(1, _CHUNK // ((2 * self.buffers + 1) * self._width))

    @contextmanager
    def _one_at_a_time(self, step: int) -> Iterator[None]:
        """Between the look at what rows have and the note of what they got, no other thread."""
        self.check_owner()  # before the lock, which a fork may have inherited closed
        with self._lock:
            self._check(step)
            yield

    @contextmanager
    def to_the_end(self) -> Iterator[None]:
        """Work that loses noise if it stops half-way; the noise then refuses to go on."""
        try:
            yield
        except BaseException:
            self._is_broken = True
            raise

    def _advance_(self, rows: Tensor, done: Tensor, step: int, *, onto: Tensor) -> Tensor:
        """Bring rows forward; their noise is added to `onto` (contiguous float32), on the grid."""
        if not len(rows):
            return onto
        d = self.buffers
        starts, which = torch.unique(done, return_inverse=True)
        maps = torch.from_numpy(self._skips.between(starts.cpu().numpy(), stop=step + 1))
        maps = maps.to(self._device)
        maps = maps.index_select(0, which) if len(starts) > 1 else maps  # of each row, or of all
        # A stretch of m steps has m fresh normals: factors of short ones have m columns only.
        columns = min(step + 1 - int(starts[0]), d + 1)
        fresh, coins = self._draws.normals_and_coins(
            rows + self.start, step=step, first=columns * self._width
        )
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
        # An element is rounded once, by the coins of its first normal.
        noise, grid = moved[:, d].mul_(self.scale).float(), self._grid_at(step)
        add_on_grid_(onto, noise, jitters=coins * grid, step=grid)
        # Last: what failed before, for want of memory say, has taken no noise from the rows.
        self._is_broken = True
        self._state.index_copy_(0, rows, moved[:, :d].float())
        self._done.index_fill_(0, rows, step + 1)
        self._is_broken = False
        return onto

    def check_table(self, table: Tensor) -> None:
        check_shape(self.shape, **{"the table": table})
        if table.device.type != self._device.type:
            raise InvalidInput(f"the table must be on {self._device}, got {table.device}")

    def check_gradients(self, gradients: Tensor, *, rows: int) -> None:
        check_shape((rows, *self.shape[1:]), gradients=gradients)

    def _check_unbroken(self) -> None:
        if self._is_broken:
            raise NoshuffleError("an earlier touch failed half-way; go on from the last checkpoint")

    def _check(self, step: int) -> None:
        self._check_unbroken()
        whole(at_least=0, step=step)
        if step >= self.horizon:
            raise HorizonExceeded(
                f"the noise was planned for {self.horizon} steps, the last is step "
                f"{self.horizon - 1}, got step {step}; plan again"
            )

    def _checked(self, rows: Tensor) -> Tensor:
        moved = rows.to(self._device) if isinstance(rows, Tensor) else rows
        return checked_rows(moved, count=self.shape[0])

    def state_dict(self) -> dict[str, Any]:
        """Everything but the key. As secret as the data: it tells which rows were touched when."""
        self._check_unbroken()
        kept = {"buffers": self._state.cpu().clone(), "done": self._done.cpu().clone()}
        later = [list(key) for key in self._draws.source.ring[1:]]
        return {**self._identity, "later": later, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the noise that wrote `state` stopped; refuses another noise's."""
        for key, expected in self._identity.items():
            if key not in state or state[key] != expected:
                raise InvalidInput(
                    f"the saved lazy noise has another {key} than this one; resume with the plan, "
                    "key and table of the run that was saved"
                )
        for key, kept in (("buffers", self._state), ("done", self._done)):
            saved = state.get(key, ())
            if getattr(saved, "dtype", None) != kept.dtype or saved.shape != kept.shape:
                shape = tuple(kept.shape)
                raise InvalidInput(f"the saved {key} must be {kept.dtype} and have shape {shape}")
        saved = state["done"]
        if int(saved.min()) < 0 or int(saved.max()) > self.horizon:
            raise InvalidInput(f"the saved steps must be from 0 to {self.horizon}")
        check_ring(state, self._draws.source.ring, used=int(saved.max()))
        self._state.copy_(state["buffers"])
        self._done.copy_(saved)
        self._is_broken = False

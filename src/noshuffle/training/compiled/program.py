"""A private step of fixed shapes as three CUDA graphs over buffers that stay where they are.

    digest    fingerprints of a batch without ids                → 32 bytes a tensor to the host
    sum       per-example gradients, clip, sum                   → losses, then norms to the host
    release   digest of the sum; add the noise, divide, update   → 24 bytes to the host

The ledger is written while the device is at work on `sum`; the digest of the sum is read some time
during the next step (a replay asks for it first). Nothing here decides anything: order and guard
are those of `step`. State: the buffers, and what the last step left in them until the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from noshuffle.clipping.products import repeatable
from noshuffle.errors import Unsupported
from noshuffle.release import tags
from noshuffle.release.device_threshold import DeviceThreshold
from noshuffle.release.digest import DigestRing, Keys, Printer
from noshuffle.release.guard import Mask
from noshuffle.release.unit_ids import Ids
from noshuffle.training.compiled.flat import Sums, TotalFn
from noshuffle.training.compiled.graphs import BatchBuffers, Captured, Signal, warmed
from noshuffle.training.compiled.staged import StagedUsers
from noshuffle.training.compiled.update import Held, Update
from noshuffle.training.step_parts import Parts

Rows = NDArray[np.float32]


def in_memory(value: Tensor) -> Tensor:
    """The numbers of a parameter in the order in which they lie (channels last, say)."""
    flat = value.detach()
    if flat.is_contiguous():
        return flat
    span = 1 + sum((size - 1) * stride for size, stride in zip(flat.shape, flat.stride()))
    if span != flat.numel():
        raise Unsupported("a parameter has gaps in memory")
    return flat.as_strided((flat.numel(),), (1,))


def _as_it_lies(value: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in the type and the order of memory of its parameter, as optimizers want it."""
    if value.stride() == parameter.stride():
        return value.to(parameter.dtype)
    return torch.empty_like(parameter.detach()).copy_(value)


class Program(BatchBuffers):
    """The graphs of one kind of batch, up to `capacity` rows.

    Guarantees: rows that are not kept contribute exactly zero, whatever a buffer holds; `release`
    adds the noise of the next step of the stream, once.
    """

    def __init__(
        self,
        parts: Parts,
        batch: tuple[Any, ...],
        *,
        capacity: int,
        keys: Keys,
        captures: bool,
        moving: DeviceThreshold | None = None,
    ) -> None:
        super().__init__(batch, capacity=capacity, device=keys.device)
        self.parts, self.captures, self._keys = parts, captures, keys
        self.users: StagedUsers | None = None
        self.moving = moving
        if parts.groups_users:
            is_mean = parts.reduce == "mean"
            self.users = StagedUsers(capacity=capacity, device=keys.device, is_mean=is_mean)
        #: Which numbers of the report are norms of units.
        self.units: Ids | slice = slice(0)
        self.structure = repr(self.spec).encode()
        self._printer = Printer(keys, [[buffer] for buffer in self.tensors])
        self._pool = torch.cuda.graph_pool_handle() if captures else None
        self._prints = self._host((len(self.tensors), 4), torch.int64)
        self._report = self._host((3, capacity), torch.float32)
        self._losses = self._host((capacity,), torch.float32)
        # The same memory as NumPy sees it; to ask for such a view takes longer than to read it.
        self._told: tuple[NDArray[np.int64], Rows, Rows] = (
            self._prints.numpy(),
            self._report.numpy(),
            self._losses.numpy(),
        )
        self._digested, self._shown, self._summed = (
            Signal(self.device, captures=captures) for _ in range(3)
        )
        self._ring = DigestRing(self.device) if captures else None
        self._is_shown = False
        self.sums: Sums | None = None
        self._grads: dict[nn.Parameter, Tensor] = {}
        nothing = Captured(lambda: None, captures=False)
        self._digest = self._sum = self._hash = self._release = nothing
        self._sum_printer: Printer | None = None
        #: Whether the sum draws random numbers, so that each step must set the generator.
        self.is_random = True
        self.update: Update | None = None
        self._held: list[Held] = []

    def _host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=self.captures, device="cpu")

    @property
    def values(self) -> dict[str, Tensor]:
        """The clipped sum, which must be ready."""
        assert self.sums is not None
        return self.sums.values

    # -- building ------------------------------------------------------------------------------

    def _captured(self, do: Callable[[], None]) -> Captured:
        return Captured(do, captures=self.captures, pool=self._pool)

    def capture_digest(self) -> None:
        """Ready the fingerprints of the batch, and the digest of the sum, which must be ready."""
        self._do_digest()
        self._digest = self._captured(self._do_digest)
        if self._ring is not None:
            # Its tables are sent to the device here: inside a capture they would be sent again
            # with every replay, from memory that is somebody else's by then.
            values = [in_memory(self.values[name]) for name in sorted(self.values)]
            values += self.moving.printed if self.moving is not None else []
            self._sum_printer = Printer(self._keys, [values])
            torch.cuda.synchronize(self.device)
            self._hash_sum()
            self._hash = self._captured(self._hash_sum)
            generator = torch.cuda.default_generators[self.device.index or 0]
            before = generator.get_state()
            self._sum()
            torch.cuda.synchronize(self.device)
            self.is_random = not torch.equal(generator.get_state(), before)
        self._reset()

    def capture_sum(self, total: TotalFn) -> None:
        """Ready the clipped sum by one of its forms; a former one is forgotten."""
        self._is_shown = False

        def do() -> None:
            sums = total(self.batch, self.keep)
            report = sums.report
            if report is None:
                report = torch.stack([t.float() for t in (sums.losses, sums.norms, sums.bad)])
            if self.moving is not None:
                present = self.keep if self.users is None else self.users.present()
                self.moving.count_(report[1], present)
            self._report.copy_(report, non_blocking=True)
            self._summed.raise_()
            self.sums = sums

        with repeatable():
            if self.captures:
                warmed(do, self.device)
            self._sum = self._captured(do)
        self._shown.reset()
        self._summed.reset()

    def capture_release(self, update: Update) -> None:
        """Ready noise, division and update; the sum must be ready."""
        self.update = update
        update.prepare()
        if self.captures:
            self.parts.noise.prepare(self.values, counts_itself=True)
            if self.moving is not None:
                self.moving.prepare()
        self._release = self._captured(self._do_release)
        self._held = update.held()

    def show(self, losses: Tensor) -> None:
        """Send losses ahead, so that the host can read them while the backward pass runs."""
        self._losses.copy_(losses, non_blocking=True)
        self._shown.raise_()
        self._is_shown = True

    # -- what the graphs hold ------------------------------------------------------------------

    def _do_digest(self) -> None:
        self._prints.copy_(self._printer.run_(), non_blocking=True)
        self._digested.raise_()

    def _hash_sum(self) -> None:
        assert self._ring is not None
        assert self._sum_printer is not None
        self._ring.publish_(self._sum_printer)

    @torch.no_grad()
    def _do_release(self) -> None:
        assert self.update is not None
        values = self.values
        if self._ring is not None:
            self._hash_sum()
        moving, own = self.moving, list(values.values())
        if moving is not None:
            torch._foreach_mul_(own, moving.before)
        self.parts.noise.add_(values)
        torch._foreach_mul_(own, 1.0 / self.parts.planned_batch if moving is None else moving.after)
        self._grads = {p: _as_it_lies(values[n], p) for n, p in self.parts.parameters.items()}
        self._give()
        if self.update.is_captured:
            self.update.run(self._grads)
        if moving is not None:
            moving.move_()

    def _give(self) -> None:
        for parameter, grad in self._grads.items():
            if parameter.grad is not grad:
                parameter.grad = grad

    # -- one step ------------------------------------------------------------------------------

    def digest(self) -> None:
        """Start the fingerprints of what is staged."""
        self._digested.expect()
        self._digest()

    def prints(self) -> list[bytes]:
        """Digests of the tensors of the batch; waits for them."""
        self._digested.wait()
        return [row.tobytes() for row in self._told[0]]

    def stage_units(self, size: int, keep: Mask | None, ids: Ids | None) -> None:
        """Say whose the rows are, where users are clipped, and to what norm, where it moves."""
        self.units = slice(size) if keep is None else np.flatnonzero(keep)
        if self.users is not None:
            assert ids is not None
            self.users.stage(ids, keep)
            self.units = slice(self.users.count)
        if self.moving is not None:
            self.moving.stage()

    def sum(self) -> None:
        """Start the clipped sum of what is staged."""
        self._shown.expect()
        self._summed.expect()
        self._sum()

    def sum_digest(self, *, is_now: bool) -> Callable[[], bytes]:
        """The digest of the sum, to be waited for within the next few steps.

        It comes with `release`, or by itself where somebody must know it first (`is_now`).
        """
        ring = self._ring
        if ring is None:
            values = [self.values[name] for name in sorted(self.values)]
            values += self.moving.printed if self.moving is not None else []
            here = tags.of_group(values, self.parts.secret)
            return lambda: here
        if is_now:
            number = ring.expect()
            self._hash()
        else:
            number = ring.expected + 1
        return lambda: ring.read(number)

    def forget(self) -> None:
        """Make the sum zero: it may not be released."""
        if self.sums is not None:
            torch._foreach_zero_(list(self.sums.values.values()))

    def give_up(self) -> None:
        """A step did not come to its end: nothing of it is left, or waited for.

        Somebody may have been interrupted before a graph was started that would have told.
        """
        self.forget()
        self._reset()

    def _reset(self) -> None:
        """Expect nothing that is on its way."""
        for signal in (self._digested, self._shown, self._summed):
            signal.reset()
        if self._ring is not None:
            self._ring.reset()

    def release(self) -> None:
        """Noise, division, update. The ledger must hold the step."""
        assert self.update is not None
        self.update.before()
        if self.moving is not None:
            self.moving.announce(self.parts.release.step)
        if self.captures:
            self.parts.noise.announce(counts_itself=True)
        if self._ring is not None:
            self._ring.expect()
        self._release()
        self._give()
        if not self.update.is_captured:
            self.update.run({})

    def report(self) -> Rows:
        """Losses, norms and non-finite marks of all rows, until the next step; waits."""
        self._summed.wait()
        return self._told[1]

    def losses(self) -> Rows:
        """Losses of all rows of the buffers, until the next step; waits for them alone."""
        if not self._is_shown:
            first: Rows = self.report()[0]
            return first
        self._shown.wait()
        return self._told[2]

    def has_moved(self) -> bool:
        """Whether the optimizer's settings or tensors are no longer those that were captured."""
        update = self.update
        assert update is not None
        if not update.is_captured or not self.captures:
            return update.is_for_now and self.captures
        return not update.is_as(self._held)

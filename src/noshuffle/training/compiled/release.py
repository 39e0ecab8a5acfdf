"""What becomes of a clipped sum that stays where it is, as CUDA graphs.

    digest    of the sum, for a step that somebody must compare first       → 24 bytes to the host
    release   the same; add the noise, divide, update                       → 24 bytes to the host

Nothing here decides anything: the ledger must hold the step. State: what was captured, and digests
on their way to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from noshuffle.errors import Unsupported
from noshuffle.release import tags
from noshuffle.release.digest import DigestRing, Keys, Printer
from noshuffle.training.compiled.graphs import Captured
from noshuffle.training.compiled.update import FrozenSetting, Update
from noshuffle.training.step_parts import Parts


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


class CapturedRelease:
    """Digest, noise, division and update for the sum that `values_fn` gives; what a graph was
    captured with stays where it is. The private gradient takes the place of the sum.

    Guarantees: `release` adds the noise of the next step of the stream, once.
    """

    def __init__(
        self,
        parts: Parts,
        values_fn: Callable[[], dict[str, Tensor]],
        *,
        keys: Keys,
        captures: bool,
        pool: Any = None,
    ) -> None:
        self.parts, self.captures = parts, captures
        self._values_fn, self._pool = values_fn, pool
        self._grads: dict[nn.Parameter, Tensor] = {}
        self.update: Update | None = None
        self._frozen: list[FrozenSetting] = []
        self._hash = self._release = Captured(lambda: None, captures=False)
        self._ring: DigestRing | None = None
        self._printer: Printer | None = None
        if captures:
            self._ring = DigestRing(keys.device)
            # Its tables are sent to the device here: inside a capture they would be sent again
            # with every replay, from memory that is somebody else's by then.
            self._printer = Printer(keys, [[in_memory(value) for value in self._printed]])
            torch.cuda.synchronize(keys.device)
            self._publish()
            self._hash = self._captured(self._publish)
            self._ring.reset()

    @property
    def _printed(self) -> list[Tensor]:
        """What the digest covers."""
        sums = self._values_fn()
        return [sums[name] for name in sorted(sums)]

    def _captured(self, do: Callable[[], None]) -> Captured:
        return Captured(do, captures=self.captures, pool=self._pool)

    def capture(self, update: Update) -> None:
        """Ready noise, division and this update."""
        self.update = update
        update.prepare()
        if self.captures:
            self.parts.noise.prepare(self._values_fn(), counts_itself=True)
        self._release = self._captured(self._do)
        self._frozen = update.frozen()

    # -- what the graphs hold ------------------------------------------------------------------

    def _publish(self) -> None:
        assert self._ring is not None
        assert self._printer is not None
        self._ring.publish_(self._printer)

    @torch.no_grad()
    def _do(self) -> None:
        assert self.update is not None
        if self._ring is not None:
            self._publish()
        values = self._values_fn()
        self.parts.noise.add_(values)
        torch._foreach_mul_(list(values.values()), 1.0 / self.parts.planned_batch)
        self._grads = {p: _as_it_lies(values[n], p) for n, p in self.parts.parameters.items()}
        self._give()
        if self.update.is_captured:
            self.update.run(self._grads)

    def _give(self) -> None:
        for parameter, grad in self._grads.items():
            if parameter.grad is not grad:
                parameter.grad = grad

    # -- one step ------------------------------------------------------------------------------

    def digest(self, *, is_now: bool) -> Callable[[], bytes]:
        """The digest of the sum, to be waited for within the next few steps.

        It comes with `release`, or by itself where somebody must know it first (`is_now`).
        """
        ring = self._ring
        if ring is None:
            here = tags.of_group(self._printed, self.parts.secret)
            return lambda: here
        if is_now:
            number = ring.expect()
            self._hash()
        else:
            number = ring.expected + 1
        return lambda: ring.read(number)

    def release(self) -> None:
        """Noise, division, update. The ledger must hold the step."""
        assert self.update is not None
        self.update.before()
        if self.captures:
            self.parts.noise.announce(counts_itself=True)
        if self._ring is not None:
            self._ring.expect()
        self._release()
        self._give()
        if not self.update.is_captured:
            self.update.run({})

    def has_moved(self) -> bool:
        """Whether the optimizer's settings or tensors are no longer those that were captured."""
        update = self.update
        assert update is not None
        if not update.is_captured or not self.captures:
            return update.is_for_now and self.captures
        return not update.is_as(self._frozen)

    def reset(self) -> None:
        """Expect nothing that is on its way: somebody may have been interrupted before a graph was
        started that would have told."""
        if self._ring is not None:
            self._ring.reset()

"""A count that a device raises inside a graph, and that the host can wait for.

No event can be waited for in the middle of a CUDA graph. So the graph adds one to a counter on the
device and copies it into the host's memory, after the copies of whatever it wants to tell; the
copies of one stream are made in order, so a host that sees the new count finds the rest there too.

State: the counter on the device, its copy, and how often a graph that raises it was started.

>>> signal = Signal(torch.device("cpu"), captures=False)
>>> signal.expect(); signal.raise_(); signal.wait()
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from noshuffle.errors import NoshuffleError

#: Looks at the count before other threads get their turn, and before the host lets the device tell.
_TURN, _PATIENCE = 256, 2**18


#: Lets others run, for a third of a microsecond if there are none; time.sleep(0) takes 57 of them.
_turn: Callable[[], Any] = getattr(os, "sched_yield", bool)


class Signal:
    """Raised by the device, waited for by the host."""

    def __init__(self, device: torch.device, *, captures: bool) -> None:
        self._tick = torch.zeros(1, dtype=torch.int64, device=device)
        self._copy = torch.zeros(1, dtype=torch.int64, pin_memory=captures)
        self._told = self._copy.numpy()
        self._expected = 0
        self._device = device

    def raise_(self) -> None:
        """Tell the host; this is what a graph holds."""
        self._tick.add_(1)
        self._copy.copy_(self._tick, non_blocking=True)

    def expect(self) -> None:
        """The host starts a graph that raises this."""
        self._expected += 1

    def reset(self) -> None:
        """Start anew; nothing may be on its way."""
        self._tick.zero_()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._copy.fill_(-1)
        self._expected = 0

    def wait(self) -> None:
        """Return when the last graph that was started has raised it; raises if the device failed.

        Some milliseconds of looking, as an event's own wait does, then an ordinary wait.
        """
        told, expected, looks = self._told, self._expected, 0
        while told[0] != expected:
            looks += 1
            if looks % _TURN == 0:
                _turn()
            if looks == _PATIENCE:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                if told[0] != expected:
                    raise NoshuffleError("the device lost a step; go on from the last checkpoint")

"""Streams of a GPU that the steps of a run, and the parts of a batch, go on, one after the other.

Parts are added to one total, which is made zero behind its release; the noise of a step is made of
that of the steps before. Where the next part, release or step comes on another stream than the last
one, that stream waits for it, and memory of a total is not given out before it is done; where there
is one stream, nothing is asked of the device. What a user's own work on streams waits for is up to
the user, as everywhere in torch. State: the stream that was last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class StreamOrder:
    """The streams of a run, in the order of its steps and their parts."""

    def __init__(self) -> None:
        self._last: Any = None

    def follow(self, device: torch.device, made: Callable[[], Iterable[Tensor]]) -> None:
        """Have the current stream go on behind the last one, and use the tensors made there."""
        now, last = torch.cuda.current_stream(device), self._last
        if last is not None and now != last:
            now.wait_stream(last)
            for value in made():
                value.record_stream(now)
        self._last = now  # after that: a part that is interrupted here may be given once more

"""StepLine: how far a fit is, on standard error. Steps are public: they follow from the plan.

State: when it last wrote.

>>> import contextlib, io
>>> with contextlib.redirect_stderr(io.StringIO()) as told:
...     StepLine(2, every_s=0.0)(1)
>>> told.getvalue()
'noshuffle: step 1 of 2\\n'
"""

from __future__ import annotations

import sys
import time


class StepLine:
    """Writes a line, at most once in `every_s` seconds, and the first one after as long."""

    def __init__(self, total: int, *, every_s: float = 1.0) -> None:
        self.total, self.every_s, self._last = total, every_s, time.monotonic()

    def __call__(self, steps: int) -> None:
        now = time.monotonic()
        if now - self._last >= self.every_s:
            self._last = now
            print(f"noshuffle: step {steps:,} of {self.total:,}", file=sys.stderr, flush=True)

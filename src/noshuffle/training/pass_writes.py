"""What the user's own forward passes write into a model is undone, as that of private steps is.

State: the pass that is under way.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import nn

from noshuffle.clipping.state import restored


class PassWrites:
    """The writes of passes through one model that no private step has made."""

    def __init__(self, model: nn.Module) -> None:
        self._open: ExitStack | None = None

    def loading(self) -> None:
        """Values are about to be loaded."""

    def loaded(self, model: nn.Module) -> None:
        """Values were loaded."""

    def begin(self, model: nn.Module, *, is_heard: bool, is_hooked: bool = True) -> None:
        """A pass begins; one that is not heard has no end."""
        self.end()
        if is_heard:
            self._open = ExitStack()
            self._open.enter_context(restored(model))

    def end(self) -> list[str]:
        """A pass has ended."""
        open_, self._open = self._open, None
        if open_ is not None:
            open_.close()
        return []

    def judge(self, model: nn.Module, loss_fn: Any, batch: Any) -> None:
        """At a step: the model is as it was."""

"""Differentially private training without sampling or shuffling.

    plan = noshuffle.Plan.fit(noshuffle.Epochs(20, 240), mechanism="blt", epsilon=8.0, delta=1e-5)
    private = noshuffle.privatize(model, optimizer, plan, clip_norm=1.0, batch_size=250)
    for x, y in loader:
        private.step(loss_fn, x, y)

Names are imported when they are first used, so that the mathematics never waits for torch.

>>> import noshuffle
>>> noshuffle.Epochs(epochs=2, steps_per_epoch=3).steps
6
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from noshuffle.version import __version__ as __version__

if TYPE_CHECKING:
    from noshuffle.budget import Budget, tune
    from noshuffle.clipping import ModelLoss
    from noshuffle.errors import NoshuffleError
    from noshuffle.optim import FTRL
    from noshuffle.participation import (
        Epochs,
        FixedSize,
        MinSeparation,
        Poisson,
        Restarted,
        SinglePass,
    )
    from noshuffle.plan import Plan
    from noshuffle.release.private_sum import PrivateSum
    from noshuffle.release.verify import verify
    from noshuffle.statement import PrivacyStatement
    from noshuffle.training import Private, privatize


_HOMES = {
    "Budget": "budget",
    "Epochs": "participation",
    "FTRL": "optim",
    "FixedSize": "participation",
    "MinSeparation": "participation",
    "ModelLoss": "clipping",
    "NoshuffleError": "errors",
    "Plan": "plan",
    "Poisson": "participation",
    "PrivacyStatement": "statement",
    "Private": "training",
    "PrivateSum": "release.private_sum",
    "Restarted": "participation",
    "SinglePass": "participation",
    "privatize": "training",
    "tune": "budget",
    "verify": "release.verify",
}

__all__ = [
    "FTRL",
    "Budget",
    "Epochs",
    "FixedSize",
    "MinSeparation",
    "ModelLoss",
    "NoshuffleError",
    "Plan",
    "Poisson",
    "PrivacyStatement",
    "Private",
    "PrivateSum",
    "Restarted",
    "SinglePass",
    "privatize",
    "tune",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"noshuffle.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'noshuffle' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

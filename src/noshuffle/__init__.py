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

from typing import TYPE_CHECKING

from noshuffle.lazy_names import lazily
from noshuffle.version import __version__ as __version__

if TYPE_CHECKING:
    from noshuffle.budget import Budget as Budget
    from noshuffle.budget import tune as tune
    from noshuffle.clipping import ModelLoss as ModelLoss
    from noshuffle.clipping.fix import fix as fix
    from noshuffle.errors import NoshuffleError as NoshuffleError
    from noshuffle.optim import FTRL as FTRL
    from noshuffle.participation import Epochs as Epochs
    from noshuffle.participation import FixedSize as FixedSize
    from noshuffle.participation import MinSeparation as MinSeparation
    from noshuffle.participation import Poisson as Poisson
    from noshuffle.participation import Restarted as Restarted
    from noshuffle.participation import SinglePass as SinglePass
    from noshuffle.plan import Plan as Plan
    from noshuffle.plan import PrivacyStatement as PrivacyStatement
    from noshuffle.release.folder import load_model as load_model
    from noshuffle.release.private_sum import PrivateSum as PrivateSum
    from noshuffle.release.verify import verify as verify
    from noshuffle.training import Private as Private
    from noshuffle.training import privatize as privatize

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
    "PrivacyStatement": "plan",
    "Private": "training",
    "PrivateSum": "release.private_sum",
    "Restarted": "participation",
    "SinglePass": "participation",
    "fix": "clipping.fix",
    "load_model": "release.folder",
    "privatize": "training",
    "tune": "budget",
    "verify": "release.verify",
}

__all__ = list(_HOMES)


__getattr__, __dir__ = lazily(__name__, _HOMES)

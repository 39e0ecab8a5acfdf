"""Private training: the step, the loop, the run folder and its verification."""

from __future__ import annotations

from noshuffle.release.batches import Batch
from noshuffle.release.folder import RunFolder
from noshuffle.release.sampler import in_order
from noshuffle.release.verify import Verdict, verify
from noshuffle.training.assemble import privatize
from noshuffle.training.batches import with_ids
from noshuffle.training.loop import fit_model
from noshuffle.training.private import Private

__all__ = [
    "Batch",
    "Private",
    "RunFolder",
    "Verdict",
    "fit_model",
    "in_order",
    "privatize",
    "verify",
    "with_ids",
]

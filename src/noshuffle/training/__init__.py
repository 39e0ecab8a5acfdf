"""Private training: the step, the loop, the run folder and its verification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from noshuffle.release.folder import RunFolder
from noshuffle.release.sampler import in_order
from noshuffle.release.verdict import Verdict
from noshuffle.release.verify import verify
from noshuffle.training.assemble import privatize
from noshuffle.training.batches import Batch, with_ids
from noshuffle.training.loop import fit_model
from noshuffle.training.private import Private

if TYPE_CHECKING:
    from noshuffle.training.distributed import privatize_distributed

__all__ = [
    "Batch",
    "Private",
    "RunFolder",
    "Verdict",
    "fit_model",
    "in_order",
    "privatize",
    "privatize_distributed",
    "verify",
    "with_ids",
]


def __getattr__(name: str) -> Any:
    # torch's distributed tensors take seconds to import, which most processes never need.
    if name == "privatize_distributed":
        from noshuffle.training.distributed import privatize_distributed

        return privatize_distributed
    raise AttributeError(f"module 'noshuffle.training' has no attribute {name!r}")

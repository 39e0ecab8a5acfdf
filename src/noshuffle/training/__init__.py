"""Private training: the step, the loop, the run folder and its verification."""

from noshuffle.training.assemble import privatize
from noshuffle.training.distributed import privatize_distributed
from noshuffle.training.loop import fit_model
from noshuffle.training.private import Private
from noshuffle.training.run_folder import RunFolder
from noshuffle.training.sampler import in_order
from noshuffle.training.verify import Verdict, verify

__all__ = [
    "Private",
    "RunFolder",
    "Verdict",
    "fit_model",
    "in_order",
    "privatize",
    "privatize_distributed",
    "verify",
]

"""Clipped sums: per-example (or per-user) gradients, each bounded, added up.

objective   how a loss is written          forms     per-example gradients not written out
clipped     bounds and the clipped sum     rules*    one rule per layer type
factor      min(1, c/‖g‖), the only one    isolation_check  are the rules right for a model?
units       units, weights, the last steps ghost     one backward pass (tape, layers)
check       what a model must not contain  per_example  any model, written out
adaptive    a threshold that follows a quantile      choose  which engine, and why
products    half precision, wide sums      gram      norms from inner products (a kernel)
microbatches fast, lean, or what fits      causal_lm the loss of causal language models
rowwise     rows of a CPU in a few calls   snapshot  whether a model is as it was
statefulness  what a model keeps           row_order rows ordered by what they hold
"""

from noshuffle.clipping.causal_lm import next_token
from noshuffle.clipping.check import validate
from noshuffle.clipping.choose import auto
from noshuffle.clipping.factor import Clip, ClippedSum, Flat, PerLayer
from noshuffle.clipping.ghost import Ghost
from noshuffle.clipping.objective import ModelLoss
from noshuffle.clipping.per_example import PerExample

__all__ = [
    "Clip",
    "ClippedSum",
    "Flat",
    "Ghost",
    "ModelLoss",
    "PerExample",
    "PerLayer",
    "auto",
    "next_token",
    "validate",
]

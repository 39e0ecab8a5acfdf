"""Clipped sums: per-example (or per-user) gradients, each bounded, added up.

factor      min(1, c/‖g‖), the only one; bounds, sums   units     units, the last steps of a sum
objective   losses and batches, row by row              criteria  torch's criteria by row
ghost       one backward pass (ghost_forms, tape)       forms     gradients not written out
isolated    the same with examples apart by vmap        layers    which rule, which axis
per_example any model, written out                      check     what a model must not contain
trial       are examples apart, are rules right?        state     what a pass writes is undone
rules*      one rule per layer type                     stateless a call with other tensors
products    half precision, wide sums                   gram      norms from inner products
microbatches  fast, lean, or what fits
adaptive    a threshold that follows a quantile         causal_lm the loss of language models
captured    what a loss takes from around it            tolerance for rounding of squared norms
"""

from noshuffle.clipping.causal_lm import next_token
from noshuffle.clipping.check import validate
from noshuffle.clipping.factor import Clip, ClippedSum, Flat, PerLayer
from noshuffle.clipping.ghost import Ghost, auto
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

"""Clipped sums: per-example (or per-user) gradients, each bounded, added up.

factor      min(1, c/‖g‖), the only one; bounds, sums   units     units, the last steps of a sum
objective   losses and batches, row by row              criteria  torch's criteria by row
ghost       one backward pass (ghost_forms, tape)       forms     gradients not written out
rules*      one rule per layer type                     layers    which rule, which axis
per_example any model, written out                      check     what a model must not contain
snapshot    whether a model is as it was                isolation_check  do examples mix?
statefulness  what a model keeps                        stateless a call with other tensors
products    half precision, wide sums                   gram      norms from inner products
microbatches  fast, lean, or what fits
adaptive    a threshold that follows a quantile         causal_lm the loss of language models
rule_check  are the rules right?
captured    what a loss takes from around it            batch_check  are all of a batch apart?
trial_runs  runs of a trial, under the same draws       batch_gradients  and on the way back?
row_check   is row b of every layer example b?  outside_use  weights used around their layers
rule_trial  all that is asked of rules at first  tolerance  for rounding of squared norms
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

"""Plans: every decision that privacy rests on, what it promises, and what it is compared with.

    plan        Plan: participation, strategy, noise, δ; frozen, as JSON, by its hash
    guarantee   ε and δ of a plan, and the least noise: one class per accountant
    fit         a mechanism by name as a strategy for a participation
    comparison  mechanisms, and kinds of sampling, side by side at equal (ε, δ)
    statement   PrivacyStatement: a guarantee and its assumptions in plain words

>>> from noshuffle.participation import Epochs
>>> Plan.fit(Epochs(2, 8), mechanism="tree", epsilon=1.0).statement().exact
True
"""

from noshuffle.plan.comparison import compare, compare_sampling
from noshuffle.plan.plan import Plan
from noshuffle.plan.statement import PrivacyStatement

__all__ = ["Plan", "PrivacyStatement", "compare", "compare_sampling"]

"""What all runs on the same data cost together: limit, log, searches.

Budget   a durable log of runs, with a limit that no run can pass
tune     the best of many settings by a score, at the price of a bound on repetitions
"""

from noshuffle.budget.budget import Budget
from noshuffle.budget.cost import Cost, cost_of
from noshuffle.budget.search import Trial, Tuned, tune

__all__ = ["Budget", "Cost", "Trial", "Tuned", "cost_of", "tune"]

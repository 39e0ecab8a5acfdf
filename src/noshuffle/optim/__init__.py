"""Update rules on released gradients: FTRL, its constraint sets and composite regularizers.

Everything here is post-processing: it never changes a guarantee. Any other torch optimizer works
in the place of `FTRL`.
"""

from noshuffle.optim.composite import elastic_net, group_lasso, lasso
from noshuffle.optim.constraints import box, l1_ball, l2_ball, simplex
from noshuffle.optim.ftrl import FTRL

__all__ = ["FTRL", "box", "elastic_net", "group_lasso", "l1_ball", "l2_ball", "lasso", "simplex"]

"""Federated training with user-level privacy, without sampling.

cohort      who is asked: check-ins, limits, limits counted afterwards
clients     local training and clipping           vectorised  the same, many clients at once
server      clipped sum → noise → new parameters  ground      what it stands on
rounds      the protocol, crash-safe              per_user    ε of one user
simulate    all of it in one process              tasks       data by user
recurrent   LSTM layers that can be stacked       timer       a device that limits itself
"""

from noshuffle.federated.clients import LocalTraining, clip_delta, local_train
from noshuffle.federated.cohort import account_afterwards, observed_participation
from noshuffle.federated.per_user import statement_for
from noshuffle.federated.rounds import Rounds
from noshuffle.federated.server import ServerOptimizer
from noshuffle.federated.simulate import simulate

__all__ = [
    "LocalTraining",
    "Rounds",
    "ServerOptimizer",
    "account_afterwards",
    "clip_delta",
    "local_train",
    "observed_participation",
    "simulate",
    "statement_for",
]

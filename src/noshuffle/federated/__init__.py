"""Federated training with user-level privacy, without sampling.

cohort      who is asked: check-ins, limits, limits counted afterwards
clients     local training and clipping           vectorised  the same, many clients at once
server      clipped sum → noise → new parameters  server_checks  what it refuses
rounds      the protocol, crash-safe              per_user    ε of one user
simulate    all of it in one process              tasks       data by user
stackoverflow, word_models   the published files   timer       a device that limits itself
recurrent   LSTM layers that can be stacked
flower      the same rounds on Flower             flower_client, flower_identity, flower_replies

Names are imported when they are first used: a client that only clips, and may be started anew for
every message, does not wait for the mathematics of the server.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from noshuffle.federated.telemetry import switch_off
from noshuffle.lazy_names import lazily

if TYPE_CHECKING:
    from noshuffle.federated.clients import LocalTraining as LocalTraining
    from noshuffle.federated.clients import clip_delta as clip_delta
    from noshuffle.federated.clients import local_train as local_train
    from noshuffle.federated.cohort import account_afterwards as account_afterwards
    from noshuffle.federated.cohort import observed_participation as observed_participation
    from noshuffle.federated.cohort import read_log as read_log
    from noshuffle.federated.per_user import statement_for as statement_for
    from noshuffle.federated.rounds import Rounds as Rounds
    from noshuffle.federated.server import ServerOptimizer as ServerOptimizer
    from noshuffle.federated.simulate import simulate as simulate
    from noshuffle.federated.timer import participation_from_times as participation_from_times

_HOMES = {
    "LocalTraining": "clients",
    "Rounds": "rounds",
    "ServerOptimizer": "server",
    "account_afterwards": "cohort",
    "clip_delta": "clients",
    "local_train": "clients",
    "observed_participation": "cohort",
    "participation_from_times": "timer",
    "read_log": "cohort",
    "simulate": "simulate",
    "statement_for": "per_user",
}

__all__ = list(_HOMES)


__getattr__, __dir__ = lazily(__name__, _HOMES)


class _FederatedModule(ModuleType):
    """`simulate` names a function and the file it is in; here it is always the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES:  # importing a file puts its module here under its own name
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _FederatedModule
switch_off()  # before anything here imports Flower

"""The client: train on this node's user, clip, answer who it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import Context

from noshuffle.federated.flower_client import partition_of, task_client

from .task import parts_of

if TYPE_CHECKING:
    from noshuffle.federated.timer import Timer


def timer_of(context: Context) -> Timer | None:
    """The device's own limit, kept in the app's own storage; only if the run asks for one."""
    seconds = float(context.run_config["timer-seconds"])
    if seconds <= 0:
        return None
    from noshuffle.federated.timer import Timer

    name = f"partition-{partition_of(context)}.json"
    return Timer(
        Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr")) / "noshuffle-timers" / name,
        seconds=seconds,
        most=int(context.run_config["max-participations"]),
    )


app = task_client(parts_of, timer=timer_of)

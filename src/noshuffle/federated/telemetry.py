"""Nothing that runs private training reports home.

Importing `noshuffle.federated` switches off these reports in this process, unless the environment
says otherwise. Processes that Flower starts by itself need the same variables set where they are
started (see docs/federated.md).

>>> sorted(SWITCHES)
['FLWR_DISABLE_UPDATE_CHECK', 'FLWR_TELEMETRY_ENABLED', 'RAY_USAGE_STATS_ENABLED']
"""

from __future__ import annotations

import os

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def switch_off() -> None:
    """Set what is not set. Flower reads its own when it is first imported."""
    for name, value in SWITCHES.items():
        os.environ.setdefault(name, value)

"""What importing the federated package does, and does not."""

from __future__ import annotations

import os
import subprocess
import sys
from types import FunctionType

import pytest

import noshuffle.federated
import noshuffle.federated.simulate  # the file; its name must not hide the function
from noshuffle.federated import telemetry


def test_public_names_are_there() -> None:
    for name in noshuffle.federated.__all__:
        assert getattr(noshuffle.federated, name).__name__ == name
    assert isinstance(noshuffle.federated.simulate, FunctionType)
    assert set(noshuffle.federated.__all__) <= set(dir(noshuffle.federated))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = noshuffle.federated.nonsense


def test_switches_are_set_but_not_overruled(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in telemetry.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    telemetry.switch_off()
    assert os.environ["FLWR_TELEMETRY_ENABLED"] == "1"
    assert os.environ["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_a_client_does_not_wait_for_the_server_half() -> None:
    """Flower starts a process for every message: it loads what clipping needs, and no telemetry."""
    pytest.importorskip("flwr", reason="needs the extra 'federated'")
    program = (
        "import sys, noshuffle.federated.flower_client; from flwr.supercore import telemetry; "
        "heavy = {'noshuffle.plan', 'noshuffle.strategies', 'noshuffle.training', 'scipy'}; "
        "print(sorted(heavy & sys.modules.keys()), telemetry.FLWR_TELEMETRY_ENABLED)"
    )
    env = {"PATH": "/usr/bin:/bin"}
    found = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300
    )
    assert found.stdout.strip() == "[] 0", found.stderr

"""Kill −9 at random instants, resume: bit-identical parameters, and evidence that verifies.

A process of its own (`crash`) trains in forks, each of which gets a real SIGKILL after a random
number of calls (of Python and C functions alike, so also inside a checkpoint or a transaction);
the next one resumes, is perhaps killed again, until one finishes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def crash(folder: Path, *, instants: int, seed: int) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.crash", str(folder), str(instants), str(seed)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == instants
    for result in results:
        assert result["same"], result
        assert result["failures"] == [], result
        assert result["answer"] == "NOT PRIVATE"  # the test seed
        assert result["mode"] == "0o600"
        if result["changed"] is not None:
            assert str(result["changed"]).startswith("ReplayRefused"), result
    return results


def test_killed_at_a_few_instants(tmp_path: Path) -> None:
    crash(tmp_path, instants=2, seed=1)


@pytest.mark.slow
def test_killed_at_thirty_instants(tmp_path: Path) -> None:
    results = crash(tmp_path, instants=30, seed=2)
    assert sum(r["kills"] for r in results) >= 30
    assert any(r["changed"] for r in results)

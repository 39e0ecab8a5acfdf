"""A seal that ends before it flushes a file: the run takes no step, and the next seal ends it.

Not cut in between are the transactions of the ledger, which SQLite writes by itself.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.release import positions

from noshuffle.errors import InvalidInput
from noshuffle.participation import Participation, SinglePass
from noshuffle.release.folder import RunFolder
from noshuffle.release.private_sum import PrivateSum
from noshuffle.release.seal import finish_seal, seal
from noshuffle.release.verify import verify


class Killed(BaseException):
    """No `except Exception` on the way holds it up."""


def cut_short(path: Path, writes: int) -> bool:
    """Seal a run and end before write number `writes` is on the disk; False if it has fewer."""
    sync, left = os.fsync, writes

    def count(handle: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        sync(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", count)
        try:
            seal(path)
        except Killed:
            return True
    return False


def secrets(path: Path) -> list[bytes]:
    ring = RunFolder(path).ring()
    return [ring.secret.hex().encode(), *(life.noise.hex().encode() for life in ring.lives)]


RULES = {
    "in order": (SinglePass(steps=6), 12),
    "secret draws": (positions.FEW_OF_MANY, positions.MANY),
}


@pytest.mark.parametrize(("rule", "population"), RULES.values(), ids=RULES)
def test_a_seal_that_ends_anywhere(tmp_path: Path, rule: Participation, population: int) -> None:
    """Where it was killed in the overwriting of key.json, it had left a file of zeros: REFUTED."""
    whole = tmp_path / "run"
    drawn = positions.finished(whole, rule, population, keep_keys=True)
    drawn = drawn if rule.is_sampled else []
    secret, plan = secrets(whole), RunFolder(whole).plan()
    for writes in range(1000):
        path = shutil.copytree(whole, tmp_path / str(writes))
        if not cut_short(path, writes):
            break
        then = verify(path)
        assert then.answer in ("PROVED", "CONSISTENT"), (writes, then.words())
        with pytest.raises(InvalidInput, match="sealed"):
            PrivateSum(plan, clip=1.0, shape=(2,), run=path)
        finish_seal(RunFolder(path))
        verdict = verify(path)
        assert verdict.answer == "PROVED", (writes, verdict.words())
        kept = b"".join(file.read_bytes() for file in path.rglob("*") if file.is_file())
        assert not any(one in kept for one in secret), writes
        assert positions.shown(path, drawn) == [], writes
        assert not any((path / "checkpoints").rglob(".*")), writes
    assert writes > 8

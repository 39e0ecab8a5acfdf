"""Secret draws whose units can be told from all other bytes of a run folder, and where they stand.

`FEW_OF_MANY`: unit t + k·GROUPS, k = 0 … 3, takes part in step t, with certainty, so that every
batch has four units. Their numbers are long; nothing else in a folder looks like them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from noshuffle.participation import CyclicPoisson, Participation
from noshuffle.plan import Plan
from noshuffle.release.ledger_tables import encode_units
from noshuffle.release.private_sum import PrivateSum
from noshuffle.release.unit_ids import Ids

STEPS, GROUPS = 6, 24_999_983
MANY = 4 * GROUPS
FEW_OF_MANY = CyclicPoisson(STEPS, GROUPS, 1.0)


def forms(drawn: Sequence[Ids]) -> Iterator[tuple[str, bytes]]:
    """All ways to write down a unit, or the units of a step, that a file could hold."""
    for step, ids in enumerate(drawn):
        if len(ids):
            yield f"list of step {step}", encode_units(ids)
            yield f"numbers of step {step}", ids.astype("<i8").tobytes()
        for unit in ids[(ids > 10**6) & (ids != GROUPS)].tolist():  # the plan names the groups
            yield f"unit {unit}", str(unit).encode()
            yield f"unit {unit}", np.int64(unit).tobytes()
            yield f"unit {unit}", unit.to_bytes(8, "big")
            yield f"unit {unit}", f"{unit:x}".encode()


def shown(folder: Path, drawn: Sequence[Ids]) -> list[str]:
    """What the files of a folder tell of the draws, in words; by their bytes alone."""
    looked_for = list(forms(drawn))
    return [
        f"{file.relative_to(folder)}: {what}"
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        for data in [file.read_bytes()]
        for what, form in looked_for
        if form in data
    ]


def finished(
    path: Path,
    rule: Participation = FEW_OF_MANY,
    population: int = MANY,
    *,
    keep_keys: bool = False,
) -> list[Ids]:
    """A finished run of secret draws (or of all units in order) in a folder; what was drawn."""
    plan = Plan.fit(rule, mechanism="identity", noise_multiplier=2.0)
    sums = PrivateSum(plan, clip=1.0, shape=(2,), run=path)
    if rule.is_sampled:
        sampler = sums.sampler(population)
        drawn = [sampler.draw(step) for step in range(rule.steps)]
    else:
        drawn = list(np.arange(population).reshape(rule.steps, -1))
    for step, ids in enumerate(drawn):
        sums.add(np.ones((len(ids), 2)), ids=ids)
        if step % 2:
            sums.save()
    sums.close(keep_keys=keep_keys)
    return drawn

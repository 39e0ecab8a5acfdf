"""The list of mutants is about the code as it is: every patch applies, every killer exists."""

from __future__ import annotations

import ast

import pytest
from tests.mutants.listed import MUTANTS
from tests.mutants.mutant import ROOT, Mutant

NAMES = [mutant.name for mutant in MUTANTS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_the_patch_applies_and_reads_as_python(mutant: Mutant) -> None:
    changed = mutant.changed()
    assert changed != (ROOT / "src/noshuffle" / mutant.file).read_text()
    if mutant.file.endswith(".py"):
        ast.parse(changed)


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_what_kills_it_exists(mutant: Mutant) -> None:
    for test in mutant.by:
        file, *names = test.split("::")
        text = (ROOT / file).read_text()
        for name in names:
            assert f"def {name.split('[')[0]}(" in text or f"class {name}" in text, test


def test_at_least_sixty_and_every_fault_of_version_0_1() -> None:
    assert len(MUTANTS) >= 60
    assert len(set(NAMES)) == len(NAMES)
    faults = {mutant.fault for mutant in MUTANTS}
    assert {f"G{number}" for number in range(1, 16)} <= faults
    assert {f"P{number}" for number in (1, 2, 3, 4, 5, 6, 8, 10, 11, 13, 14, 16)} <= faults

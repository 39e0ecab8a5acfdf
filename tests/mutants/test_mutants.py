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


def test_one_for_a_promise() -> None:
    assert len({mutant.promise for mutant in MUTANTS}) == len(set(NAMES)) == len(MUTANTS)

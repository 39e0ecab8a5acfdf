"""Every stored value comes out again: the bridge over a rewrite of what computes them."""

from __future__ import annotations

import warnings

import pytest
from tests.golden.entries import SECTIONS, differences, section, stored

VALUES = {name: stored(name) for name in SECTIONS}


@pytest.mark.parametrize(("name", "entry"), [(n, e) for n in SECTIONS for e in VALUES[n]])
def test_golden(name: str, entry: str) -> None:
    how = section(name)[entry]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = differences(how, how.compute(), VALUES[name][entry])
    assert not found, (
        f"a golden value changed: python -m tests.golden.write {name}, and say in the commit why\n"
        + "\n".join(found[:20])
    )


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_has_values(name: str) -> None:
    assert VALUES[name]
    assert VALUES[name].keys() <= section(name).keys()

"""No loop is silently different from its twin: `loops`, and the table of docs/loops.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.training import loop_list, loop_list_kinds, loop_list_more  # noqa: F401
from tests.training.loops import LOOPS, outcome, table

#: What the loops found when they were first run, looked at in every run of the suite.
QUICK = (
    "loss.backward(gradient",
    "MultiMarginLoss",
    "TransformerEncoderLayer",
    "mixup",
    "second step",
    "rows against the first one",
    "x.std(0)",
    "outputs picked",
    "single rows",
    "masked mean",
    "truncated BPTT",
    "DCGAN",
    "head outside",
    "sharpness",
    "step under torch.no_grad",
)


@pytest.fixture(autouse=True)
def _off_grid(monkeypatch):
    """Sums that differ in their last bits may be rounded to neighbouring points of the grid."""
    monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(
            one,
            id=one.name,
            marks=() if any(w in one.name for w in QUICK) else pytest.mark.slow,
        )
        for one in LOOPS
    ],
)
def test_equal_refused_or_warned_of(one):
    found = outcome(one)
    assert one.is_met(found), found
    assert "silent" not in found


def test_there_are_as_many_as_the_page_says_and_no_two_have_one_name():
    page = Path("docs/loops.md").read_text(encoding="utf8")
    assert f"{len(LOOPS)} loops." in page
    assert all(f"| {one.name} |" in page for one in LOOPS)
    assert len({one.name for one in LOOPS}) == len(LOOPS) > 81


@pytest.mark.slow
def test_the_page_is_what_the_command_makes():
    assert table() in Path("docs/loops.md").read_text(encoding="utf8")

"""The client's own timer, and the separation that follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noshuffle.errors import InvalidInput
from noshuffle.federated.timer import Timer, separation_from_times


def test_once_per_period_over_restarts(tmp_path: Path) -> None:
    def claim(now: float) -> bool:
        return Timer(tmp_path / "app" / "timer.json", seconds=100, most=3).claim(now=now)

    times = [5, 6, 104, 105, 3, 150, 205, 400, 10_000]
    assert [t for t in times if claim(t)] == [5, 105, 205]


def test_a_damaged_file_is_no_fresh_start(tmp_path: Path) -> None:
    path = tmp_path / "timer.json"
    for text in ("", "{}", '{"format": "noshuffle-timer/1", "count": "x", "last": 0}', "[1]"):
        path.write_text(text)
        with pytest.raises(InvalidInput, match="stay out of the run"):
            Timer(path, seconds=1, most=1).claim()
    with pytest.raises(InvalidInput, match="finite time"):
        Timer(tmp_path / "new.json", seconds=1, most=1).claim(now=float("nan"))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.integers(1, 25),
)
@settings(max_examples=80, deadline=None)
def test_separation_against_all_pairs(waits: list[int], seconds: int) -> None:
    times = [float(sum(waits[: i + 1])) for i in range(len(waits))]
    pairs = [
        j - i
        for i in range(len(times))
        for j in range(i + 1, len(times))
        if times[j] - times[i] >= seconds
    ]
    assert separation_from_times(times, seconds=seconds) == min(pairs, default=len(times))


def test_times_are_checked() -> None:
    for wrong in ([2.0, 1.0], [float("inf")]):
        with pytest.raises(InvalidInput, match="in order"):
            separation_from_times(wrong, seconds=1)

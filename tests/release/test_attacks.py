"""What was tried against the door from outside, and gave a sum bare of noise or a false verdict."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.release.folders import LOSS, data, open_run

from noshuffle import Plan, PrivateSum, SinglePass
from noshuffle.clipping import Clip, ClippedSum
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, NoshuffleError, ReplayRefused
from noshuffle.noise import test_source as named_seed
from noshuffle.release.opening import fork
from noshuffle.release.release import Release
from noshuffle.release.seal import note_files
from noshuffle.release.threshold import COUNT
from noshuffle.release.verify import verify
from noshuffle.strategies import identity, tree

PLAN = Plan(participation=SinglePass(steps=6), strategy=tree(), noise_multiplier=4.0)
ONE, TWO = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.0, -0.1])


def begin(path: Path, **options: object) -> Release:
    return Release.begin(PLAN, {"w": (3,)}, clip=1.0, run=path, **options)  # type: ignore[arg-type]


def give(release: Release, step: int, total: torch.Tensor) -> torch.Tensor:
    """Release a step of one unit; what came out."""
    values = {"w": total.clone()}
    release.close(release.admit(step, release.identify([step])), values)
    return values["w"]


def test_leave_for_one_step_does_not_use_the_noise_of_another(tmp_path: Path):
    """Both ways gave S + n and S' + n: the difference was S − S' to the grid."""
    release = begin(tmp_path / "r")
    give(release, 0, ONE), give(release, 1, TWO)
    release.ledger.let_go()
    again = begin(tmp_path / "r")
    leave = again.admit(0, again.identify([0]))
    again.close(leave, {"w": ONE.clone()})
    with pytest.raises(InvalidInput, match="noise is that of step 1"):
        again.close(leave, {"w": ONE.clone()})
    again.ledger.let_go()
    last = begin(tmp_path / "r")
    values = {"w": torch.ones(3)}
    with pytest.raises(InvalidInput, match="noise is that of step 0"):
        last.close(last.admit(last.released, last.identify([9])), values)
    assert torch.equal(values["w"], torch.ones(3))
    assert last.released == 2


def test_noise_is_used_once_and_after_its_row(tmp_path: Path):
    release = begin(tmp_path / "r")
    values = {"w": ONE.clone()}
    leave = release.admit(0, release.identify([0]))
    for use in (
        lambda: release.add_noise_(values),
        lambda: release.close(leave, values, is_open=True),
    ):
        with pytest.raises(InvalidInput, match="row of step 0 is not written"):
            use()
    release.open(leave)
    release.close(leave, values, is_open=True)
    with pytest.raises(InvalidInput):
        release.close(leave, {"w": TWO.clone()}, is_open=True)
    with pytest.raises(InvalidInput):
        release.add_noise_({"w": TWO.clone()})
    assert release.step == release.released == 1
    release.ledger.let_go()
    again = begin(tmp_path / "r")  # a replay may not call itself open
    with pytest.raises(InvalidInput):
        again.close(again.admit(0, again.identify([0])), {"w": TWO.clone()}, is_open=True)


def test_a_run_in_memory_that_was_put_back_uses_no_noise_again():
    """It may do without rows, and then nobody knows what its noise lay under."""
    release = Release.begin(PLAN, {"w": (3,)}, clip=1.0)
    before = release.state_dict()
    release.add_noise_({"w": ONE.clone()})
    release.load_state_dict(before)
    with pytest.raises(InvalidInput, match="row of step 0 is not written"):
        release.add_noise_({"w": TWO.clone()})
    with pytest.raises(ReplayRefused, match="was put back"):
        give(release, 0, TWO)


def test_a_replay_under_other_names_is_no_second_noise(tmp_path: Path):
    """Two hundred replays under two hundred names had a mean with a fourteenth of the noise."""
    for k in range(2):
        names = {f"n{k}": (2,)}
        if k:
            with pytest.raises(InvalidInput, match="sums"):
                PrivateSum(PLAN, clip=1.0, shape=names, run=tmp_path / "r")
            break
        sums = PrivateSum(PLAN, clip=1.0, shape=names, run=tmp_path / "r")
        sums.add({f"n{k}": np.full((1, 2), 0.3)}, ids=[1])
        sums.ledger.let_go()


def test_bits_of_another_type_are_another_sum(tmp_path: Path):
    release = begin(tmp_path / "r")
    half = ONE.to(torch.bfloat16)
    give(release, 0, half)
    release.ledger.let_go()
    with pytest.raises(ReplayRefused):
        give(begin(tmp_path / "r"), 0, half.view(torch.float16))


def test_an_older_object_does_not_go_on_beside_a_newer_one(tmp_path: Path):
    """Its step was on record under keys that the folder did not hold: a replay had other noise."""
    older = begin(tmp_path / "r")
    give(older, 0, ONE)
    newer = begin(tmp_path / "r")
    with pytest.raises(ReplayRefused, match="gone on with this run"):
        give(older, 1, TWO)
    with pytest.raises(ReplayRefused, match="gone on with this run"):
        give(older, 1, TWO)
    with pytest.raises(ReplayRefused, match="gone on with this run"):
        older.ledger.note("replay", step=0)
    with pytest.raises(ReplayRefused, match="gone on with this run"):
        give(older, 1, TWO)
    give(newer, 0, ONE), give(newer, 1, TWO)
    newer.close_run()
    assert not verify(tmp_path / "r").refuted


def test_files_may_be_noted_while_a_run_is_open(tmp_path: Path):
    release = begin(tmp_path / "r")
    give(release, 0, ONE)
    (tmp_path / "r" / "report.html").write_text("a page")
    note_files(tmp_path / "r")
    give(release, 1, TWO)
    release.close_run()
    assert verify(tmp_path / "r").answer == "PROVED"


class Interrupting:
    """A connection that is interrupted right after it has written a row."""

    def __init__(self, db: sqlite3.Connection, word: str) -> None:
        self.db, self.word = db, word

    def __getattr__(self, name: str) -> object:
        return getattr(self.db, name)

    def execute(self, sql: str, *rest: object) -> sqlite3.Cursor:
        done = self.db.execute(sql, *rest)  # type: ignore[arg-type]
        if self.word and sql.startswith(self.word):
            self.word = ""
            raise KeyboardInterrupt
        return done


@pytest.mark.parametrize("word", ["INSERT INTO steps", "COMMIT"])
def test_an_interrupt_right_after_a_row_breaks_no_chain(tmp_path: Path, word: str):
    """Most of a small step is the write: Ctrl-C is seen when it is over."""
    release = begin(tmp_path / "r")
    give(release, 0, ONE)
    file = release.ledger
    file.db = Interrupting(file.db, word)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        release.note_files() if word == "COMMIT" else give(release, 1, TWO)
    give(release, 1, TWO)
    release.close_run()
    found = verify(tmp_path / "r")
    assert found.answer == "PROVED"
    assert found.released == 2


def norms(count: int) -> ClippedSum:
    ones = torch.ones(count)
    values = {"w": torch.zeros(3)}
    return ClippedSum(values, 1.0, norms=0.1 * ones, losses=ones, bad=ones < 0, present=ones > 0)


def test_a_moving_clip_norm_is_part_of_what_is_repeated(tmp_path: Path):
    """A step was passed over, so nothing was learned of it, and the next one had the same sum under
    another multiple of the same noise: two equations for sum and noise."""
    plan = Plan(participation=SinglePass(steps=4), strategy=identity(), noise_multiplier=4.0)
    moving = QuantileClip(initial=1.0, units=10, bit_noise=20.0)

    def run() -> Release:
        return Release.begin(plan, {"w": (3,)}, clip=moving, run=tmp_path / "r")

    def step(release: Release, total: torch.Tensor) -> torch.Tensor:
        values, own = {"w": total.clone()}, [norms(10)]
        at = release.step
        leave = release.admit(at, release.identify([at]))
        release.close(leave, values, also=release.counted(own))
        release.learn(own, step=at)
        return values["w"]

    first = run()
    step(first, ONE)
    before: Clip = first.threshold.clip
    step(first, TWO)
    first.ledger.let_go()
    again = run()
    again.skip()
    assert again.threshold.clip != before
    with pytest.raises(ReplayRefused):
        step(again, TWO)


def test_the_counts_of_a_moving_clip_share_no_stream():
    plan = Plan(participation=SinglePass(steps=4), strategy=identity(), noise_multiplier=4.0)
    moving = QuantileClip(initial=1.0, units=10, bit_noise=20.0)
    with pytest.raises(InvalidInput, match="name of the counts"):
        Release.begin(plan, {COUNT: (3,)}, clip=moving)


def test_a_fork_inherits_what_its_ancestor_rested_on(tmp_path: Path):
    """The fork of a run with a test seed was PROVED."""
    sums = PrivateSum(PLAN, clip=1.0, shape=(), run=tmp_path / "a", source=named_seed(seed=1))
    sums.add([0.5])
    sums.close()
    for old, new in (("a", "b"), ("b", "c")):
        fork(tmp_path / old, tmp_path / new)
        child = PrivateSum(PLAN, clip=1.0, shape=(), run=tmp_path / new)
        child.add([0.5], ids=[1])
        said = " ".join(child.statement().assumptions)
        assert "NOT PRIVATE" in said
        assert "fingerprints only" in said
        child.close()
        found = verify(tmp_path / new)
        assert found.answer == "NOT PRIVATE"
        assert not found.refuted


def test_names_are_matched_whatever_their_order():
    plan = Plan(participation=SinglePass(steps=3), strategy=tree(), noise_multiplier=0.0)
    sums = PrivateSum(plan, clip=9.0, shape={"a": (), "b": ()})
    assert sums.add({"b": [1.0], "a": [2.0]}, ids=[1]) == {"a": 2.0, "b": 1.0}


def test_an_empty_step_of_a_sum_is_noise_alone():
    plan = Plan(participation=SinglePass(steps=3), strategy=tree(), noise_multiplier=0.0)
    assert PrivateSum(plan, clip=9.0, shape=(2,)).add(np.zeros((0, 2)), ids=[]).tolist() == [0, 0]


@pytest.mark.parametrize("divisor", [0, -3, float("nan"), float("inf")])
def test_a_divisor_is_a_positive_number(divisor: float):
    with pytest.raises(NoshuffleError, match="divisor"):
        Release.begin(PLAN, {"w": (2,)}, clip=1.0, divisor=divisor)


def _cut_last(path: Path) -> None:
    db = sqlite3.connect(path / "ledger.sqlite")
    db.execute("DELETE FROM log WHERE seq = (SELECT MAX(seq) FROM log)")
    db.commit()
    db.close()


def _page(name: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("ε = 0.01")

    return write


CHANGES = {
    "newest row cut": _cut_last,
    "folder": _page("report/index.html"),
    "hidden": _page(".report.html"),
    "like the ledger": _page("ledger.sqlite.html"),
    "among checkpoints": _page("checkpoints/model.safetensors"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("steps", [3, 20])
def test_what_was_changed_is_not_proved(tmp_path: Path, change: str, steps: int):
    private = open_run(tmp_path / "r")
    x, y = data()
    for t in range(steps):
        own = np.arange(6) + 6 * (t % 4)
        private.step(LOSS, x[own], y[own], ids=own)
    private.save()
    private.close()
    assert verify(tmp_path / "r").answer == "PROVED"
    shutil.copytree(tmp_path / "r", tmp_path / "changed")
    CHANGES[change](tmp_path / "changed")
    assert verify(tmp_path / "changed").answer != "PROVED"

"""Admission under every participation, against slow definitions; durability; replay."""

from __future__ import annotations

import itertools
import math
import sqlite3

import numpy as np
import pytest

from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    ParticipationViolation,
    ReplayRefused,
    VerificationFailed,
)
from noshuffle.participation import (
    AnyOrderEpochs,
    Epochs,
    FixedSize,
    MinSeparation,
    Restarted,
    SinglePass,
)
from noshuffle.release import guard
from noshuffle.release.ledger import Ledger
from noshuffle.release.ledger_file import LedgerFile
from noshuffle.release.ledger_tables import Evidence, broken_link, step_link
from noshuffle.release.units import BatchCache, Seen, Spread, UnitTable


def is_allowed(participation, pattern):
    """The definition of each pattern, written for people: all steps of one unit at once."""
    if isinstance(participation, SinglePass):
        return len(pattern) <= 1
    if isinstance(participation, Epochs):
        return len({t % participation.steps_per_epoch for t in pattern}) <= 1
    if isinstance(participation, AnyOrderEpochs):
        epochs = [t // participation.steps_per_epoch for t in pattern]
        return len(set(epochs)) == len(epochs)
    if isinstance(participation, MinSeparation):
        gaps = [b - a for a, b in itertools.pairwise(pattern)]
        return len(pattern) <= participation.max_participations and all(
            g >= participation.separation for g in gaps
        )
    base, every = participation.participation, participation.every
    if isinstance(base, Epochs):
        blocks = [[t % every for t in pattern if t // every == i] for i in range(99)]
        return all(is_allowed(base, block) for block in blocks)
    return is_allowed(base, pattern)


RULES = [
    SinglePass(steps=8),
    Epochs(epochs=4, steps_per_epoch=2),
    AnyOrderEpochs(epochs=2, steps_per_epoch=4),
    MinSeparation(steps=8, separation=3, max_participations=2),
    Restarted(Epochs(epochs=4, steps_per_epoch=2), every=4),
    Restarted(Epochs(epochs=3, steps_per_epoch=3), every=4),
    Restarted(SinglePass(steps=8), every=4),
    Restarted(MinSeparation(steps=8, separation=2, max_participations=3), every=4),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_every_pattern_of_one_unit_is_judged_by_its_definition(rule):
    """All 2^n patterns: the guard lets through exactly those that the promise allows."""
    steps, refused = rule.steps, set[tuple[int, ...]]()
    for bits in range(2**steps):
        pattern = tuple(t for t in range(steps) if bits >> t & 1)
        passed = not any(pattern[:i] in refused for i in range(1, len(pattern) + 1))
        ledger = Ledger(rule) if passed else None  # else what begins so was refused already
        for t in range(steps) if ledger else ():
            ids = np.array([1] if t in pattern else [], dtype=np.int64)
            try:
                ledger.record(ledger.admit(t, ids, bytes([t])))
            except ParticipationViolation:
                passed = False
                refused.add(pattern[: pattern.index(t) + 1])
                break
        assert passed == is_allowed(rule, pattern), pattern


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_one_record_is_judged_as_many_are(rule):
    for step, first, last, count in itertools.product(range(9), range(8), range(8), range(1, 5)):
        if first <= last:
            one = {"first": [first, first], "last": [last, last], "count": [count, count]}
            seen = Seen(**{name: np.array(value) for name, value in one.items()})
            wanted = guard.is_admitted(rule, step=step, seen=seen)
            found = guard.is_group_admitted(rule, step=step, record=(first, last, count))
            assert [found, found] == wanted.tolist()


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_batches_that_are_remembered_are_judged_like_new_ones(rule, drop):
    """The same few batches in any order, against a ledger that remembers nothing."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        batches = [np.array([3, 1, 2]), np.array([4, 5]), np.array([5, 6, 7]), np.array([9])]
        ledger, slow = Ledger(rule), Ledger(rule)
        for t in range(rule.steps):
            batch = batches[int(rng.integers(len(batches)))].copy()
            slow._known = BatchCache()
            told = []
            for one in (ledger, slow):
                try:
                    told.append(one.admit(t, batch, bytes([t]), drop=drop))
                except ParticipationViolation as error:
                    told.append(str(error))
            fast, wanted = told
            if isinstance(wanted, str):
                assert fast == wanted
                break
            assert fast.units.tolist() == wanted.units.tolist()
            assert fast.is_empty == wanted.is_empty
            assert (fast.keep is None) == (wanted.keep is None)
            assert fast.keep is None or fast.keep.tolist() == wanted.keep.tolist()
            ledger.record(fast)
            slow.record(wanted)
            batch[:] = 0  # the caller's own array
        pairs = zip(ledger.units(), slow.units())
        (a, b), (one, two) = pairs
        assert a.tolist() == b.tolist()
        assert [v.tolist() for v in vars(one).values()] == [v.tolist() for v in vars(two).values()]


def test_what_is_recorded_is_known_whoever_asks_next(monkeypatch, tmp_path):
    """The table is told later than the file; nobody sees the difference, not even if it fails."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(Epochs(epochs=3, steps_per_epoch=2), path=path)
    ledger.record(ledger.admit(0, np.array([5, 6]), b"a"))
    assert ledger.released == 1

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UnitTable, "update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ledger.settle()
        with pytest.raises(KeyboardInterrupt):  # nothing is admitted before it is told
            ledger.admit(1, np.array([5]), b"b")
    with pytest.raises(ParticipationViolation, match="unit 5 may not take part in step 1"):
        ledger.admit(1, np.array([5]), b"b")
    ledger.record(ledger.admit(1, np.array([7]), b"b"))
    assert ledger.units()[1].count.tolist() == [1, 1, 1]
    ledger.record(ledger.admit(2, np.array([5, 6]), b"a"))
    ledger.close()
    again = Ledger(Epochs(epochs=3, steps_per_epoch=2), path=path)
    assert again.units()[1].count.tolist() == [2, 2, 1]
    with pytest.raises(ValueError, match="read-only"):
        again.admit(3, np.array([7]), b"b").units[0] = 8
    again.close()


class InterruptedAt(Ledger):
    """Interrupted as soon as it is about to note that a row was written, so many times."""

    times = 0

    def __setattr__(self, name, value):
        if name == "_later" and value is not None and self.times:
            self.times -= 1
            raise KeyboardInterrupt
        super().__setattr__(name, value)


@pytest.mark.parametrize("times", [1, 2])
def test_a_row_whose_call_was_interrupted_is_no_other_process(times):
    """The row is on the disk, and the call ended before it said so here; and once more so."""
    ledger = InterruptedAt(SinglePass(steps=5))
    ledger.record(ledger.admit(0, np.array([5, 6]), b"a"), bytes(16))
    ledger.times = times
    with pytest.raises(KeyboardInterrupt):
        ledger.record(ledger.admit(1, np.array([7, 8]), b"b"), bytes([1]) * 16)
    if times == 2:
        leave = ledger.admit(1, np.array([9]), b"c")
        with pytest.raises(ReplayRefused, match="by a call that was interrupted; give the step"):
            ledger.record(leave)
    assert ledger.released == 2
    with pytest.raises(ReplayRefused, match="step 1 is on record with other data"):
        ledger.admit(1, np.array([9]), b"c")
    assert ledger.admit(1, np.array([7, 8]), b"b").is_replay
    assert ledger.digest(1) == bytes([1]) * 16
    with pytest.raises(ParticipationViolation, match="unit 7"):
        ledger.admit(2, np.array([7]), b"c")
    ledger.record(ledger.admit(2, np.array([9]), b"c"))
    assert [row.units.tolist() for row in ledger.rows()] == [[5, 6], [7, 8], [9]]


def test_ids_of_another_width_are_not_taken_for_others():
    """[5, 0] in 32 bits has the bytes of [5] in 64."""
    ledger = Ledger(Epochs(epochs=2, steps_per_epoch=3))
    ledger.record(ledger.admit(0, np.array([5]), b"a"))
    ledger.record(ledger.admit(1, np.array([0]), b"b"))
    ledger.record(ledger.admit(2, np.array([7]), b"c"))
    with pytest.raises(ParticipationViolation, match="unit 0 may not"):
        ledger.admit(3, np.array([5, 0], dtype=np.int32), b"a")
    assert ledger.admit(3, np.array([5], dtype=np.int32), b"a").units.tolist() == [5]


def test_units_that_are_remembered_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr("noshuffle.release.units._MOST_ROWS", 6)
    ledger = Ledger(SinglePass(steps=50))
    for t in range(50):
        ledger.record(ledger.admit(t, np.array([2 * t, 2 * t + 1]), bytes([t])))
        assert len(ledger._known._batches) <= 3


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_extremes_admit_no_batch_that_its_units_would_not(rule):
    rng, sure = np.random.default_rng(0), 0
    for step in range(1, 8):
        for size in (1, 2, 2, 3) * 40:
            first = rng.integers(0, step, size)
            last = np.maximum(first, rng.integers(0, step, size))
            seen = Seen(first, last, rng.integers(1, 4, size))
            ends = np.stack([first, last, seen.count, 0 * first])
            spread = Spread(size, tuple(ends.min(axis=1)), tuple(ends.max(axis=1)))
            is_sure = guard.are_all_admitted(rule, step=step, spread=spread)
            assert not is_sure or guard.is_admitted(rule, step=step, seen=seen).all()
            sure += is_sure
    assert (sure > 0) == ("SinglePass" not in repr(rule))


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_dropping_admits_the_greedy_pattern(rule):
    rng = np.random.default_rng(1)
    ledger, taken = Ledger(rule), {}
    for t in range(rule.steps):
        ids = rng.integers(0, 6, size=5)
        admission = ledger.admit(t, ids, bytes([t]), drop=True)
        keep = np.ones(5, bool) if admission.keep is None else admission.keep
        seen_now = set()
        for unit, is_kept in zip(ids.tolist(), keep):
            mine = taken.setdefault(unit, [])
            fine = unit not in seen_now and is_allowed(rule, [*mine, t])
            assert is_kept == fine
            seen_now.add(unit)
            if fine:
                mine.append(t)
        assert admission.is_empty == (not keep.any())
        ledger.record(admission)
        again = ledger.admit(t, ids, bytes([t]))  # a replay keeps the same rows, charges nothing
        assert again.is_replay
        assert np.array_equal(np.ones(5, bool) if again.keep is None else again.keep, keep)
    ids, seen = ledger.units()
    assert dict(zip(ids.tolist(), seen.count.tolist())) == {
        u: len(p) for u, p in taken.items() if p
    }


def test_message_names_unit_step_and_rule():
    ledger = Ledger(MinSeparation(steps=9, separation=3, max_participations=2))
    ledger.record(ledger.admit(0, np.array([4, 5]), b"a"))
    with pytest.raises(ParticipationViolation, match=r"unit 5 .* step 1: it took part in step 0"):
        ledger.admit(1, np.array([9, 5]), b"b")
    ledger = Ledger(Epochs(epochs=2, steps_per_epoch=2))
    ledger.record(ledger.admit(0, np.array([4, 5]), b"a"))
    with pytest.raises(ParticipationViolation, match=r"2 more|1 more units.*seen first in step 0"):
        ledger.admit(1, np.array([4, 5]), b"b")


def test_a_unit_twice_in_a_batch():
    with pytest.raises(ParticipationViolation, match="unit 7 appears twice in step 0"):
        Ledger(SinglePass(steps=3)).admit(0, np.array([7, 8, 7]), b"")
    users = Ledger(SinglePass(steps=3), unit="user")
    admission = users.admit(0, np.array([7, 8, 7]), b"")
    assert admission.keep is None
    assert admission.units.tolist() == [7, 8]


def test_horizon_and_order_of_steps():
    ledger = Ledger(SinglePass(steps=1))
    with pytest.raises(InvalidInput, match="the next step is 0"):
        Ledger(SinglePass(steps=5)).admit(2, np.array([1]), b"")
    ledger.record(ledger.admit(0, np.array([1]), b""))
    with pytest.raises(HorizonExceeded, match="beyond the 1 planned"):
        ledger.admit(1, np.array([2]), b"")


def test_without_ids_batches_are_units():
    single = Ledger(SinglePass(steps=5))
    single.record(single.admit(0, None, b"a"))
    with pytest.raises(ParticipationViolation, match="seen before"):
        single.admit(1, None, b"a")
    single.record(single.admit(1, None, b"b"))
    with pytest.raises(InvalidInput, match="identifies units by fingerprints"):
        single.admit(2, np.array([1]), b"c")
    epochs = Ledger(Epochs(epochs=3, steps_per_epoch=2))
    for t, batch in enumerate([b"a", b"b", b"a"]):
        epochs.record(epochs.admit(t, None, batch))
    for wrong in (b"a", b"c"):  # moved; changed
        with pytest.raises(ParticipationViolation, match="last epoch"):
            epochs.admit(3, None, wrong)
    dropped = epochs.admit(3, None, b"c", drop=True)
    assert dropped.is_empty
    epochs.record(dropped)
    assert epochs.admit(3, None, b"c").is_empty  # the replay releases noise alone again
    epochs.record(epochs.admit(4, None, b"a"))
    assert epochs.admit(5, None, b"c", drop=True).is_empty  # it never took part: rows of a, perhaps
    assert not epochs.admit(5, None, b"b").is_empty
    shuffled = Ledger(AnyOrderEpochs(epochs=2, steps_per_epoch=2))
    for t, batch in enumerate([b"a", b"b", b"b"]):
        shuffled.record(shuffled.admit(t, None, batch))
    for wrong in (b"b", b"c"):  # twice in an epoch; rows that may have been in a and b
        with pytest.raises(ParticipationViolation, match="seen before"):
            shuffled.admit(3, None, wrong)
    shuffled.record(shuffled.admit(3, None, b"a"))
    restarted = Ledger(Restarted(Epochs(epochs=4, steps_per_epoch=2), every=4))
    for t, batch in enumerate([b"a", b"b", b"a", b"b", b"b", b"a", b"b", b"a"]):
        restarted.record(restarted.admit(t, None, batch))
    rows = [(t, np.array([unit])) for t, unit in enumerate([1, 2, 2, 3])]
    for rule, wrong in ((AnyOrderEpochs(2, 2), 1), (Epochs(4, 1), 2)):  # as verify sees them
        assert not list(guard.violations(rule, UnitTable(), rows))
        assert len(list(guard.violations(rule, UnitTable(), rows, by_content=True))) == wrong


def test_a_replay_is_admitted_without_a_row_and_keeps_the_units_of_its_step(tmp_path):
    """Whether its sum is the released one, `Release` decides by the digest."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(SinglePass(steps=5), path=path)
    for t in range(3):
        ledger.record(ledger.admit(t, np.array([t, t + 10]), bytes([t])), bytes([t]) * 16)
    ledger.let_go()
    again = Ledger(SinglePass(steps=5), path=path)  # a second process, after a crash of the first
    assert again.released == 3
    repeated = again.admit(1, np.array([1, 11]), bytes([1]))
    assert repeated.is_replay
    assert repeated.keep is None
    assert again.digest(1) == bytes([1]) * 16
    with pytest.raises(ReplayRefused, match="another process"):  # never a second row of a step
        again.record(repeated)
    other = again.admit(1, np.array([1, 12]), b"")  # a unit that was not in it stays out
    assert other.keep.tolist() == [True, False]
    assert other.units.tolist() == [1, 11]
    with pytest.raises(ReplayRefused, match="step 1 is on record with other data"):
        again.admit(1, np.array([1, 11]), bytes([9]))  # both prints are known, and differ
    with pytest.raises(ParticipationViolation, match="unit 11"):
        again.admit(3, np.array([11]), bytes([3]))


@pytest.mark.parametrize("is_closed", [True, False])
def test_late_digests_reach_the_disk_with_the_next_row_or_the_end(tmp_path, is_closed):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(SinglePass(steps=6), path=path)
    for t in range(4):
        ledger.record(ledger.admit(t, np.array([t]), b""))
        ledger.expect_digest(t, lambda t=t: bytes([t + 1]) * 16)
    if is_closed:
        ledger.close()
    else:
        ledger.db.close()  # as a process that is killed leaves it
    again = Ledger(SinglePass(steps=6), path=path)
    assert [again.digest(t) for t in range(3)] == [bytes([t + 1]) * 16 for t in range(3)]
    assert again.digest(3) == (bytes([4]) * 16 if is_closed else b"")
    rows = list(again.rows())
    assert [row.digest for row in rows] == [b""] * 4
    assert [row.late for row in rows] == [b"", *(bytes([t + 1]) * 16 for t in range(3))]


def test_a_link_tells_where_a_field_ends():
    """Or bytes could move from the batch into the digest, and from one field into two."""
    made = [b"batch", b"digest", b"", b"ids"]
    links = {step_link(b"before", 0, 0, 1.0, 3, *made)}
    for moved in ([b"batchd", b"igest", b"", b"ids"], [b"batch", b"", b"digest", b"ids"]):
        links.add(step_link(b"before", 0, 0, 1.0, 3, *moved))
    assert len(links) == 3


def test_the_chain_names_every_row(tmp_path):
    """Steps and log share one sequence; whatever is changed, cut or exchanged breaks a link."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(SinglePass(steps=6), path=path)
    ledger.begin_life(keys="a")
    for t in range(3):
        ledger.record(ledger.admit(t, np.array([t]), b"b"), bytes([t]) * 16)
        ledger.note("note", number=t)
    ledger.close()
    db = sqlite3.connect(path, isolation_level=None)
    assert broken_link(db) is None
    seqs = [
        seq
        for (seq,) in db.execute("SELECT seq FROM steps UNION ALL SELECT seq FROM log ORDER BY seq")
    ]
    assert seqs == list(range(1, len(seqs) + 1))
    changes = [
        f"UPDATE steps SET {field} = {value} WHERE step = 1"
        for field, value in {
            "seq": 99, "life": 1, "time": 1.5, "batch": "x'00'", "digest": "x'00'",
            "late": "x'00'", "units": 7, "ids": "x'00'", "link": "x'00'", "step": 77,
        }.items()
    ] + [
        f"UPDATE log SET {field} = {value} WHERE kind = 'note' AND seq = "
        "(SELECT MIN(seq) FROM log WHERE kind = 'note')"
        for field, value in {
            "seq": 99, "kind": "'other'", "time": 1.5, "body": "x'00'", "link": "x'00'",
        }.items()
    ] + [
        "DELETE FROM steps WHERE step = 1",
        "DELETE FROM log WHERE kind = 'life'",
        "INSERT INTO log SELECT seq + 99, kind, time, body, link FROM log WHERE kind = 'life'",
    ]  # fmt: skip
    for change in changes:
        db.execute("BEGIN")
        db.execute(change)
        assert broken_link(db) is not None, change
        db.execute("ROLLBACK")
    assert broken_link(db) is None
    db.close()


@pytest.mark.parametrize("summarise_at", [None, 0, 3, 7])
def test_reopened_ledger_knows_everything(tmp_path, summarise_at):
    rule = Restarted(Epochs(epochs=6, steps_per_epoch=2), every=4)
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(rule, path=path)
    rng = np.random.default_rng(3)
    for t in range(10):
        ids = rng.permutation(30)[:12]
        ledger.record(ledger.admit(t, ids, bytes([t]), drop=True))
        if t == summarise_at:
            ledger.summarise()
    other = Ledger(rule, path=path)
    for a, b in zip(vars(ledger.units()[1]).values(), vars(other.units()[1]).values()):
        assert np.array_equal(a, b)
    assert other.released == 10


def test_a_summary_is_written_when_it_pays(tmp_path, monkeypatch):
    """Few participations a unit are read from the steps again; many are summarised."""
    monkeypatch.setattr("noshuffle.release.ledger._TIDY_UNITS", 8)
    path = tmp_path / "ledger.sqlite"
    rule = Epochs(epochs=20, steps_per_epoch=2)
    ledger = Ledger(rule, path=path)
    covered = []
    for t in range(40):
        ledger.record(ledger.admit(t, np.arange(6) + 6 * (t % 2), bytes([t])))
        if t % 2:
            ledger.tidy()
            covered.append(int(ledger.meta("summarised") or 0))
        if t == 21:  # another process goes on, and knows what is not covered
            ledger = Ledger(rule, path=path)
    assert sorted(set(covered)) == [0, 16, 32]
    assert covered.index(16) == 7  # the eighth epoch
    again = Ledger(rule, path=path)
    assert again.released == 40
    assert again.units()[1].count.tolist() == [20] * 12
    monkeypatch.setattr("noshuffle.release.ledger._TIDY_STEPS", 4)
    again.tidy()
    assert int(again.meta("summarised") or 0) == 40


def test_two_processes_cannot_release_the_same_step(tmp_path):
    path = tmp_path / "ledger.sqlite"
    one, two = (Ledger(SinglePass(steps=5), path=path) for _ in range(2))
    a, b = one.admit(0, np.array([1]), b"a"), two.admit(0, np.array([2]), b"b")
    one.record(a)
    with pytest.raises(ReplayRefused, match="another process"):
        two.record(b)


def test_a_cut_ledger_is_noticed(tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(SinglePass(steps=5), path=path)
    for t in range(3):
        ledger.record(ledger.admit(t, np.array([t]), bytes([t])))
    ledger.db.execute("DELETE FROM steps WHERE step = 1")
    with pytest.raises(VerificationFailed, match="lacks step 1"):
        Ledger(SinglePass(steps=5), path=path)


def test_facts_are_written_once():
    ledger = Ledger(SinglePass(steps=5))
    ledger.bind("plan", "a")
    ledger.bind("plan", "a")
    with pytest.raises(InvalidInput, match="started with plan = a, got b"):
        ledger.bind("plan", "b")


def test_sampled_steps_take_the_draw_and_nothing_else():
    class Fixed:
        def handed_out(self, step):
            return np.array([1, 4, 6]) + step

    ledger = Ledger(FixedSize(steps=4, batch=3, population=10))
    with pytest.raises(ParticipationViolation, match="our sampler"):
        ledger.admit(0, np.array([1, 4, 6]), b"")
    ledger.sampler = Fixed()
    with pytest.raises(ParticipationViolation, match="no ids"):
        ledger.admit(0, None, b"")
    for wrong in ([1, 4], [1, 4, 7], [1, 4, 4], [1, 4, 6, 7]):
        with pytest.raises(ParticipationViolation, match="not the one"):
            ledger.admit(0, np.array(wrong), b"")
    ledger.record(ledger.admit(0, np.array([6, 1, 4]), b""))
    ledger.record(ledger.admit(1, np.array([2, 5, 7]), b""))
    assert ledger.released == 2


def test_many_ids_do_not_need_python_loops():
    """10⁵ ids a step for 30 steps: the work is a few array operations, the state stays right."""
    rule = Epochs(epochs=3, steps_per_epoch=10)
    ledger = Ledger(rule)
    for t in range(rule.steps):
        ids = np.arange(100_000, dtype=np.int64) + 100_000 * (t % 10)
        ledger.record(ledger.admit(t, ids, bytes([t % 10])))
    ids, seen = ledger.units()
    assert len(ids) == 10**6
    assert (seen.count == 3).all()
    assert math.isclose(ledger.released, 30)


@pytest.mark.parametrize("at", ["BEGIN IMMEDIATE", "INSERT INTO meta", "INSERT INTO steps"])
def test_an_interrupted_first_row_leaves_later_ones_durable(tmp_path, at):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(SinglePass(steps=5), path=path)
    real = ledger.db

    class Interrupted:
        in_transaction = property(lambda self: real.in_transaction)

        def execute(self, text, *values):
            found = real.execute(text, *values)
            if text.startswith(at):
                raise KeyboardInterrupt
            return found

    ledger.db = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        ledger.record(ledger.admit(0, np.array([5, 6]), b"batch"))
    ledger.db = real
    ledger.record(ledger.admit(0, np.array([5, 6]), b"batch"))
    assert [row.step for row in Ledger(SinglePass(steps=5), path=path).rows()] == [0]
    real.close()


def test_an_interrupted_summary_does_not_hold_back_the_next_rows(tmp_path):
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(SinglePass(steps=5), path=path)
    ledger.record(ledger.admit(0, np.array([5, 6]), b"batch"))
    ledger.db.execute("BEGIN IMMEDIATE")  # a summary that was left in the middle
    ledger.db.execute("DELETE FROM units")
    ledger.record(ledger.admit(1, np.array([7]), b"other"))
    assert [row.step for row in Ledger(SinglePass(steps=5), path=path).rows()] == [0, 1]
    ledger.close()


def test_a_summary_of_fewer_steps_does_not_replace_one_of_more(tmp_path):
    path, rule = tmp_path / "ledger.sqlite", SinglePass(steps=4)
    ledger = Ledger(rule, path=path)
    ledger.record(ledger.admit(0, np.array([1, 2]), b"0"))
    behind = Ledger(rule, path=path)
    ledger.record(ledger.admit(1, np.array([3]), b"1"))
    ledger.summarise()
    behind.close()
    assert ledger.saved_units()[0] == 2
    ledger.close()
    assert Ledger(rule, path=path).units()[0].tolist() == [1, 2, 3]


def test_the_last_epoch_is_read_from_the_file_and_a_gap_is_noticed(tmp_path):
    ledger = Ledger(Epochs(epochs=3, steps_per_epoch=2), path=tmp_path / "ledger.sqlite")
    for step, batch in enumerate([b"one", b"two", b"one"]):
        ledger.record(ledger.admit(step, None, batch))
    assert Ledger(ledger.participation, path=tmp_path / "ledger.sqlite").admit(3, None, b"two")
    with pytest.raises(ParticipationViolation, match="differs from the batches of the last epoch"):
        ledger.admit(3, None, b"three")
    ledger.db.execute("DELETE FROM steps WHERE step = 1")
    with pytest.raises(VerificationFailed, match="lacks step 1"):
        Ledger(ledger.participation, path=tmp_path / "ledger.sqlite")


@pytest.mark.parametrize(
    "edit",
    [
        "DELETE FROM steps WHERE step = 1",
        "DELETE FROM steps WHERE step = 2",
        "DELETE FROM units",
        "DELETE FROM units WHERE unit = 6",
        "UPDATE units SET count = 1",
        "UPDATE meta SET value = '1' WHERE name = 'summarised'",
    ],
)
def test_a_summary_that_does_not_follow_from_the_steps_is_refused(tmp_path, edit):
    """Units that it forgot would be admitted again."""
    rule, path = MinSeparation(9, 1, 3), tmp_path / "ledger.sqlite"
    ledger = Ledger(rule, path=path)
    for step in range(3):
        ledger.record(ledger.admit(step, np.array([5, 6 + step % 2]), bytes([step])))
    ledger.close()
    assert Ledger(rule, path=path).released == 3
    db = sqlite3.connect(path)
    db.execute(edit)
    db.commit()
    db.close()
    with pytest.raises(VerificationFailed, match="it was cut or edited"):
        Ledger(rule, path=path)


def test_a_ledger_is_opened_as_of_one_moment(tmp_path, monkeypatch):
    """Another process writes its summary while this one reads; half of each would be wrong."""
    rule, path = SinglePass(steps=9), tmp_path / "ledger.sqlite"
    writer = Ledger(rule, path=path)

    def one_more():
        step = writer.released
        writer.record(writer.admit(step, np.array([2 * step, 2 * step + 1]), bytes([step])))
        writer.summarise()

    one_more()
    read = LedgerFile.saved_units

    def in_between(file):
        found = read(file)
        one_more()
        return found

    monkeypatch.setattr(LedgerFile, "saved_units", in_between)
    other = Ledger(rule, path=path)
    assert (other.released, other.units()[0].tolist()) == (1, [0, 1])
    assert writer.released == 2
    with pytest.raises(ReplayRefused, match="another process"):
        other.record(other.admit(1, np.array([2]), b"other"))


def test_a_ledger_that_was_overtaken_writes_nothing(tmp_path):
    """Two objects on one file in one process: the older one would break the chain."""
    first = Ledger(SinglePass(steps=9), path=tmp_path / "ledger.sqlite")
    first.begin_life(keys="a")
    first.record(first.admit(0, np.array([1]), b""), b"digest")
    second = Ledger(SinglePass(steps=9), path=tmp_path / "ledger.sqlite")
    second.begin_life(keys="b")
    with pytest.raises(ReplayRefused, match="gone on with this run"):
        first.record(first.admit(1, np.array([2]), b""), b"digest")
    with pytest.raises(ReplayRefused, match="gone on with this run"):
        first.note("skip", step=0)
    second.record(second.admit(1, np.array([2]), b""), b"digest")
    with pytest.raises(ReplayRefused, match="gone on with this run"):
        first.note("skip", step=0)
    second.close()
    evidence = Evidence(tmp_path / "ledger.sqlite")
    assert broken_link(evidence.db) is None
    evidence.close()

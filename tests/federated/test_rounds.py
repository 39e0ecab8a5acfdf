"""The protocol: bad replies cost nobody else, crashes skip a row, resumed runs are the same run."""

from __future__ import annotations

import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.federated.blobs import killed

from noshuffle import MinSeparation, Plan
from noshuffle.errors import InvalidInput, NoshuffleError, ReuseRefused
from noshuffle.federated import (
    Rounds,
    ServerOptimizer,
    observed_participation,
    read_log,
    statement_for,
)
from noshuffle.federated.server_checks import checked_sum
from noshuffle.noise import test_source as a_source
from noshuffle.release.verify import verify

USERS = [f"user {i}" for i in range(20)]


@lru_cache
def a_plan() -> Plan:
    return Plan.fit(MinSeparation(10, 3, 3), mechanism="blt", noise_multiplier=0.7, unit="user")


def rounds_in(run: Path | None, **more: Any) -> Rounds:
    server = ServerOptimizer(
        {"w": torch.zeros(3), "scale": torch.tensor(1.0)},
        a_plan(),
        clip=1.0,
        cohort_size=4,
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
        source=a_source(seed=4),
        run=run,
    )
    return Rounds(server, **more)


def check_ins(step: int) -> list[str]:
    return random.Random(step).sample(USERS, 12)


def delta_of(user: str, step: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * int(user.split()[1]) + step)
    return {"w": torch.randn(3, generator=g), "scale": torch.randn((), generator=g)}


def one_round(rounds: Rounds, *, backwards: bool = False, silent: tuple[str, ...] = ()) -> Any:
    work = rounds.begin(check_ins(rounds.server.round))
    assert work is not None
    users = [u for u in work.users if u not in silent]
    for user in reversed(users) if backwards else users:
        assert rounds.receive(user, delta_of(user, work.step)) is None
    return rounds.finish()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def test_bad_replies_are_refused_and_cost_nobody_else(tmp_path: Path) -> None:
    honest, attacked = rounds_in(None), rounds_in(None)
    work = honest.begin(check_ins(0))
    assert work is not None
    assert attacked.begin(check_ins(0)) is not None
    *good, bad = work.users
    stranger = next(u for u in USERS if u not in work.users)
    fine = delta_of(good[0], 0)
    for user in good:
        honest.receive(user, delta_of(user, 0))
    lines = [
        attacked.receive(bad, {"w": fine["w"]}),
        attacked.receive(bad, {**fine, "w": torch.zeros(4)}),
        attacked.receive(bad, {**fine, "w": torch.zeros(3, dtype=torch.int64)}),
        attacked.receive(bad, {**fine, "extra": torch.zeros(1)}),
        attacked.receive(bad, {**fine, "x" * 10**6: torch.zeros(1)}),
        attacked.receive(bad, {"w": "text", "scale": 1.0}),  # type: ignore[dict-item]
        attacked.receive(bad, [1, 2]),  # type: ignore[arg-type]
        attacked.receive(bad, {**fine, "w": torch.zeros(3).to_sparse()}),
        attacked.receive(bad, fine, norm="large"),  # type: ignore[arg-type]
        attacked.receive([bad], fine),  # type: ignore[arg-type]
        attacked.receive(stranger, fine),
        attacked.receive(bad, fine, step=3),
        attacked.receive(bad, {**fine, "w": torch.full((3,), math.nan)}),
        attacked.receive(bad, fine),
    ]
    for user in good:
        assert attacked.receive(user, delta_of(user, 0)) is None
        lines.append(attacked.receive(user, delta_of(user, 7)))
    words = ["lacks 'scale'", "must be floating point of shape (3,)", "torch.int64", "'extra'"]
    words += ["has 'xxx"]
    words += ["lacks 'w'", "named tensors", "shape (3,)", "named tensors", "was not asked"]
    words += ["was not asked", "answers round 3", "NaN", *["answers twice"] * 4]
    for line, word in zip(lines, words, strict=True):
        assert line is not None
        assert word in line
        assert "\n" not in line
        assert len(line) <= 300
    report, other = attacked.finish(), honest.finish()
    assert same(report.parameters, other.parameters)
    assert (report.asked, report.answered, report.nonfinite) == (4, 4, 1)
    assert len(report.refused) == len(lines)
    assert attacked.receive(good[0], fine) is not None  # too late


def test_the_server_clips_again_and_ignores_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the grid of the noise, on which a last place can make a whole step."""
    monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)
    rounds = rounds_in(None)
    work = rounds.begin(check_ins(0))
    assert work is not None
    huge = {"w": torch.full((3,), 1e6), "scale": torch.tensor(1e6), "seen": torch.tensor(9)}
    quiet = rounds_in(None)
    assert quiet.begin(check_ins(0)) is not None
    unit = {"w": torch.full((3,), 0.5), "scale": torch.tensor(0.5)}
    for r, delta in ((rounds, huge), (quiet, unit)):
        assert r.receive(work.users[0], delta) is None
    a, b = rounds.finish().parameters, quiet.finish().parameters
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6)


def test_order_of_arrival_does_not_matter_to_the_last_bit() -> None:
    one, two = rounds_in(None), rounds_in(None)
    for _ in range(6):
        assert same(one_round(one).parameters, one_round(two, backwards=True).parameters)


def test_limits_hold_and_few_are_enough_or_are_waited_for() -> None:
    rounds = rounds_in(None, at_least=2)
    cohorts = []
    for _ in range(10):
        work = rounds.begin(USERS[:5])
        if work is None:
            assert rounds.server.round == len(cohorts)  # nobody charged
            work = rounds.begin(USERS[10:])
            assert work is not None
        cohorts.append(work.users)
        rounds.finish()
    assert {len(users) for users in cohorts} == {2, 4}
    seen = observed_participation(cohorts)
    assert seen.separation >= 3
    assert seen.max_participations <= 3
    few = rounds_in(None)
    assert [len(few_users(few)) for _ in range(2)] == [4, 1]
    assert few.begin(USERS[:5]) is None


def few_users(rounds: Rounds) -> tuple[Any, ...]:
    work = rounds.begin(USERS[:5])
    assert work is not None
    rounds.finish()
    return work.users


def test_stop_and_resume_is_the_run_that_never_stopped(tmp_path: Path) -> None:
    straight = rounds_in(tmp_path / "a")
    for _ in range(9):
        expected = one_round(straight, silent=("user 3",)).parameters
    killed(lambda: [one_round(r, silent=("user 3",)) for r in [rounds_in(tmp_path / "b")] * 4])
    resumed = rounds_in(tmp_path / "b")
    assert resumed.resume() == ()
    for _ in range(5):
        got = one_round(resumed, silent=("user 3",)).parameters
    assert same(got, expected)
    for r, name in ((straight, "a"), (resumed, "b")):
        r.close()
        assert verify(tmp_path / name).refuted == ()


@pytest.mark.parametrize("crash", ["after intent", "after some replies", "before checkpoint"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_crash_skips_the_row_and_keeps_the_charge(tmp_path: Path, crash: str, at: int) -> None:
    reference = rounds_in(tmp_path / "a")
    for t in range(8):
        if t == at:
            assert reference.begin(check_ins(t)) is not None
            reference.abandon()
        else:
            expected = one_round(reference).parameters

    def first() -> None:
        run = rounds_in(tmp_path / "b")
        for _ in range(at):
            one_round(run)
        work = run.begin(check_ins(at))
        assert work is not None
        if crash == "after some replies":
            run.receive(work.users[0], delta_of(str(work.users[0]), at))
        if crash == "before checkpoint":
            run.save = lambda: None  # type: ignore[method-assign]
            run.finish()

    killed(first)
    killed(lambda: rounds_in(tmp_path / "b").resume())  # a second crash changes nothing
    again, before = rounds_in(tmp_path / "b"), rounds_in(None)
    assert again.resume() == (at,)
    for _ in range(at):
        one_round(before)
    assert same(again.server.parameters(), before.server.parameters())
    assert again.server.round == at + 1
    asked = before.begin(check_ins(at))
    assert asked is not None
    assert set(read_log(tmp_path / "b")[at]) == set(again.server.units(asked.users))
    for _ in range(at + 1, 8):
        got = one_round(again).parameters
    assert same(got, expected)
    again.close()
    assert verify(tmp_path / "b").refuted == ()


def test_another_setting_or_kind_of_id_is_refused(tmp_path: Path) -> None:
    rounds = rounds_in(tmp_path / "a")
    one_round(rounds)
    rounds.close()
    with pytest.raises(InvalidInput, match="clip"):
        ServerOptimizer(
            {"w": torch.zeros(3)}, a_plan(), clip=2.0, cohort_size=4, run=tmp_path / "a",
            optimizer_fn=lambda p: torch.optim.SGD(p, lr=0.5),
        )  # fmt: skip
    resumed = rounds_in(tmp_path / "a")
    resumed.resume()
    with pytest.raises(InvalidInput, match="told its units apart by names"):
        resumed.begin([1, 2, 3])


def test_a_round_that_fails_half_way_ends_this_server(tmp_path: Path) -> None:
    """Noise was added, then the update failed: the run is opened again, and passes the round."""
    rounds = rounds_in(tmp_path / "a")
    one_round(rounds)
    before = rounds.server.parameters()

    def fail() -> None:
        raise RuntimeError("no memory left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds.server.optimizer, "step", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            one_round(rounds)
    for use in (lambda: rounds.begin(check_ins(1)), rounds.abandon, rounds.save, rounds.resume):
        with pytest.raises(NoshuffleError, match="half-way"):
            use()
    rounds.close()  # saves nothing, lets go of the folder
    rounds = rounds_in(tmp_path / "a")
    assert rounds.resume() == (1,)
    assert same(rounds.server.parameters(), before)
    one_round(rounds)
    assert rounds.server.round == 3


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"w": torch.zeros(4), "scale": torch.tensor(1.0)},
            r'sums = .*"w": \[3\]}, .* "w": \[4\]}',
        ),
        ({"v": torch.zeros(3), "scale": torch.tensor(1.0)}, "begun with sums"),
        ({"w": torch.zeros(3)}, "begun with sums"),
        (None, r"optimizer = SGD\(lr=0.5, momentum=0.9\), and now it is Adam"),
        ({"lr": 0.25, "momentum": 0.9}, r"now it is SGD\(lr=0.25, momentum=0.9\)"),
        ({"lr": 0.5}, r"now it is SGD\(lr=0.5\); build it as it was"),
    ],
)
def test_another_model_or_optimizer_is_refused(tmp_path: Path, given: Any, words: str) -> None:
    rounds = rounds_in(tmp_path / "a")
    one_round(rounds)
    rounds.close()
    fine = {"w": torch.zeros(3), "scale": torch.tensor(1.0)}
    kind: Any = torch.optim.Adam if given is None else torch.optim.SGD
    is_model = given is not None and "lr" not in given
    settings = given if given is not None and not is_model else {"lr": 0.5}

    with pytest.raises(InvalidInput, match=words):
        ServerOptimizer(
            given if is_model else fine, a_plan(), clip=1.0, cohort_size=4, run=tmp_path / "a",
            optimizer_fn=lambda p: kind(p, **settings), source=a_source(seed=4),
        )  # fmt: skip


def test_a_rate_that_was_changed_on_the_way_is_the_rate_after_resume(tmp_path: Path) -> None:
    rounds = rounds_in(tmp_path / "a")
    one_round(rounds)
    rounds.server.optimizer.param_groups[0]["lr"] = 0.125
    one_round(rounds)
    rounds.close()
    resumed = rounds_in(tmp_path / "a")
    resumed.resume()
    assert resumed.server.optimizer.param_groups[0]["lr"] == 0.125
    resumed.server.optimizer.param_groups[0]["lr"] = 0.25
    one_round(resumed)
    resumed.close()
    again = rounds_in(tmp_path / "a")
    again.resume()
    assert again.server.optimizer.param_groups[0]["lr"] == 0.25


def test_a_second_server_beside_a_live_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another process: in the same one, the old server may be what a notebook left behind."""
    monkeypatch.setattr("noshuffle.release.log._WAIT", 0.1)
    live = rounds_in(tmp_path / "a")
    assert live.begin(check_ins(0)) is not None

    def elsewhere() -> None:
        with pytest.raises(ReuseRefused, match="another process writes"):
            rounds_in(tmp_path / "a")

    killed(elsewhere)
    assert live.finish().asked == 4
    live.close()
    assert rounds_in(tmp_path / "a").resume() == ()


def test_a_fork_adds_up_with_the_run_that_it_ends(tmp_path: Path) -> None:
    old = rounds_in(tmp_path / "a")
    one_round(old)
    old.close()
    new = ServerOptimizer(
        {"w": torch.zeros(3)}, a_plan(), clip=2.0, cohort_size=4, run=tmp_path / "b",
        fork_of=tmp_path / "a", optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0),
    )  # fmt: skip
    spent = new.statement().epsilon
    assert spent == pytest.approx(old.server.statement().epsilon)
    new.step({"w": torch.zeros(3)}, cohort=["user 1"])
    assert new.statement().epsilon > spent
    assert statement_for(new, "user 2").epsilon == new.statement().epsilon  # perhaps in the old one
    with pytest.raises(InvalidInput, match="has ended"):
        rounds_in(tmp_path / "a")


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thread has a round of its own, from its charge to its update."""
    rounds, inside, most = rounds_in(None), 0, 0

    def slow(*args: Any, **options: Any) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.02)
        inside -= 1
        return checked_sum(*args, **options)

    monkeypatch.setattr("noshuffle.federated.server_checks.checked_sum", slow)
    server, zero = rounds.server, {"w": torch.zeros(3), "scale": torch.tensor(0.0)}
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda i: server.step(zero, cohort=[f"user {i}"]), range(3)))
    assert (most, server.round) == (1, 3)
    rounds.begin(USERS)
    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(rounds.finish) for _ in range(3)]
    assert sorted(job.exception() is None for job in jobs) == [False, False, True]
    assert (most, server.round) == (1, 4)

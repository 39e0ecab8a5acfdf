"""A budget counts every run on its data, refuses what would pass its limit, survives a crash."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kills import child

from noshuffle import Plan, Poisson, PrivateSum, SinglePass, noise, verify
from noshuffle.accounting import gaussian
from noshuffle.budget import Budget
from noshuffle.errors import (
    BudgetExceeded,
    InvalidInput,
    NoshuffleError,
    Unsupported,
    VerificationFailed,
)
from noshuffle.participation import BallsInBins, CyclicPoisson, Participation
from noshuffle.plan import PrivacyStatement
from noshuffle.strategies import identity

DELTA = 1e-5


def plan_of(epsilon: float = 1.0, steps: int = 4, **more: Any) -> Plan:
    return Plan.fit(SinglePass(steps), mechanism="tree", epsilon=epsilon, delta=DELTA, **more)


def begin(budget: Any, plan: Plan | None = None, **more: Any) -> PrivateSum:
    return PrivateSum(plan or plan_of(), clip=1.0, shape=(), budget=budget, **more)


def release(sums: PrivateSum, steps: int = 1) -> None:
    for _ in range(steps):
        sums.add([0.5], ids=[sums.step])


def mu_of(budget: Budget) -> float:
    return budget.total().mu


def pure(epsilon: float) -> PrivacyStatement:
    return replace(plan_of().statement(), epsilon=epsilon, delta=0.0, mu=None, rho=None)


def in_a_child(work: Callable[[], object]) -> int:
    """Do this in a forked process, which ends like one that was killed; its number."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    return pid


def killed(work: Callable[[], object]) -> None:
    assert os.waitpid(in_a_child(work), 0)[1] == signal.SIGKILL


@pytest.fixture
def budget(tmp_path: Path) -> Budget:
    return Budget(tmp_path / "budget", epsilon=3.0, delta=DELTA)


# -- what runs cost ----------------------------------------------------------------------------


def test_runs_add_up_as_gaussians_do(budget: Budget) -> None:
    plans = [plan_of(0.5), plan_of(1.0, steps=7), plan_of(0.8, steps=16)]
    for plan in plans:
        begin(budget, plan)
    squared = sum((plan.sensitivity.value / plan.noise_multiplier) ** 2 for plan in plans)
    spent = budget.total()
    assert math.isclose(spent.mu, math.sqrt(squared), rel_tol=1e-14)
    assert gaussian.delta(mu=spent.mu, epsilon=spent.epsilon(DELTA)) == pytest.approx(DELTA)
    assert spent.is_exact


def test_a_run_is_charged_for_what_it_released(budget: Budget) -> None:
    plan = plan_of(2.0, steps=8)
    sums = begin(budget, plan)
    release(sums, 2)
    assert math.isclose(mu_of(budget), plan.mu())  # reserved as long as it is open
    sums.close()
    assert math.isclose(mu_of(budget), plan.mu(2))
    assert mu_of(budget) < plan.mu()
    assert not budget.entries()[0].is_open
    assert "This is run 1 of 1 on this data" in sums.statement().words()


def test_sampled_runs_cost_what_their_loss_distribution_says(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "b", epsilon=8.0, delta=DELTA)
    plan = Plan.fit(Poisson(200, 0.02), mechanism="identity", noise_multiplier=1.0, delta=DELTA)
    sums = begin(budget, plan)
    alone = budget.total()
    assert plan.epsilon() <= alone.epsilon(DELTA) <= 1.15 * plan.epsilon()
    assert not alone.is_exact
    sums.close()
    assert mu_of(budget) == 0  # nothing was drawn
    sums = begin(budget, plan)
    drawn = sums.sampler(50).draw(0)
    sums.add(np.zeros(len(drawn)), ids=drawn)
    sums.close()  # which may have been chosen by what came out: no sum over steps says what it cost
    assert budget.total() == alone


def test_what_is_set_aside_for_pure_epsilon(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "b", epsilon=3.0, delta=DELTA, pure=1.0)
    budget.reserve("a choice", pure(0.6)).settle(pure(0.6))
    begin(budget, plan_of(1.0))
    wanted = 0.6 + gaussian.epsilon(mu=plan_of(1.0).mu(), delta=DELTA)
    assert budget.total().epsilon(DELTA) == pytest.approx(wanted, rel=1e-12)
    with pytest.raises(BudgetExceeded, match="set aside"):  # nor does the rest hold it
        budget.reserve("a choice", pure(0.6))
    budget.reserve("a choice", pure(0.4))
    with pytest.raises(BudgetExceeded):  # the rest is 2, not 3
        begin(budget, plan_of(2.0))


@pytest.mark.parametrize("delta", [0.0, DELTA])
def test_all_of_epsilon_may_be_pure(tmp_path: Path, delta: float) -> None:
    budget = Budget(tmp_path / "b", epsilon=1.0, delta=delta, pure=1.0)
    for _ in range(2):
        budget.reserve("a choice", pure(0.5)).settle(pure(0.5))
    assert (budget.total().pure, budget.left()) == (1.0, 0.0)
    for statement in (pure(0.01), plan_of(0.001).statement()):
        with pytest.raises(BudgetExceeded):
            budget.reserve("more", statement)


def test_runs_without_noise_must_be_named(budget: Budget) -> None:
    bare = Plan.fit(SinglePass(4), mechanism="tree", noise_multiplier=0.0, delta=DELTA)
    with pytest.raises(BudgetExceeded, match="name it"):
        begin(budget, bare)
    begin(budget.unprotected("plain SGD"), bare)
    private = begin(budget)
    assert math.isclose(mu_of(budget), plan_of().mu())  # apart from the limit
    assert budget.unprotected_runs() == budget.declared() == ["plain SGD"]
    assert "without any privacy: plain SGD" in private.statement().words()
    assert "NOT PRIVATE" in budget.words()


def test_a_run_with_a_test_seed_is_no_run_of_a_budget(budget: Budget) -> None:
    """No ε holds for it, so no charge would be right."""
    with pytest.raises(BudgetExceeded, match="comes from a named test seed"):
        begin(budget, source=noise.test_source(seed=1))
    assert not budget.entries()
    release(begin(budget.unprotected("rehearsal"), source=noise.test_source(seed=1)))
    assert budget.unprotected_runs() == ["rehearsal"]
    assert budget.total().mu == 0


# -- the limit ---------------------------------------------------------------------------------


def test_the_limit_is_kept_to_the_last_digit(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "b", epsilon=1.0, delta=DELTA)
    begin(budget, plan_of(0.7))
    with pytest.raises(BudgetExceeded, match="would fit"):
        begin(budget, plan_of(budget.left() * 1.0001))
    begin(budget, plan_of(budget.left()))  # what is said to fit does
    assert budget.total().epsilon(DELTA) <= 1.0
    assert budget.left() < 1e-3
    whole = Budget(tmp_path / "c", epsilon=1.0, delta=DELTA)
    begin(whole, plan_of(1.0))  # a plan for all of it fits exactly
    with pytest.raises(BudgetExceeded):
        begin(whole, plan_of(1e-3))


def test_limits_are_fixed(budget: Budget) -> None:
    for wrong in ({"epsilon": 4.0}, {"delta": 1e-6}, {"unit": "user"}):
        with pytest.raises(InvalidInput, match="fixed before the first run"):
            Budget(budget.folder, **wrong)
    assert Budget(budget.folder, epsilon=3.0, unit="example").epsilon == 3.0
    with pytest.raises(InvalidInput, match="give epsilon and delta"):
        Budget(budget.folder / "none")
    with pytest.raises(InvalidInput, match="protects one example"):
        begin(budget, plan_of(unit="user"))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        *(({"epsilon": e}, "between 1e-9 and 1e6") for e in (5e-324, 1e-12, 1e9, 1e308)),
        *(({"pure": part}, "pure") for part in (-1.0, math.nan, math.inf, 1.0 + 1e-12)),
        ({"delta": 1.0}, "delta"),
        ({"unit": "row"}, "unit"),
    ],
)
def test_limits_that_mean_nothing_are_refused(
    tmp_path: Path, wrong: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidInput, match=match):
        Budget(tmp_path / "b", **{"epsilon": 1.0, "delta": DELTA, **wrong})
    assert not (tmp_path / "b").exists()


def test_two_processes_cannot_both_have_the_last_of_it(tmp_path: Path) -> None:
    plan = plan_of(1.0, steps=8)
    limit = gaussian.epsilon(mu=plan.mu() * math.sqrt(1.5), delta=DELTA)  # room for one of them
    budget = Budget(tmp_path / "b", epsilon=limit, delta=DELTA)
    gate, said = tmp_path / "gate", plan.statement()

    def work() -> None:
        while not gate.exists():
            time.sleep(1e-4)
        for _ in range(3):
            with suppress(BudgetExceeded):
                budget.reserve("run", said, plan=plan, steps=8)

    children = [in_a_child(work) for _ in range(3)]
    gate.touch()
    for one in children:
        os.waitpid(one, 0)
    assert len(budget.entries()) == 1


def test_threads_wait_for_each_other(budget: Budget) -> None:
    said = plan_of(0.01).statement()
    with ThreadPoolExecutor(4) as pool:
        for place in list(pool.map(lambda _: budget.reserve("run", said), range(12))):
            pool.submit(place.settle, said)
    assert [entry.is_open for entry in budget.entries()] == [False] * 12


def test_a_run_that_its_budget_refused_leaves_nothing(tmp_path: Path) -> None:
    small = Budget(tmp_path / "small", epsilon=1.0, delta=DELTA)
    large = Budget(tmp_path / "large", epsilon=4.0, delta=DELTA)
    plan, run = plan_of(2.0), tmp_path / "runs" / "a"
    with pytest.raises(BudgetExceeded):
        begin(small, plan, run=run)
    assert not run.parent.exists()
    assert not small.entries()
    sums = begin(large, plan, run=run)
    release(sums)
    sums.close()
    with pytest.raises(InvalidInput, match="draws on the budget"):  # what was released stays
        begin(small, plan, run=run)
    assert (run / "log.jsonl").exists()
    assert mu_of(large) > 0


# -- who comes back ----------------------------------------------------------------------------


def test_a_run_in_a_folder_comes_back_to_its_place(budget: Budget, tmp_path: Path) -> None:
    plan, run = plan_of(1.0, steps=6), tmp_path / "run"
    sums = begin(budget, plan, run=run)
    release(sums)
    sums.close()
    assert math.isclose(mu_of(budget), plan.mu(1))
    with pytest.raises(InvalidInput, match="draws on the budget"):
        begin(None, plan, run=run)
    again = begin(budget, plan, run=run)
    assert math.isclose(mu_of(budget), plan.mu())
    release(again)
    again.close()
    run.rename(tmp_path / "moved")  # nobody has it open
    again = begin(budget, plan, run=tmp_path / "moved")
    again.close()
    assert math.isclose(mu_of(budget), plan.mu(2))
    assert len(budget.entries()) == 1
    assert "This is run 1 of 1 on this data" in (tmp_path / "moved/statement.json").read_text()
    assert verify(tmp_path / "moved").exit_code == 0


@pytest.mark.parametrize("then", ["goes on", "is closed", "is killed", "is opened again"])
def test_a_copy_of_a_run_that_goes_on_pays_for_itself(
    budget: Budget, tmp_path: Path, then: str
) -> None:
    """Taken while the run was open, and opened before or after the run ended, however it did."""
    plan, run, copied = plan_of(1.0, steps=4), tmp_path / "run", tmp_path / "copy"
    kept: list[PrivateSum] = []

    def life() -> None:
        sums = begin(budget, plan, run=run)
        release(sums)
        shutil.copytree(run, copied)
        release(sums)
        if then == "is closed":
            sums.close()
        kept.append(sums)

    killed(life) if then in ("is killed", "is opened again") else life()
    if then == "is opened again":
        kept.append(begin(budget, plan, run=run))
    own = mu_of(budget)
    killed(lambda: begin(budget, plan, run=copied))
    release(begin(budget, plan, run=copied))
    assert len(budget.entries()) == 2
    assert math.isclose(mu_of(budget), math.hypot(own, plan.mu()))


@pytest.mark.parametrize("then", ["was closed", "was opened again"])
def test_a_backup_that_was_put_back_pays_for_itself(
    budget: Budget, tmp_path: Path, then: str
) -> None:
    plan, run, backup = plan_of(1.0, steps=8), tmp_path / "run", tmp_path / "backup"

    def life() -> None:
        sums = begin(budget, plan, run=run)
        release(sums)
        if not backup.exists():
            shutil.copytree(run, backup)
        release(sums)
        if then == "was closed":
            sums.close()

    killed(life)
    killed(life)
    lost = mu_of(budget)
    shutil.rmtree(run)
    shutil.copytree(backup, run)
    killed(life)
    assert len(budget.entries()) == 2
    assert mu_of(budget) > lost


@pytest.mark.parametrize("rule", [BallsInBins(1, 6), CyclicPoisson(6, 2, 0.5)], ids=repr)
def test_a_copy_that_shares_secret_positions_is_refused(
    budget: Budget, tmp_path: Path, rule: Participation
) -> None:
    """Eight copies of one secret shuffle cost five times what eight runs cost, at δ = 0.01."""
    plan = Plan(participation=rule, strategy=identity(), noise_multiplier=20.0, delta=DELTA)
    begin(budget, plan, run=tmp_path / "run").close()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    begin(budget, plan, run=tmp_path / "run").close()  # the run itself goes on
    with pytest.raises(Unsupported, match="share them, and cost more than two runs"):
        begin(budget, plan, run=tmp_path / "copy")
    assert len(budget.entries()) == 1


def test_a_run_that_lost_its_place_to_a_backup_is_charged_when_it_closes(
    budget: Budget, tmp_path: Path
) -> None:
    plan, run = plan_of(1.0, steps=4), tmp_path / "run"
    sums = begin(budget, plan, run=run)
    shutil.copytree(run, tmp_path / "backup")
    release(sums, 3)
    run.rename(tmp_path / "elsewhere")  # and it goes on there
    shutil.copytree(tmp_path / "backup", run)
    begin(budget, plan, run=run)
    sums.release.close_run()
    assert math.isclose(mu_of(budget), math.hypot(plan.mu(3), plan.mu()))
    assert [entry.is_open for entry in budget.entries()] == [True, False]


def test_a_killed_run_stays_charged_until_it_is_opened_and_closed(
    budget: Budget, tmp_path: Path
) -> None:
    plan = plan_of(1.0, steps=8)
    killed(lambda: release(begin(budget, plan), 3))
    assert math.isclose(mu_of(budget), plan.mu())
    killed(lambda: release(begin(budget, plan, run=tmp_path / "run"), 3))
    assert math.isclose(mu_of(budget), plan.mu() * math.sqrt(2))
    assert [entry.is_open for entry in budget.entries()] == [True, True]
    begin(budget, plan, run=tmp_path / "run").close()  # opened again: what it released is known
    assert math.isclose(mu_of(budget), math.hypot(plan.mu(), plan.mu(3)))


def test_a_kill_at_any_place_never_leaves_a_budget_too_low(tmp_path: Path) -> None:
    """Of a run that begins, releases and is closed; the next process finds its place again."""
    plan = plan_of(1.0, steps=4)

    def life(place: Path) -> None:
        budget = Budget(place / "budget", epsilon=3.0, delta=DELTA)
        sums = begin(budget, plan, run=place / "run")
        (place / "released").touch()  # so it counts as released from here on
        release(sums, 2)
        sums.close()

    def is_ours(frame: Any, event: str) -> bool:
        name = frame.f_code.co_filename
        return "noshuffle/budget" in name or "noshuffle/release" in name

    for name in ("whole", "counted"):
        (tmp_path / name).mkdir()
    life(tmp_path / "whole")
    calls = child(lambda: life(tmp_path / "counted"), None, counts=is_ours)
    assert isinstance(calls, int), calls
    found = set()
    for number, at in enumerate(np.linspace(1, calls - 1, 24).astype(int)):
        place = tmp_path / str(number)
        place.mkdir()
        child(partial(life, place), int(at), counts=is_ours)
        budget = Budget(place / "budget", epsilon=3.0, delta=DELTA)
        assert len(budget.entries()) <= 1
        is_out, mu = (place / "released").exists(), mu_of(budget)
        assert mu in (0.0, plan.mu(2), plan.mu())
        assert mu >= plan.mu(2) * is_out
        found.add((mu, is_out))
        if (place / "run/log.jsonl").exists():
            with suppress(InvalidInput):  # killed while it was begun: the folder is no run
                sums = begin(budget, plan, run=place / "run")
                sums.close()
                assert math.isclose(mu_of(budget), plan.mu(sums.step) if sums.step else 0.0)
                assert len(budget.entries()) == 1
        begin(budget, plan)
    assert {(0.0, False), (plan.mu(), True), (plan.mu(2), True)} <= found


def test_a_forked_process_cannot_settle_a_run_that_goes_on(budget: Budget) -> None:
    sums = begin(budget)
    release(sums)
    pid = os.fork()
    if not pid:
        with suppress(NoshuffleError):
            sums.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert budget.entries()[0].is_open


def test_a_fork_does_not_pay_for_a_parent_in_the_same_budget(
    budget: Budget, tmp_path: Path
) -> None:
    plan = plan_of(1.0, steps=6)
    sums = begin(budget, plan, run=tmp_path / "run")
    release(sums)
    sums.close()
    new = begin(budget, plan, run=tmp_path / "fork", fork_of=tmp_path / "run")
    assert math.isclose(mu_of(budget), math.hypot(plan.mu(1), plan.mu()))
    release(new)  # its own statement covers both
    assert math.isclose(new.statement().mu or 0.0, math.hypot(plan.mu(1), plan.mu(1)))
    other = Budget(tmp_path / "other", epsilon=4.0, delta=DELTA)
    new.close()
    begin(other, plan, run=tmp_path / "third", fork_of=tmp_path / "fork")
    assert math.isclose(mu_of(other), math.hypot(math.sqrt(2) * plan.mu(1), plan.mu()))


# -- what is on the disk -----------------------------------------------------------------------


def _changed(line: bytes) -> bytes:
    return line.replace(b"3.0", b"9.0").replace(b'"mu":0', b'"mu":1')


@pytest.mark.parametrize("line", [0, 1, 2])
@pytest.mark.parametrize("how", ["changed", "cut out"])
def test_an_edited_budget_is_refused(budget: Budget, how: str, line: int) -> None:
    for _ in range(3):
        begin(budget)
    file = budget.folder / "budget.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    lines[line : line + 1] = [] if how == "cut out" else [_changed(lines[line])]
    file.write_bytes(b"".join(lines))
    for use in (lambda: Budget(budget.folder), budget.total, lambda: begin(budget)):
        with pytest.raises(VerificationFailed, match="bring the budget back"):
            use()
    assert file.read_bytes() == b"".join(lines)  # nothing was cut off


def test_a_line_that_was_not_written_to_its_end_does_not_count(budget: Budget) -> None:
    begin(budget)
    spent, file = budget.total(), budget.folder / "budget.jsonl"
    whole = file.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for size in range(1, len(last), 7):
        file.write_bytes(whole + last[:size])
        assert Budget(budget.folder).total() == spent
    begin(budget)
    assert len(Budget(budget.folder).entries()) == 2


@pytest.mark.parametrize("left", [b"", b'{"kind":"budg'])
def test_a_budget_whose_first_process_died_is_begun_by_the_next(
    tmp_path: Path, left: bytes
) -> None:
    (tmp_path / "budget.jsonl").write_bytes(left)
    with pytest.raises(InvalidInput, match="holds no budget"):
        Budget(tmp_path)
    assert Budget(tmp_path, epsilon=1.0, delta=DELTA).limit["epsilon"] == 1.0


def test_a_run_knows_that_its_budget_is_older_or_another(budget: Budget, tmp_path: Path) -> None:
    shutil.copytree(budget.folder, tmp_path / "old")
    run = begin(budget, run=tmp_path / "run")
    release(run)
    run.close()
    with pytest.raises(VerificationFailed, match="older than the run"):
        begin(Budget(tmp_path / "old"), run=tmp_path / "run")
    with pytest.raises(InvalidInput, match="draws on the budget"):
        begin(Budget(tmp_path / "other", epsilon=3.0, delta=DELTA), run=tmp_path / "run")
    # A run that was forked from it knows it too: what it cost was in neither sum.
    with pytest.raises(VerificationFailed, match="older than the run"):
        begin(Budget(tmp_path / "old"), run=tmp_path / "fork", fork_of=tmp_path / "run")
    (budget.folder / "budget.jsonl").unlink()
    for use in (budget.total, lambda: begin(budget)):
        with pytest.raises(VerificationFailed, match="bring it back"):
            use()
    Budget(budget.folder, epsilon=9.0, delta=DELTA)
    with pytest.raises(VerificationFailed, match="is not the budget"):
        begin(budget)


def test_a_budget_is_its_folder(
    budget: Budget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert copy.deepcopy(budget) is budget
    begin(pickle.loads(pickle.dumps(budget)))
    assert len(budget.entries()) == 1
    monkeypatch.chdir(tmp_path)
    own = Budget("budget")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")  # where another one of that name is
    other = Budget("budget", epsilon=3.0, delta=DELTA)
    begin(own)
    assert (len(budget.entries()), len(other.entries())) == (2, 0)
    rows = [json.loads(line) for line in (budget.folder / "budget.jsonl").open()]
    assert rows[0]["limit"]["epsilon"] == 3.0


@pytest.mark.parametrize("given", ["a folder", 4.0])
def test_a_budget_is_given_as_one(given: Any) -> None:
    with pytest.raises(InvalidInput, match=r"budget must be a noshuffle.Budget, got (str|float)"):
        begin(given)

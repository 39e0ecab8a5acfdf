"""A budget counts every run on its data, refuses what would pass its limit, survives a crash."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from noshuffle import (
    Epochs,
    Plan,
    Poisson,
    PrivateSum,
    SinglePass,
    privatize,
    verify,
)
from noshuffle.accounting import gaussian
from noshuffle.budget import Budget, store
from noshuffle.convex.solvers.base import guarantee
from noshuffle.errors import (
    BudgetExceeded,
    InvalidInput,
    ReplayRefused,
    Unsupported,
    VerificationFailed,
)
from noshuffle.participation import BallsInBins, CyclicPoisson, Participation
from noshuffle.release import account
from noshuffle.release.account import Account
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger import Ledger
from noshuffle.release.opening import fork
from noshuffle.release.release import Release
from noshuffle.rounding import up
from noshuffle.statement import PrivacyStatement
from noshuffle.strategies import identity

DELTA = 1e-5


def plan_of(epsilon: float = 1.0, steps: int = 4, **more: object) -> Plan:
    return Plan.fit(SinglePass(steps), mechanism="tree", epsilon=epsilon, delta=DELTA, **more)


def sums_of(budget: Account | None, plan: Plan | None = None, **more: object) -> PrivateSum:
    return PrivateSum(plan or plan_of(), clip=1.0, shape=(), budget=budget, **more)


def mu_of(budget: Budget) -> float:
    return budget.total().mu


@pytest.fixture
def budget(tmp_path: Path) -> Budget:
    return Budget(tmp_path / "budget", epsilon=3.0, delta=DELTA)


def test_runs_add_up_as_gaussians_do(budget: Budget) -> None:
    plans = [plan_of(0.5), plan_of(1.0, steps=7), plan_of(0.8, steps=16)]
    for plan in plans:
        sums_of(budget, plan)
    squared = sum((plan.sensitivity.value / plan.noise_multiplier) ** 2 for plan in plans)
    spent = budget.total()
    assert math.isclose(spent.mu, math.sqrt(squared), rel_tol=1e-14)
    # the exact curve at that μ, written out once more
    epsilon, mu = spent.epsilon(DELTA), math.sqrt(squared)
    normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
    cdf = lambda x: float(normal.cdf(torch.tensor(x, dtype=torch.float64)))  # noqa: E731
    delta = cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * cdf(-mu / 2 - epsilon / mu)
    assert math.isclose(delta, DELTA, rel_tol=1e-6)
    assert spent.is_exact


def test_a_run_is_charged_for_what_it_released(budget: Budget) -> None:
    plan = plan_of(2.0, steps=8)
    sums = sums_of(budget, plan)
    assert math.isclose(mu_of(budget), plan.mu())
    sums.add([0.5], ids=[1])
    sums.add([0.5], ids=[2])
    assert math.isclose(mu_of(budget), plan.mu())  # reserved as long as it is open
    sums.close()
    assert math.isclose(mu_of(budget), plan.mu(2))
    assert mu_of(budget) < plan.mu()
    assert not budget.entries()[0].is_open


def test_the_limit_is_kept_to_the_last_digit(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "b", epsilon=1.0, delta=DELTA)
    sums_of(budget, plan_of(0.7))
    with pytest.raises(BudgetExceeded, match="would fit"):
        sums_of(budget, plan_of(budget.left() * 1.0001))
    sums_of(budget, plan_of(budget.left()))  # what is said to fit does
    assert budget.total().epsilon(DELTA) <= 1.0
    assert budget.left() < 1e-3
    whole = Budget(tmp_path / "c", epsilon=1.0, delta=DELTA)
    sums_of(whole, plan_of(1.0))  # a plan for all of it fits exactly
    with pytest.raises(BudgetExceeded):
        sums_of(whole, plan_of(1e-3))


def test_a_run_in_a_folder_comes_back_to_its_place(budget: Budget, tmp_path: Path) -> None:
    plan, run = plan_of(1.0, steps=6), tmp_path / "run"
    sums = sums_of(budget, plan, run=run)
    sums.add([0.5], ids=[1])
    sums.close(keep_keys=True)
    assert math.isclose(mu_of(budget), plan.mu(1))
    with pytest.raises(InvalidInput, match="draws on the budget"):
        sums_of(None, plan, run=run)
    again = sums_of(budget, plan, run=run)
    assert math.isclose(mu_of(budget), plan.mu())
    again.add([0.5], ids=[2])
    again.close(keep_keys=True)
    assert math.isclose(mu_of(budget), plan.mu(2))
    assert len(budget.entries()) == 1
    assert "This is run 1 of 1 on this data" in (run / "statement.json").read_text()
    assert verify(run).exit_code == 0, verify(run).words()


def test_a_copy_of_a_run_is_a_run_of_its_own(budget: Budget, tmp_path: Path) -> None:
    plan = plan_of(1.0, steps=6)
    sums = sums_of(budget, plan, run=tmp_path / "run")
    sums.add([0.5], ids=[1])
    sums.close(keep_keys=True)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    sums_of(budget, plan, run=tmp_path / "run")
    sums_of(budget, plan, run=tmp_path / "copy")
    assert math.isclose(mu_of(budget), plan.mu() * math.sqrt(2))


@pytest.mark.parametrize("rule", [BallsInBins(1, 6), CyclicPoisson(6, 2, 0.5)], ids=repr)
def test_a_copy_that_shares_secret_positions_is_refused(
    budget: Budget, tmp_path: Path, rule: Participation
) -> None:
    """Eight copies of one secret shuffle cost five times what eight runs cost, at δ = 0.01."""
    plan = Plan(participation=rule, strategy=identity(), noise_multiplier=20.0, delta=DELTA)

    def opened(name: str) -> Any:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return privatize(
            model, optimizer, plan, clip_norm=1.0, batch_size=4,
            run=tmp_path / name, budget=budget,
        )  # fmt: skip

    opened("run").close(keep_keys=True)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(Unsupported, match="share them, and cost more than two runs"):
        opened("copy")
    opened("run").close(keep_keys=True)  # the run itself goes on
    assert len(budget.entries()) == 1


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_copy_taken_in_the_middle_of_a_life_pays_for_itself(
    budget: Budget, tmp_path: Path, is_closed: bool
) -> None:
    """The original goes on in the same life: its keys do not tell it from the copy."""
    plan, run, copied = plan_of(1.0, steps=4), tmp_path / "run", tmp_path / "copy"
    sums = sums_of(budget, plan, run=run)
    sums.add([0.5], ids=[1])
    shutil.copytree(run, copied)
    sums.add([0.5], ids=[2])
    if is_closed:
        sums.close(keep_keys=True)
    sums_of(budget, plan, run=copied)
    assert len(budget.entries()) == 2
    first = plan.mu(2) if is_closed else plan.mu()
    assert math.isclose(mu_of(budget), math.hypot(first, plan.mu()))


def test_an_older_state_that_was_put_back_in_place_pays_for_itself(budget: Budget) -> None:
    """It has the keys of the run, and fewer steps on record than were settled."""
    plan = plan_of(1.0, steps=4)
    charge = budget.open("run", plan.statement(), lives=["a"])
    charge.settle(plan.statement(steps=2), plan=plan, steps=2, rows=2)
    known = {"origin": charge.origin, "lives": ["a", "b"]}
    budget.open("run", plan.statement(), **known, released=2)
    assert len(budget.entries()) == 1
    budget.open("run", plan.statement(), **known, released=1)
    assert len(budget.entries()) == 2


def put_back(run: Path, backup: Path, how: str) -> None:
    """A backup in the place of a run folder."""
    if how == "removed":
        shutil.rmtree(run)
    else:
        run.rename(run.with_name("moved"))
    shutil.copytree(backup, run)


@pytest.mark.parametrize("how", ["removed", "moved away"])
@pytest.mark.parametrize("lives", [0, 1, 2])
def test_a_backup_that_was_put_back_does_not_speak_for_what_was_lost(
    budget: Budget, tmp_path: Path, how: str, lives: int
) -> None:
    """Six steps left; a ledger that knows of one, and what it goes on with, is another run's."""
    plan, run, backup = plan_of(1.0, steps=8), tmp_path / "run", tmp_path / "backup"

    def first() -> None:
        sums = sums_of(budget, plan, run=run)
        for step in range(6):
            if step == 1:
                shutil.copytree(run, backup)
            sums.add([0.5], ids=[step])

    def later() -> None:
        sums = sums_of(budget, plan, run=run)
        while sums.step < 3:
            sums.add([0.5], ids=[sums.step])

    os.waitpid(in_a_child(first), 0)
    put_back(run, backup, how)
    for _ in range(lives):
        os.waitpid(in_a_child(later), 0)
    rest = plan.mu(3) if lives else 0.0
    assert mu_of(budget) >= math.hypot(plan.mu(6), rest) * (1 - 1e-12)
    assert math.isclose(mu_of(budget), math.hypot(plan.mu(), plan.mu() if lives else 0.0))
    assert len(budget.entries()) == (2 if lives else 1)


def test_a_copy_whose_first_process_was_killed_at_once_is_still_a_copy(
    budget: Budget, tmp_path: Path, monkeypatch: Any
) -> None:
    """It came as far as its ledger, and not into the books: the next one is not the original."""
    plan, run, copied = plan_of(1.0, steps=4), tmp_path / "run", tmp_path / "copy"
    sums = sums_of(budget, plan, run=run)
    sums.add([0.5], ids=[1])
    shutil.copytree(run, copied)

    def ends(*args: Any, **more: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        monkeypatch.setattr(Budget, "open", ends)
        sums_of(budget, plan, run=copied)

    os.waitpid(in_a_child(work), 0)
    sums_of(budget, plan, run=copied)
    assert len(budget.entries()) == 2
    assert math.isclose(mu_of(budget), plan.mu() * math.sqrt(2))


@pytest.mark.parametrize("epsilon", [5e-324, 1e-12, 1e9, 1e308])
def test_limits_that_mean_nothing_are_refused(tmp_path: Path, epsilon: float) -> None:
    with pytest.raises(InvalidInput, match="between 1e-9 and 1e6"):
        Budget(tmp_path / "budget", epsilon=epsilon, delta=1e-5)


def test_a_fork_does_not_pay_for_its_parent_twice(budget: Budget, tmp_path: Path) -> None:
    plan = plan_of(1.0, steps=6)
    sums = sums_of(budget, plan, run=tmp_path / "run")
    sums.add([0.5], ids=[1])
    sums.close(keep_keys=True)
    child = sums_of(budget, plan, run=fork(tmp_path / "run", tmp_path / "fork"))
    assert math.isclose(mu_of(budget), math.hypot(plan.mu(1), plan.mu()))
    child.add([0.5], ids=[2])  # its own statement covers both
    assert math.isclose(child.statement().mu, math.hypot(plan.mu(1), plan.mu(1)))


def in_a_child(work: Callable[[], object]) -> int:
    """Do this in a forked process, which ends like one that was killed; its number."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    return pid


def killed(budget: Budget, run: Path | None) -> None:
    def work() -> None:
        sums = sums_of(budget, plan_of(1.0, steps=8), run=run)
        for step in range(3):
            sums.add([0.5], ids=[step])

    assert os.waitpid(in_a_child(work), 0)[1] == signal.SIGKILL


def test_a_killed_run_stays_charged_until_it_is_opened_and_closed(
    budget: Budget, tmp_path: Path
) -> None:
    plan = plan_of(1.0, steps=8)
    killed(budget, None)
    assert math.isclose(mu_of(budget), plan.mu())
    killed(budget, tmp_path / "run")
    assert math.isclose(mu_of(budget), plan.mu() * math.sqrt(2))
    assert [entry.is_open for entry in budget.entries()] == [True, True]
    sums_of(budget, plan, run=tmp_path / "run").close()  # opened again: what it released is known
    assert math.isclose(mu_of(budget), math.hypot(plan.mu(), plan.mu(3)))


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
                budget.open("run", said, plan=plan, steps=8)

    children = [in_a_child(work) for _ in range(3)]
    gate.touch()
    for child in children:
        os.waitpid(child, 0)
    assert len(budget.entries()) == 1


def _edit(folder: Path, command: str) -> None:
    db = sqlite3.connect(folder / "books.sqlite")
    db.execute(command)
    db.commit()
    db.close()


@pytest.mark.parametrize(
    "command",
    [
        "DELETE FROM log WHERE seq = (SELECT MAX(seq) FROM log)",
        "DELETE FROM log WHERE kind = 'open'",
        "UPDATE log SET body = replace(body, '3.0', '9.0') WHERE kind = 'limit'",
        "UPDATE log SET body = replace(body, '\"mu\": 0', '\"mu\": -0') WHERE kind = 'open'",
        "DROP TABLE log",
    ],
)
def test_edited_books_are_refused(budget: Budget, command: str) -> None:
    sums_of(budget)
    sums_of(budget)
    _edit(budget.folder, command)
    with pytest.raises(VerificationFailed, match="bring the budget back"):
        Budget(budget.folder)
    with pytest.raises(VerificationFailed):
        sums_of(budget)


def test_a_limit_that_was_edited_in_plain_text_is_refused(budget: Budget) -> None:
    sums_of(budget)
    file = budget.folder / "budget.json"
    told = json.loads(file.read_text())
    told["limit"]["epsilon"] = 1.0
    file.write_text(json.dumps(told))
    with pytest.raises(VerificationFailed, match="another limit"):
        Budget(budget.folder)


def test_a_full_disk_is_not_told_as_damage(budget: Budget, monkeypatch: Any) -> None:
    """SQLite ends a transaction by itself when it cannot write: to end it once more is an error."""
    connect = store.Books._connect

    def connected(self: store.Books) -> sqlite3.Connection:
        db = connect(self)
        (size,) = db.execute("PRAGMA page_count").fetchone()
        db.execute(f"PRAGMA max_page_count={size}")
        return db

    monkeypatch.setattr(store.Books, "_connect", connected)
    with pytest.raises(sqlite3.OperationalError, match="database or disk is full"):
        budget.unprotected("x" * 100_000)
    assert budget.declared() == []


def test_books_that_were_put_back_are_refused(budget: Budget, tmp_path: Path) -> None:
    sums_of(budget)
    shutil.copy(budget.folder / "books.sqlite", tmp_path / "old")
    run = sums_of(budget, plan_of(0.5), run=tmp_path / "run")
    run.close(keep_keys=True)
    shutil.copy(tmp_path / "old", budget.folder / "books.sqlite")
    with pytest.raises(VerificationFailed, match="lacks rows"):
        Budget(budget.folder)
    (budget.folder / "budget.json").unlink()
    with pytest.raises(VerificationFailed, match="missing"):
        Budget(budget.folder)


def test_a_run_knows_that_its_budget_is_older(budget: Budget, tmp_path: Path) -> None:
    shutil.copytree(budget.folder, tmp_path / "old")
    run = sums_of(budget, run=tmp_path / "run")
    run.add([1.0], ids=[1])
    run.close(keep_keys=True)
    with pytest.raises(VerificationFailed, match="older than the run"):
        sums_of(Budget(tmp_path / "old"), run=tmp_path / "run")
    other = Budget(tmp_path / "other", epsilon=3.0, delta=DELTA)
    with pytest.raises(InvalidInput, match="not this"):
        sums_of(other, run=tmp_path / "run")
    # Its forks know it too: what it cost was in neither sum.
    with pytest.raises(VerificationFailed, match="older than the run"):
        sums_of(Budget(tmp_path / "old"), run=fork(tmp_path / "run", tmp_path / "fork"))


def test_limits_are_fixed(budget: Budget) -> None:
    for wrong in ({"epsilon": 4.0}, {"delta": 1e-6}, {"unit": "user"}):
        with pytest.raises(InvalidInput, match="fixed before the first run"):
            Budget(budget.folder, **wrong)
    assert Budget(budget.folder, epsilon=3.0, unit="example").epsilon == 3.0
    with pytest.raises(InvalidInput, match="give epsilon and delta"):
        Budget(budget.folder / "none")
    with pytest.raises(InvalidInput, match="protects one example"):
        sums_of(budget, plan_of(unit="user"))


def test_runs_without_noise_must_be_named(budget: Budget) -> None:
    bare = Plan.fit(SinglePass(4), mechanism="tree", noise_multiplier=0.0, delta=DELTA)
    with pytest.raises(BudgetExceeded, match="name it"):
        sums_of(budget, bare)
    sums_of(budget.unprotected("plain SGD"), bare)
    private = sums_of(budget, plan_of(1.0))
    assert math.isclose(mu_of(budget), plan_of(1.0).mu())  # apart from the limit
    assert budget.unprotected_runs() == ["plain SGD"]
    assert "without any privacy: plain SGD" in private.statement().words()
    assert "NOT PRIVATE" in budget.words()


def test_a_warm_start_adds_up(budget: Budget) -> None:
    plan = Plan.fit(Epochs(2, 2), mechanism="tree", epsilon=1.0, delta=DELTA)
    model = nn.Linear(2, 1)
    for _ in range(2):  # the second run goes on from the weights of the first
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        private = privatize(
            model, optimizer, plan, clip_norm=1.0, batch_size=4, budget=budget, compile=False
        )
        for step in range(4):
            private.step(
                nn.MSELoss(), torch.ones(4, 2), torch.ones(4, 1), ids=np.arange(4) + 4 * (step % 2)
            )
        private.close()
    said = private.statement()
    wanted = gaussian.epsilon(mu=plan.mu() * math.sqrt(2), delta=DELTA)
    assert f"all together (those under way as reserved) cost ε = {up(wanted)}" in said.words()
    assert "This is run 2 of 2" in said.words()


def test_a_budget_is_its_folder(budget: Budget) -> None:
    assert copy.deepcopy(budget) is budget
    sums_of(pickle.loads(pickle.dumps(budget)))
    assert len(budget.entries()) == 1
    assert json.loads((budget.folder / "budget.json").read_text())["limit"]["epsilon"] == 3.0


def test_a_budget_stays_the_same_wherever_its_process_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another folder of that name was, runs were charged to the budget in it."""
    monkeypatch.chdir(tmp_path)
    budget = Budget("budget", epsilon=3.0, delta=DELTA)
    first = sums_of(budget)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    other = Budget("budget", epsilon=3.0, delta=DELTA)
    first.close()
    sums_of(budget)
    assert len(budget.entries()) == len(Budget(tmp_path / "budget").entries()) == 2
    assert not other.entries()


def test_sampled_runs_cost_what_their_loss_distribution_says(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "b", epsilon=8.0, delta=DELTA)
    plan = Plan.fit(Poisson(200, 0.02), mechanism="identity", noise_multiplier=1.0, delta=DELTA)
    sums = sums_of(budget, plan)
    alone = budget.total()
    assert plan.epsilon() <= alone.epsilon(DELTA) <= 1.15 * plan.epsilon()
    assert not alone.is_exact
    sums.close()
    assert budget.total().mu == 0  # nothing was drawn
    sums = sums_of(budget, plan)
    drawn = sums.sampler(50).draw(0)
    sums.add(np.zeros(len(drawn)), ids=drawn)
    sums.close()  # which may have been chosen by what came out: no sum over steps says what it cost
    assert budget.total() == alone


def pure(epsilon: float) -> PrivacyStatement:
    return guarantee(
        epsilon=epsilon, noise=1.0, sensitivity=1.0, mechanism="m", neighbours="zero-out"
    )


def test_what_is_set_aside_for_pure_epsilon(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "b", epsilon=3.0, delta=DELTA, pure=1.0)
    budget.open("a choice", pure(0.6)).settle(pure(0.6))
    sums_of(budget, plan_of(1.0))
    wanted = 0.6 + gaussian.epsilon(mu=plan_of(1.0).mu(), delta=DELTA)
    assert budget.total().epsilon(DELTA) == pytest.approx(wanted, rel=1e-12)
    with pytest.raises(BudgetExceeded, match="set aside"):  # nor does the rest hold it
        budget.open("a choice", pure(0.6))
    budget.open("a choice", pure(0.4))
    with pytest.raises(BudgetExceeded):  # the rest is 2, not 3
        sums_of(budget, plan_of(2.0))
    bare = Budget(tmp_path / "c", epsilon=1.0, delta=0.0)
    bare.open("a choice", pure(0.5))
    bare.open("a choice", pure(0.5))
    with pytest.raises(BudgetExceeded):
        bare.open("a choice", pure(1e-9))
    with pytest.raises(BudgetExceeded):
        sums_of(bare, plan_of(0.1))
    with pytest.raises(InvalidInput, match="part of epsilon"):
        Budget(tmp_path / "d", epsilon=1.0, delta=DELTA, pure=2.0)


# -- units -------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", ["nothing but a file", "what was not committed"])
def test_a_budget_whose_first_process_died_is_begun_by_the_next(
    tmp_path: Path, monkeypatch: Any, left: str
) -> None:
    """Nothing was spent, and the folder is no wreck that somebody has to remove by hand."""
    if left == "nothing but a file":
        (tmp_path / "books.sqlite").touch()
    else:
        monkeypatch.setattr(store.Books, "_add", Mock(side_effect=SystemExit))
        with pytest.raises(SystemExit):
            Budget(tmp_path, epsilon=2.0, delta=DELTA)
        monkeypatch.undo()
    with pytest.raises(InvalidInput, match="holds no budget"):
        Budget(tmp_path)
    assert Budget(tmp_path, epsilon=1.0, delta=DELTA).limit["epsilon"] == 1.0


def test_a_fork_pays_for_a_parent_in_another_budget(tmp_path: Path) -> None:
    one, two = (Budget(tmp_path / name, epsilon=4.0, delta=DELTA) for name in "ab")
    parent = sums_of(one, run=tmp_path / "parent")
    for step in range(4):
        parent.add([1.0], ids=[step])
    parent.close(keep_keys=True)
    for budget, runs in ((one, 1), (two, 2)):
        folder = fork(tmp_path / "parent", tmp_path / f"fork-{budget.folder.name}")
        child = sums_of(budget, run=folder)
        entry = budget.entries()[-1]
        assert entry.cost.mu == pytest.approx(math.sqrt(runs) * plan_of().statement().mu)
        child.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_cannot_settle_a_run_that_goes_on(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "b", epsilon=2.0, delta=DELTA)
    sums = sums_of(budget)
    child = os.fork()
    if not child:
        try:
            sums.release.settle_budget()
        except BaseException:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert budget.entries()[0].is_open
    sums.close()


def test_a_run_that_fails_to_open_lets_go_of_its_ledger(tmp_path: Path, monkeypatch: Any) -> None:
    closed: list[bool] = []

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no books")

    monkeypatch.setattr(account, "leave", fails)
    monkeypatch.setattr(Ledger, "let_go", lambda self: closed.append(True))
    with pytest.raises(RuntimeError, match="no books"):
        Release.begin(plan_of(), {"a": (2,)}, clip=1.0, facts={"unit": "user"})
    assert closed == [True]


@pytest.mark.parametrize("part", [-1.0, math.nan, math.inf, 1.0 + 1e-12])
def test_pure_is_a_part_of_epsilon(tmp_path: Path, part: float) -> None:
    with pytest.raises(InvalidInput):
        Budget(tmp_path / "b", epsilon=1.0, delta=DELTA, pure=part)
    assert not (tmp_path / "b").exists()


def test_all_of_epsilon_may_be_pure(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "b", epsilon=1.0, delta=DELTA, pure=1.0)
    with pytest.raises(BudgetExceeded):
        sums_of(budget, plan_of(0.001))
    said = pure(0.5)
    for _ in range(2):
        budget.open("run", said).settle(said)
    assert budget.total().pure == 1.0
    with pytest.raises(BudgetExceeded):
        budget.open("run", pure(0.1))


def test_an_object_that_was_overtaken_leaves_the_account(budget: Budget, tmp_path: Path) -> None:
    """It closed the account at its own steps, and whoever went on with the run paid nothing."""
    plan = plan_of()
    old = sums_of(budget, plan, run=tmp_path / "run")
    old.add(np.zeros(2), ids=[0, 1])
    reserved = mu_of(budget)
    new = sums_of(budget, plan, run=tmp_path / "run")
    with suppress(ReplayRefused):
        old.close()
    assert mu_of(budget) == reserved
    for step in range(plan.steps):  # the first as it was
        new.add(np.zeros(2), ids=[2 * step, 2 * step + 1])
    new.close()
    assert mu_of(budget) == pytest.approx(plan.mu(), rel=1e-12)


def test_a_run_that_died_while_its_budget_refused_it_does_not_go_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, plan = Budget(tmp_path / "budget", epsilon=1.0, delta=DELTA), plan_of(2.0)
    monkeypatch.setattr(RunFolder, "withdraw", lambda *_: None)  # killed before it
    with pytest.raises(BudgetExceeded):
        PrivateSum(plan, clip=1.0, shape=(), run=tmp_path / "run", budget=budget).add([1.0])
    monkeypatch.undo()
    with pytest.raises(InvalidInput, match=r"draws on the budget .*; give budget="):
        PrivateSum(plan, clip=1.0, shape=(), run=tmp_path / "run").add([1.0])
    with pytest.raises(BudgetExceeded):
        PrivateSum(plan, clip=1.0, shape=(), run=tmp_path / "run", budget=budget).add([1.0])
    assert (tmp_path / "run" / "plan.json").exists()  # of a run that was there before


def test_a_run_that_its_budget_refused_leaves_nothing(tmp_path: Path) -> None:
    """Keys, plan and a ledger stayed, bound to that budget: the folder took no other run."""
    small = Budget(tmp_path / "small", epsilon=1.0, delta=DELTA)
    large = Budget(tmp_path / "large", epsilon=4.0, delta=DELTA)
    plan, run = plan_of(2.0), tmp_path / "runs" / "a"
    with pytest.raises(BudgetExceeded):
        PrivateSum(plan, clip=1.0, shape=(), run=run, budget=small)
    assert not run.parent.exists()
    assert not small.entries()
    sums = PrivateSum(plan, clip=1.0, shape=(), run=run, budget=large)
    sums.add([1.0], ids=[1])
    sums.close()
    with pytest.raises(InvalidInput, match="draws on the budget"):  # what was released stays
        PrivateSum(plan, clip=1.0, shape=(), run=run, budget=small)
    assert RunFolder(run).is_started
    assert mu_of(large) > 0
    # What a fork carries of its parent is no part of the run that was refused.
    child = fork(run, tmp_path / "child")
    with pytest.raises(BudgetExceeded):
        PrivateSum(plan, clip=1.0, shape=(), run=child, budget=small)
    assert [file.name for file in child.path.iterdir() if file.name != ".lock"] == [
        "ancestors.json"
    ]


def test_a_run_that_fails_after_its_charge_stays_with_it(
    budget: Budget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of()
    with monkeypatch.context() as patch:
        patch.setattr(
            "noshuffle.budget.open_run.OpenRun.words", Mock(side_effect=KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            sums_of(budget, plan, run=tmp_path / "run")
    reserved = mu_of(budget)
    assert reserved > 0
    sums_of(budget, plan, run=tmp_path / "run")  # finds its place again
    assert mu_of(budget) == reserved
    assert len(budget.entries()) == 1


def test_a_run_that_ends_between_its_charge_and_its_ledger_stays_with_it(
    budget: Budget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder was taken back and the charge stayed with nobody; killed there, it paid twice."""
    plan, bind = plan_of(), Ledger.bind

    def stopped(ledger: Ledger, key: str, value: str) -> None:
        if key == "budget":
            raise KeyboardInterrupt
        bind(ledger, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "bind", stopped)
        with pytest.raises(KeyboardInterrupt):
            sums_of(budget, plan, run=tmp_path / "run")
    reserved = mu_of(budget)
    assert reserved > 0
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    sums_of(budget, plan, run=tmp_path / "run").add([1.0], ids=[1])
    assert mu_of(budget) == reserved
    assert len(budget.entries()) == 1
    sums_of(budget, plan, run=tmp_path / "copy")  # another run, which pays for itself
    assert len(budget.entries()) == 2


@pytest.mark.parametrize("given", ["a folder", 4.0])
def test_a_budget_is_given_as_one(given: Any) -> None:
    with pytest.raises(InvalidInput, match=r"budget must be a noshuffle.Budget, got (str|float)"):
        PrivateSum(plan_of(), clip=1.0, shape=(), budget=given).add([1.0])

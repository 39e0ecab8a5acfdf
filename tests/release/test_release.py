"""Release: once per noise, fail-stop, fresh draws in every process, and what a folder must hold."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    NoshuffleError,
    ParticipationViolation,
    ReuseRefused,
    Unsupported,
)
from noshuffle.noise import Source, test_source
from noshuffle.participation import BallsInBins, Epochs, Poisson, SinglePass
from noshuffle.plan import Plan
from noshuffle.plan.statement import UNCHECKED
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History
from noshuffle.release.log import read
from noshuffle.release.open_run import seal
from noshuffle.release.release import Release
from noshuffle.release.verify import verify

SIZE = 64
MECHANISMS = ("identity", "tree", "blt", "banded_inverse", "banded", "blt_two_sided", "dense")


def plan_of(mechanism: str = "blt", part: Any = None, **options: Any) -> Plan:
    part = part or Epochs(2, 4)
    return Plan.fit(part, mechanism=mechanism, **{"noise_multiplier": 1.0, **options})


def opened(plan: Plan, run: Path | None = None, **options: Any) -> Release:
    release = Release(plan, {"w": (SIZE,)}, clip=1.0, divisor=4, run=run, **options)
    if run is not None:
        release.restore()
    return release


def step(release: Release, ids: Sequence[Any] | None = None) -> np.ndarray:
    """One step of zeros: what leaves is noise."""
    t = release.step
    own = [10 * (t % 4), 10 * (t % 4) + 1] if ids is None else ids
    ticket = release.admit(release.identify(own))
    values = {"w": torch.zeros(SIZE)}
    release.close(ticket, values)
    release.finish(ticket)
    return values["w"].numpy() * 4


def save(release: Release) -> None:
    release.save({"model": {"w": torch.zeros(SIZE)}})


def kill(release: Release) -> None:
    """As a process that ends at once: nothing is brought up to date."""
    release.log.close()


# -- once ------------------------------------------------------------------------------------------


def test_a_ticket_is_used_once_and_a_step_needs_one() -> None:
    release = opened(plan_of())
    ticket = release.admit(release.identify([1]))
    with pytest.raises(NoshuffleError, match="step 0 failed half-way"):
        release.admit(release.identify([2]))
    values = {"w": torch.zeros(SIZE)}
    release.close(ticket, values)
    for again in (release.close, lambda t, _: release.use(t), lambda t, _: release.pass_over(t)):
        with pytest.raises(ReuseRefused, match="used once"):
            again(ticket, values)
    release.finish(ticket)
    with pytest.raises(ReuseRefused, match="closed last"):
        release.finish(ticket)
    with pytest.raises(ReuseRefused, match="used once"):
        release.close(ticket, values)


def test_a_failure_inside_a_step_ends_the_object_and_the_folder_goes_on(tmp_path: Path) -> None:
    plan, run = plan_of(), tmp_path / "run"
    release = opened(plan, run)
    step(release)
    save(release)
    release.admit(release.identify([5]))  # and then the loss raises
    for attempt in (lambda: step(release), lambda: save(release), release.pass_over):
        with pytest.raises(NoshuffleError, match=r"step 1 failed half-way.*open the run again"):
            attempt()
    release.close_run()
    again = opened(plan, run)
    assert again.step == again.noise.step == 2
    step(again)
    again.close_run()
    verdict = verify(run)
    assert verdict.is_verified
    assert verdict.released == 3


def test_a_sum_is_divided_by_the_planned_constant() -> None:
    release = Release(plan_of(noise_multiplier=0.0), {"w": (2,)}, clip=1.0, divisor=4)
    for ids in ([1], [2, 3]):
        ticket, values = release.admit(release.identify(ids)), {"w": torch.ones(2)}
        release.close(ticket, values)
        release.finish(ticket)
        assert values["w"].tolist() == [0.25, 0.25]


def test_runs_that_were_given_one_key_share_no_noise() -> None:
    key = Source(bytes(range(32)))
    one, other = (step(opened(plan_of(), source=key)) for _ in range(2))
    assert (one != other).mean() > 0.9


def test_masks_are_fresh_and_secret() -> None:
    runs = [opened(plan_of()) for _ in range(2)]
    seeds = {run.seed(step, part) for run in runs for step in range(3) for part in range(2)}
    assert len(seeds) == 12


def test_a_refused_batch_writes_no_row_and_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    release = opened(plan_of(), tmp_path / "run")
    step(release, [1, 2])
    size = (tmp_path / "run" / "log.jsonl").stat().st_size
    for ids in ([1, 3], [4, 4]):
        with pytest.raises(ParticipationViolation):
            release.admit(release.identify(ids))
    with pytest.raises(InvalidInput, match="by integers, and now names came"):
        release.admit(release.identify(["1"]))
    with pytest.raises(InvalidInput, match="named in every step"):
        release.admit(None)
    assert (tmp_path / "run" / "log.jsonl").stat().st_size == size
    step(release, [3])
    assert release.step == 2


def test_parts_of_a_step_are_one_step_and_share_no_unit(tmp_path: Path) -> None:
    release = opened(plan_of(), tmp_path / "run")
    ticket = release.admit(release.identify([1, 2]), is_partial=True)
    with pytest.raises(ParticipationViolation, match="another part of this step"):
        release.add_part(ticket, release.identify([2, 3]))
    release.add_part(ticket, release.identify([3, 4]))
    release.close(ticket, {"w": torch.zeros(SIZE)})
    release.finish(ticket)
    assert release.step == 1
    kill(release)
    seen: list[tuple[int, list[int]]] = []
    history = History.read(
        RunFolder(tmp_path / "run"), on_step=lambda t, units: seen.append((t, units.tolist()))
    )
    assert history.steps == 1
    assert seen == [(0, [1, 2]), (0, [3, 4])]


def test_a_plan_ends_and_its_secret_with_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    release = opened(plan_of(), run)
    secret = release.secret.hex().encode()
    for _ in range(8):
        step(release)
        save(release)
    with pytest.raises(HorizonExceeded):
        step(release)
    release.close_run()
    assert not [p for p in run.rglob("*") if p.name.startswith("secret")]
    assert not [p for p in run.rglob("*") if p.is_file() and secret in p.read_bytes()]
    with pytest.raises(InvalidInput, match=r"has ended.*fork_of="):
        opened(plan_of(), run)
    assert verify(run).answer == "VERIFIED"


def test_a_secret_that_a_kill_left_behind_the_end_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    release = opened(plan_of(), run)
    step(release)
    save(release)
    copy = (run / "secret.json").read_bytes()
    seal(run) if kill(release) is None else None
    (run / "secret.json").write_bytes(copy)
    (run / "checkpoints" / ".step-00000009.1.tmp").mkdir()
    (run / "checkpoints" / ".step-00000009.1.tmp" / "secret.pt").write_bytes(b"noise")
    with pytest.raises(InvalidInput, match="has ended"):
        opened(plan_of(), run)
    assert not [p for p in run.rglob("*") if "secret" in p.name]


# -- copies, rollbacks, branches -------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_two_continuations_share_only_what_was_released(tmp_path: Path, mechanism: str) -> None:
    plan = plan_of(mechanism)
    run = tmp_path / "run"
    release = opened(plan, run)
    common = [step(release) for _ in range(3)]
    save(release)
    kill(release)
    rows: dict[str, list[np.ndarray]] = {}
    for name in "ab":
        shutil.copytree(run, tmp_path / name)
        branch = opened(plan, tmp_path / name)
        assert branch.step == 3
        rows[name] = [step(branch) for _ in range(5)]
        branch.close_run()
        assert verify(tmp_path / name).is_verified
    for t in range(3, 8):
        # The difference of two branches is fresh noise of the rows that only they have drawn.
        gap = rows["a"][t - 3] - rows["b"][t - 3]

        assert gap.std() > 0.25
    flat = [*common, *rows["a"], *rows["b"]]
    assert all((one != other).any() for one, other in combinations(flat, 2))


def test_rows_without_a_sum_are_passed_over_with_their_own_noise(tmp_path: Path) -> None:
    plan = plan_of("blt")
    release = opened(plan, tmp_path / "a", source=test_source(seed=1))
    unbroken = [step(release) for _ in range(8)]
    release = opened(plan, tmp_path / "b", source=test_source(seed=1))
    for _ in range(2):
        step(release)
    save(release)
    for _ in range(3):
        step(release)
    kill(release)
    again = opened(plan, tmp_path / "b")
    assert again.step == 5
    assert [step(again).tolist() for _ in range(3)] == [row.tolist() for row in unbroken[5:]]


def test_rows_are_on_the_disk_before_what_came_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, sync, move = tmp_path / "run" / "log.jsonl", os.fdatasync, os.replace
    synced, seen = [0], []

    def slowly(handle: int) -> None:
        size = os.fstat(handle).st_size
        time.sleep(0.02)
        sync(handle)
        synced[0] = size

    def replace(old: Any, new: Any) -> None:
        seen.append((synced[0], log.stat().st_size))
        move(old, new)

    release = opened(plan_of(), tmp_path / "run")
    monkeypatch.setattr(os, "fdatasync", slowly)
    step(release)
    release.flush()
    assert synced[0] == log.stat().st_size
    step(release)
    monkeypatch.setattr(os, "replace", replace)
    save(release)
    assert seen
    assert all(on_disk == written for on_disk, written in seen)


def test_a_state_of_another_branch_or_run_is_not_loaded(tmp_path: Path) -> None:
    plan, run = plan_of(), tmp_path / "run"
    release = opened(plan, run)
    step(release)
    save(release)
    kill(release)
    for name in "ab":
        shutil.copytree(run, tmp_path / name)
        branch = opened(plan, tmp_path / name)
        step(branch)
        save(branch)
        kill(branch)
    for file in ("secret.pt", "state.pt"):
        shutil.rmtree(tmp_path / "mixed", ignore_errors=True)
        shutil.copytree(tmp_path / "b", tmp_path / "mixed")
        place = Path("checkpoints", "step-00000002", file)
        shutil.copy(tmp_path / "a" / place, tmp_path / "mixed" / place)
        with pytest.raises(InvalidInput, match="is not what this run saved there"):
            opened(plan, tmp_path / "mixed")
    shutil.rmtree(tmp_path / "mixed" / "checkpoints" / "step-00000002")
    assert opened(plan, tmp_path / "mixed").step == 2  # goes on from the checkpoint before


def test_a_log_that_is_older_than_the_files_beside_it_is_refused(tmp_path: Path) -> None:
    plan, run = plan_of(), tmp_path / "run"
    release = opened(plan, run)
    step(release)
    old = (run / "log.jsonl").read_bytes()
    step(release)
    save(release)
    kill(release)
    (run / "log.jsonl").write_bytes(old)
    with pytest.raises(ReuseRefused, match="older than they are"):
        opened(plan, run)
    assert verify(run).answer == "REFUTED"
    for gone in (b"", None):
        (run / "log.jsonl").unlink()
        if gone is not None:
            (run / "log.jsonl").write_bytes(gone)
        with pytest.raises(InvalidInput, match=r"missing or empty.*new run"):
            opened(plan, run)


def test_a_kill_while_a_run_begins_leaves_a_folder_that_begins_again(tmp_path: Path) -> None:
    plan, run = plan_of(), tmp_path / "run"
    kill(opened(plan, run))
    for left in (("secret.json",), ("secret.json", "plan.json"), ("log.jsonl",)):
        shutil.rmtree(tmp_path / "left", ignore_errors=True)
        (tmp_path / "left").mkdir()
        for name in left:
            shutil.copy(run / name, tmp_path / "left" / name)
        if left == ("log.jsonl",):
            (tmp_path / "left" / "log.jsonl").write_bytes(b"")
        release = opened(plan, tmp_path / "left")
        assert release.secret != opened_secret(run)
        step(release)
        kill(release)


def opened_secret(run: Path) -> bytes:
    return bytes.fromhex(json.loads((run / "secret.json").read_text())["secret"])


def test_a_forked_process_cannot_release() -> None:
    release = opened(plan_of())
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            step(release)
            os.write(writing, b"released")
        except ReuseRefused:
            os.write(writing, b"refused")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 99) == b"refused"


# -- what a run is held to -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"clip": 2.0}, "begun with clip = "),
        ({"divisor": 8}, "begun with divisor = 4"),
        ({"shapes": {"v": (SIZE,)}}, "begun with sums"),
        ({"plan": plan_of("tree")}, "another plan"),
        ({"source": test_source(seed=1)}, "another key"),
        ({"facts": {"initial": "elsewhere"}}, "begun with initial"),
    ],
)
def test_a_run_goes_on_as_it_was_begun(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    plan, run = plan_of(), tmp_path / "run"
    release = opened(plan, run)
    step(release)
    kill(release)
    how = {"plan": plan, "shapes": {"w": (SIZE,)}, "clip": 1.0, "divisor": 4, "run": run}
    with pytest.raises(InvalidInput, match=match):
        Release(**{**how, **change})
    assert opened(plan, run).step == 1


def test_steps_wait_for_the_newest_checkpoint_to_be_loaded(tmp_path: Path) -> None:
    plan, run = plan_of(), tmp_path / "run"
    release = opened(plan, run)
    step(release)
    kill(release)
    again = Release(plan, {"w": (SIZE,)}, clip=1.0, divisor=4, run=run)
    with pytest.raises(InvalidInput, match="load its newest checkpoint first"):
        again.admit(again.identify([1]))


def test_units_without_names_are_said_beside_epsilon_and_do_not_come_back(tmp_path: Path) -> None:
    plan, run = plan_of(part=SinglePass(8)), tmp_path / "run"
    release = opened(plan, run)
    for _ in range(2):
        ticket = release.admit(None)
        release.close(ticket, {"w": torch.zeros(SIZE)})
        release.finish(ticket)
    said = release.statement()
    assert not said.participation_checked
    assert UNCHECKED in said.headline()
    save(release)
    kill(release)
    told = json.loads((run / "statement.json").read_text())
    assert told["participation_checked"] is False
    verdict = verify(run)
    assert verdict.is_verified
    assert UNCHECKED in verdict.words().splitlines()[0]
    with pytest.raises(InvalidInput, match=r"nobody named the units.*fork_of="):
        opened(plan, run)
    fork = opened(plan, tmp_path / "fork", fork_of=run)
    step(fork)
    assert not fork.statement().participation_checked


# -- forks -----------------------------------------------------------------------------------------


def test_a_fork_adds_what_the_old_run_spent_and_ends_it(tmp_path: Path) -> None:
    plan, old = plan_of(), tmp_path / "old"
    release = opened(plan, old)
    step(release)
    save(release)
    kill(release)
    fork = opened(plan_of("tree", noise_multiplier=2.0), tmp_path / "new", fork_of=old)
    for _ in range(8):
        step(fork)
    mu = np.hypot(plan.mu(1), fork.plan.mu(8))
    assert fork.statement().mu == pytest.approx(mu, rel=1e-12)
    assert fork.epsilon_after(8) == fork.statement().epsilon
    fork.close_run()
    assert verify(tmp_path / "new").is_verified
    with pytest.raises(InvalidInput, match="has ended"):
        opened(plan, old)
    third = opened(plan, tmp_path / "third", fork_of=tmp_path / "new")
    step(third)
    assert third.statement().mu == pytest.approx(np.hypot(mu, plan.mu(1)), rel=1e-12)
    with pytest.raises(InvalidInput, match="begins a new run"):
        opened(plan, tmp_path / "third", fork_of=old) if kill(third) is None else None


def test_a_fork_keeps_the_unit(tmp_path: Path) -> None:
    kill(opened(plan_of(), tmp_path / "old"))
    with pytest.raises(InvalidInput, match="must keep the unit"):
        opened(plan_of(unit="user"), tmp_path / "new", fork_of=tmp_path / "old")
    assert not (tmp_path / "new").exists()
    assert opened(plan_of(), tmp_path / "old").step == 0


# -- secret draws ----------------------------------------------------------------------------------


def test_a_sampled_step_holds_what_was_drawn_and_the_log_does_not_say_it(tmp_path: Path) -> None:
    plan = plan_of("identity", Poisson(8, 0.3))
    release = opened(plan, tmp_path / "run")
    with pytest.raises(ParticipationViolation, match="takes its batches from our sampler"):
        release.admit(release.identify([1]))
    drawn = [*release.sampler(40)]
    with pytest.raises(ParticipationViolation, match="not the one that the secret sampler drew"):
        release.admit(release.identify(drawn[0][1:]))
    step(release, drawn[0])
    half = len(drawn[1]) // 2
    ticket = release.admit(release.identify(drawn[1][:half]), is_partial=True)
    with pytest.raises(ParticipationViolation, match="is not the one that the secret sampler drew"):
        release.add_part(ticket, release.identify(drawn[1]))
    release.add_part(ticket, release.identify(drawn[1][half:]))
    release.close(ticket, {"w": torch.zeros(SIZE)})
    release.finish(ticket)
    ticket = release.admit(release.identify(drawn[2][:1]), is_partial=True)
    with pytest.raises(ParticipationViolation, match="did not come"):
        release.close(ticket, {"w": torch.zeros(SIZE)})
    kill(release)
    rows = [row for row in read(tmp_path / "run" / "log.jsonl") if row["kind"] == "step"]
    assert [set(row) for row in rows] == [{"kind", "step", "link"}] * 3


def test_draws_of_a_copy_differ_and_secret_positions_stay(tmp_path: Path) -> None:
    for part, is_kept in ((Poisson(8, 0.3), False), (BallsInBins(2, 4), True)):
        plan, run = plan_of("identity", part), tmp_path / part.kind
        release = opened(plan, run)
        drawn = [*release.sampler(60)]
        step(release, drawn[0])
        kill(release)
        shutil.copytree(run, tmp_path / f"copy of {part.kind}")
        later = []
        for place in (run, tmp_path / f"copy of {part.kind}"):
            branch = opened(plan, place)
            later.append([own.tolist() for own in branch.sampler(60)])
            kill(branch)
        assert (later[0] == later[1]) is is_kept
        if is_kept:
            assert later[0] == [own.tolist() for own in drawn[1:]]


def test_a_sampled_log_tells_no_times(tmp_path: Path) -> None:
    plan = plan_of("identity", Poisson(8, 0.3))
    release = opened(plan, tmp_path / "run")
    for drawn in [*release.sampler(40)]:
        step(release, drawn)
    release.close_run()
    for row in read(tmp_path / "run" / "log.jsonl"):
        assert not {"time", "seconds", "at_time"} & set(row)
        assert len(str(row.get("day", "2026-01-01"))) == 10


def test_a_run_is_neither_copied_nor_pickled() -> None:
    import copy

    with pytest.raises(Unsupported, match="neither copied nor pickled"):
        copy.deepcopy(opened(plan_of()))

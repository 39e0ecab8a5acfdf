"""verify: a good run passes; every doctored file is noticed."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest
import torch
from tests.release.folders import cut, edit_json, key_pair, relink, sql
from torch import nn

from noshuffle.errors import InvalidInput, ReplayRefused, VerificationFailed
from noshuffle.noise import test_source
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    Epochs,
    FixedSize,
    Poisson,
    SinglePass,
    TruncatedPoisson,
)
from noshuffle.plan import Plan
from noshuffle.release import ledger_tables as evidence
from noshuffle.release.checkpoint import load
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger import Ledger
from noshuffle.release.ledger_file import LedgerFile
from noshuffle.release.ledger_tables import Evidence, encode_units
from noshuffle.release.opening import fork, load_model
from noshuffle.release.private_sum import PrivateSum
from noshuffle.release.sampler_kinds import make_sampler
from noshuffle.release.seal import seal
from noshuffle.release.verdict import UNSIGNED
from noshuffle.statement import of_stops
from noshuffle.strategies import identity, tree
from noshuffle.training import fit_model, in_order, privatize, verify
from noshuffle.training.batches import TensorBatches

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randint(2, (24,), generator=torch.Generator().manual_seed(1))


def train(path, rule, *, strategy=None, z=2.0, run=None, source=None, keep_keys=False):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    plan = Plan(participation=rule, strategy=strategy or identity(), noise_multiplier=z)
    private = privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        clip_norm=1.0,
        batch_size=6,
        run=run or path,
        source=source,
    )
    order = private.sampler(24) if rule.is_sampled else in_order(24, 6)
    fit_model(private, TensorBatches((X, Y), order), nn.CrossEntropyLoss())
    private.close(keep_keys=keep_keys)
    return private


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "good"
    train(path, Epochs(epochs=2, steps_per_epoch=4), strategy=tree(), keep_keys=True)
    return path


@pytest.fixture
def copy(good, tmp_path):
    return shutil.copytree(good, tmp_path / "copy")


def edit(file, change):
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record, sort_keys=True, separators=(",", ":")))


def test_a_good_run_is_proved(good):
    verdict = verify(good)
    assert (verdict.answer, verdict.exit_code) == ("PROVED", 0), verdict.words()
    assert verdict.words().startswith("PROVED: 8 of 8 planned steps")
    assert UNSIGNED in verdict.words()
    verdict.check()
    record = json.loads((good / "statement.json").read_text())
    assert verdict.epsilon == record["epsilon"]
    assert verdict.to_dict()["verified"] is True
    assert record["released_steps"] == 8


SAMPLED = [
    Poisson(6, 0.3),
    FixedSize(6, 5, 24),
    CyclicPoisson(6, 2, 0.6),
    BallsInBins(2, 3),
    TruncatedPoisson(6, 0.4, 8, 24),
]


@pytest.mark.parametrize("rule", SAMPLED, ids=repr)
def test_sampled_runs_verify_and_foreign_draws_do_not(tmp_path, rule):
    path = tmp_path / "run"
    private = train(path, rule, keep_keys=True)
    assert verify(path).answer == "PROVED", verify(path).words()
    hidden = shutil.copytree(path, tmp_path / "hidden")
    (hidden / "checkpoints/key.json").unlink()
    verdict = verify(hidden)
    assert (verdict.answer, verdict.exit_code) == ("CONSISTENT", 3)
    assert "what needs the keys" in verdict.unchecked[0]
    sealed = tmp_path / "sealed"
    train(sealed, rule)
    assert not (sealed / "checkpoints/key.json").exists()
    verdict = verify(sealed)
    assert verdict.answer == "PROVED", verdict.words()  # checked before the keys were destroyed
    assert any("secret draws of 6 steps" in line for line in verdict.checked)
    unnamed = shutil.copytree(sealed, tmp_path / "unnamed")
    edit_json(unnamed / "statement.json", lambda r: r.pop("mu"))  # None, but said
    assert verify(unnamed).answer == "REFUTED"
    summed = shutil.copytree(sealed, tmp_path / "summed")  # who was drawn is in no summary
    sql(summed, ("INSERT INTO units VALUES (3, 0, 0, 1)",))
    assert verify(summed).answer == "REFUTED"
    ring = private._parts.release._ring
    drawn = make_sampler(rule, key=ring.sampling_key, population=24).draw(2)
    ids = np.setdiff1d(np.arange(24), drawn)
    sql(path, ("UPDATE steps SET ids = ?, units = ? WHERE step = 2", (encode_units(ids), len(ids))))
    relink(path)  # not even by somebody who makes the whole chain anew
    assert any("sampler drew" in f for f in verify(path).failures)
    with pytest.raises(VerificationFailed, match="sampler drew"):
        seal(path)
    assert (path / "checkpoints/key.json").exists()  # nothing was destroyed


DOCTORED = {
    "step removed": (("DELETE FROM steps WHERE step = 3",), "lacks step 3"),
    "last step removed": (
        ("DELETE FROM steps WHERE step = 7",),
        "covers 8 steps, the ledger has 7",
    ),
    "step added": (
        (
            "INSERT INTO steps SELECT 8, 999, life, time, batch, digest, late, units, ids, link "
            "FROM steps WHERE step = 0",
        ),
        "9 steps were released, the plan covers 8",
    ),
    "unit moved": (
        ("UPDATE steps SET ids = (SELECT ids FROM steps WHERE step = 0) WHERE step = 5",),
        "should not have taken part in step 5",
    ),
    "unit hidden": (
        ("UPDATE steps SET ids = ?, units = 1 WHERE step = 5", (encode_units(np.array([6])),)),
        "summary of units",
    ),
    "count changed": (("UPDATE steps SET units = 2 WHERE step = 1",), "claims 2 units"),
    "unit twice": (
        ("UPDATE steps SET ids = ?, units = 2 WHERE step = 5", (encode_units(np.array([6, 6])),)),
        "lists a unit twice",
    ),
    "summary edited": (("UPDATE units SET count = 1 WHERE unit = 4",), "summary of units"),
    "plan hash edited": (("UPDATE meta SET value = 'x' WHERE name = 'plan'",), "another plan"),
    "key edited": (("UPDATE meta SET value = 'x' WHERE name = 'key'",), "the keys are not those"),
    "unit of privacy edited": (
        ("UPDATE meta SET value = 'user' WHERE name = 'unit'",),
        "counts users",
    ),
    "test seed hidden or claimed": (
        ("UPDATE meta SET value = 'yes' WHERE name = 'test_key'",),
        "assumptions",
    ),
    "blob damaged": (("UPDATE steps SET ids = x'00' WHERE step = 2",), "damaged"),
    "table gone": (("DROP TABLE units",), "damaged"),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_doctored_ledger(copy, name):
    command, words = DOCTORED[name]
    sql(copy, command)
    verdict = verify(copy)
    assert any(words in f for f in verdict.failures), verdict.words()
    assert (verdict.answer, verdict.exit_code) == ("REFUTED", 1)
    assert verdict.words().startswith("REFUTED")
    with pytest.raises(VerificationFailed):
        verdict.check()


def test_doctored_plan(copy):
    edit(copy / "plan.json", lambda r: r.update(noise_multiplier=3.0))
    assert any("another plan" in f for f in verify(copy).failures)
    text = (copy / "plan.json").read_text()
    (copy / "plan.json").write_text(text + " ")
    assert any("canonical" in f for f in verify(copy).failures)
    (copy / "plan.json").write_text("{}")
    assert "plan.json cannot be read" in verify(copy).failures[0]
    (copy / "plan.json").unlink()
    assert not verify(copy).is_verified


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", 0.1),
        ("delta", 1e-9),
        ("unit", "user"),
        ("neighbours", "replace-one"),
        ("assumptions", []),
        ("exact", False),
        ("sensitivity", 1.0),
        ("surprise", 1),
    ],
)
def test_doctored_statement(copy, field, value):
    edit(copy / "statement.json", lambda r: r.update({field: value}))
    failures = verify(copy).failures
    assert any(f.startswith(f"statement.json says {field} = ") for f in failures), failures


def test_what_a_stop_rests_on_may_be_missing_and_not_be_changed(tmp_path):
    """Version 0.1 did not write it down."""
    plan = Plan(participation=Epochs(2, 4), strategy=tree(), noise_multiplier=2.0)
    sums = PrivateSum(plan, clip=1.0, run=tmp_path / "run")
    sums.add(X[:6], ids=range(6))
    sums.close()
    file = tmp_path / "run/statement.json"
    told = json.loads(file.read_text())["assumptions"]
    (said,) = of_stops(told)
    assert verify(tmp_path / "run").answer == "PROVED"
    edit_json(file, lambda r: r.update(assumptions=[one for one in told if one != said]))
    assert verify(tmp_path / "run").answer == "CONSISTENT"
    other = said.replace("after step 1", "after step 2")
    edit_json(file, lambda r: r.update(assumptions=[other if one == said else one for one in told]))
    assert any("says assumptions" in line for line in verify(tmp_path / "run").refuted)


def test_a_statement_that_is_behind_is_told_in_one_line(copy):
    """As after a crash: what differs because of the steps is not told as well."""
    change = {"released_steps": 7, "epsilon": 0.5, "rho": 0.1, "assumptions": []}
    edit_json(copy / "statement.json", lambda r: r.update(change))
    (failure,) = verify(copy).failures
    assert "covers 7 steps, the ledger has 8; resume the run" in failure
    edit(copy / "statement.json", lambda r: r.update({"delta": 0.1}))
    assert any("statement.json says delta" in f for f in verify(copy).failures)


def test_a_statement_of_an_earlier_row_does_not_leave_out_a_process(tmp_path):
    """Rows of the ledger that stand before its last step count, whichever row it names."""
    plan = Plan(participation=Epochs(2, 4), strategy=tree(), noise_multiplier=2.0)
    for steps in ([0, 1], [2, 3]):  # two processes
        sums = PrivateSum(plan, clip=1.0, run=tmp_path / "run")
        for step in steps:
            sums.add(X[6 * step : 6 * step + 6], ids=range(6 * step, 6 * step + 6))
        sums.close()
    db = sqlite3.connect(tmp_path / "run/ledger.sqlite")
    lives = "SELECT seq - 1 FROM log WHERE kind = 'life' ORDER BY seq DESC"
    (row,) = db.execute(lives).fetchone()
    (link,) = db.execute("SELECT link FROM log WHERE seq = ?", (row,)).fetchone()
    db.close()

    def forge(record):
        said = [one for one in record["assumptions"] if "2 processes" not in one]
        assert len(said) == len(record["assumptions"]) - 1
        record.update(ledger_rows=row, ledger_link=link.hex(), assumptions=said)

    assert verify(tmp_path / "run").answer == "PROVED"
    edit_json(tmp_path / "run/statement.json", forge)
    assert any("says assumptions" in line for line in verify(tmp_path / "run").refuted)


def test_a_state_that_cannot_be_unpacked_is_one_line(copy):
    """torch raises what its unpickler happens to meet: KeyError, UnicodeDecodeError, …"""
    (file,) = (copy / "checkpoints/step-00000008").glob("state.pt")
    whole = file.read_bytes()
    name = whole.index(b"threshold")
    file.write_bytes(whole[:name] + b"\xff" + whole[name + 1 :])
    assert any("state.pt cannot be read" in line for line in verify(copy).refuted)
    with pytest.raises(InvalidInput, match=r"is damaged \(UnicodeDecodeError\); bring"):
        load(file.parent)


def test_missing_or_foreign_pieces(copy):
    (copy / "statement.json").unlink()
    assert any("statement.json cannot be read" in f for f in verify(copy).failures)
    (copy / "ledger.sqlite").unlink()
    for extra in copy.glob("ledger.sqlite-*"):
        extra.unlink()
    assert any("ledger.sqlite" in f for f in verify(copy).failures)


def test_verify_changes_nothing(good):
    before = {p: p.read_bytes() for p in good.rglob("*") if p.is_file()}
    verify(good)
    assert {p: p.read_bytes() for p in good.rglob("*") if p.is_file()} == before


def test_evidence_with_a_log_that_was_not_folded_in(tmp_path, monkeypatch):
    """What a killed process leaves, also where nothing may be written."""
    live = Ledger(SinglePass(steps=9), path=tmp_path / "ledger.sqlite")
    for t in range(4):
        live.record(live.admit(t, np.array([t]), bytes([t])))
    left = tmp_path / "left"
    left.mkdir()
    for name in ("ledger.sqlite", "ledger.sqlite-wal"):
        shutil.copyfile(tmp_path / name, left / name)
    direct = Evidence(left / "ledger.sqlite")
    assert len(list(direct.rows())) == 4
    direct.close()
    real = evidence._open

    def read_only_folder(path, how):
        if path.parent == left:
            raise sqlite3.OperationalError("unable to open database file")
        return real(path, how)

    monkeypatch.setattr(evidence, "_open", read_only_folder)
    copied = Evidence(left / "ledger.sqlite")
    assert [row.units.tolist() for row in copied.rows()] == [[0], [1], [2], [3]]
    copied.close()


def test_a_model_of_other_modules_is_refused_in_one_line(good):
    with pytest.raises(InvalidInput, match=r"build the same modules .*size mismatch") as refusal:
        load_model(good, nn.Linear(3, 2))
    assert "\n" not in str(refusal.value)


def test_a_fork_adds_up_and_closes_its_parent(good, tmp_path):
    parent = shutil.copytree(good, tmp_path / "parent")
    child = fork(parent, tmp_path / "child")
    model = nn.Linear(4, 2)
    assert load_model(parent, model) == 8
    rule = Epochs(epochs=1, steps_per_epoch=4)
    private = train(None, rule, strategy=tree(), run=child, keep_keys=True)
    own, old = private.plan.mu(), verify(parent)
    assert old.is_verified, old.words()
    statement = json.loads(child.statement_file.read_text())
    parent_mu = json.loads((parent / "statement.json").read_text())["mu"]
    assert statement["mu"] == pytest.approx((own**2 + parent_mu**2) ** 0.5)
    assert any("fork" in s for s in statement["assumptions"])
    assert verify(child.path).is_verified, verify(child.path).words()
    key = [json.loads((p / "checkpoints/key.json").read_text()) for p in (parent, child.path)]
    assert key[0]["lives"][0]["noise"] != key[1]["lives"][0]["noise"]
    with pytest.raises(InvalidInput, match="was forked after 8 steps"):
        train(parent, Epochs(epochs=2, steps_per_epoch=4), strategy=tree())
    with pytest.raises(InvalidInput, match="not empty"):
        fork(parent, child.path)
    edit(child.ancestors_file, lambda r: r[0].update(released=0))
    assert not verify(child.path).is_verified


def test_a_run_that_is_open_when_it_is_forked_releases_nothing_more(tmp_path):
    model = nn.Linear(4, 2)
    plan = Plan(participation=SinglePass(steps=4), strategy=tree(), noise_multiplier=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = privatize(model, optimizer, plan, clip_norm=1.0, batch_size=6, run=tmp_path / "run")

    def step(t):
        torch.manual_seed(t)
        x, y = torch.randn(6, 4), torch.randint(2, (6,))
        return private.step(nn.CrossEntropyLoss(), x, y, ids=range(6 * t, 6 * t + 6))

    step(0)
    early = Ledger(plan.participation, path=tmp_path / "run/ledger.sqlite")
    step(1)
    assert early.released == 1  # it was opened before the second step
    assert early.end() == 2
    child = fork(tmp_path / "run", tmp_path / "child")
    assert child.ancestors()[0].released == 2
    before = model.weight.detach().clone()
    with pytest.raises(ReplayRefused, match="forked after 2 steps"):
        step(2)
    assert private.steps_released == 2
    assert torch.equal(model.weight, before)
    private.write_statement()
    assert verify(tmp_path / "run").is_verified, verify(tmp_path / "run").words()


def test_a_test_seed_is_called_not_private(tmp_path):
    model = nn.Linear(4, 2)
    plan = Plan(
        participation=Epochs(epochs=1, steps_per_epoch=4), strategy=tree(), noise_multiplier=2.0
    )
    privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        clip_norm=1.0,
        batch_size=6,
        run=tmp_path / "run",
        source=test_source(seed=1),
    ).close()
    record = json.loads((tmp_path / "run/statement.json").read_text())
    assert any("NOT PRIVATE" in s for s in record["assumptions"])
    verdict = verify(tmp_path / "run")
    assert (verdict.answer, verdict.exit_code) == ("NOT PRIVATE", 4), verdict.words()
    assert not verdict.is_verified
    with pytest.raises(VerificationFailed, match="test seed"):
        verdict.check()


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize("why", ["test seed", "no noise"])
def test_what_is_not_private_says_so_itself(tmp_path, why, is_finished):
    """It used to be called verified, with ε to four digits."""
    path, rule = tmp_path / "run", Epochs(epochs=1, steps_per_epoch=4)
    options = {"z": 0.0} if why == "no noise" else {"source": test_source(seed="told")}
    train(path, rule, strategy=tree(), keep_keys=not is_finished, **options)
    verdict = verify(path)
    assert (verdict.answer, verdict.exit_code) == ("NOT PRIVATE", 4), verdict.words()
    assert verdict.refuted == ()
    (reason,) = verdict.not_private
    assert why in reason or "has no noise" in reason
    assert verdict.to_dict()["verified"] is False


def test_the_unit_of_a_batch_without_ids_is_its_print(tmp_path):
    model = nn.Linear(4, 2)
    plan = Plan(participation=SinglePass(2), strategy=identity(), noise_multiplier=1.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    private = privatize(model, sgd, plan, clip_norm=1.0, batch_size=6, run=tmp_path / "run")
    for rows in (slice(0, 6), slice(6, 12)):
        private.step(nn.CrossEntropyLoss(), X[rows], Y[rows])
    private.close()
    assert verify(tmp_path / "run").answer == "PROVED"
    print_of_another = ("UPDATE steps SET batch = (SELECT batch FROM steps WHERE step = 0)",)
    sql(tmp_path / "run", print_of_another)
    relink(tmp_path / "run")
    assert "step 1 lists another unit than its batch" in verify(tmp_path / "run").failures


def test_a_ledger_of_the_first_version_is_neither_proved_nor_damaged(copy):
    """Its rows have no links; it was called damaged."""
    (copy / "ledger.sqlite").unlink()
    with closing(sqlite3.connect(copy / "ledger.sqlite")) as db:
        db.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        db.execute("CREATE TABLE steps (step INTEGER PRIMARY KEY, time REAL, batch BLOB, ids BLOB)")
    with pytest.raises(InvalidInput, match=r"written by noshuffle 0\.1"):
        verify(copy)
    with pytest.raises(InvalidInput, match=r"written by noshuffle 0\.1"):
        LedgerFile(copy / "ledger.sqlite")


def test_a_slip_in_the_name_of_the_folder_refutes_nothing(tmp_path):
    with pytest.raises(InvalidInput, match="nope is not a folder; give a run folder"):
        verify(tmp_path / "nope")


@pytest.mark.parametrize("change", ["remove", "edit"])
def test_what_a_run_was_forked_from_cannot_be_sealed_away(tmp_path, change):
    """The newest note of files had none of it, and the smaller ε of the fork alone was PROVED."""
    plan = Plan(participation=SinglePass(steps=4), strategy=tree(), noise_multiplier=2.0)

    def released(run, steps):
        sums = PrivateSum(plan, clip=1.0, shape=(), run=run)
        for step in range(steps):
            sums.add([1.0], ids=[step])
        sums.save()
        sums.close()

    released(tmp_path / "parent", 4)
    child = fork(tmp_path / "parent", tmp_path / "child")
    released(child, 2)
    assert verify(child.path).answer == "PROVED"
    if change == "remove":
        child.ancestors_file.unlink()
    else:
        edit(child.ancestors_file, lambda r: r[0].update(released=0))
    seal(child)
    found = verify(child.path)
    assert found.answer == "REFUTED"
    assert "ancestors.json is not" in found.words()


def test_a_seal_does_not_make_edited_settings_good(tmp_path):
    """REFUTED became PROVED by `noshuffle seal`, which noted what it found."""
    plan = Plan(participation=SinglePass(steps=4), strategy=tree(), noise_multiplier=2.0)
    sums = PrivateSum(plan, clip=1.0, shape=(), run=tmp_path / "run")
    RunFolder(tmp_path / "run").write_config({"epochs": 1})
    sums.add([1.0], ids=[1])
    sums.save()
    sums.close()
    edit(tmp_path / "run" / "config.json", lambda r: r.update(epochs=9))
    with pytest.raises(VerificationFailed, match="is not what the ledger says"):
        seal(tmp_path / "run")
    assert verify(tmp_path / "run").answer == "REFUTED"


@pytest.mark.parametrize("change", ["remove", "edit"])
def test_a_fork_that_was_killed_before_it_was_saved_knows_what_it_came_from(tmp_path, change):
    """Its ledger had no note of ancestors.json, so that without it nobody knew of the parent."""
    plan = Plan(participation=SinglePass(steps=4), strategy=tree(), noise_multiplier=2.0)
    parent = PrivateSum(plan, clip=1.0, shape=(), run=tmp_path / "parent")
    parent.add([1.0], ids=[0])
    parent.save()
    child = fork(tmp_path / "parent", tmp_path / "child")
    sums = PrivateSum(plan, clip=1.0, shape=(), run=child)
    sums.add([1.0], ids=[1])
    kept = shutil.copytree(child.path, tmp_path / "killed")
    lost = RunFolder(kept)
    if change == "remove":
        lost.ancestors_file.unlink()
    else:
        edit(lost.ancestors_file, lambda r: r[0].update(released=0))
    assert "ancestors.json is not" in verify(kept).words()
    with pytest.raises(ReplayRefused, match=r"ancestors.json is (gone|not what)"):
        PrivateSum(plan, clip=1.0, shape=(), run=kept)


@pytest.mark.parametrize("change", ["ancestors gone", "ancestors edited", "plan edited"])
def test_a_run_whose_files_are_not_those_of_its_ledger_is_not_forked(tmp_path, change):
    """A fork of a fork was PROVED without the runs, or with less ε of those, that were edited."""

    def released(folder):
        plan = Plan(participation=SinglePass(steps=4), strategy=tree(), noise_multiplier=2.0)
        sums = PrivateSum(plan, clip=1.0, shape=(), run=folder)
        sums.add([1.0], ids=[0])
        sums.save()
        sums.close()

    released(tmp_path / "parent")
    child = fork(tmp_path / "parent", tmp_path / "child")
    released(child)
    kept = child.ancestors_file.read_text()
    if change == "ancestors gone":
        child.ancestors_file.unlink()
    elif change == "ancestors edited":
        edit(child.ancestors_file, lambda r: r[0].update(released=0))
    else:
        edit(child.plan_file, lambda r: r.update(noise_multiplier=6.0))
    with pytest.raises(ReplayRefused, match=r"is gone|is not what"):
        fork(child, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    if "ancestors" in change:  # the refusal has ended nothing
        child.ancestors_file.write_text(kept)
        assert verify(child.path).answer == "PROVED"
        fork(child, tmp_path / "again")


@pytest.mark.parametrize("change", ["a fact", "a row", "rows cut", "rows cut, chain anew"])
def test_a_run_whose_ledger_was_edited_is_not_forked(tmp_path, change):
    """Its fork was PROVED: of a test seed that was hidden, or with less ε for rows cut out."""
    path = tmp_path / "parent"
    plan = Plan(participation=SinglePass(steps=4), strategy=tree(), noise_multiplier=2.0)
    sums = PrivateSum(plan, clip=1.0, shape=(), run=path, source=test_source(seed=1))
    for i in range(4):
        sums.add([1.0], ids=[i])
    sums.save()
    sums.close()
    kept = tmp_path / "kept"
    shutil.copytree(path, kept)
    if change == "a fact":
        sql(path, ("UPDATE meta SET value = 'no' WHERE name = 'test_key'",))
    elif change == "a row":
        sql(path, ("UPDATE steps SET batch = x'00' WHERE step = 1",))
    else:
        shutil.rmtree(path / "checkpoints")
        edit(path / "statement.json", lambda r: r.update(released_steps=1))
        if change == "rows cut":
            gone = ("steps WHERE step > 0", "units", "meta WHERE name = 'summarised'")
            sql(path, *((f"DELETE FROM {rows}",) for rows in gone))
        else:
            cut(path, 3)
    with pytest.raises(VerificationFailed, match=r"bring ledger\.sqlite back"):
        fork(path, tmp_path / "child")
    assert not (tmp_path / "child").exists()
    fork(kept, tmp_path / "child")


@pytest.mark.parametrize("is_sealed", [False, True])
@pytest.mark.parametrize("name", ["totals.csv", "metrics.jsonl"])
def test_a_seal_does_not_make_edited_or_strange_files_good(tmp_path, is_sealed, name):
    """Any file but config.json was noted as it was found, so that REFUTED became PROVED."""
    plan = Plan(participation=SinglePass(steps=2), strategy=tree(), noise_multiplier=2.0)
    run = RunFolder(tmp_path / "run")
    sums = PrivateSum(plan, clip=1.0, shape=(), run=run)
    (run.path / name).write_text('{"step": 1}\n')
    for step in range(2):
        sums.add([1.0], ids=[step])
    sums.save()
    sums.close(keep_keys=not is_sealed)
    assert verify(run.path).answer == "PROVED"
    (run.path / "stranger.txt").write_text("of somebody else")
    private, public, _ = key_pair(tmp_path)
    seal(run, sign=private)
    found = verify(run.path, public_key=public)
    assert found.answer == "CONSISTENT"
    assert "stranger.txt, which the ledger does not know of" in found.unchecked
    (run.path / name).write_text('{"step": 2}\n')
    with pytest.raises(VerificationFailed, match=f"{name} is not what the ledger says"):
        seal(run, sign=private)
    assert verify(run.path).answer == "REFUTED"

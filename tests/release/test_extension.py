"""Runs that are extended in their folder: one guarantee over old and new steps."""

import json
import math
import shutil
import sqlite3

import numpy as np
import pytest
import torch
from tests.kills import child
from tests.release.folders import edit_json

import noshuffle as ns
from noshuffle.auditing.run_folder import audit_run
from noshuffle.errors import (
    InvalidInput,
    NoshuffleError,
    ParticipationViolation,
    ReplayRefused,
    Unsupported,
)
from noshuffle.noise import test_source as named_source
from noshuffle.release import extension
from noshuffle.release.extension import extend
from noshuffle.release.seal import seal
from noshuffle.release.verify import verify
from noshuffle.strategies import blt, identity

ROWS, BATCH = 12, 3
X = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
SHORT = ns.Plan(
    participation=ns.Epochs(2, 4), strategy=blt((0.9, 0.4), (0.2, 0.1)), noise_multiplier=3.0
)
MORE = SHORT.extended(epochs=1, mechanism=blt((0.7,), (0.3,)))


def start(plan, folder, *, batch=BATCH, clip=1.0, source=None, budget=None):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ns.privatize(
        model, optimizer, plan, clip_norm=clip, batch_size=batch, run=folder, source=source,
        budget=budget,
    )  # fmt: skip


def train(private, upto, *, batch=BATCH, ids=lambda i: i, scale=1.0):
    for step in range(private.steps_done, upto):
        rows = np.arange(step * batch, (step + 1) * batch) % ROWS
        private.step(lambda out: scale * out.square().mean(), X[rows], ids=ids(rows))
    private.save()


def finished(folder, plan=SHORT, *, keep_keys=False, source=None, **how):
    private = start(plan, folder, source=source)
    train(private, plan.steps, **how)
    private.close(keep_keys=keep_keys)
    return private


def test_a_sealed_run_goes_on_under_one_guarantee(tmp_path):
    finished(tmp_path / "run")
    before = verify(tmp_path / "run")
    extend(tmp_path / "run", MORE)
    assert verify(tmp_path / "run").answer == "PROVED"  # at rest, too
    private = start(MORE, tmp_path / "run")
    assert private.resume() == 8
    train(private, 10)
    del private  # killed in the middle
    private = start(MORE, tmp_path / "run")
    assert private.resume() == 10
    train(private, 12)
    private.close()
    after = verify(tmp_path / "run")
    assert after.answer == "PROVED", after
    assert any("extension" in line for line in after.checked)
    # μ² of a unit that takes part in both; each of them alone would be too little.
    assert after.epsilon == pytest.approx(MORE.epsilon(), rel=1e-12)
    assert after.epsilon > before.epsilon * 1.1
    told = json.loads((tmp_path / "run" / "statement.json").read_text())
    assert told["released_steps"] == 12
    assert "2 phases with independent noise" in told["mechanism"]
    assert all(finding.answer == "HOLDS" for finding in audit_run(tmp_path / "run"))
    assert not (tmp_path / "run" / "checkpoints" / "key.json").exists()
    extend(tmp_path / "run", MORE.extended(epochs=1, mechanism=identity()))  # and once more
    assert verify(tmp_path / "run").answer == "PROVED"


def test_noise_that_goes_on_is_that_of_one_long_run(tmp_path):
    longer = SHORT.extended(epochs=1, mechanism="continue")
    whole = finished(tmp_path / "whole", longer, source=named_source(seed=3), keep_keys=True)
    finished(tmp_path / "run", source=named_source(seed=3), keep_keys=True)
    extend(tmp_path / "run", longer)
    private = start(longer, tmp_path / "run", source=named_source(seed=3))
    assert private.resume() == 8
    train(private, 12)
    assert torch.equal(private.model.weight, whole.model.weight)
    private.close()
    sealed = tmp_path / "sealed"
    finished(sealed)
    with pytest.raises(InvalidInput, match="a phase of their own"):
        extend(sealed, longer)


def test_batch_size_and_clip_norm_change_on_the_way(tmp_path):
    private = start(SHORT, tmp_path)
    train(private, 4)  # one of two epochs
    private.close()
    plan = SHORT.extended(epochs=2, steps_per_epoch=2, after=4, mechanism=identity())
    extend(tmp_path, plan, batch_size=6, clip_norm=0.5)
    with pytest.raises(InvalidInput, match="clip"):
        start(plan, tmp_path, batch=6, clip=1.0)
    private = start(plan, tmp_path, batch=6, clip=0.5)
    assert private.resume() == 4
    train(private, 8, batch=6)
    with pytest.raises(NoshuffleError):
        train(private, 9, batch=6)
    private.close()
    found = verify(tmp_path)
    assert found.answer == "PROVED", found
    told = json.loads((tmp_path / "statement.json").read_text())["assumptions"]
    (made,) = (said for said in told if said.startswith("Released"))  # of all steps, not the last
    assert (
        "clip Flat(norm=0.5), divided by 6, noise of deviation 1.5 a draw; before step 4 " in made
    )
    assert made.endswith("clip Flat(norm=1.0), divided by 3, noise of deviation 3.0 a draw.")
    # One of four steps, and two of independent noise: the squares add up.
    first = SHORT.sensitivity_after(4).squared
    assert private.plan.sensitivity.squared == pytest.approx(first + 2, rel=1e-12)
    assert found.epsilon == pytest.approx(
        ns.accounting.gaussian.epsilon(mu=math.sqrt(first + 2) / 3.0, delta=1e-5)
    )


@pytest.mark.parametrize("strategy", [SHORT.strategy, identity(gains=(1.0, 1.1) * 4)])
def test_a_coming_phase_may_have_more_buffers(tmp_path, strategy):
    """The run stopped inside its old phase, and goes on there."""
    old = ns.Plan(participation=SHORT.participation, strategy=strategy, noise_multiplier=3.0)
    private = start(old, tmp_path)
    train(private, 6)
    private.close()
    plan = old.extended(epochs=1, mechanism=blt((0.9, 0.8, 0.5), (0.1, 0.1, 0.1)))
    extend(tmp_path, plan)
    private = start(plan, tmp_path)
    assert private.resume() == 6
    train(private, 12)
    private.close()
    assert verify(tmp_path).answer == "PROVED"


def test_units_are_held_to_the_extended_pattern(tmp_path):
    finished(tmp_path)
    extend(tmp_path, MORE)
    private = start(MORE, tmp_path)
    private.resume()
    with pytest.raises(ParticipationViolation, match="every 4 steps"):
        private.step(lambda out: out.square().mean(), X[3:6], ids=np.arange(3, 6))


def test_places_of_a_stage_are_counted_from_its_begin(tmp_path):
    """A stage that begins where steps were released already: its units have new first steps."""
    phase = blt((0.7,), (0.3,))
    old = SHORT.extended(epochs=2, mechanism=phase)
    private = start(old, tmp_path)
    train(private, 12)
    private.close()
    plan = old.extended(epochs=3, steps_per_epoch=3, after=8, mechanism=phase)
    extend(tmp_path, plan)
    private = start(plan, tmp_path)
    assert private.resume() == 12
    rows = np.array([9, 10, 11])  # were in step 11: once more right after it is in no pattern
    with pytest.raises(ParticipationViolation, match="seen first in step 11"):
        private.step(lambda out: out.square().mean(), X[rows], ids=rows)
    rows = np.array([3, 4, 5])  # were in step 9
    private.step(lambda out: out.square().mean(), X[rows], ids=rows)
    private.save()
    private.close()
    assert verify(tmp_path).answer == "PROVED"


def test_a_step_is_not_repeated_under_another_clip_norm(tmp_path):
    """Nobody is clipped at 1.0 or 0.5: the sum is the same, and two scales of one noise cancel."""
    private = start(SHORT, tmp_path)
    train(private, 4, scale=1e-3)
    private.close()
    plan = SHORT.extended(epochs=2, after=4, mechanism=identity())
    extend(tmp_path, plan, clip_norm=0.5)
    private = start(plan, tmp_path, clip=0.5)  # and no resume: step 0 again, with the same data
    with pytest.raises(ReplayRefused, match="another clip norm"):
        train(private, 1, scale=1e-3)
    private.close()
    private = start(plan, tmp_path, clip=0.5)
    private.resume()
    train(private, 5, scale=1e-3)
    private.close()
    assert verify(tmp_path).answer == "PROVED"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (ns.Plan(participation=ns.Epochs(3, 4), strategy=identity(), noise_multiplier=3.0), "step"),
        (SHORT.extended(epochs=1, after=4, mechanism=identity()), "nothing to extend"),
        (SHORT.extended(epochs=2, after=4, mechanism=identity()), "differs from what was released"),
        (
            ns.Plan(participation=ns.Epochs(3, 4), strategy=SHORT.strategy, noise_multiplier=2.0),
            "noise_multiplier",
        ),
        (
            ns.Plan(participation=ns.SinglePass(12), strategy=MORE.strategy, noise_multiplier=3.0),
            "should not have taken part",
        ),
    ],
)
def test_another_plan_is_no_extension(tmp_path, plan, words):
    finished(tmp_path)
    with pytest.raises(NoshuffleError, match=words):
        extend(tmp_path, plan)
    assert verify(tmp_path).answer == "PROVED"


def test_a_plan_that_is_shorter_than_what_was_released_is_refuted(tmp_path):
    finished(tmp_path)
    extend(tmp_path, MORE)
    shorter = {"participation": ns.Epochs(1, 4).to_dict()}
    edit_json(tmp_path / "plan.json", lambda record: record.update(shorter))
    found = verify(tmp_path)
    assert any("4 steps, and 8 were released" in line for line in found.refuted), found.words()


def test_units_by_name_of_a_sealed_run(tmp_path):
    finished(tmp_path, ids=lambda rows: [f"unit {i}" for i in rows])
    with pytest.raises(Unsupported, match="not recognised"):
        extend(tmp_path, MORE)
    extend(tmp_path, SHORT.extended(epochs=1, steps_per_epoch=2, mechanism=identity()))


def test_an_extension_that_was_killed_is_brought_to_its_end(tmp_path, monkeypatch):
    finished(tmp_path)

    def killed(*_):
        raise KeyboardInterrupt

    for what, name in ((extension, "_apply"), (extension.checkpoint, "digests")):
        with monkeypatch.context() as patch:
            patch.setattr(what, name, killed)
            with pytest.raises(KeyboardInterrupt):
                extend(tmp_path, MORE)
    private = start(MORE, tmp_path)
    assert private.resume() == 8
    train(private, 12)
    private.close()
    assert verify(tmp_path).answer == "PROVED"


@pytest.mark.parametrize("name", ["state.pt", "model.safetensors"])
def test_a_checkpoint_exchanged_after_the_kill_is_not_taken_over(tmp_path, monkeypatch, name):
    finished(tmp_path / "run")
    finished(tmp_path / "other", scale=2.0)
    with monkeypatch.context() as patch:
        patch.setattr(extension, "_apply", lambda *_: None)
        extend(tmp_path / "run", MORE)
    theirs, ours = (
        extension.checkpoint.saved(tmp_path / run / "checkpoints")[-1] / name
        for run in ("other", "run")
    )
    kept = ours.read_bytes()
    ours.write_bytes(theirs.read_bytes())
    for _ in range(2):
        with pytest.raises(InvalidInput, match="not what this run saved"):
            extension.finish(extension.RunFolder(tmp_path / "run"))
    ours.write_bytes(kept)
    private = start(MORE, tmp_path / "run")
    assert private.resume() == 8


def test_a_fact_that_changed_otherwise_is_refuted(tmp_path):
    """Whoever rewrites the chain cannot put a cheaper plan under rows of another noise."""
    finished(tmp_path, keep_keys=True)
    cheap = ns.Plan(
        participation=ns.Epochs(3, 4), strategy=identity(gains=(0.5,) * 12), noise_multiplier=3.0
    )
    assert cheap.epsilon() < MORE.epsilon()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "why_not", lambda *_: "")
        extend(tmp_path, cheap)
    found = verify(tmp_path)
    assert found.answer == "REFUTED"
    assert any("does not cover what was released" in line for line in found.refuted)
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    assert db.execute("SELECT COUNT(*) FROM log WHERE kind = 'extended'").fetchone() == (1,)
    db.close()


def test_a_budget_pays_for_all_of_an_extended_run(tmp_path):
    budget = ns.Budget(tmp_path / "budget", epsilon=MORE.epsilon() * 1.01, delta=1e-5)
    private = start(SHORT, tmp_path / "run", budget=budget)
    train(private, 8)
    private.close()
    assert budget.total().epsilon(1e-5) == pytest.approx(SHORT.epsilon(), rel=1e-6)
    extend(tmp_path / "run", MORE)
    private = start(MORE, tmp_path / "run", budget=budget)
    private.resume()
    train(private, 12)
    private.close()
    assert budget.total().epsilon(1e-5) == pytest.approx(MORE.epsilon(), rel=1e-6)
    assert verify(tmp_path / "run").answer == "PROVED"


def updates(plan, folder, *, clip, batch, size=1e6):
    """What every step adds to the weights, of units whose gradients are long (or zero)."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1, bias=False)
    private = ns.privatize(
        model, torch.optim.SGD(model.parameters(), lr=1.0), plan, clip_norm=clip,
        batch_size=batch, run=folder, source=named_source(seed=5),
    )  # fmt: skip
    found = []
    for step in range(plan.steps):
        before = model.weight.detach().clone()
        x = torch.eye(4)[:1] * size
        private.step(lambda out: out.sum(), x, ids=[step])
        found.append((before - model.weight.detach()).flatten())
        if step == 3 and folder is not None:  # what goes on has the norm of its step
            private.save()
            private.resume()
    if folder is not None:
        private.save()
    private.close(keep_keys=True)
    return torch.stack(found)


def test_a_clip_norm_and_a_divisor_by_step(tmp_path):
    """Units are clipped to ζ_t; noise is z·ζ_t times its row, under noise that is correlated."""
    strategy, part = blt((0.9, 0.4), (0.2, 0.1)), ns.SinglePass(6)
    plan = ns.Plan(participation=part, strategy=strategy, noise_multiplier=2.0)
    none = ns.Plan(participation=part, strategy=strategy, noise_multiplier=0.0)
    clip, batch = [(0, 1.0), (2, 0.5), (5, 4.0)], lambda step: 2 if step < 3 else 4
    norms = torch.tensor([1.0, 1.0, 0.5, 0.5, 0.5, 4.0])
    factor = norms / torch.tensor([2.0, 2.0, 2.0, 4.0, 4.0, 4.0])
    clipped = updates(none, None, clip=clip, batch=batch)
    torch.testing.assert_close(clipped.norm(dim=1), factor)
    one = updates(plan, None, clip=1.0, batch=1, size=0.0)
    scheduled = updates(plan, tmp_path, clip=clip, batch=batch, size=0.0)
    torch.testing.assert_close(scheduled, one * factor[:, None])
    found = verify(tmp_path)
    assert found.answer == "NOT PRIVATE", found  # the test seed alone: nothing is refuted
    assert found.epsilon == pytest.approx(plan.epsilon())
    told = (tmp_path / "statement.json").read_text()
    assert "BySteps(pieces=((0, 1.0), (2, 0.5), (5, 4.0)))" in told


@pytest.mark.parametrize(
    "bad",
    [
        *([], [1.0, 1.0], [(1, 1.0)], [(0, 1.0), (0, 2.0)], [(0, -1.0)]),
        *([(0, 1.0), (2.5, 0.5)], [(0, 1.0), (2.0, 0.5)], [(0, 1.0, 3)], [(0, "1")], [("0", 1.0)]),
    ],
)
def test_schedules_that_are_none(bad):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(InvalidInput):
        ns.privatize(model, optimizer, SHORT, clip_norm=bad, batch_size=4)


#: What leaves something on the disk; a kill between two of them is as good as any other.
WRITES = {"write_bytes", "take_coming_ring", "begin_life", "rebind", "note", "hold_to"}


def is_write(frame, event):
    return event == "return" and frame.f_code.co_name in WRITES


@pytest.mark.parametrize("keep_keys", [False, True], ids=["sealed", "with keys"])
def test_an_extension_that_is_killed_refutes_nothing(tmp_path, keep_keys):
    """After every write: nothing was begun, or it is said what to do, and then it is done."""
    plan = SHORT.extended(epochs=1, mechanism="continue") if keep_keys else MORE
    finished(tmp_path / "run", keep_keys=keep_keys)
    answers, said, kills = [], "killed", 0
    while str(said).startswith("killed"):
        kills += 1
        path = tmp_path / f"run{kills}"
        shutil.copytree(tmp_path / "run", path)
        said = child(lambda: extend(path, plan), kills, counts=is_write)  # noqa: B023
        try:
            answers.append(verify(path).answer)
        except InvalidInput as error:
            answers.append(str(error).partition(" is ")[2][:14])
        extend(path, plan)  # brings it to its end, or begins anew
        assert verify(path).answer == "PROVED"
        if kills % 3:  # the others are trained to their end, too
            continue
        private = start(plan, path)
        assert private.resume() == 8
        train(private, 12)
        private.close()
        assert verify(path).answer == "PROVED"
    assert set(answers) == {"PROVED", "being extended"}
    assert kills > 6
    assert not isinstance(said, str), said


@pytest.mark.parametrize("kills", [4, 5, 8], ids=["note", "keys", "checkpoint"])
def test_a_half_extended_run_is_brought_to_its_end_before_it_is_sealed(tmp_path, kills):
    """A seal of the mixture of two plans was refuted, and its keys were gone."""
    finished(tmp_path)
    assert str(child(lambda: extend(tmp_path, MORE), kills, counts=is_write)).startswith("killed")
    with pytest.raises(InvalidInput, match="being extended"):
        verify(tmp_path)
    seal(tmp_path)
    assert verify(tmp_path).answer == "PROVED"


def test_a_half_extended_run_that_is_opened_is_brought_to_its_end(tmp_path):
    """Down to statement.json, which a kill before its writing left as it was."""
    finished(tmp_path)
    said = child(lambda: extend(tmp_path, MORE), None, counts=is_write)
    assert isinstance(said, int)
    shutil.rmtree(tmp_path)
    finished(tmp_path)
    child(lambda: extend(tmp_path, MORE), said - 1, counts=is_write)  # all but the statement
    with pytest.raises(InvalidInput, match="being extended"):
        verify(tmp_path)
    extension.finish(ns.release.folder.RunFolder(tmp_path))
    assert verify(tmp_path).answer == "PROVED"


def test_a_folder_in_which_no_run_has_begun(tmp_path):
    """A process that is killed before plan.json is there leaves keys at most."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "key.json").touch()
    with pytest.raises(InvalidInput, match=r"no run has begun .*; begin one with --out"):
        verify(tmp_path)
    (tmp_path / "config.json").touch()
    with pytest.raises(InvalidInput, match=r"no run has begun .*; --resume begins it"):
        verify(tmp_path)
    finished(tmp_path / "run")
    for name in ("plan.json", "ledger.sqlite", "statement.json"):
        (tmp_path / "run" / name).unlink()
    assert verify(tmp_path / "run").answer == "REFUTED"  # checkpoints are there

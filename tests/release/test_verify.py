"""verify: what holds is verified, every change is named; what it cannot know is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from noshuffle import Plan, PrivateSum, SinglePass, verify
from noshuffle.errors import InvalidInput, VerificationFailed
from noshuffle.noise import test_source
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History
from noshuffle.release.log import START, _link
from noshuffle.release.open_run import seal
from noshuffle.release.verify import OLD_COPY

PLAN = Plan.fit(SinglePass(6), mechanism="blt", noise_multiplier=1.0)


def made(run: Path, steps: int = 4, **options: Any) -> Path:
    sums = PrivateSum(PLAN, clip=1.0, shape=(2,), run=run, **options)
    for t in range(steps):
        sums.add([[0.1, 0.2], [0.3, 0.4]], ids=[3 * t, 3 * t + 2])
        if t == 1:
            sums.save()
    sums.close()
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("runs") / "run")


def rewritten(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """A log made anew with other rows, every link right: what only a later link can show."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows)
    link, lines = START, []
    for row in rows:
        row.pop("link")
        body = json.dumps(row, separators=(",", ":")).encode()[:-1]
        link = _link(link, body)
        lines.append(body + b',"link":"' + link.encode() + b'"}\n')
    path.write_bytes(b"".join(lines))


def test_a_run_is_verified_and_what_a_folder_cannot_show_stands_below(run: Path) -> None:
    verdict = verify(run)
    assert (verdict.answer, verdict.exit_code) == ("VERIFIED", 0)
    assert (verdict.released, verdict.planned) == (4, 6)
    assert verdict.epsilon == PLAN.epsilon_after(4)
    assert OLD_COPY in verdict.unchecked
    verdict.check()


def test_an_old_copy_is_verified_with_its_own_steps(tmp_path: Path) -> None:
    sums = PrivateSum(PLAN, clip=1.0, shape=(), run=tmp_path / "run")
    sums.add([1.0], ids=[0])
    sums.save()
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    for t in range(1, 4):
        sums.add([1.0], ids=[t])
    sums.close()
    assert [verify(tmp_path / name).released for name in ("old", "run")] == [1, 4]
    assert verify(tmp_path / "old").is_verified


def test_a_killed_run_is_verified_for_all_steps_in_its_log(tmp_path: Path) -> None:
    sums = PrivateSum(PLAN, clip=1.0, shape=(), run=tmp_path / "run")
    for t in range(3):
        sums.add([1.0], ids=[t])
    sums.release.log.close()
    verdict = verify(tmp_path / "run")
    assert verdict.is_verified
    assert verdict.released == 3
    assert verdict.epsilon == PLAN.epsilon_after(3)
    assert any("statement.json covers 0 steps" in line for line in verdict.unchecked)
    with (tmp_path / "run" / "log.jsonl").open("ab") as file:
        file.write(b'{"kind":"st')
    assert verify(tmp_path / "run").is_verified  # a torn line is no step


def test_test_seeds_and_no_noise_are_not_private(tmp_path: Path) -> None:
    seeded = verify(made(tmp_path / "seeded", source=test_source(seed=1)))
    assert (seeded.answer, seeded.exit_code) == ("NOT PRIVATE", 4)
    assert "named test seed" in seeded.not_private[0]
    bare = Plan.fit(SinglePass(2), mechanism="tree", noise_multiplier=0.0)
    sums = PrivateSum(bare, clip=1.0, shape=(), run=tmp_path / "bare")
    sums.add([1.0], ids=[0])
    sums.close()
    assert verify(tmp_path / "bare").answer == "NOT PRIVATE"
    with pytest.raises(VerificationFailed, match="no noise"):
        verify(tmp_path / "bare").check()


def test_a_change_in_any_line_of_the_log_is_named(run: Path, tmp_path: Path) -> None:
    lines = (run / "log.jsonl").read_bytes().splitlines(keepends=True)
    for number in range(len(lines)):
        for name, edited in (
            ("changed", lines[number].replace(b'":', b'": ', 1)),
            ("cut", b""),
            ("doubled", lines[number] * 2),
        ):
            copy = tmp_path / f"{number} {name}"
            shutil.copytree(run, copy)
            changed = [*lines[:number], edited, *lines[number + 1 :]]
            (copy / "log.jsonl").write_bytes(b"".join(changed))
            verdict = verify(copy)
            is_tail = name == "cut" and number == len(lines) - 1
            assert verdict.answer == "REFUTED", (number, name)
            assert verdict.exit_code == 1
            assert is_tail or "line" in verdict.refuted[0] or "log" in verdict.refuted[0]


CHANGES: dict[str, tuple[Callable[[list[dict[str, Any]]], None], str]] = {
    "a step is missing": (lambda rows: rows.pop(4), "stands where"),
    "a unit comes twice": (lambda rows: rows[4].update(units=[0, 1]), "may not take part"),
    "more steps": (
        lambda rows: rows.extend(
            {"kind": "step", "step": t, "units": [90 + t, 91 + t], "link": ""} for t in range(4, 8)
        ),
        "beyond the 6 planned steps",
    ),
    "less noise": (lambda rows: rows[0].update(noise_scale="0.5"), "noise multiplier"),
    "another plan": (lambda rows: rows[0].update(plan="0" * 64), "not the plan of the log"),
    "units are damaged": (lambda rows: rows[4].update(units="4AA"), "damaged"),
    "it went on": (
        lambda rows: rows.extend(
            [{"kind": "end", "link": ""}, {**rows[1], "step": 4}],
        ),
        "went on after its end",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_log_that_contradicts_itself_is_refuted_even_with_right_links(
    run: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(run, tmp_path / "run")
    change, sentence = CHANGES[name]
    rewritten(tmp_path / "run" / "log.jsonl", change)
    verdict = verify(tmp_path / "run")
    assert verdict.answer == "REFUTED"
    assert any(sentence in line for line in verdict.refuted), verdict.refuted


def test_a_log_made_anew_is_shown_by_the_link_in_the_statement(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    rewritten(tmp_path / "run" / "log.jsonl", lambda rows: rows[0].update(version="9"))
    verdict = verify(tmp_path / "run")
    assert any("made anew" in line for line in verdict.refuted)


@pytest.mark.parametrize("name", [*json.loads(json.dumps(PLAN.statement().to_dict())), "log_link"])
def test_a_statement_that_says_something_else_is_refuted(
    run: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "statement.json"
    told = json.loads(file.read_text())
    old = told[name]
    told[name] = (
        not old if isinstance(old, bool) else [*old, "."] if isinstance(old, list) else
        old * 0.99 if isinstance(old, float) else f"{old}?"
    )  # fmt: skip
    file.write_text(json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    verdict = verify(tmp_path / "run")
    assert verdict.answer == "REFUTED"
    file.unlink()
    assert "statement.json is missing" in verify(tmp_path / "run").refuted


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
def test_a_changed_checkpoint_is_refuted(run: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = RunFolder(tmp_path / "run").saved()[-1] / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert "not those that the run saved" in verify(tmp_path / "run").refuted[0]


def test_plan_json_in_another_form_or_of_another_plan_is_refuted(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "plan.json"
    file.write_text(file.read_text() + "\n")
    assert "canonical" in verify(tmp_path / "run").refuted[0]
    file.write_text(Plan.fit(SinglePass(6), mechanism="blt", noise_multiplier=2.0).to_json())
    assert any("not the plan of the log" in line for line in verify(tmp_path / "run").refuted)
    file.write_text("{")
    assert "cannot be read" in verify(tmp_path / "run").refuted[0]


def test_what_is_no_run_refutes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="not a folder"):
        verify(tmp_path / "nothing")
    with pytest.raises(InvalidInput, match="not a run folder"):
        verify(tmp_path)


def test_a_signature_says_who_vouches(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    (tmp_path / "key.pem").write_bytes(pem)
    public = key.public_key().public_bytes(form.Encoding.Raw, form.PublicFormat.Raw).hex()
    run = made(tmp_path / "run", 3)
    assert "no signature.json" in verify(run, public_key=public).refuted[0]
    seal(run, sign=tmp_path / "key.pem")
    verdict = verify(run, public_key=public)
    assert verdict.is_verified
    assert verdict.is_signed
    assert "another key" in verify(run, public_key="0" * 64).refuted[0]
    (run / "metrics.jsonl").write_text("{}\n")
    assert "not those that were signed" in verify(run, public_key=public).refuted[0]


def test_the_statement_is_the_plans_own(run: Path) -> None:
    said = History.read(RunFolder(run)).statement()
    assert said.epsilon == PLAN.statement(steps=4).epsilon
    assert torch.__version__ in said.words()

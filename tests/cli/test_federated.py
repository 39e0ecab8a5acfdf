"""`noshuffle federated` as a person runs it: train, look, verify, stop, kill, resume."""

from __future__ import annotations

import json
import re
import shutil
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import same

from noshuffle.cli import main
from noshuffle.cli.federated import federated
from noshuffle.cli.federated_job import run_job
from noshuffle.cli.federated_parts import (
    assemble,
    make_answers,
    make_check_ins,
    make_clip,
    make_plan,
)
from noshuffle.cli.federated_settings import PRESETS, FederatedSettings, clip_of, limits_of
from noshuffle.cli.job_view import Stopped
from noshuffle.clipping.adaptive import QuantileClip, gradient_multiplier
from noshuffle.errors import InvalidInput
from noshuffle.federated.simulate import Simulation, simulate
from noshuffle.federated.tasks import load_task
from noshuffle.release.folder import RunFolder, load

SMALL: dict[str, Any] = {
    "rounds": 8,
    "clients_per_round": 20,
    "mechanism": "tree",
    "test_seed": "here",
    "baseline": False,
}


def command(path: Path, **more: Any) -> list[str]:
    options = {**SMALL, **more}
    line = ["federated", "--out", str(path)]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            line.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            line += [flag, str(value)]
    return line


def last_model(path: Path) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = load(RunFolder(path).saved()[-1])["model"]
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "plain"
    assert main([*command(path, drop_out=0.2, check_in_rate=0.5), "--json"]) == 0
    return path


def test_a_run_that_ends_for_want_of_users_is_no_success(tmp_path: Path) -> None:
    line = command(tmp_path / "r", separation=1, max_participations=1, clients_per_round=200)
    assert main([*line, "--json"]) == 5


def test_the_speed_that_is_told_is_that_of_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Simulation, "rounds_per_second", 4.25)
    assert main([*command(tmp_path / "r", rounds=2), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds_per_second"] == 4.25
    assert main([*command(tmp_path / "s", rounds=2)]) == 0
    assert "2 of 2 (4.2 a second)" in capsys.readouterr().out


def test_the_folder_holds_the_evidence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 4
    assert "NOT PRIVATE: 8 of 8" in capsys.readouterr().out
    assert not list(run.rglob("secret*"))  # a finished run has ended
    statement = json.loads((run / "statement.json").read_text())
    assert statement["unit"] == "user"
    assert statement["epsilon"] <= 8
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(1, 9), 8]
    raw = {"asked", "answered", "nonfinite", "refused"}
    assert not any(raw & set(row) for row in rows)  # raw counts are for the operator alone
    operator = run / "operator.jsonl"
    assert operator.stat().st_mode & 0o077 == 0
    counts = [json.loads(line) for line in operator.read_text().splitlines()]
    assert [row["step"] for row in counts] == list(range(8))
    assert sum(row["answered"] for row in counts) < sum(row["asked"] for row in counts)
    honest = (run / "statement.json").read_text()
    (run / "statement.json").write_text(json.dumps({**statement, "epsilon": 1.0}))
    assert main(["verify", str(run)]) == 1
    (run / "statement.json").write_text(honest)


@pytest.mark.usefixtures("pictures")
def test_the_report_can_be_drawn_again(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert page.count("<svg") == 3  # without those of ε: it has a test seed
    assert not re.findall(r"(?:src|href)=[\"']https?:", page)
    (run / "report.html").unlink()
    assert main(["report", str(run)]) == 0
    assert (run / "report.html").read_text() == page


def test_without_options_it_works_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOSHUFFLE_DATA", raising=False)
    monkeypatch.setattr("noshuffle.cli.federated_job.write_report", lambda path: path)
    assert main(["federated", "--rounds", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["task"] == "digits"
    assert told["limits"]["separation"] == 5
    assert told["limits"]["max_participations"] == 1
    assert sum(row["users"] for row in told["users"]) == 475
    assert told["baseline_accuracy"] is None  # a run without privacy must be asked for
    assert Path(told["run"]).parent == Path("runs")


def test_a_person_gets_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(tmp_path / "r")) == 0
    shown = capsys.readouterr()
    assert "accuracy on held-out users" in shown.out
    assert "ε by how often a user was asked" in shown.out
    assert "separation 8 (derived)" in " ".join(shown.err.split())
    assert "ε per user ≤" in shown.err


def test_the_help_tells_the_defaults() -> None:
    """A number or first word called a default is the one that is used, whatever the task."""
    told = {}
    for one in federated.options():
        found = re.search(r"(\w+) \(default[);]|default ([\d.]+)\)", one.text)
        if found is not None:
            told[one.name] = found[1] or found[2]
    assert told.pop("task") == "digits"
    assert len(told) > 10
    for task in PRESETS:
        used = FederatedSettings.of({"task": task}).to_dict()
        for name, default in told.items():
            assert str(used[name]) in (default, f"{default}.0"), name


@pytest.mark.parametrize(
    "more",
    [
        {"mechanism": "dp-fedavg", "amplified": True},
        {"mechanism": "dp-fedavg"},
        {"mechanism": "dp-fedavg", "amplified": True, "drop_out": 0.5, "clip": "adaptive:0.7"},
        {"mechanism": "blt", "server_optimizer": "adam", "server_lr": 0.01, "proximal": 0.1},
        {
            "mechanism": "identity",
            "noise_multiplier": 0,
            "server_optimizer": "sgd",
            "order": "list",
        },
        {
            "clip": "adaptive",
            "order": "list",
            "separation": 2,
            "max_participations": 3,
            "model": "linear",
        },
    ],
    ids=lambda more: "-".join(map(str, more.values())),
)
def test_baselines_and_variants_verify(
    more: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("noshuffle.cli.federated_job.write_report", lambda path: path)
    assert main([*command(tmp_path / "r", **more), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rounds"] == 8
    if "noise_multiplier" not in more:
        assert 7.99 < told["statement"]["epsilon"] <= 8
    assert main(["verify", str(tmp_path / "r")]) == 4  # the test seed, and nothing else
    # How many users a secret draw asked is as secret as who.
    assert (tmp_path / "r/operator.jsonl").exists() == ("amplified" not in more)


@pytest.mark.parametrize(
    "line",
    [
        "--task wishes",
        "--model lstm",
        "--task shakespeare",
        "--task drama --model mlp",
        "--rounds 0",
        "--clients-per-round 1000",
        "--clients-per-round 1000 --mechanism dp-fedavg --amplified",
        "--client-lr -1",
        "--clip nan",
        "--clip adaptive:2",
        "--clip adaptive:0.5:1:1",
        "--clip often",
        "--clip adaptive --mechanism blt",
        "--server-optimizer magic",
        "--epsilon 0",
        "--epsilon 1 --noise-multiplier 1",
        "--amplified",
        "--amplified --mechanism dp-fedavg --separation 3",
        "--amplified --mechanism dp-fedavg --check-in-rate 0.5",
        "--order year",
        "--order chaos",
        "--drop-out 1",
        "--check-in-rate 0",
        "--device toaster",
        "--mechanism magic",
        "--config missing.toml",
        "--resume nowhere",
        "--resume nowhere --rounds 3",
    ],
)
def test_bad_input_is_one_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOSHUFFLE_DATA", raising=False)
    status = main(["federated", *line.split()])
    captured = capsys.readouterr()
    assert status == 2, captured
    assert captured.err.count("noshuffle:") == 1
    assert captured.err.endswith("\n")
    assert "Traceback" not in captured.err


def test_other_folders_are_left_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(run)) == 2
    assert "--resume" in capsys.readouterr().err


def test_a_run_of_an_app_goes_on_by_the_app(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = {"kind": "federated", "at_least": 1, "rounds": 3, "run_folder": "~/runs/digits"}
    (tmp_path / "config.json").write_text(json.dumps(kept), encoding="utf8")
    assert main(["federated", "--resume", str(tmp_path)]) == 2
    assert "an app on Flower; go on with the app's flwr run" in capsys.readouterr().err


def test_what_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert main(["federated", "--clip", "adaptive", "--rounds", "4", "--out", str(out)]) == 2
    assert not out.exists()


def test_a_convolution_over_rows_that_are_no_images_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = """
        from dataclasses import replace
        from noshuffle.federated.tasks import digits
        def task():
            found = digits()
            return replace(found, x=found.x.flatten(1), x_test=found.x_test.flatten(1))
    """
    (tmp_path / "flat_task.py").write_text(textwrap.dedent(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "run"
    line = ["federated", "--task", "flat_task:task", "--model", "cnn", "--rounds", "4"]
    assert main([*line, "--out", str(out)]) == 2
    assert "takes images (channels, height, width), got examples of shape (64,)" in (
        capsys.readouterr().err
    )
    assert not out.exists()


def test_a_task_without_held_out_rows_is_refused_before_anything_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = """
        from dataclasses import replace
        from noshuffle.federated.tasks import digits
        def task():
            found = digits()
            return replace(found, x_test=found.x_test[:0], y_test=found.y_test[:0])
    """
    (tmp_path / "untested_task.py").write_text(textwrap.dedent(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "run"
    line = ["federated", "--task", "untested_task:task", "--rounds", "4", "--out", str(out)]
    assert main(line) == 2
    assert "has no held-out rows" in capsys.readouterr().err
    assert not out.exists()


def test_a_copied_folder_goes_on_under_noise_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both continuations are releases of their own: from the copy on their models differ."""
    monkeypatch.setattr("noshuffle.cli.federated_job.write_report", lambda path: path)
    seen: list[int] = []
    with pytest.raises(Stopped):
        run_job(
            FederatedSettings.of({**SMALL, "test_seed": None}),
            tmp_path / "a",
            watch=lambda s: seen.append(s.step),
            is_stopped=lambda: len(seen) == 3,
        )
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert same(last_model(tmp_path / "a"), last_model(tmp_path / "b"))
    for name in "ab":
        assert main(["federated", "--resume", str(tmp_path / name), "--json"]) == 0
        assert main(["verify", str(tmp_path / name)]) == 0
    assert not same(last_model(tmp_path / "a"), last_model(tmp_path / "b"))


def test_settings_from_toml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[federated]\nrounds = 3\nmechanism = 'tree'\nepsilon = 3.0\nclip = 0.25\n")
    line = f"federated --config {config} --no-baseline --clients-per-round 5 --json"
    assert main([*line.split(), "--out", str(tmp_path / "r")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["statement"]["epsilon"] <= 3.0
    assert (told["settings"]["clip"], told["rounds"]) == ("0.25", 3)


def test_stopped_between_rounds_and_resumed_is_bit_identical(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = FederatedSettings.of({**SMALL, "drop_out": 0.2, "check_in_rate": 0.5})
    seen: list[int] = []
    with pytest.raises(Stopped):
        run_job(
            settings,
            tmp_path / "r",
            watch=lambda s: seen.append(s.step),
            is_stopped=lambda: len(seen) == 3,
        )
    assert main(["verify", str(tmp_path / "r")]) == 4
    capsys.readouterr()
    assert main(["federated", "--resume", str(tmp_path / "r"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["skipped_rounds"] == []
    assert same(last_model(tmp_path / "r"), last_model(run))
    for name in ("metrics.jsonl", "operator.jsonl"):
        assert (tmp_path / "r" / name).read_text() == (run / name).read_text()
    assert "2 processes went on" in (tmp_path / "r" / "report.html").read_text()
    assert main(["federated", "--resume", str(tmp_path / "r"), "--json"]) == 0  # nothing is left
    assert same(last_model(tmp_path / "r"), last_model(run))


Interrupted = Callable[..., int | None]


def long_run(path: Path) -> list[str]:
    return command(path, rounds=400, clients_per_round=60)


def test_killed_and_resumed_is_the_run_that_lost_that_round(
    tmp_path: Path, interrupted: Interrupted
) -> None:
    """SIGKILL somewhere inside a round; then the same run, which gives the same round up."""
    path = tmp_path / "killed"
    told = path / "operator.jsonl"
    assert interrupted(long_run(path), signal.SIGKILL, file=told, lines=3) == -signal.SIGKILL
    settings = FederatedSettings.of({**SMALL, "rounds": 400, "clients_per_round": 60})
    job, lost = assemble(settings, path)
    until = job.server.round + 2
    twin, _ = assemble(settings, tmp_path / "twin")
    both = []
    for one in (job, twin):
        one.set_rate()
        for stop in (*lost, until):
            if one.server.round < stop:
                advance(one, stop)
            if stop in lost and one is twin:
                assert one.rounds.begin(one.check_ins(stop)) is not None
                one.rounds.abandon()
        both.append(one.server.parameters())
        one.rounds.close()
    assert same(*both)
    assert main(["verify", str(path)]) == 4


def advance(job: Any, until: int) -> None:
    simulate(
        job.rounds,
        job.model,
        job.task,
        local=job.local,
        check_ins=job.check_ins,
        until=until,
        progress=lambda _: job.set_rate(),
    )


def test_ctrl_c_ends_the_round_and_says_how_to_go_on(
    tmp_path: Path, interrupted: Interrupted
) -> None:
    path = tmp_path / "stopped"
    told = path / "operator.jsonl"
    assert interrupted(long_run(path), signal.SIGINT, file=told, lines=2) == 130
    assert main(["verify", str(path)]) == 4
    settings = FederatedSettings.of({**SMALL, "rounds": 400, "clients_per_round": 60})
    job, lost = assemble(settings, path)
    job.rounds.close()
    assert not lost


def test_limits_follow_from_the_population() -> None:
    def derived(users: int, **more: Any) -> tuple[int, int]:
        made = limits_of(FederatedSettings.of({"test_seed": "x", **more}), users=users)
        return made.separation, made.max_participations

    assert derived(479, rounds=60, clients_per_round=95) == (5, 12)
    assert derived(100, rounds=50, clients_per_round=10) == (10, 5)
    assert derived(100, rounds=50, clients_per_round=100) == (1, 50)
    assert derived(100, rounds=5, clients_per_round=1) == (5, 1)  # never longer than the run
    assert derived(100, rounds=50, clients_per_round=10, check_in_rate=0.25) == (7, 8)
    assert derived(100, rounds=50, clients_per_round=10, separation=3) == (3, 10)
    assert derived(100, rounds=50, clients_per_round=10, max_participations=2) == (10, 2)
    drift = {"task": "drama", "order": "year", "rounds": 1000, "clients_per_round": 100}
    assert derived(10_080, **drift) == (10, 10)
    short = FederatedSettings.of({"rounds": 50, "clients_per_round": 10, "max_participations": 2})
    assert limits_of(short, users=100).shortage == 300


def test_derived_limits_fill_the_cohorts() -> None:
    """Every round asks as many as planned, whoever of the half that checks in comes first."""
    for rate in (1.0, 0.5):
        settings = FederatedSettings.of(
            {**SMALL, "rounds": 30, "clients_per_round": 30, "check_in_rate": rate}
        )
        job, _ = assemble(settings, None)
        sizes = []
        for step in range(30):
            work = job.rounds.begin(job.check_ins(step))
            assert work is not None
            sizes.append(len(work.users))
            job.rounds.finish()
        assert sum(sizes) >= 0.97 * 900
        assert rate < 1 or sizes == [30] * 30


def test_who_comes_and_who_answers_depends_on_the_round_alone() -> None:
    settings = FederatedSettings.of({**SMALL, "drop_out": 0.3, "check_in_rate": 0.4})
    task = load_task("digits")
    come, answers = make_check_ins(settings, task), make_answers(settings, task)
    assert answers is not None
    again, replies = make_check_ins(settings, task), make_answers(settings, task)
    assert replies is not None
    for step in (3, 0, 7):
        users = come(step)
        assert 120 < len(users) < 260
        assert users == again(step)
        assert [answers(step, u) for u in users] == [replies(step, u) for u in users]
    share = sum(answers(t, u) for t in range(10) for u in task.users) / (10 * len(task))
    assert 0.66 < share < 0.74


def test_an_adaptive_clip_leaves_room_for_the_updates() -> None:
    for more in ({"mechanism": "dp-fedavg"}, {"mechanism": "dp-fedavg", "amplified": True}):
        settings = FederatedSettings.of({**SMALL, **more, "clip": "adaptive", "epsilon": 1.0})
        plan = make_plan(settings, load_task("digits"))
        clip = make_clip(settings, plan)
        assert isinstance(clip, QuantileClip)
        ratio = 1.0
        if not plan.participation.is_sampled:
            ratio = (plan.sensitivity.squared / plan.participation.most) ** 0.5
        z = plan.noise_multiplier
        assert gradient_multiplier(z, bit_noise=clip.noise * ratio) < 1.06 * z
    with pytest.raises(InvalidInput, match="number > 0, or adaptive"):
        clip_of("0.5x")
    settings = FederatedSettings.of({**SMALL, "mechanism": "blt", "clip": "adaptive"})
    with pytest.raises(InvalidInput, match="use --mechanism dp-fedavg, or a number for --clip"):
        make_clip(settings, make_plan(settings, load_task("digits")))

"""What may be published holds nothing raw: every figure of metrics.jsonl follows from a release."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from noshuffle.cli import federated_job, job, main
from noshuffle.datasets import load

#: A figure that no other part of a run comes up with: no share of 360 examples is 13.7 %.
BASELINE = 0.1371911
OWN = """
import torch
from noshuffle.datasets import DataSet

def people():
    made = torch.Generator().manual_seed(0)
    x = torch.randn(300, 5, generator=made)
    y = (x[:, 0] > 0).long()
    return DataSet("people", "table", x[:240], y[:240], x[240:], y[240:], 2)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, str]:
    """A run on digits, its model, and what was said beside it."""
    path = tmp_path_factory.mktemp("published") / "run"
    kept: list[nn.Module] = []
    with pytest.MonkeyPatch.context() as patch:
        made = job.make_model

        def keep(*given: Any) -> nn.Module:
            kept.append(made(*given))
            return kept[-1]

        patch.setattr(job, "make_model", keep)
        patch.setattr(job, "_baseline", lambda *given: BASELINE)
        line = f"train --epochs 1 --batch-size 240 --mechanism identity --baseline --out {path}"
        assert main(line.split()) == 0
    return path, kept[0], path.name


def test_no_figure_of_a_model_without_privacy_is_in_the_folder(
    trained: tuple[Path, nn.Module, str],
) -> None:
    path = trained[0]
    pages = [p for p in path.rglob("*") if p.suffix in (".html", ".json", ".jsonl", ".md")]
    assert len(pages) > 4
    for page in pages:
        text = page.read_text(encoding="utf8")
        assert "13.7 %" not in text, page
        assert "0.137191" not in text, page


def test_the_terminal_alone_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "_baseline", lambda *given: BASELINE)
    line = f"train --epochs 1 --batch-size 240 --mechanism identity --out {tmp_path / 'r'}"
    assert main([*line.split(), "--baseline"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "13.7 % (NOT PRIVATE: do not publish)" in said
    assert main(f"{line}2 --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["baseline_accuracy"] is None  # off by default


def test_metrics_and_report_hold_no_norm_and_no_loss_of_anybody(
    trained: tuple[Path, nn.Module, str],
) -> None:
    """Every figure is one of those that may be known: each is computed here from what was released.

    (Searching for raw figures instead would find one by chance now and then: there are thousands.)
    """
    path, model, _ = trained
    data = load("digits")
    with torch.no_grad():
        right = (model(data.x_test).argmax(1) == data.y_test).float().mean().item()
    released = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    epsilon = json.loads((path / "statement.json").read_text(encoding="utf8"))["epsilon"]
    rate = json.loads((path / "config.json").read_text(encoding="utf8"))["lr"]
    epoch, summary = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    assert epoch == {
        "epoch": 0,
        "step": 5,
        "epsilon": pytest.approx(epsilon),
        "learning_rate": pytest.approx(0.05 * rate),  # where a cool-down ends
        "private_gradient_norm": pytest.approx(float(released.norm()), rel=1e-4),
        "test_accuracy": pytest.approx(right),
        "trained_parameters": released.numel(),
    }
    known = {"rows": 360, "is_public": True, "words": "held-out examples of digits"}
    accuracy = pytest.approx(right)
    assert summary == {"kind": "summary", "step": 5, "test_accuracy": accuracy, "test_data": known}
    page = (path / "report.html").read_text(encoding="utf8")
    words = set(re.findall(r"<!-- (.*?) -->", page))  # the words of a picture, beside their shapes
    assert not any("norm" in w and "example" in w for w in words)
    assert not any("above" in w or "private (" in w for w in words)


def test_the_page_says_whose_data_the_accuracy_is_of(
    trained: tuple[Path, nn.Module, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (trained[0] / "report.html").read_text(encoding="utf8")
    assert "measured on 360 held-out examples of digits, which are public" in page
    (tmp_path / "own_people.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    out = tmp_path / "run"
    line = f"train --data own_people:people --epochs 1 --batch-size 60 --lr 0.1 --out {out} --json"
    assert main([*line.split(), "--mechanism", "identity"]) == 0
    page = (out / "report.html").read_text(encoding="utf8")
    assert "measured on 60 held-out examples of people, which training did not see" in page
    assert "covered by no guarantee, so publish them only if that data is public" in page


def test_a_federated_page_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(federated_job, "_baseline", lambda *given: BASELINE)
    line = "federated --rounds 3 --clients-per-round 9 --mechanism tree --baseline --drop-out 0.3"
    assert main([*line.split(), "--out", str(tmp_path / "r")]) == 0
    assert "13.7 %" in capsys.readouterr().out
    asked = [
        json.loads(row) for row in (tmp_path / "r" / "operator.jsonl").read_text().splitlines()
    ]
    answered = sum(row["answered"] for row in asked)
    for name in ("report.html", "metrics.jsonl", "statement.json", "config.json"):
        text = (tmp_path / "r" / name).read_text(encoding="utf8")
        assert "13.7 %" not in text
        assert "0.137191" not in text
        assert f"answers: {answered}" not in text
    assert not (tmp_path / "r" / "baseline.json").exists()
    page = (tmp_path / "r" / "report.html").read_text(encoding="utf8")
    assert "examples of users of digits who took no part, which are public" in page

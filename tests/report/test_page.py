"""What a page says is what its statement says: cut-off runs, runs not private, pictures."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

from noshuffle import PrivateSum
from noshuffle.cli import main
from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.plan.statement import UNCHECKED
from noshuffle.report import page, plots, read_run
from noshuffle.report.audit import section
from noshuffle.report.run import RunRecord


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    path = tmp_path_factory.mktemp("page") / "run"
    line = f"train --epochs 2 --batch-size 240 --model linear --mechanism tree --out {path}"
    assert main(line.split()) == 0
    return read_run(path)


def cut_off(run: RunRecord, *, released: int) -> RunRecord:
    """The record of the same run, had it been killed."""
    said = run.plan.statement(steps=released).to_dict()
    return replace(run, statement=said, released=released, summary={})


def test_a_run_that_was_cut_off_shows_what_it_has_spent(
    run: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    curve = plots.epsilon_curve

    def noted(plan: Plan, *, last: int) -> str:
        drawn.append(last)
        return curve(plan, last=last)

    monkeypatch.setattr(plots, "epsilon_curve", noted)
    text = page(cut_off(run, released=3))
    assert drawn == [3]
    assert f"3 of {run.plan.steps} steps" in text
    whole = page(run)
    assert drawn == [3, run.plan.steps]
    assert f"{run.plan.steps} of" not in whole


def test_misses_follow_from_the_statement_not_from_the_whole_plan(run: RunRecord) -> None:
    part = cut_off(run, released=3)
    alphas = [0.01, 0.1, 0.5]
    assert part.least_misses(alphas).tolist() == run.plan.tradeoff(alphas, steps=3).tolist()
    assert (part.least_misses(alphas) > run.least_misses(alphas)).all()
    both = replace(run, statement={**run.statement, "mu": 9.0})  # a fork: parents are in its μ
    assert (both.least_misses(alphas) < run.least_misses(alphas)).all()


def test_a_page_of_a_run_that_is_not_private_promises_nothing(run: RunRecord) -> None:
    said = {**run.statement, "assumptions": ["NOT PRIVATE: there is no noise.", "Another."]}
    text = page(replace(run, statement=said))
    assert "none of this holds" in text
    for promise in (
        "The guarantee",
        "It holds provided",
        "Privacy spent",
        "never below",
        "at most",
    ):
        assert promise in page(run), promise
        assert promise not in text, promise


def test_a_page_says_beside_epsilon_that_nobody_checked_who_took_part(tmp_path: Path) -> None:
    plan = Plan.fit(Epochs(2, 2), mechanism="tree", noise_multiplier=4.0)
    told = {}
    for ids in (None, [0]):
        sums = PrivateSum(plan, clip=1.0, shape=(), run=tmp_path / str(ids))
        sums.add([1.0], ids=ids)
        sums.close()
        told[ids is None] = page(read_run(tmp_path / str(ids)))
    assert UNCHECKED in told[True]
    assert UNCHECKED not in told[False]


def test_a_page_asks_nobody_and_its_pictures_have_names(run: RunRecord) -> None:
    text = page(run)
    assert not re.findall(r"(?:src|href|url)\s*[=(]\s*['\"]?(?:https?:)?//", text)
    assert "<script" not in text
    assert "nan" not in re.sub(r"<[^>]*>", " ", text).lower().split()
    pictures = re.findall(r"<figure><svg ([^>]*)>", text)
    assert len(pictures) > 3
    assert all('role="img"' in one and "aria-label=" in one for one in pictures)
    assert "<td>constraint</td><td>none</td>" in text


def test_an_audit_picture_has_no_offset_on_its_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio of 1 − 1e-7 is one."""
    stops = [{"steps": n, "stated": 1.0, "low": 1 - 1e-7 * n, "answer": "HOLDS"} for n in (1, 2, 3)]
    part = {"kind": "plan", "answer": "HOLDS", "stops": stops, "mechanism": "m", "delta": 1e-5,
            "participation": "p", "left_out": None}  # fmt: skip
    seen = []
    save = Figure.savefig

    def look(figure: Figure, *given: Any, **more: Any) -> None:
        save(figure, *given, **more)
        for axes in figure.axes:
            seen.append(
                (axes.get_ylabel(), axes.yaxis.get_offset_text().get_text(), axes.get_ylim())
            )

    monkeypatch.setattr(Figure, "savefig", look)
    section({"answer": "HOLDS", "parts": [part]})
    ((_, offset, (low, high)),) = [one for one in seen if "emitted" in one[0]]
    assert not offset
    assert low < 0.99
    assert high > 1.01


def test_plans_without_an_end_have_no_of(run: RunRecord) -> None:
    assert run.progress("rounds") == f"{run.plan.steps} rounds"
    assert isinstance(run.plan, Plan)
    assert json.loads(Path(run.path, "statement.json").read_text())["epsilon"] > 0


def test_ticks_of_a_plan_are_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    save = Figure.savefig

    def look(figure: Figure, *given: Any, **more: Any) -> None:
        save(figure, *given, **more)
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                ticks = [*axis.get_ticklabels(), *axis.get_ticklabels(minor=True)]
                said.extend(tick.get_text() for tick in ticks)

    monkeypatch.setattr(Figure, "savefig", look)
    line = f"plan --steps 32 --target-epsilon 1 --mechanism tree --plot {tmp_path / 'plan.svg'}"
    assert main(line.split()) == 0
    assert any(text.startswith("0.") for text in said)
    assert not [text for text in said if "e" in text]


def test_names_of_lines_stay_near_their_lines() -> None:
    assert plots.apart([0.1, 0.5, 0.9], gap=0.1) == [0.1, 0.5, 0.9]
    moved = plots.apart([0.0, 0.01, 0.02, 0.5], gap=0.1)
    assert moved == pytest.approx([-0.09, 0.01, 0.11, 0.5])


@pytest.mark.parametrize("neighbours", ["zero-out", "replace-one"])
def test_a_page_says_what_its_neighbours_differ_in(run: RunRecord, neighbours: str) -> None:
    """Of replaced units it said "took part or not", and somebody takes part either way."""
    plan = replace(run.plan, neighbours=neighbours)
    text = page(replace(run, plan=plan, statement=plan.statement().to_dict()))
    is_swap = neighbours == "replace-one"
    for words in ("took part or not", "Whoever guesses who took part", "whether one unit took"):
        assert (words in text) != is_swap
    for words in ("took part or any other in its place", "which of two units took part"):
        assert (words in text) == is_swap


def test_pictures_leave_the_backend_and_the_figures_of_the_user_alone(tmp_path: Path) -> None:
    """A notebook's would show nothing any more."""
    own = pyplot.figure()
    with pyplot.rc_context({"backend": "svg"}):
        was = pyplot.rcParams["backend"]
        plots.learning_curve([{"step": n, "test_accuracy": 0.1 * n} for n in (1, 2, 3)])
        line = f"plan --steps 32 --target-epsilon 1 --mechanism tree --plot {tmp_path / 'plan.svg'}"
        assert main(line.split()) == 0
        assert pyplot.rcParams["backend"] == was
    assert pyplot.get_fignums() == [own.number]
    pyplot.close(own)


def test_of_two_lines_that_are_alike_one_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr(
        plots, "_noise_curve", lambda series, step: drawn.append([name for name, _ in series])
    )
    for steps_per_epoch in (1, 8):  # the best tree of epochs of one step is independent noise
        plan = Plan.fit(Epochs(4, steps_per_epoch), mechanism="identity", noise_multiplier=1.0)
        list(plots.noise_figure(plan, "noise"))
    assert drawn == [["this run (identity)"], ["this run (identity)", "Honaker tree, best restart"]]

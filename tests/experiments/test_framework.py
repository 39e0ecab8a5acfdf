"""A study is resumable cell by cell, obeys its limit, keeps protocols apart, and decides claims."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from noshuffle import experiments
from noshuffle.cli import main
from noshuffle.errors import InvalidInput
from noshuffle.experiments import accuracy
from noshuffle.experiments.__main__ import main as program
from noshuffle.experiments.figure import Cell, Claim, not_tested, only_keys, shipped, verdict
from noshuffle.experiments.panels import legend_below, panels
from noshuffle.experiments.runner import compute
from noshuffle.experiments.store import Store


class Clock:
    """Seconds that pass only when a cell works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def cells(clock: Clock, done: list[str]) -> list[Cell]:
    def work(key: str, seconds: float) -> Any:
        def do(results: Any) -> int:
            clock.now += seconds
            done.append(key)
            return len(results)

        return do

    sizes = {"a": 1.0, "b": 2.0, "c": 4.0}
    return [
        Cell(key, work(key, cost), cost=cost, needs=("a",) if key == "c" else ())
        for key, cost in sizes.items()
    ]


def test_a_killed_study_goes_on(tmp_path: Path) -> None:
    clock, done = Clock(), list[str]()
    path = tmp_path / "r.json"

    def dies(results: Any) -> int:
        raise KeyboardInterrupt

    first = cells(clock, done)
    with pytest.raises(KeyboardInterrupt):
        compute([first[0], Cell("b", dies)], Store(path, "f", {"x": 1}), say=None, clock=clock)
    outcome = compute(first, Store(path, "f", {"x": 1}), say=None, clock=clock)
    assert outcome.is_whole
    assert done == ["a", "b", "c"]  # a was not done again
    assert Store(path, "f", {"x": 1}).results == {"a": 0, "b": 1, "c": 2}


def test_a_limit_stops_before_the_cell_that_would_pass_it(tmp_path: Path) -> None:
    clock, done, said = Clock(), list[str](), list[str]()
    store = Store(tmp_path / "r.json", "f", {})
    outcome = compute(cells(clock, done), store, within=6.9, say=said.append, clock=clock)
    assert (outcome.done, outcome.total, done) == (2, 3, ["a", "b"])  # c would end at 7.0
    assert "goes on" in outcome.stopped
    assert said[0].endswith("left 6 s")
    outcome = compute(cells(clock, done), store, within=4.1, say=None, clock=clock)
    assert outcome.is_whole


def test_seconds_of_another_machine_say_nothing_of_this_one(tmp_path: Path) -> None:
    clock, done = Clock(), list[str]()
    store = Store(tmp_path / "r.json", "f", {})
    compute(cells(clock, done)[:1], store, say=None, clock=clock)
    store.record["cells"]["a"] |= {"on": "a slow machine", "seconds": 1000.0}
    assert compute(cells(clock, done), store, within=6.9, say=None, clock=clock).is_whole
    assert done == ["a", "b", "c"]


def test_a_cell_without_what_it_needs_waits(tmp_path: Path) -> None:
    clock, done, said = Clock(), list[str](), list[str]()
    last = cells(clock, done)[2]
    outcome = compute([last], Store(tmp_path / "r.json", "f", {}), say=said.append, clock=clock)
    assert (outcome.done, done) == (0, [])
    assert "waits for a" in said[0]
    assert [cell.key for cell in only_keys(cells(clock, done), ["c"])] == ["a", "c"]
    with pytest.raises(InvalidInput, match="no cell"):
        only_keys(cells(clock, done), ["z"])


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    Store(path, "f", {"rates": (1, 2)}).put("a", 1, seconds=1.0, device="cpu")
    assert Store(path, "f", {"rates": [1, 2]}).results == {"a": 1}
    for figure, settings in (("f", {"rates": [1, 3]}), ("g", {"rates": [1, 2]})):
        with pytest.raises(InvalidInput, match="another --out"):
            Store(path, figure, settings)


def test_claims_hold_differ_or_wait() -> None:
    claims = [
        Claim("a < b", "1", lambda r: verdict(r["a"] < r["b"], "")),
        Claim("c", "2", lambda r: not_tested("too few")),
        Claim("d", "3", lambda r: verdict(r["d"] > 0, "")),
    ]
    found = [claim.check({"a": 1, "b": 0}).verdict for claim in claims]
    assert found == ["DIFFERS", "NOT TESTED", "NOT TESTED"]
    assert claims[0].check({"a": 0, "b": 1}).verdict == "HOLDS"


@pytest.mark.parametrize("name", sorted(experiments.FIGURES))
def test_settings_ship_and_keys_are_unique(name: str) -> None:
    for quick in (False, True):
        asked = experiments.Request(settings=shipped(name, quick=quick), quick=quick)
        keys = [cell.key for cell in experiments.figure(name).cells(asked)]
        assert len(keys) == len(set(keys)) > 0


def test_the_command_writes_table_pictures_claims_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    line = f"reproduce rates --quick --only noisy_max --out {out} --json"
    assert not main(line.split())
    record = json.loads(capsys.readouterr().out)
    assert list(record["cells"]) == ["noisy_max"]
    assert {"noshuffle", "python", "numpy"} <= set(record["cells"]["noisy_max"]["versions"])
    told = {claim["text"].split()[0]: claim["verdict"] for claim in record["claims"]}
    assert (told["noisy_max"], told["ftrl"]) == ("HOLDS", "NOT TESTED")
    assert (out / "figure.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (out / "figure.svg").read_text(encoding="utf8")
    assert "| noisy_max | ε |" in (out / "table.md").read_text(encoding="utf8")
    assert not main(f"reproduce rates --quick --draw --out {out}".split())
    assert "HOLDS" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        "histogram",
        "rates --only nothing",
        "rates --within -1",
        "rates --device tpu",
        "rates --data no/such/folder",
        "rates --only=",
        "rates --draw --out nowhere",
        "rates --quick --out a/file",
        "rates --within 1e400",
        "rates --trials 0",
    ],
)
def test_bad_input_is_one_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And leaves nothing behind."""
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    Path("a/file").touch()
    assert main(["reproduce", *line.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def kept(**other: Any) -> dict[str, Any]:
    """The results of one cell of the figure of rates."""
    settings = {**shipped("rates", quick=True), "is_quick": True}
    cell = {"result": {"ε": None}, "seconds": 1.0}
    return {"figure": "rates", "settings": settings, "cells": {"ftrl": cell}, **other}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ('{"figure": "ra', "is not JSON"),
        ("[]", "does not hold results of rates"),
        (kept(figure="noise"), "does not hold results of rates"),
        (kept(settings={"is_quick": True, "steps": 1}), "other settings (of another version?)"),
        (kept(settings={"is_quick": False}), "made with no --quick; give the same"),
        (kept(cells=None), "is damaged"),
        (kept(cells={"ftrl": {"result": 1}}), "is damaged"),
        (kept(cells={"ftrl": {"result": 1, "seconds": "?"}}), "is damaged"),
        (kept(), "cannot be drawn"),
        (kept(cells={}), "has no results to draw"),
    ],
)
def test_results_that_cannot_be_gone_on_with_are_one_line(
    found: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half written, of another version, edited: told, and left as they were."""
    text = found if isinstance(found, str) else json.dumps(found)
    (tmp_path / "results.json").write_text(text)
    assert main(["reproduce", "rates", "--quick", "--draw", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert (tmp_path / "results.json").read_text() == text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_one_process_at_a_time_computes_in_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second would write its results over those of the first."""
    ready, told = os.pipe()
    other = os.fork()
    if other == 0:
        try:
            with Store(tmp_path / "results.json", "rates", {}).alone():
                os.write(told, b"held")
                signal.pause()  # until it is killed
        finally:
            os._exit(1)
    try:
        assert os.read(ready, 4) == b"held"
        line = f"reproduce rates --quick --only noisy_max --out {tmp_path}"
        assert main(line.split()) == 2
        assert "another process computes in" in capsys.readouterr().err
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    assert not main(line.split())


def study(**other: Any) -> dict[str, Any]:
    task = {"title": "t", "data": "mnist", "model": "linear", "batch": 10, "epochs": 1,
            "held_out": 10, "search": [1.0], "middle": [0.1]}  # fmt: skip
    group = {"task": "t", "lines": ["l"], "epsilons": [1.0], "trials": [0]}
    settings = {
        "factors": [0.5, 1.0, 2.0],
        "tasks": {"t": task},
        "lines": {"l": {"title": "l", "fit": "blt"}},
        "groups": [group],
    }
    for path, value in other.items():
        part: Any = settings
        *way, last = path.split("__")
        for name in way:
            part = part[int(name) if name.isdigit() else name]
        part[last] = value
    return settings


def test_one_learning_rate_is_not_searched_any_wider() -> None:
    """An IndexError."""
    for settings, widens in ((study(), 1), (study(factors=[1.0]), 0)):
        keys = [cell.key for cell in accuracy.cells(experiments.Request(settings=settings))]
        assert sum("widen" in key for key in keys) == widens
        assert sum("final" in key for key in keys) == 1


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"factors": []}, "settings: factors is empty"),
        ({"groups": []}, "settings: groups is empty"),
        ({"groups__0__epsilons": []}, "group 1: epsilons is empty"),
        ({"groups__0__trials": []}, "group 1: trials is empty"),
        ({"groups__0__lines": ["m"]}, "lines of group 1 must be one of l"),
        ({"groups__0__task": "u"}, "task of group 1 must be one of t"),
        ({"tasks__t__colour": 1}, "task t has an unknown key 'colour'"),
        ({"lines__l__colour": 1}, "line l has an unknown key 'colour'"),
        ({"tasks__t__search": [1.0, 2.0]}, "needs a middle for each ε"),
        ({"tasks__t__search": []}, "task t: search is empty"),
        ({"lines__l": {}}, "line l: fit is missing"),
    ],
)
def test_settings_of_a_study_that_cannot_be_are_one_line(other: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words.replace("(", r"\(")):
        accuracy.cells(experiments.Request(settings=study(**other)))


@pytest.mark.parametrize("before", ["elsewhere", None])
def test_the_folder_of_the_data_is_that_of_one_run(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--data stayed in the environment: whatever the same process did next looked there."""
    monkeypatch.setenv("NOSHUFFLE_DATA", "elsewhere")
    if before is None:
        monkeypatch.delenv("NOSHUFFLE_DATA")
    seen: list[str | None] = []

    def computed(*_: Any, **__: Any) -> Any:
        seen.append(os.environ.get("NOSHUFFLE_DATA"))
        raise InvalidInput("enough")

    monkeypatch.setattr(experiments, "compute", computed)
    line = f"reproduce rates --quick --data {tmp_path} --out {tmp_path / 'r'}"
    assert main(line.split()) == 2
    assert program(["rates", "--quick", "--data", str(tmp_path), "--out", str(tmp_path / "r")]) == 2
    assert seen == [str(tmp_path)] * 2
    assert os.environ.get("NOSHUFFLE_DATA") == before


def test_a_legend_is_below_its_panel_and_pictures_are_alike_each_time(tmp_path: Path) -> None:
    """In the panel it hid points that came later."""
    drawn = []
    for name in ("a", "b"):
        with panels(tmp_path / name / "f.svg", 1, 1, size=(4.0, 3.0)) as (axes,):
            (tmp_path / name).mkdir()
            legend_below(axes)  # of nothing: none
            assert axes.get_legend() is None
            for i in range(12):
                axes.plot([0, 1], [i, 2 * i], label=f"line {i}")
            legend_below(axes)
            axes.figure.draw_without_rendering()
            legend = axes.get_legend().get_window_extent()
            assert legend.y1 < axes.get_window_extent().y0
            assert legend.y0 >= 0
        drawn.append((tmp_path / name / "f.svg").read_bytes())
    assert drawn[0] == drawn[1]

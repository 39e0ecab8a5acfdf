"""Accuracy over ε: rates come from held-out training rows, figures from test rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from noshuffle.errors import InvalidInput
from noshuffle.experiments import accuracy, beyond, figure1, fitted, sampling, train_lines
from noshuffle.experiments.figure import Request, shipped
from noshuffle.experiments.lines import groups
from noshuffle.experiments.runner import compute
from noshuffle.experiments.store import Store
from noshuffle.participation import BallsInBins, CyclicPoisson, Poisson
from noshuffle.plan import Plan
from noshuffle.strategies import identity

SETTINGS: dict[str, Any] = {
    **{k: v for k, v in shipped("figure1").items() if k not in ("tasks", "groups", "factors")},
    "factors": [0.5, 1.5],
    "tasks": {
        "mnist": {
            "title": "digits",
            "data": "digits",
            "model": "linear",
            "batch": 25,
            "epochs": 2,
            "held_out": 400,
            "rows": 1400,
            "most": 3,
            "search": [2.0, 16.0],
            "middle": [0.2, 0.6],
        }
    },
    "groups": [
        {"task": "mnist", "lines": ["tree", "identity"], "epsilons": [2.0, 16.0], "trials": [0, 1]},
        {"task": "mnist", "lines": ["amplified", "none"], "epsilons": [16.0], "trials": [0]},
    ],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    settings = {**SETTINGS, "groups": [*SETTINGS["groups"]]}
    settings["groups"][1] = {**settings["groups"][1], "lines": ["amplified"]}
    path = tmp_path_factory.mktemp("results") / "r.json"
    store = Store(path, "figure1", settings)
    with pytest.MonkeyPatch.context() as patch:
        true = fitted.plan

        def quick(name: str, **how: Any) -> Plan:
            if name != "amplified":
                return true(name, **how)
            part = Poisson(how["epochs"] * how["per_epoch"], how["rate"])
            return Plan(participation=part, strategy=identity(), noise_multiplier=1.0)

        patch.setattr(fitted, "plan", quick)
        outcome = compute(accuracy.cells(Request(settings=settings)), store, say=None)
    assert outcome.is_whole
    return Store(path, "figure1", settings).results


def test_figures_of_every_run_are_kept(results: dict[str, Any]) -> None:
    final = results["mnist/tree/final/0-0"]
    assert (final["steps"], final["batch"], final["rows"], final["delta"]) == (112, 25, 1400, 1e-5)
    run = final["runs"][0]
    assert run["seed"] == 1000
    plan = fitted.plan("tree", epochs=2, per_epoch=56, epsilon=2.0, delta=1e-5, rate=1 / 56)
    assert run["noise_multiplier"] == plan.noise_multiplier
    assert run["noise_rms"] == fitted.predicted(plan)
    assert results["mnist/tree/search/0"]["rows"] == 1000
    points = accuracy.curve(results, "mnist", "tree")
    assert [len(point.values) for point in points.values()] == [2, 2]
    assert points[16.0].mean > 0.5  # a linear model of ten digits, by chance 0.1
    shown = figure1.FIGURE.table(results)
    assert "| DP-FTRLM (Honaker tree, best restart) | 2 |" in shown
    assert "digits stands in" in shown


def test_the_rate_is_the_best_on_held_out_rows(results: dict[str, Any]) -> None:
    grid = accuracy.search_grid(results, "mnist", "tree")
    assert sorted(grid) == [2.0, 16.0]
    assert all(len(tried) >= 2 for tried in grid.values())
    for run in results["mnist/tree/final/0-0"]["runs"]:
        best = max(grid[run["epsilon"]].values())
        assert grid[run["epsilon"]][run["learning_rate"]] == best
    # Of two factors the best is an end, so one more was tried at each ε.
    assert len(results["mnist/tree/widen"]["runs"]) == 2
    assert all(len(tried) == 3 for tried in grid.values())


def test_a_search_sees_no_test_rows() -> None:
    task = next(iter(groups(SETTINGS))).task
    search = train_lines.StudyRows(task, Request(settings=SETTINGS), is_search=True)
    final = train_lines.StudyRows(task, Request(settings=SETTINGS), is_search=False)
    assert torch.equal(search.x, final.x[:1000])
    assert torch.equal(search.scored[0], final.x[1000:1400])
    assert len(final.scored[0]) == 360


@pytest.mark.parametrize("kind", ["cyclic", "bins"])
def test_sampled_lines_have_the_noise_of_their_participation(kind: str) -> None:
    how = {"epochs": 20, "per_epoch": 240}
    plan = fitted.plan(f"{kind}@2", **how, epsilon=2.0, delta=1e-5, rate=1 / 240)
    turns = fitted.groups(plan.strategy)
    part = {"cyclic": CyclicPoisson(4800, turns, turns / 240), "bins": BallsInBins(20, 240)}[kind]
    assert plan.participation == part
    assert (
        plan.epsilon()
        <= 2.0
        < replace(plan, noise_multiplier=0.99 * plan.noise_multiplier).epsilon()
    )


def test_never_below_allows_one_deviation_to_the_line_with_the_least_noise() -> None:
    def told(cyclic: tuple[float, ...], bins: tuple[float, ...] = (), noise: float = 9.0) -> str:
        runs = {
            "cyclic": (cyclic, 8.0),
            "bins": (bins, noise),
            "amplified": ((0.80, 0.82), 5.0),
            "blt": ((0.79, 0.79), 5.0),
        }
        results = {
            f"mnist/{line}/final/0-0": {
                "runs": [
                    {"epsilon": 1.0, "accuracy": a, "learning_rate": 0.1, "noise_rms": z}
                    for a in values
                ]
            }
            for line, (values, z) in runs.items()
            if values
        }
        return sampling.FIGURE.checked(results)[0].verdict

    assert told((0.80, 0.80)) == "HOLDS"  # 0.81 less a deviation of 0.014
    assert told((0.795, 0.795)) == "DIFFERS"
    assert told((0.83, 0.83)) == "HOLDS"
    assert told((0.83, 0.83), (0.7, 0.7)) == "HOLDS"  # the noise of bins is larger
    assert told((0.83, 0.83), (0.7, 0.7), 7.0) == "DIFFERS"  # its noise decides, not its accuracy
    assert told((0.70, 0.70), (0.83, 0.83), 7.0) == "HOLDS"
    assert told((0.70, 0.70), (0.83, 0.83)) == "DIFFERS"


def made(line: str, *accuracies: float) -> dict[str, Any]:
    runs = [
        {"epsilon": e, "accuracy": a, "learning_rate": 0.1}
        for e, a in zip((1.0, 4.0, 16.0), accuracies)
    ]
    return {f"mnist/{line}/final/0-0": {"runs": runs, "data": "mnist"}}


def test_claims_and_picture(tmp_path: Path) -> None:
    above, passes = (
        "DP-FTRLM is above unamplified DP-SGDM at every ε on MNIST",
        "DP-FTRLM passes amplified DP-SGDM at larger ε on MNIST",
    )
    far = "unamplified DP-SGDM at its largest ε is below amplified at its smallest on MNIST"
    amplified, identity = made("amplified", 0.7, 0.75, 0.8), made("identity", 0.3, 0.4, 0.6)

    def told(results: dict[str, Any]) -> list[str]:
        found = {claim.text: claim.verdict for claim in figure1.FIGURE.checked(results)}
        return [found[text] for text in (above, passes, far)]

    results = {**made("tree", 0.6, 0.76, 0.9), **amplified, **identity}
    assert told(results) == ["HOLDS", "HOLDS", "HOLDS"]
    worse = {**made("tree", 0.2, 0.7, 0.79), **amplified, **made("identity", 0.3, 0.4, 0.75)}
    assert told(worse) == ["DIFFERS", "DIFFERS", "DIFFERS"]
    crossing_twice = {**made("tree", 0.71, 0.7, 0.9), **amplified}
    assert told(crossing_twice) == ["NOT TESTED", "DIFFERS", "NOT TESTED"]
    figure1.FIGURE.draw(results, tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text(encoding="utf8")


def test_lines_are_fitted_to_their_own_momentum() -> None:
    lines = {line.name: line for group in groups(shipped("figure1")) for line in group.lines}
    names = {name: lines[name].fit_at(1.0) for name in ("blt", "blt_heavy", "amplified_heavy")}
    assert names == {"blt": "blt", "blt_heavy": "blt~0.97", "amplified_heavy": "amplified"}
    how: dict[str, Any] = {"epochs": 20, "per_epoch": 100, "epsilon": 1.0}
    plans = {
        beta: fitted.plan(fitted.name_at("blt", momentum=beta), **how, delta=1e-5, rate=0.01)
        for beta in (0.9, 0.97)
    }
    felt = {  # noise that momentum makes of the plan fitted to `fit`, at equal η / (1 − momentum)
        (fit, used): fitted.predicted(plan, momentum=used)
        for fit, plan in plans.items()
        for used in plans
    }
    assert felt[0.9, 0.9] < felt[0.97, 0.9]
    assert felt[0.97, 0.97] < felt[0.9, 0.97]
    assert felt[0.97, 0.97] < 0.95 * felt[0.9, 0.9]


@pytest.mark.parametrize(
    ("more", "numbers"),
    [({"features": "scattering", "model": "softmax"}, 81 * 4), ({"augment": 2}, 64)],
)
def test_tasks_with_features_and_copies(more: dict[str, Any], numbers: int) -> None:
    record = {**SETTINGS["tasks"]["mnist"], "rows": 500, "batch": 50, "epochs": 1, **more}
    settings = {**SETTINGS, "tasks": {"mnist": record}}
    group = groups(settings)[1]
    task, line = group.task, next(line for line in group.lines if line.name == "none")
    rows = train_lines.StudyRows(task, Request(settings=settings), is_search=True)
    assert (len(rows.x), rows.x[0].numel()) == (100, numbers)
    found = train_lines.train(
        task, line, [(0.0, 0.05, 0)], Request(settings=settings), is_search=True
    )
    assert 0.1 < found["runs"][0]["accuracy"] <= 1.0


def test_recipes_are_chosen_by_held_out_rows() -> None:
    def runs(*pairs: tuple[float, float]) -> dict[str, Any]:
        return {"runs": [{"epsilon": e, "learning_rate": 0.1, "accuracy": a} for e, a in pairs]}

    results = {
        "cifar10_scattered/blt/search/0": runs((1.0, 0.62), (8.0, 0.66)),
        "cifar10_scattered/blt/final/0-0": runs((1.0, 0.61), (8.0, 0.90)),
        "cifar10_feature_cnn/blt/search/0": runs((1.0, 0.60), (8.0, 0.70)),
        "cifar10_feature_cnn/blt/final/0-0": runs((1.0, 0.95), (8.0, 0.69)),
        "mnist_scattered/blt/search/0": runs((1.0, 0.98)),
    }
    best = beyond.best_recipes(results, "cifar10")
    found = {e: (task, point.mean) for e, (task, point) in best.items()}
    assert found == {1.0: ("cifar10_scattered", 0.61), 8.0: ("cifar10_feature_cnn", 0.69)}
    told = {str(checked).split()[0] for checked in beyond.FIGURE.checked(results)}
    assert told == {"DIFFERS", "NOT"}
    with pytest.raises(KeyError, match="mnist"):
        beyond.best_recipes({}, "mnist")


def test_groups_of_one_line_that_search_apart_have_cells_of_their_own() -> None:
    common = {"task": "mnist", "lines": ["tree"], "trials": [0]}
    own = [{**common, "epsilons": [e], "search": [e]} for e in (2.0, 16.0)]
    found = {c.key: c for c in accuracy.cells(Request(settings={**SETTINGS, "groups": own}))}
    assert list(found) == [
        f"mnist/tree/{name}"
        for name in ("search/0", "widen", "final/0-0", "search/1", "widen/1", "final/0-1")
    ]
    assert found["mnist/tree/final/0-1"].needs == ("mnist/tree/search/1", "mnist/tree/widen/1")
    run = {"epsilon": 2.0, "learning_rate": 0.1, "accuracy": 0.5}
    known = {
        "mnist/tree/search/0": {"runs": [run]},
        "mnist/tree/search/1": {"runs": [{**run, "epsilon": 16.0, "learning_rate": 0.4}]},
    }
    grid = accuracy.search_grid(known, "mnist", "tree")
    assert accuracy.chosen_rate(grid, 2.0) == pytest.approx(0.1)
    assert accuracy.chosen_rate(grid, 16.0) == pytest.approx(0.4)


def test_rates_of_another_line_by_a_factor() -> None:
    own = {"task": "mnist", "lines": ["tree"], "trials": [0], "epsilons": [2.0, 16.0]}
    lines = {**SETTINGS["lines"], "more": {**SETTINGS["lines"]["tree"], "times": 2}}
    taken = {**own, "lines": ["more"], "rates_of": "tree", "rates_times": 1.5}
    settings = {**SETTINGS, "lines": lines, "groups": [taken]}
    found = {cell.key: cell for cell in accuracy.cells(Request(settings=settings))}
    *searches, final = found
    assert {key.rpartition("/")[0] for key in searches} == {"mnist/tree/search", "mnist/tree"}
    assert (final, found[final].needs) == ("mnist/more/final/0-0", tuple(searches))
    run = {"epsilon": 2.0, "learning_rate": 0.1, "accuracy": 0.5}
    known = {"mnist/tree/search/0": {"runs": [run, {**run, "epsilon": 16.0}]}}
    with pytest.MonkeyPatch.context() as patch:
        seen: list[Any] = []
        patch.setattr(
            "noshuffle.experiments.train_lines.train",
            lambda task, line, runs, asked, is_search: seen.append((line.name, runs)),
        )
        found[final].work(known)
    assert seen == [("more", [(2.0, 0.15, 0), (16.0, 0.15, 0)])]
    wrong = {**settings, "groups": [{**taken, "rates_of": "unknown"}]}
    with pytest.raises(InvalidInput, match="rates_of of group 1"):
        accuracy.cells(Request(settings=wrong))


def test_batch_and_momentum_of_each_line_are_chosen_by_held_out_rows() -> None:
    def runs(accuracy: float) -> dict[str, Any]:
        return {"runs": [{"epsilon": 1.0, "learning_rate": 0.1, "accuracy": accuracy}]}

    results = {
        "mnist/blt/search/0": runs(0.90),
        "mnist/blt/final/0-0": runs(0.99),
        "mnist_large/blt_heavy/search/0": runs(0.91),
        "mnist_large/blt_heavy/final/0-0": runs(0.92),
        "mnist/amplified/search/0": runs(0.95),
        "mnist/amplified/final/0-0": runs(0.93),
    }
    told = {c.text: str(c) for c in figure1.FIGURE.checked(results) if "held-out rows" in c.text}
    first, second = told.values()
    assert first.startswith("DIFFERS")
    assert (
        "92.00 (1 trial) against 93.00 (1 trial) (mnist_large/blt_heavy, mnist/amplified)" in first
    )
    assert second.startswith("NOT TESTED")


def test_several_seeds_on_held_out_rows_choose_where_every_option_has_them() -> None:
    def runs(*accuracies: float) -> dict[str, Any]:
        common = {"epsilon": 1.0, "learning_rate": 0.1}
        return {"runs": [{**common, "accuracy": value} for value in accuracies]}

    results = {
        "mnist/blt/search/0": runs(0.95),  # the better one by a single seed
        "mnist/blt/final/0-0": runs(0.96),
        "mnist/blt/choice/1-0": runs(0.90, 0.91),
        "mnist/more/search/0": runs(0.90),
        "mnist/more/final/0-0": runs(0.97),
    }
    options = [("mnist", "blt"), ("mnist", "more")]
    assert accuracy.best_held_out(results, options)[1.0][1] == "blt"
    results["mnist/more/choice/1-0"] = runs(0.92, 0.93)
    task, line, point = accuracy.best_held_out(results, options)[1.0]
    assert (task, line, point.values) == ("mnist", "more", (0.97,))  # test figures choose nothing


def test_trials_by_held_out_rows_see_no_test_rows() -> None:
    group = {"task": "mnist", "lines": ["tree"], "trials": [1, 2], "epsilons": [2.0]}
    settings = {**SETTINGS, "groups": [{**group, "by_held_out": True}]}
    found = {cell.key: cell for cell in accuracy.cells(Request(settings=settings))}
    *searches, choice = found
    assert (choice, found[choice].needs) == ("mnist/tree/choice/1-0", tuple(searches))
    run = {"epsilon": 2.0, "learning_rate": 0.1, "accuracy": 0.5}
    with pytest.MonkeyPatch.context() as patch:
        seen: list[Any] = []
        patch.setattr(
            "noshuffle.experiments.train_lines.train",
            lambda task, line, runs, asked, is_search: seen.append((runs, is_search)),
        )
        found[choice].work({"mnist/tree/search/0": {"runs": [run]}})
    assert seen == [([(2.0, 0.1, 1), (2.0, 0.1, 2)], True)]

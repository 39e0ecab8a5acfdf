"""`order`: the same guarantee in every order of the rows, and the accuracy under each.

    file             as the data come                  shuffled once    one public permutation
    by writer        all digits of a person together   by class         zeros, then ones, …
    adversarial      by class, and in a class from the clearest row to the least clear one, by the
                     margin of a model without privacy

Every pass repeats the order, so a row takes part once in each, a pass of steps apart: that is all
correlated noise asks for. The order is a part of the data: the neighbour of a stream is the stream
with one row zeroed, in place. "sampled" is amplified DP-SGD, which draws its own batches by secret
coin flips and cannot be had in any of these orders: what sampling would have bought. "none" has no
noise and tells what an order costs an optimizer anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from noshuffle.experiments.figure import Cell, Figure, Request, Results
from noshuffle.experiments.order_view import CLAIMS, draw, table
from noshuffle.participation import Epochs, Participation, Poisson
from noshuffle.plan import Plan
from noshuffle.strategies import identity

if TYPE_CHECKING:
    from noshuffle.datasets.record import DataSet

Rows = np.ndarray[Any, np.dtype[np.int64]]
#: The seed of the one permutation of "shuffled once"; public.
PERMUTATION = 2021


@lru_cache(maxsize=2)
def _data(name: str) -> DataSet:
    from noshuffle import datasets

    return datasets.load(name)


def arranged(order: str, data: DataSet, rows: Rows) -> Rows:
    """These rows (in file order) in the order of that name."""
    labels = data.y_train.numpy()[rows]
    if order == "shuffled once":
        return np.random.default_rng(PERMUTATION).permutation(rows)
    if order == "by class":
        return rows[np.argsort(labels, kind="stable")]
    if order == "by writer":
        if data.units is None:
            raise KeyError(f"writers of {data.name}")
        return rows[np.argsort(data.units.numpy()[rows], kind="stable")]
    if order == "adversarial":
        return rows[np.lexsort((-_margins(data, rows), labels))]
    return rows


def _margins(data: DataSet, rows: Rows) -> np.ndarray[Any, Any]:
    """How clear every row is to a ridge regression on these rows: right score less the next."""
    x = data.x_train.flatten(1).double().numpy()[rows]
    y = data.y_train.numpy()[rows]
    x = np.hstack([x, np.ones((len(x), 1))])
    gram = x.T @ x + 1e-3 * len(x) * np.eye(x.shape[1])
    scores = x @ np.linalg.solve(gram, x.T @ np.eye(data.classes)[y])
    own = scores[np.arange(len(y)), y]
    scores[np.arange(len(y)), y] = -np.inf
    return np.asarray(own - scores.max(1))


def _plan(settings: Mapping[str, Any], name: str, rows: int) -> Plan:
    """The plan of a mechanism for so many rows; "none" has the limits and no noise."""
    steps = rows // settings["batch_size"]
    part: Participation = Epochs(epochs=settings["epochs"], steps_per_epoch=steps)
    if name == "none":
        return Plan(participation=part, strategy=identity(), noise_multiplier=0.0)
    if name == "sampled":
        part = Poisson(part.steps, settings["batch_size"] / rows)
    from noshuffle.strategies.workload import momentum

    workload = None if name == "sampled" else momentum(settings["momentum"])
    return Plan.fit(
        part,
        mechanism="identity" if name == "sampled" else name,
        epsilon=settings["epsilon"],
        delta=settings["delta"],
        workload=workload,
    )


def _trained(
    settings: Mapping[str, Any], device: str, order: str, rows: Rows,
    runs: Sequence[tuple[Plan, float, int]], x_test: Any, y_test: Any,
) -> list[float]:  # fmt: skip
    """Accuracy in % of every run (plan, rate and seed) on these rows in this order."""
    from noshuffle.experiments import one_run
    from noshuffle.strategies.workload import cooldown
    from noshuffle.training import models

    data = _data(settings["data"])
    x, y, x_test, y_test = (
        part.to(device) for part in (data.x_train, data.y_train, x_test, y_test)
    )
    rows, accuracies = arranged(order, data, rows), []
    for plan, rate, seed in runs:
        private = one_run.train(
            lambda: models.build(settings["model"], data.shape, data.classes),
            plan,
            x,
            y,
            rows,
            batch_size=settings["batch_size"],
            clip_norm=settings["clip_norm"],
            learning_rate=rate,
            momentum=settings["momentum"],
            learning_rates=cooldown(plan.steps),
            seed=seed,
        )
        accuracies.append(round(100 * one_run.accuracy(private.model, x_test, y_test), 3))
    return accuracies


def _names(settings: Mapping[str, Any], order: str) -> list[str]:
    return ["sampled"] if order == "sampled" else settings["mechanisms"]


def _search(
    settings: Mapping[str, Any], device: str, order: str, results: Results
) -> dict[str, dict[str, float]]:
    """Accuracy on held-out training rows of every mechanism and rate."""
    data = _data(settings["data"])
    cut = len(data) * 9 // 10
    plans = {name: _plan(settings, name, cut) for name in _names(settings, order)}
    grid = [(name, rate) for name in plans for rate in settings["rates"]]
    runs = [(plans[name], rate, 0) for name, rate in grid]
    held = data.x_train[cut:], data.y_train[cut:]
    found = _trained(settings, device, order, np.arange(cut), runs, *held)
    out: dict[str, dict[str, float]] = {}
    for (name, rate), accuracy in zip(grid, found):
        out.setdefault(name, {})[f"{rate:g}"] = accuracy
    return out


def _final(
    settings: Mapping[str, Any], device: str, key: str, order: str, trials: int, results: Results
) -> dict[str, Any]:
    """Test accuracy of every mechanism at its chosen rate, over seeds."""
    data, searched = _data(settings["data"]), results[key]
    chosen = {n: float(max(tried, key=tried.__getitem__)) for n, tried in searched.items()}
    plans = {name: _plan(settings, name, len(data)) for name in chosen}
    grid = [(name, seed) for name in chosen for seed in range(1, trials + 1)]
    runs = [(plans[name], chosen[name], seed) for name, seed in grid]
    rows = np.arange(len(data))
    found = _trained(settings, device, order, rows, runs, data.x_test, data.y_test)
    return {
        name: {
            "rate": chosen[name],
            "epsilon": plans[name].epsilon() if name != "none" else None,
            "noise_multiplier": plans[name].noise_multiplier,
            "accuracy": [a for (other, _), a in zip(grid, found) if other == name],
        }
        for name in chosen
    }


def _cells(asked: Request) -> Sequence[Cell]:
    settings = dict(asked.settings)
    other = settings.pop("cuda", {})
    if asked.device.startswith("cuda") and not asked.quick:
        settings.update(other)
    trials = asked.trials or settings["trials"]
    cells = []
    for order in [*settings["orders"], "sampled"]:
        head = f"{settings['data']}, {settings['model']}"
        search, final = f"{head}/search/{order}", f"{head}/final/{order}"
        work = partial(_search, settings, asked.device, order)
        size = len(_names(settings, order))
        cells.append(Cell(search, work, size * len(settings["rates"]), head))
        work = partial(_final, settings, asked.device, search, order, trials)
        cells.append(Cell(final, work, size * trials, head, (search,)))
    return cells


FIGURE = Figure(
    name="order",
    title="one guarantee, every order",
    cells=_cells,
    table=table,
    draw=draw,
    claims=CLAIMS,
)  # fmt: skip

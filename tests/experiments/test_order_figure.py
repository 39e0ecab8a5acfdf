"""The figure `order`: orders are what they say, cells train by plan, verdicts go both ways."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.container import BarContainer, ErrorbarContainer

from noshuffle.experiments import order, order_view
from noshuffle.experiments.figure import DIFFERS, HOLDS, NOT_TESTED, Request, shipped

ROWS = np.arange(300)


def test_orders_are_permutations_that_sort_as_they_say() -> None:
    data = order._data("digits")
    labels = data.y_train.numpy()
    for name in ("file", "shuffled once", "by class", "adversarial"):
        rows = order.arranged(name, data, ROWS)
        assert np.array_equal(np.sort(rows), ROWS)
        assert np.array_equal(rows, ROWS) == (name == "file")
        assert bool(np.all(np.diff(labels[rows]) >= 0)) == (name in ("by class", "adversarial"))
    clear = order._margins(data, ROWS)
    zeros = [row for row in order.arranged("adversarial", data, ROWS) if labels[row] == 0]
    assert np.all(np.diff(clear[zeros]) <= 0)
    with pytest.raises(KeyError, match="writers"):
        order.arranged("by writer", data, ROWS)


@pytest.mark.slow
def test_a_toy_study_trains_by_its_plans() -> None:
    settings = {
        **shipped("order", quick=True),
        "epochs": 2,
        "batch_size": 400,
        "trials": 1,
        "rates": [0.3],
        "orders": ["by class"],
        "mechanisms": ["identity", "none"],
    }
    found: dict[str, Any] = {}
    for cell in order.FIGURE.cells(Request(settings=settings)):
        found[cell.key] = cell.work(found)
    final = found["digits, linear/final/by class"]
    assert final["identity"]["epsilon"] == pytest.approx(8.0, abs=1e-6)
    assert final["none"]["noise_multiplier"] == 0.0
    assert found["digits, linear/final/sampled"]["sampled"]["epsilon"] <= 8.0
    for name, record in final.items():
        assert found["digits, linear/search/by class"][name].keys() == {"0.3"}
        assert 0 <= record["accuracy"][0] <= 100


def made_up(**accuracy: float) -> dict[str, Any]:
    every = {"blt": 90.0, "tree": 88.0, "identity": 80.0, "none": 95.0, **accuracy}
    made = {
        name: {"rate": 0.1, "epsilon": 2.0, "accuracy": [value, value + 0.2]}
        for name, value in every.items()
    }
    orders = {f"mnist, linear/final/{name}": made for name in order_view.ORDERS[:-1]}
    return {**orders, "mnist, linear/final/sampled": {"sampled": made["blt"]}}


def test_claims_and_picture(tmp_path: Path) -> None:
    results = made_up()
    words = [claim.verdict for claim in order.FIGURE.checked(results)]
    assert words == [HOLDS] * 5
    assert "| by writer | 90.10 ± 0.14 (0.1) | 88.10" in order.FIGURE.table(results)
    order.FIGURE.draw(results, tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 5_000
    assert {claim.verdict for claim in order.FIGURE.checked({})} == {NOT_TESTED}


def test_what_does_not_begin_at_zero_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bars from 65 % on made 70 look like a fifth of 90."""
    figure, axis = pyplot.subplots()
    monkeypatch.setattr(order_view, "panels", lambda *_, **__: nullcontext([axis]))
    order_view.draw(made_up(), Path("a.svg"))
    bars = [one for one in axis.containers if isinstance(one, BarContainer)]
    assert not bars or axis.get_ylim()[0] == 0
    middle = [one for one in axis.containers if isinstance(one, ErrorbarContainer)]
    assert middle[0].lines[0].get_ydata() == pytest.approx([90.1] * 5)
    pyplot.close(figure)


def test_claims_can_fail() -> None:
    results = made_up(tree=70.0)
    worse = made_up(blt=60.0)["mnist, linear/final/file"]
    worse["blt"]["epsilon"] = 3.0
    results["mnist, linear/final/by class"] = worse
    results["mnist, linear/final/file"] = worse
    words = [claim.verdict for claim in order.FIGURE.checked(results)]
    assert words == [DIFFERS] * 5

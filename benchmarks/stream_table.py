"""Bank Marketing and Elec2 as streams in time order: progressive AUC, and how it drifts.

    NOSHUFFLE_DATA=... python benchmarks/stream_table.py [--output stream_auc.png] [--epsilons 1 8]

Every row is predicted by the newest private iterate before it is learned from, in batches of 64,
δ = 1e-6. The table has the AUC of the whole stream and of its quarters; the picture the AUC in a
sliding window of 3,000 rows with the share of positives under it. "frozen" learns without privacy
from the first quarter and then stays as it is: what drift costs a model that does not go on.
Features use public bounds, code books and the calendar only. The AUC itself is computed from raw
labels: these are experiments, not releases.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
from adult_table import rows_of
from sklearn.metrics import roc_auc_score

from noshuffle.convex import PrivateLogisticRegression
from noshuffle.datasets.store import local
from noshuffle.datasets.tables import bank_marketing
from noshuffle.errors import DataUnavailable

DELTA, BATCH, WINDOW = 1e-6, 64, 3000
EPSILONS = (0.1, 0.5, 1.0, 2.0, 8.0, math.inf)


def bank_rows() -> tuple[Any, Any]:
    data = bank_marketing()
    x = np.concatenate([rows_of(data.x_train), rows_of(data.x_test)])
    return x, np.concatenate([data.y_train.numpy(), data.y_test.numpy()])


def elec2_rows() -> tuple[Any, Any]:
    """Half-hours and weekdays as indicators, prices as logarithms: the calendar is public."""
    path = local("elec2.npz")
    if path is None:
        raise DataUnavailable("elec2.npz is not in $NOSHUFFLE_DATA; set it to the data folder")
    with np.load(path) as file:
        x, y = file["x"].astype(np.float64), file["y"].astype(np.int64)
    half_hour = np.eye(48)[np.rint(x[:, 2] * 47).astype(int)]
    weekday = np.eye(7)[np.rint(x[:, 1]).astype(int) - 1]
    price = np.log1p(1000 * x[:, [3, 5]]) / np.log(1001)
    return np.column_stack([x[:, [0, 4, 6, 7]], price, half_hour, weekday]), y


def progressive(x: Any, y: Any, *, epsilon: float, horizon: int | None, until: int) -> Any:
    """Margins of every row by the model of the moment; learning stops after `until` rows."""
    model = PrivateLogisticRegression(
        epsilon=epsilon, delta=DELTA, horizon=horizon, batch_size=BATCH, averaging="last"
    )
    margins = np.zeros(len(y))
    for first in range(0, until, BATCH):
        piece = slice(first, min(first + BATCH, until))
        if first:
            margins[piece] = model.decision_function(x[piece])
        model.partial_fit(x[piece], y[piece], classes=[0, 1])
    if until < len(y):
        margins[until:] = model.decision_function(x[until:])
    return margins


def windows(y: Any, margins: Any, *, points: int = 60) -> tuple[Any, Any]:
    """(last row, AUC) of sliding windows."""
    ends = np.linspace(WINDOW, len(y), points).astype(int)
    return ends, np.array([roc_auc_score(y[e - WINDOW : e], margins[e - WINDOW : e]) for e in ends])


def measured(name: str, x: Any, y: Any, epsilons: list[float]) -> dict[str, Any]:
    """Print the table of one stream; returns the margins by label."""
    print(f"\n{name}: {len(y):,} rows x {x.shape[1]} features in time order, progressive AUC")
    print(f"{'':>22}{'all':>8}" + "".join(f"{f'quarter {q}':>11}" for q in range(1, 5)))
    quarters = np.array_split(np.arange(len(y)), 4)
    runs: list[tuple[str, float, int | None, int]] = []
    for epsilon in epsilons:
        told = "not private" if math.isinf(epsilon) else f"ε = {epsilon:g}"
        runs.append((told, epsilon, len(y), len(y)))
        if epsilon == 1.0:
            runs.append((f"{told}, horizon unknown", epsilon, None, len(y)))
    runs.append(("frozen after 1/4", math.inf, len(y), len(y) // 4))
    found = {}
    for told, epsilon, horizon, until in runs:
        margins = progressive(x, y, epsilon=epsilon, horizon=horizon, until=until)
        found[told] = margins
        parts = [roc_auc_score(y[q], margins[q]) for q in quarters]
        line = f"{told:>22}{roc_auc_score(y, margins):>8.3f}"
        print(line + "".join(f"{part:>11.3f}" for part in parts), flush=True)
    return found


def draw(path: Path, streams: list[tuple[str, Any, dict[str, Any]]]) -> None:
    """AUC in a sliding window, and the share of positives beneath it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        2,
        len(streams),
        figsize=(6.2 * len(streams), 5.4),
        layout="constrained",
        squeeze=False,
        gridspec_kw={"height_ratios": [3, 1]},
    )
    for (name, y, found), (above, below) in zip(streams, grid.T):
        private = [told for told in found if told.startswith("ε") and "unknown" not in told]
        shades = pyplot.get_cmap("viridis")(np.linspace(0.85, 0.2, len(private)))
        styles: dict[str, dict[str, Any]] = {t: {"color": c} for t, c in zip(private, shades)}
        styles["not private"] = {"color": "#1f2933", "lw": 2.0}
        styles["frozen after 1/4"] = {"color": "#c8553d", "ls": "--"}
        for told, margins in found.items():
            if told in styles:
                above.plot(*windows(y, margins), **{"lw": 1.4, **styles[told]}, label=told)
        above.axvline(len(y) // 4, color="#9aa5b1", lw=0.8, ls=":")
        above.set(ylabel=f"AUC of the last {WINDOW:,} rows", title=name)
        above.legend(frameon=False, fontsize=8, ncols=2)
        ends = np.linspace(WINDOW, len(y), 60).astype(int)
        share = [100 * float(y[e - WINDOW : e].mean()) for e in ends]
        below.fill_between(ends, share, color="#9aa5b1", alpha=0.5, lw=0)
        below.set(xlabel="row, in time order", ylabel="positives, %", ylim=(0, None))
        for axes in (above, below):
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlim(0, len(y))
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
    print(f"\npicture written to {path}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("stream_auc.png"))
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    given = parser.parse_args()
    streams = []
    for name, (x, y) in (("Bank Marketing", bank_rows()), ("Elec2", elec2_rows())):
        streams.append((name, y, measured(name, x, y, given.epsilons)))
    draw(given.output, streams)


if __name__ == "__main__":
    main()

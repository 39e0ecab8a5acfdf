"""What is told of a `noshuffle train` run, or of a run in a loop of one's own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from noshuffle.errors import NoshuffleError
from noshuffle.participation.patterns import OPEN
from noshuffle.report import plots
from noshuffle.report.run import RunRecord
from noshuffle.strategies import Strategy
from noshuffle.strategies.base import ToeplitzStrategy


def lead(run: RunRecord) -> str:
    data = run.config.get("data", "own data")
    model = run.config.get("model", "own model")
    return f"{model} on {data}, {run.progress()}, {run.plan.strategy.words()}"


def _steps(run: RunRecord) -> int:
    """The planned steps; of a run without an end, those that were released."""
    told = max(1, run.released)
    return told if run.plan.steps == OPEN else run.plan.steps


def cards(run: RunRecord) -> list[tuple[str, str]]:
    return []


def figures(run: RunRecord) -> Iterator[plots.Figure]:
    if any(row.get("test_accuracy") is not None for row in run.evaluations):
        caption = "Accuracy on held-out data, computed from the released model."
        yield plots.learning_curve(run.evaluations), caption
    if not run.not_private:
        yield from _privacy(run)
    yield from _signal(run)
    if len({row.get("clip_norm") for row in run.evaluations}) > 1:
        yield (
            plots.clip_curve(run.evaluations),
            "The clip norm follows a quantile of the norms by noisy counts, which are paid for.",
        )
    yield from plots.noise_figure(
        run.plan,
        "What the noise has added to the model's running sum: all mechanisms at this ε.",
        per=run.config.get("batch_size"),
    )


def _privacy(run: RunRecord) -> Iterator[plots.Figure]:
    """What the statement covers, which of a run that was cut off is less than was planned."""
    last, stated = max(1, run.released), run.statement.get("epsilon")
    # Counts spend all of it at the first step; of a fork, the plan has its own part alone.
    is_whole = not (run.has_counts or run.ancestors)
    if is_whole and (stated is None or stated <= 1.001 * run.plan.epsilon_after(last)):
        yield plots.epsilon_curve(run.plan, last=last), f"Privacy spent over {run.progress()}."
    if run.plan.noise_multiplier:
        is_swap = run.plan.neighbours == "replace-one"
        asked = "which of two units took part" if is_swap else "whether one unit took part"
        caption = f"Errors of any test {asked}: never below the line."
        yield plots.tradeoff_curve(run.least_misses), caption


def _row_norms(strategy: Strategy, n: int) -> Any:
    """‖row t of C⁻¹‖ for every step: how long the noise of a step is for unit draws."""
    if isinstance(strategy, ToeplitzStrategy) and not strategy.has_draw_gains:
        squares = np.cumsum(strategy.noising_coefficients(n) ** 2)
        return np.sqrt(squares) / strategy.gain_values(n)
    return np.linalg.norm(strategy.noising(n), axis=1)


def _signal(run: RunRecord) -> Iterator[plots.Figure]:
    """Signal against noise: E‖noise‖ is z·ζ·‖row t of C⁻¹‖·√d / B, a function of public numbers."""
    names = ("private_gradient_norm", "trained_parameters", "step")
    rows = [row for row in run.evaluations if all(row.get(name) for name in names)]
    batch, clip = run.config.get("batch_size"), run.config.get("clip_norm")
    if len(rows) < 2 or not batch or not clip:
        return
    try:
        per_step = _row_norms(run.plan.strategy, _steps(run))
    except NoshuffleError:  # too long to compute
        return
    scale = run.plan.noise_multiplier * clip / batch
    noise = [
        scale * per_step[row["step"] - 1] * math.sqrt(row["trained_parameters"]) for row in rows
    ]
    yield (
        plots.signal_curve(rows, noise),
        "Length of the released gradient beside that of its noise alone. Where they meet, a single "
        "step is noise, and only sums over many steps carry the signal.",
    )

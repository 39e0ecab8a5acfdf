"""What is told of a `noshuffle train` run, or of a run in a loop of one's own."""

from __future__ import annotations

from collections.abc import Iterator

from noshuffle.report import plots
from noshuffle.report.run import RunRecord


def lead(run: RunRecord) -> str:
    data = run.config.get("data", "own data")
    model = run.config.get("model", "own model")
    return f"{model} on {data}, {run.plan.steps} steps, {run.plan.strategy.words()}"


def cards(run: RunRecord) -> list[tuple[str, str]]:
    return []


def figures(run: RunRecord) -> Iterator[plots.Figure]:
    if any(row.get("test_accuracy") is not None for row in run.evaluations):
        caption = "Accuracy on held-out data, computed from the released model."
        yield plots.learning_curve(run.evaluations), caption
    yield plots.epsilon_curve(run.plan, last=run.plan.steps), "Privacy spent so far."
    if run.plan.noise_multiplier:
        caption = "Errors of any test whether one unit took part in the whole run: never below."
        yield plots.tradeoff_curve(run.plan, last=run.plan.steps), caption
    yield from plots.noise_figure(
        run.plan,
        "What the noise has added to the model's running sum: all mechanisms at this ε.",
        per=run.config.get("batch_size"),
    )

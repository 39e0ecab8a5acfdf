"""What is told of a `noshuffle train` run, or of a run in a loop of one's own."""

from __future__ import annotations

from noshuffle.report import plots
from noshuffle.report.run import RunRecord


def lead(run: RunRecord) -> str:
    """What the run was, in one line."""
    data = run.config.get("data", "own data")
    model = run.config.get("model", "own model")
    return f"{model} on {data}, {run.plan.steps} steps, {run.plan.strategy.words()}"


def cards(run: RunRecord) -> list[tuple[str, str]]:
    """Nothing beyond what every page has."""
    return []


def figures(run: RunRecord) -> list[tuple[str, str]]:
    """The pictures with their captions."""
    found: list[tuple[str, str]] = []
    if any(row.get("test_accuracy") is not None for row in run.evaluations):
        found.append(
            (
                plots.learning_curve(run.evaluations),
                "Accuracy on held-out data, computed from the released model.",
            )
        )
    found.append((plots.epsilon_curve(run.plan), "Privacy spent so far."))
    series = plots.noise_series(run.plan)
    if series:
        batch = run.config.get("batch_size")
        found.append(
            (
                plots.noise_curve(series, batch_size=batch if isinstance(batch, int) else None),
                "What the noise has added to the model's running sum: all mechanisms at this ε.",
            )
        )
    return found

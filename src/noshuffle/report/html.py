"""report.html: one self-contained page with the pictures, the numbers and the statement.

The page may be published. It is a function of the plan, of released values (the model, the noisy
gradient), of settings, and of evaluations on held-out data, whose people it names
beside the figure. No gradient norm, no loss of a training example and no figure of a model trained
without noise is read from the folder, whatever lies there.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, Protocol

from noshuffle.plan.statement import FALSE_ALARMS, UNCHECKED, meaning
from noshuffle.release.files import write_bytes
from noshuffle.report import audit, federated, fit, sums, trained
from noshuffle.report.page_parts import cards, document, pictures, table, warning
from noshuffle.report.plots import Figure
from noshuffle.report.run import RunRecord, read_run
from noshuffle.rounding import up

#: What the statement says, and how a person calls it.
_STATED = {
    "unit": "protected unit",
    "neighbours": "neighbours",
    "participation": "participation",
    "mechanism": "mechanism",
    "sensitivity": "sensitivity",
    "mu": "μ (Gaussian DP)",
    "rho": "ρ (zCDP)",
    "accountant": "accountant",
}


class Teller(Protocol):
    """What tells of one kind of run: a module with these three functions."""

    def lead(self, run: RunRecord) -> str:
        """What the run was, in one line."""

    def cards(self, run: RunRecord) -> list[tuple[str, str]]:
        """Numbers at the top of the page, with what they are."""

    def figures(self, run: RunRecord) -> Iterable[Figure]:
        """Pictures with their captions."""


_TELLERS: dict[str, Teller] = {"federated": federated, "fit": fit, "sum": sums}


def _teller(run: RunRecord) -> Teller:
    return _TELLERS.get(str(run.config.get("kind")), trained)


def write_report(path: Path) -> Path:
    """Draw the report of the run in that folder; the page replaces the old one in one move."""
    write_bytes(path / "report.html", page(read_run(path)).encode())
    return path / "report.html"


def page(run: RunRecord) -> str:
    title = f"noshuffle run {run.name}"
    return document(
        title,
        f"<p class='lead'>{escape(_teller(run).lead(run))}</p>"
        + "".join(warning(sentence) for sentence in run.not_private)
        + _cards(run)
        + ("" if run.statement["participation_checked"] else warning(UNCHECKED))
        + ("" if run.not_private else _meaning(run))
        + _figures(run)
        + _statement(run)
        + (f"<h2>Second opinion</h2>{audit.section(run.audit)}" if run.audit else "")
        + _settings(run),
    )


def write_audit(record: dict[str, Any], path: Path, *, title: str) -> None:
    """Write audit.html: what `noshuffle audit` found, as a page of its own."""
    write_bytes(path, document(title, audit.section(record)).encode())


def _cards(run: RunRecord) -> str:
    epsilon = run.statement.get("epsilon")
    kind = "exact" if run.statement.get("exact") else "upper bound"
    promised = ("∞" if epsilon is None else up(epsilon, digits=3), f"ε ({kind})")
    told = [
        promised if not run.not_private else ("NOT PRIVATE", "no ε holds"),
        (up(run.statement.get("delta", run.plan.delta)), "δ"),
        (f"{run.plan.noise_multiplier:.4g}", "noise multiplier"),
    ]
    accuracy = run.summary.get("test_accuracy")
    if isinstance(accuracy, float):
        told.append((f"{100 * accuracy:.1f} %", "accuracy on held-out data"))
    if isinstance(error := run.summary.get("test_error"), float):
        told.append((f"{error:.4g}", "error on held-out data"))
    return cards([*told, *_teller(run).cards(run)])


def _meaning(run: RunRecord) -> str:
    if run.seen is None:
        return ""
    found = None
    if run.plan.noise_multiplier and run.released:  # where batches are drawn, far below ε alone
        found = 1 - float(run.least_misses([FALSE_ALARMS])[0])
    said = run.statement
    near = said.get("neighbours", run.plan.neighbours)
    sentence = meaning(*run.seen, unit=said["unit"], neighbours=near, found=found)
    return f"<p>{escape(sentence)}</p>"


def _figures(run: RunRecord) -> str:
    told = run.evaluation_words()
    said = "" if told is None else f"<p class='lead'>{escape(told)}</p>"
    return f"<h2>What happened</h2>{said}{pictures(_teller(run).figures(run))}"


def _statement(run: RunRecord) -> str:
    statement = run.statement
    rows = []
    for name, label in _STATED.items():
        value = statement.get(name)
        rows.append((label, up(value) if isinstance(value, int | float) else value))
    said = [*statement.get("assumptions", []), *run.config.get("further_assumptions", [])]
    sentences = "".join(f"<li>{escape(s)}</li>" for s in said)
    title, holds = "The guarantee", "It holds provided that:"
    if run.not_private:
        title = "What was planned"
        holds = "NOT PRIVATE, as said above: none of this holds. It was to hold provided that:"
    return f"<h2>{title}</h2>{table(rows)}<p>{holds}</p><ul>{sentences}</ul>"


def _settings(run: RunRecord) -> str:
    told = sorted((k, v) for k, v in run.config.items() if k != "further_assumptions")
    return (
        f"<h2>Settings</h2>{table([('plan hash', run.plan.hash), *told])}"
        "<p class='lead'>Recompute the guarantee from the evidence, beside the run folder: "
        f"<code>noshuffle verify {escape(run.name)}</code></p>"
    )

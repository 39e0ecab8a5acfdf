"""report.html: one self-contained page with the pictures, the numbers and the statement.

The page may be published. It is a function of the plan, of released values (the model, the noisy
gradient, noisy scores), of settings, and of evaluations on held-out data, whose people it names
beside the figure. No gradient norm, no loss of a training example and no figure of a model trained
without noise is read from the folder, whatever lies there.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, Protocol

from noshuffle.release.files import write_bytes
from noshuffle.report import audit, federated, fit, sums, trained
from noshuffle.report.plots import Figure
from noshuffle.report.run import RunRecord, read_run
from noshuffle.statement import meaning

_STYLE = """
body{font:16px/1.55 system-ui,sans-serif;color:#1f2933;max-width:60rem;margin:2rem auto;
padding:0 1rem;background:#fff}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin:2rem 0 .4rem}
.lead{color:#52606d;margin-top:0}
.cards{display:flex;flex-wrap:wrap;gap:.8rem;margin:1.2rem 0}
.card{border:1px solid #e4e7eb;border-radius:.5rem;padding:.6rem 1rem;min-width:7.5rem}
.card b{display:block;font-size:1.35rem}.card span{color:#52606d;font-size:.85rem}
.warn{border-left:4px solid #c8553d;padding:.5rem 1rem;background:#fdf3f0}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(24rem,100%),1fr));gap:1.2rem}
figure{margin:0}figure svg{width:100%;height:auto}figcaption{color:#52606d;font-size:.88rem}
table{border-collapse:collapse}td{padding:.15rem 1rem .15rem 0;vertical-align:top}
td:first-child{color:#52606d;white-space:nowrap}td{overflow-wrap:anywhere}
table+p{margin-top:1rem}code{font-size:.85rem;word-break:break-all}
@media(prefers-color-scheme:dark){body{background:#14191f;color:#e4e7eb}
.lead,.card span,figcaption,td:first-child{color:#9fb3c8}.card{border-color:#3e4c59}
.warn{background:#3b211b}figure svg{filter:invert(1) hue-rotate(180deg)}}
"""
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
    run = read_run(path)
    write_bytes(path / "report.html", page(run).encode())
    if run.config.get("kind") == "federated":
        federated.write_operator_page(run, style=_STYLE)
    return path / "report.html"


def page(run: RunRecord) -> str:
    title = f"noshuffle run {run.name}"
    unsafe = [s for s in run.statement.get("assumptions", []) if "not private" in s.lower()]
    return document(
        title,
        f"<p class='lead'>{escape(_teller(run).lead(run))}</p>"
        + "".join(f"<p class='warn'>{escape(sentence)}</p>" for sentence in unsafe)
        + _cards(run, is_private=not unsafe)
        + ("" if unsafe else _meaning(run))
        + _figures(run)
        + _statement(run)
        + (f"<h2>Second opinion</h2>{audit.section(run.audit)}" if run.audit else "")
        + _settings(run),
    )


def write_audit(record: dict[str, Any], path: Path, *, title: str) -> None:
    """Write audit.html: what `noshuffle audit` found, as a page of its own."""
    write_bytes(path, document(title, audit.section(record)).encode())


def document(title: str, body: str, head: str = "") -> str:
    """A whole page that asks for nothing else."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'>"
        "<meta name='color-scheme' content='light dark'>"
        f"{head}"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _cards(run: RunRecord, *, is_private: bool) -> str:
    epsilon = run.statement.get("epsilon")
    kind = "exact" if run.statement.get("exact") else "upper bound"
    promised = ("∞" if epsilon is None else f"{epsilon:.3g}", f"ε ({kind})")
    cards = [
        promised if is_private else ("NOT PRIVATE", "no ε holds"),
        (f"{run.plan.delta:g}", "δ"),
        (f"{run.plan.noise_multiplier:.4g}", "noise multiplier"),
    ]
    accuracy = run.summary.get("test_accuracy")
    if isinstance(accuracy, float):
        cards.append((f"{100 * accuracy:.1f} %", "accuracy on held-out data"))
    if isinstance(error := run.summary.get("test_error"), float):
        cards.append((f"{error:.4g}", "error on held-out data"))
    drawn = "".join(
        f"<div class='card'><b>{escape(value)}</b><span>{escape(label)}</span></div>"
        for value, label in (*cards, *_teller(run).cards(run))
    )
    return f"<div class='cards'>{drawn}</div>"


def _meaning(run: RunRecord) -> str:
    said = run.statement
    if said.get("epsilon") is None:
        return ""
    sentence = meaning(said["epsilon"], said["delta"], said.get("mu"), unit=said["unit"])
    return f"<p>{escape(sentence)}</p>"


def _figures(run: RunRecord) -> str:
    drawn = "".join(
        f"<figure>{svg}<figcaption>{escape(text)}</figcaption></figure>"
        for svg, text in _teller(run).figures(run)
    )
    told = run.evaluation_words()
    said = "" if told is None else f"<p class='lead'>{escape(told)}</p>"
    return f"<h2>What happened</h2>{said}<div class='grid'>{drawn}</div>"


def _statement(run: RunRecord) -> str:
    statement = run.statement
    rows = []
    for name, label in _STATED.items():
        value = statement.get(name)
        rows.append((label, f"{value:.6g}" if isinstance(value, int | float) else value))
    said = [*statement.get("assumptions", []), *run.config.get("further_assumptions", [])]
    sentences = "".join(f"<li>{escape(s)}</li>" for s in said)
    return f"<h2>The guarantee</h2>{_table(rows)}<p>It holds provided that:</p><ul>{sentences}</ul>"


def _settings(run: RunRecord) -> str:
    told = sorted((k, v) for k, v in run.config.items() if k != "further_assumptions")
    return (
        f"<h2>Settings</h2>{_table([('plan hash', run.plan.hash), *told])}"
        "<p class='lead'>Recompute the guarantee from the "
        f"evidence in this folder: <code>noshuffle verify {escape(run.name)}</code></p>"
    )


def _table(rows: list[tuple[str, Any]]) -> str:
    cells = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>"
        for key, value in rows
        if value is not None
    )
    return f"<table>{cells}</table>"

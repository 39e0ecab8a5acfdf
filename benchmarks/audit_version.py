"""Audit the plans of another version of noshuffle with this version's audit.

The package of the other version is imported as it is (its plans, its fits, its noise streams); only
`noshuffle.auditing` comes from here. So what is driven with unit draws is the stream that the other
version trained with, and what is compared is what its plans stated.

    git worktree add --detach ../old 7dd6451
    python benchmarks/audit_version.py ../old/src

Version 7dd6451 stated too small an ε for trees that were stopped; the table names the falsest
stopping point of each plan. Exit status 1 if any plan is refuted.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1] / "src" / "noshuffle"


def plans(ns: Any) -> list[tuple[str, Any]]:
    """Plans as users of that version made them: defaults by name, and trees with their options."""
    from noshuffle import participation as p
    from noshuffle.strategies import tree

    fit = ns.Plan.fit
    completed = tree("honaker", restart_every=5, completion=True)
    found: list[tuple[str, Any]] = [
        ("tree, Epochs(10, 10)", fit(p.Epochs(10, 10), mechanism="tree", epsilon=8.0)),
        ("tree, Epochs(4, 5)", fit(p.Epochs(4, 5), mechanism="tree", epsilon=8.0)),
        (
            "full tree, SinglePass(1600)",
            fit(p.SinglePass(1600), mechanism=tree("full"), epsilon=8.0),
        ),
        (
            "completed tree, MinSeparation(14, 4, 3)",
            fit(p.MinSeparation(14, 4, 3), mechanism=completed, epsilon=8.0),
        ),
        ("completed tree, SinglePass(20)", fit(p.SinglePass(20), mechanism=completed, epsilon=8.0)),
        ("plain tree, SinglePass(64)", fit(p.SinglePass(64), mechanism=tree("plain"), epsilon=8.0)),
    ]
    for name in ("blt", "banded", "bisr", "sqrt", "identity"):
        found.append((f"{name}, Epochs(4, 8)", fit(p.Epochs(4, 8), mechanism=name, epsilon=8.0)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="the src folder of the other version")
    parser.add_argument("--most-steps", type=int, default=400)
    asked = parser.parse_args()
    sys.path.insert(0, str(asked.source.resolve()))
    import noshuffle as ns

    if not Path(ns.__file__).resolve().is_relative_to(asked.source.resolve()):
        parser.error(f"{asked.source} holds no package noshuffle")
    ns.__path__.append(str(HERE))  # the other version has no auditing of its own
    from noshuffle.auditing.prefixes import audit_plan

    print(f"{'plan':40s} {'answer':12s} {'false':>9s} {'after':>6s} {'stated':>8s} {'true ≥':>8s}")
    is_refuted = False
    for name, plan in plans(ns):
        found = audit_plan(plan, most_steps=asked.most_steps)
        is_refuted |= bool(found.refuted)
        stop = found.refuted[0] if found.refuted else found.stops[-1]
        count = f"{len(found.refuted)}/{len(found.stops)}"
        numbers = f"{stop.steps:6d} {stop.stated:8.3f} {stop.low:8.3f}"
        print(f"{name:40s} {found.answer:12s} {count:>9s} {numbers}", flush=True)
    return int(is_refuted)


if __name__ == "__main__":
    sys.exit(main())

"""Which convex solver for which problem: the table of docs/convex.md, by `solvers.best`.

    python benchmarks/solver_ranking.py --out ranking.json [--only 3 6]

Mean excess over the exact optimum on synthetic tables, δ = 1e-6, zero-out. A row is kept in the
file as soon as it is there, and a second run goes on; --only takes rows by their number, from 0.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from noshuffle.convex import losses, solvers
from noshuffle.convex.solvers.domains import Ball, L1Ball, ball
from noshuffle.optim.norms import Groups, SingularValues

_GROUPS, _MATRIX = Groups(tuple(i // 5 for i in range(100))), SingularValues(10, 10)
_SPARSE: dict[str, Any] = {"loss": losses.squared(order=np.inf, radius=1.0), "domain": L1Ball(1.0)}
_BY_PARTS: list[dict[str, Any]] = [
    {
        "loss": losses.squared(order=np.inf, radius=1.0, parts=parts),
        "domain": ball(1.0, 1, parts),
    }
    for parts in (_GROUPS, _MATRIX)
]
#: Name, rows, columns, ε, seeds, and what `best` is asked with.
PROBLEMS: tuple[tuple[str, int, int, float, int, dict[str, Any]], ...] = (
    ("logistic, ball of radius 10, d = 5, n = 2,000, ε = 1", 2000, 5, 1.0, 3, {}),
    ("d = 20, n = 16,384, ε = 1", 16_384, 20, 1.0, 3, {}),
    ("d = 20, n = 16,384, ε = 0.1", 16_384, 20, 0.1, 3, {}),
    ("d = 100, n = 65,536, ε = 1", 65_536, 100, 1.0, 2, {}),
    ("squared, l1 ball, d = 100, n = 8,192, ε = 1", 8192, 100, 1.0, 3, _SPARSE),
    ("the same, n = 65,536", 65_536, 100, 1.0, 2, _SPARSE),
    ("d = 1,000, n = 8,192, ε = 4", 8192, 1000, 4.0, 2, _SPARSE),
    ("20 groups of 5, l_{2,1} ball, n = 8,192, ε = 1", 8192, 100, 1.0, 2, _BY_PARTS[0]),
    ("10 × 10 matrices, nuclear norm, n = 20,000, ε = 1", 20_000, 100, 1.0, 2, _BY_PARTS[1]),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("solver_ranking.json"))
    parser.add_argument("--only", type=int, nargs="+", default=range(len(PROBLEMS)))
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    for number in given.only:
        name, n, d, epsilon, seeds, asked = PROBLEMS[number]
        if name not in kept:
            settings = {"loss": losses.logistic(), "domain": Ball(10.0), **asked}
            loss = settings.pop("loss")
            found = solvers.best(loss, n, d, epsilon=epsilon, seeds=seeds, **settings)
            kept[name] = [[one.solver, one.excess] for one in found]
            given.out.write_text(json.dumps(kept, indent=0))
        *ranked, (_, start) = kept[name]
        told = ", ".join(f"`{s}` {e:.4f}" if e < 0.01 else f"`{s}` {e:.3f}" for s, e in ranked)
        print(f"| {name} | {told} | {start:.3f} |", flush=True)


if __name__ == "__main__":
    main()

"""Canaries in real training runs, mechanism by mechanism: what each claims and what is found.

    python benchmarks/audit_mechanisms.py [--only tree]

Digits, small CNN, ε = 8, δ = 1e-5, 256 steps, 40,000 canaries in the worst pattern. CPU seconds are
those of the whole audit of one run (training, emitted rows, guesses).
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch

from noshuffle import Plan
from noshuffle.auditing.training_run import CanaryAudit, audit_training
from noshuffle.datasets import load
from noshuffle.participation import Epochs, MinSeparation, SinglePass
from noshuffle.strategies import tree
from noshuffle.training.models import build

FOUR = Epochs(4, 64)
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "blt": (FOUR, "blt", {}),
    "banded": (FOUR, "banded", {}),
    "sqrt": (FOUR, "sqrt", {}),
    "identity": (FOUR, "identity", {}),
    "tree": (FOUR, "tree", {}),
    "full tree": (FOUR, tree("full"), {}),
    "completed tree": (
        MinSeparation(256, 60, 4),
        tree("honaker", restart_every=100, completion=True),
        {},
    ),
    "one pass, tree": (SinglePass(256), "tree", {}),
    "users, blt": (FOUR, "blt", {"examples": 3}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    data = load("digits")
    x, y = torch.cat([data.x_train, data.x_test]), torch.cat([data.y_train, data.y_test])
    print("| run | claimed μ | μ̂ | 95 % | μ̂ / claim | guesses | final model μ̂ / reach | CPU s |")
    print("|---|---|---|---|---|---|---|---|")
    is_refuted = False
    for name, (participation, mechanism, options) in CASES.items():
        if asked.only and asked.only not in name:
            continue
        unit = "user" if options else "example"
        plan = Plan.fit(participation, mechanism=mechanism, epsilon=8.0, unit=unit)
        model = build("small_cnn", data.shape, data.classes)
        began = time.process_time()
        white, final, people = audit_training(plan, model, x, y, **options)
        spent = time.process_time() - began
        is_refuted |= any(f.answer == "REFUTED" for f in (white, final, people))
        assert isinstance(white, CanaryAudit)
        assert isinstance(final, CanaryAudit)
        own, proved, claim = white.estimate, white.guesses, white.claimed_mu
        print(
            f"| {name} | {claim:.4f} | {own.mu:.4f} | {own.low:.4f} to {own.high:.4f} | "
            f"{own.mu / claim:.3f} | ε ≥ {proved.epsilon:.2f}, μ ≥ {proved.mu:.3f} | "
            f"{final.estimate.mu:.3f} / {final.reachable_mu:.3f} | {spent:.0f} |",
            flush=True,
        )
    return int(is_refuted)


if __name__ == "__main__":
    sys.exit(main())

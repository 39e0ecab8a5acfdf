"""Opacus under this package's audit: a fixed order reported as Poisson sampling, and two more.

    pip install opacus==1.6.0 && python benchmarks/audit_opacus.py [--epochs 60]

    fixed order   poisson_sampling=False, the loader's own order, every canary once an epoch; ε as
                  PrivacyEngine.get_epsilon reports it
    Poisson       the same with secret sampling, as it is accounted: should hold
    clip schedule grad_sample_mode="ghost" with a schedule of the clip norm: the noise follows the
                  optimizer's norm, the clipping keeps the module's
    seeded noise  noise_generator with the same seed in every epoch (a run that is started again
                  from a checkpoint): the same noise under two sums

Canaries are numbers of the model, one each; their loss changes its sign from epoch to epoch, as
anybody's gradient may. What the optimizer sees is recorded by a hook. The last two are held against
the ε of a fixed order without amplification, so that what refutes them is their own fault. Exit
status 1 if a claim is refuted.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from noshuffle.auditing.claim import ClaimAudit, audit_claim
from noshuffle.auditing.curve import epsilon_of
from noshuffle.auditing.recorder import record_optimizer, traces

DELTA = 1e-5


class Model(nn.Module):
    """Linear for people; one number for each canary. Outputs two logits and the canary's number."""

    def __init__(self, canaries: int) -> None:
        super().__init__()
        self.people = nn.Linear(4, 2)
        self.canary = nn.Embedding(canaries + 1, 1, padding_idx=canaries)
        nn.init.zeros_(self.canary.weight)

    def forward(self, x: Tensor) -> Tensor:
        which = x[:, 4].long()
        return torch.cat([self.people(x[:, :4]), self.canary(which).view(-1, 1)], dim=1)


class Loss(nn.Module):
    """Cross-entropy of people (targets 0, 1), ten times the number of a canary (target 2)."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction, self.sign = reduction, 1.0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        people = nn.functional.cross_entropy(outputs[:, :2], targets.clamp(max=1), reduction="none")
        losses = torch.where(targets == 2, 10.0 * self.sign * outputs[:, 2], people)
        return losses if self.reduction == "none" else losses.mean()


def data(examples: int, batch: int, canaries: int, coins: np.ndarray) -> tuple[Any, list[int]]:
    """Rows with canaries spread over the batches; the batch of every canary, in or not."""
    torch.manual_seed(0)
    x = torch.randn(examples, 5)
    y = (x[:, 0] > 0).long()
    x[:, 4] = canaries
    places = np.linspace(0, examples - 1, canaries).astype(int)
    for i in np.flatnonzero(coins):
        x[places[i]] = torch.tensor([0.0, 0.0, 0.0, 0.0, float(i)])
        y[places[i]] = 2
    return TensorDataset(x, y), [int(place) // batch for place in places]


def audited(name: str, asked: argparse.Namespace, **kind: Any) -> ClaimAudit:
    """One run of Opacus, and the audit of what it claims."""
    from opacus import PrivacyEngine
    from opacus.schedulers import ExponentialGradClip

    coins = np.random.default_rng(1).random(asked.canaries) < 0.5
    rows, steps = data(asked.examples, asked.batch, asked.canaries, coins)
    model = Model(asked.canaries)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(rows, batch_size=asked.batch, shuffle=False)
    engine, losses = PrivacyEngine(accountant="prv"), Loss()
    criterion: Any = losses
    is_ghost = bool(kind.get("clip_gamma"))
    options: dict[str, Any] = {"poisson_sampling": bool(kind.get("is_poisson"))}
    if is_ghost:
        options |= {"criterion": criterion, "grad_sample_mode": "ghost"}
    generator = torch.Generator()
    if kind.get("is_seeded"):
        options["noise_generator"] = generator
    made = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )
    private, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if is_ghost else criterion
    schedule = ExponentialGradClip(optimizer, gamma=kind["clip_gamma"]) if is_ghost else None
    with record_optimizer(optimizer, model.canary.weight) as recorder:
        for epoch in range(asked.epochs):
            generator.manual_seed(7)
            losses.sign = 1.0 - 2.0 * (epoch % 2)
            for x, y in loader:
                optimizer.zero_grad()
                loss = criterion(private(x), y)
                loss.backward()
                optimizer.step()
            if schedule is not None:
                schedule.step()
    released = recorder.rows()[:, : asked.canaries]
    epsilon = engine.get_epsilon(DELTA)
    if kind.get("is_accounted"):
        epsilon = epsilon_of(math.sqrt(asked.epochs), delta=DELTA)
    if options["poisson_sampling"]:
        signs = np.repeat(1.0 - 2.0 * (np.arange(asked.epochs) % 2), len(loader))
        received = (signs @ released)[None]  # nobody knows when a canary came
    else:
        each = len(loader)
        received = traces(released, [range(s, asked.epochs * each, each) for s in steps])
    return audit_claim(received, coins, epsilon=epsilon, delta=DELTA, name=name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--examples", type=int, default=60_000)
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--canaries", type=int, default=4_000)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    short = argparse.Namespace(**{**vars(asked), "epochs": min(asked.epochs, 10)})
    cases: list[tuple[str, argparse.Namespace, dict[str, Any]]] = [
        ("fixed order", asked, {}),
        ("Poisson", asked, {"is_poisson": True}),
        ("clip schedule", short, {"clip_gamma": 0.9, "is_accounted": True}),
        ("seeded noise", short, {"is_seeded": True, "is_accounted": True}),
    ]
    is_refuted = False
    for name, own, kind in cases:
        if asked.only and asked.only != name:
            continue
        began = time.time()
        found = audited(f"Opacus, {name}", own, **kind)
        is_refuted |= found.answer == "REFUTED"
        print(f"{found.words()}\n({time.time() - began:.0f} s, {own.epochs} epochs)\n", flush=True)
    return int(is_refuted)


if __name__ == "__main__":
    sys.exit(main())

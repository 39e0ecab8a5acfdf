"""A study on a GPU: the captured step equals the eager one, and both the runs of privatize."""

from __future__ import annotations

import pytest
import torch
from tests.training.many.test_study import Named
from torch import nn

from noshuffle.noise import test_source
from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import blt, identity, tree
from noshuffle.training import privatize
from noshuffle.training.many import Setting, Study
from noshuffle.training.models import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STEPS, SIZE = 6, 16


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 12)
        self.block = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU())
        self.back, self.leave = nn.Linear(24, 12), nn.Linear(12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x.flatten(1))
        return self.leave(x + self.back(self.block(x)))


def small_cnn() -> nn.Module:
    return build("small_cnn", (1, 8, 8), 10)


def plan(strategy, noise: float) -> Plan:
    return Plan(participation=Epochs(1, STEPS), strategy=strategy, noise_multiplier=noise)


SETTINGS = [
    Setting(plan=plan(blt((0.9,), (0.3,)), 0.5), learning_rate=0.2, seed=1),
    Setting(plan=plan(tree(), 2.0), learning_rate=0.1, momentum=0.0, clip_norm=0.25, seed=2),
    Setting(plan=plan(identity(), 1.0), learning_rate=0.1, clip_norm=0.5, seed=3),
    Setting(noise_multiplier=0.0, learning_rate=0.3, seed=4),
]


def parts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A ragged batch and a larger one among the others."""
    g = torch.Generator().manual_seed(1)
    sizes = (SIZE, SIZE - 5, SIZE, SIZE + 3, SIZE, SIZE)
    return [
        (torch.randn(n, 1, 8, 8, generator=g), torch.randint(10, (n,), generator=g)) for n in sizes
    ]


@pytest.fixture(autouse=True)
def _full_precision():
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False, deterministic=True):
        yield


@pytest.mark.parametrize(
    ("make", "form", "in_turn"),
    [(small_cnn, "stacked", False), (Residual, "vmap", False)]
    + [(make, "layer rules, in turn", True) for make in (small_cnn, Residual)],
)
def test_captured_eager_and_privatize_agree(make, form: str, in_turn: bool) -> None:
    schedule = (1.0, 1.0, 0.5, 0.5, 0.25, 0.25)
    common = {
        "steps": STEPS,
        "batch_size": SIZE,
        "learning_rates": schedule,
        "source": test_source(seed=2),
        "device": "cuda",
        "in_turn": in_turn,
    }
    captured = Study(make, SETTINGS, **common)
    eager = Study(make, SETTINGS, capture=False, **common)
    for x, y in parts():
        first, second = captured.step(x.cuda(), y.cuda()), eager.step(x, y)
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
    assert captured.why.startswith(form)
    assert "one CUDA graph" in captured.why
    assert captured.fallbacks == [
        f"a batch of {SIZE + 3} rows is larger than the captured 16: eager"
    ]
    assert eager.why.endswith("capture=False, eager")
    for k, setting in enumerate(SETTINGS):
        torch.manual_seed(setting.seed)
        model = make().cuda()
        optimizer = torch.optim.SGD(
            model.parameters(), lr=setting.learning_rate, momentum=setting.momentum
        )
        private = privatize(
            *(Named(model, k), optimizer, setting.plan or plan(identity(), 0.0)),
            clip_norm=setting.clip_norm,
            batch_size=SIZE,
            source=test_source(seed=2),
            compile=False,
        )
        for factor, (x, y) in zip(schedule, parts()):
            optimizer.param_groups[0]["lr"] = setting.learning_rate * factor
            private.step(nn.CrossEntropyLoss(), x.cuda(), y.cuda())
        for name, p in model.named_parameters():
            for study in (captured, eager):
                torch.testing.assert_close(study.params[name][k], p.detach(), rtol=1e-3, atol=1e-4)


def test_dropout_goes_on_in_a_graph() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))

    setting = Setting(noise_multiplier=0.0, learning_rate=1e-9, seed=1)
    study = Study(make, [setting] * 2, steps=4, batch_size=SIZE, device="cuda")
    x, y = (t.cuda() for t in parts()[0])
    losses = torch.stack([study.step(x, y) for _ in range(4)])
    assert "one CUDA graph" in study.why
    assert len(set(losses.flatten().tolist())) == 8

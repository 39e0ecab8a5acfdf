"""`torch.set_default_device` of a user changes nothing: every tensor says where it lies.

On a machine without a GPU "meta" stands for another device: a tensor that lands there by accident
has no numbers, and meets one that has.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._device import _device_constructors

from noshuffle.noise import test_source
from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.release.private_sum import PrivateSum
from noshuffle.strategies import blt
from noshuffle.training import privatize

ROOT = Path(__file__).parents[1] / "src" / "noshuffle"
#: What makes a tensor where the default says, as torch names it.
MAKERS = {one.__name__ for one in _device_constructors()}  # type: ignore[no-untyped-call]
ROWS, STEPS = 10, 4


def _silent(path: Path) -> Iterator[str]:
    """Calls of a file that leave the device to the default, but parameters of a model."""
    tree = ast.parse(path.read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    of_models = {id(a) for c in calls if ast.unparse(c.func) == "nn.Parameter" for a in c.args}
    for call in calls:
        name = ast.unparse(call.func)
        if not name.startswith("torch.") or name.removeprefix("torch.") not in MAKERS:
            continue
        if id(call) not in of_models and not {"device", None} & {k.arg for k in call.keywords}:
            yield f"{path.name}:{call.lineno} {ast.unparse(call)}"


def test_every_tensor_says_where_it_lies() -> None:
    assert not [found for path in sorted(ROOT.rglob("*.py")) for found in _silent(path)]


def test_a_tensor_that_does_not_is_found(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("torch.zeros(2)\ntorch.zeros(2, device=x)\nnn.Parameter(torch.zeros(2))\n")
    assert list(_silent(own)) == ["own.py:1 torch.zeros(2)"]


@pytest.fixture
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(7, 5)
        self.run = nn.LSTM(6, 7, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.run(self.embed(x))[0][:, -1])
        return out


def _images() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(8 * 64, 5))
    return model, torch.randn(ROWS * STEPS, 1, 8, 8, device="cpu")


def _words() -> tuple[nn.Module, torch.Tensor]:
    return Words(), torch.randint(9, (ROWS * STEPS, 6), device="cpu")


def _trained(kind: str) -> torch.Tensor:
    torch.manual_seed(0)
    with torch.device("cpu"):
        model, x = _words() if kind == "words" else _images()
        y = torch.randint(5, (len(x),))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    unit = "user" if kind == "users" else "example"
    plan = Plan(
        participation=Epochs(2, STEPS),
        strategy=blt((0.9,), (0.3,)),
        noise_multiplier=1.0,
        unit=unit,
    )
    common = {"clip_norm": 1.0, "batch_size": ROWS, "source": test_source(seed=3)}
    private = privatize(model, optimizer, plan, **common)
    loss_fn = nn.CrossEntropyLoss()
    criterion = private.criterion(loss_fn) if kind == "loop" else loss_fn
    for step in range(2 * STEPS):
        rows = np.arange(ROWS) + ROWS * (step % STEPS)
        xs, ys = x[rows], y[rows]
        if kind == "loop":
            private.optimizer.zero_grad()
            criterion(model(xs), ys).backward()
            private.optimizer.step()
        else:
            private.step(loss_fn, xs, ys, ids=rows // 2 if kind == "users" else rows)
    private.close()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("kind", ["images", "words", "users", "loop"])
def test_runs_are_the_same(kind: str, request: pytest.FixtureRequest) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = _trained(kind)
        request.getfixturevalue("elsewhere")
        assert torch.equal(_trained(kind), want)


def test_sums_are_the_same(request: pytest.FixtureRequest) -> None:
    plan = Plan(participation=Epochs(1, 3), strategy=blt((0.9,), (0.3,)), noise_multiplier=1.0)
    rows = {"w": torch.randn(4, 3, generator=torch.Generator().manual_seed(0), device="cpu")}

    def released() -> torch.Tensor:
        sums = PrivateSum(plan, clip=1.0, shape={"w": (3,)}, source=test_source(seed=1))
        answers = [sums.add(rows, ids=np.arange(4) + 4 * i) for i in range(3)]
        return torch.stack([answer["w"] for answer in answers])

    want = released()
    request.getfixturevalue("elsewhere")
    assert torch.equal(released(), want)

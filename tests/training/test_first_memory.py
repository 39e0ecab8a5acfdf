"""How much a first step holds at once: the trial of a model on two rows and on all."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import noshuffle as ns

WIDTH, ROWS = 768, 16


class Peak(TorchDispatchMode):
    """The most bytes of memory that operations inside the block made and that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, tuple[int, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {self._key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and self._key(t) not in {*given, *self._alive}:
                self._add(t)
        return out

    @staticmethod
    def _key(t: Tensor) -> int:
        return t.untyped_storage()._cdata

    def _add(self, t: Tensor) -> None:
        memory, key = t.untyped_storage(), self._key(t)
        gone = weakref.ref(memory, lambda _: self._remove(key))
        self._alive[key] = memory.nbytes(), gone
        self.now += memory.nbytes()
        self.most = max(self.most, self.now)

    def _remove(self, key: int) -> None:
        self.now -= self._alive.pop(key)[0]


def test_peak_counts_what_lives_at_once() -> None:
    with Peak() as peak:
        a = torch.zeros(1000)
        b = a + 1.0
        del a
        c = b * 2.0
        view = c[:10]
        del b, c
    assert peak.most == 8000
    assert peak.now == 4000
    del view
    assert peak.now == 0


@pytest.mark.parametrize("between", [nn.ReLU, lambda: nn.Dropout(0.1)])
def test_a_first_step_holds_few_copies_of_the_gradient(between: Callable[[], nn.Module]) -> None:
    """One copy of the parameters to compare with, and two gradients: a sum and an example's."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), between(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    plan = ns.Plan.fit(ns.SinglePass(100), mechanism="identity", noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = ns.privatize(model, optimizer, plan, clip_norm=1.0, batch_size=ROWS)
    x, y = torch.randn(ROWS, WIDTH), torch.randint(10, (ROWS,))
    with Peak() as peak:
        private.step(nn.CrossEntropyLoss(), x, y)
    assert private.fallbacks == []
    assert 2.0 < peak.most / size < 3.5

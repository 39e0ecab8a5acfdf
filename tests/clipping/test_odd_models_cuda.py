"""Odd models on a GPU, where steps become graphs.

A sum is that of examples one by one, and one example moves it by its clip norm at most.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.clipping.odd_models import APART, MIXING, Odd, data
from tests.clipping.test_places import Ordered, by_sorted, by_transposed, tokens
from tests.clipping.twin import flat
from torch import Tensor, nn

from noshuffle.clipping import Flat, Ghost, PerExample
from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import identity
from noshuffle.training import privatize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
CLIP = 0.2
RANDOM = ("dropout", "noise", "mixup inside")
#: What only extreme rows and ignored labels show, which a GPU is not shown.
HIDDEN = ("early exit by the last", "mean over kept labels", "mean over labelled examples")
SHOWN = [odd for odd in (*MIXING, *APART) if odd.name not in HIDDEN]
Batch = tuple[Tensor, ...]


def on_gpu(batch: Batch) -> Batch:
    return tuple(t.cuda() for t in batch)


def assert_bounded(engine: Ghost, model: nn.Module, loss: Callable[..., Tensor], batch: Batch):
    """The sum is the twin's, and without any one example it is nearer than a clip norm."""
    run = partial(engine.clipped_sum, model, loss, clip=Flat(CLIP))
    got = flat(run(batch).values)
    want = PerExample().clipped_sum(model, loss, batch, clip=Flat(CLIP)).values
    torch.testing.assert_close(got, flat(want), rtol=1e-4, atol=1e-5)
    for i in range(len(batch[0])):
        rest = tuple(t[torch.arange(len(t)) != i] for t in batch)
        assert float((got - flat(run(rest).values)).norm()) <= CLIP * 1.0001


@pytest.mark.parametrize("odd", SHOWN, ids=str)
def test_one_example_moves_a_sum_by_its_clip_norm(odd: Odd) -> None:
    torch.manual_seed(0)
    batches = [on_gpu(data(odd, seed)) for seed in (0, 1)]
    with torch.device("cuda"):
        model, engine = odd.make(), Ghost()
        engine.clipped_sum(model, odd.loss, batches[0], clip=Flat(CLIP))
        if not any(word in odd.name for word in RANDOM):
            assert_bounded(engine, model, odd.loss, batches[1])


@pytest.mark.parametrize("order", [by_sorted, by_transposed])
def test_examples_in_the_order_of_their_lengths(order) -> None:
    torch.manual_seed(1)
    first, second = on_gpu(tokens(50, is_full=True)), on_gpu(tokens(51))
    with torch.device("cuda"):
        model, engine = Ordered(order).double(), Ghost()
        for batch in (first, second):
            assert_bounded(engine, model, F.cross_entropy, batch)
    assert engine.fallbacks


def times_thirty(g: Tensor) -> None:
    g.mul_(30.0)


class Hooked(nn.Module):
    """A hook writes into the gradient at the output of the first layer."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.head = first, nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(times_thirty)
        return self.head(torch.tanh(h).flatten(1))


FIRST: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 4), (4,)),
    "sequence": (lambda: nn.Linear(4, 4), (9, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 4, 1), (4, 5)),
    "conv2d": (lambda: nn.Conv2d(3, 16, 3, padding=1), (3, 16, 16)),
    "groups": (lambda: nn.Conv2d(16, 16, 3, padding=1, groups=16), (16, 8, 8)),
    "norm": (lambda: nn.GroupNorm(2, 8), (8, 6)),
    "layer norm": (lambda: nn.LayerNorm(6), (8, 6)),
}


@pytest.mark.parametrize("name", FIRST)
def test_a_gradient_that_a_hook_writes_into(name: str) -> None:
    torch.manual_seed(0)
    make, shape = FIRST[name]
    with torch.device("cuda"):
        model, engine = Hooked(make()), Ghost()
        for size in (6, 8):
            batch = torch.randn(size, *shape), torch.randint(3, (size,))
            model(batch[0])
            assert_bounded(engine, model, F.cross_entropy, batch)


@pytest.mark.parametrize("name", FIRST)
def test_a_captured_step_of_a_hook_that_writes(name: str) -> None:
    """Steps without noise, as privatize takes them, are those of examples one by one."""
    torch.manual_seed(0)
    make, shape = FIRST[name]
    with torch.device("cuda"):
        model = Hooked(make())
        batches = [(torch.randn(8, *shape), torch.randint(3, (8,))) for _ in range(5)]
        model(batches[0][0])
    twin = Hooked(make()).cuda()
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plan = Plan(participation=Epochs(1, 5), strategy=identity(), noise_multiplier=1e-9)
    private = privatize(model, optimizer, plan, clip_norm=CLIP, batch_size=8)
    for batch in batches:
        private.step(nn.CrossEntropyLoss(), *batch)
        total = PerExample().clipped_sum(twin, F.cross_entropy, batch, clip=Flat(CLIP)).values
        with torch.no_grad():
            for key, p in twin.named_parameters():
                p -= 0.5 * total[key] / 8
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)

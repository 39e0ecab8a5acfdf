"""A client has the same bits in every group: alone, among few, among many, in any order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runs import same
from torch import Tensor, nn

from noshuffle import MinSeparation, Plan
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.federated import LocalTraining, Rounds, ServerOptimizer, simulate
from noshuffle.federated.char_models import CharTransformer
from noshuffle.federated.char_models import build as text_model
from noshuffle.federated.clients import training_of
from noshuffle.federated.recurrent import unrolled
from noshuffle.federated.tasks import FederatedTask
from noshuffle.federated.vectorised import (
    groups,
    pack,
    takes_together,
    trained_alone,
    trained_many,
    width,
)
from noshuffle.training.models import CharLSTM, build

CLASSES, LENGTH = 97, 9


def images(shape: tuple[int, ...]) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda rows: (torch.randn(rows, *shape), torch.randint(0, 10, (rows,)))


def text(rows: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randint(0, CLASSES, (2, rows, LENGTH))
    return x, y


SMALL, LARGE = (1, 8, 8), (1, 28, 28)
#: The models of the tasks, and what they take; the odd widths lie anywhere in memory.
MODELS = {
    "mlp": (lambda: build("mlp", SMALL, 10), images(SMALL)),
    "wide mlp": (lambda: build("mlp", LARGE, 10), images(LARGE)),
    "linear": (lambda: build("linear", SMALL, 10), images(SMALL)),
    "odd": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(15, 7), nn.Tanh(), nn.Linear(7, 10)),
        images((3, 5)),
    ),
    "small_cnn": (lambda: build("small_cnn", SMALL, 10), images(SMALL)),
    "tanh_cnn": (lambda: build("tanh_cnn", LARGE, 10), images(LARGE)),
    "lstm": (lambda: text_model("char_lstm", classes=CLASSES, length=LENGTH), text),
    "odd lstm": (lambda: CharLSTM(CLASSES, embedding=3, hidden=5), text),
    "transformer": (lambda: text_model("char_transformer", classes=CLASSES, length=LENGTH), text),
    "odd transformer": (
        lambda: CharTransformer(CLASSES, length=LENGTH, width=6, layers=1, heads=2),
        text,
    ),
}
LOCALS = {
    "all rows": LocalTraining(learning_rate=0.37, steps=2, epochs=2),
    "batches": LocalTraining(learning_rate=0.1, steps=3, batch_size=3, proximal=0.13),
}


@pytest.mark.parametrize("how", LOCALS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_company_does_not_matter(kind: str, how: str) -> None:
    make, data = MODELS[kind]
    local, users = LOCALS[how], 26
    rng = np.random.default_rng(len(kind))
    torch.manual_seed(0)
    model = make()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    ends = np.cumsum([0, *rng.integers(0, 8, users)])
    x, y = data(int(ends[-1]))
    rows_of = [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]
    alone = {
        user: trained_alone(model, parameters, x[r], y[r], local=local)
        for user, r in enumerate(rows_of)
        if user % 4 == 0
    }
    twin = unrolled(model)
    for size in (users, 1 + int(rng.integers(users))):
        chosen = rng.permutation(users)[:size]
        starts, stops = ends[chosen], ends[chosen + 1]
        seen = []
        for some in groups(starts, stops, local=local, at_once=int(rng.integers(4, users))):
            rows, weights = pack(starts[some], stops[some], local=local)
            steps = range(rows.shape[1])
            batches = [(x[rows[:, s]], y[rows[:, s]], weights[:, s]) for s in steps]
            found = trained_many(twin, parameters, batches, clients=len(some), local=local)
            for i, user in enumerate(chosen[some]):
                seen.append(int(user))
                for name, value in alone.get(int(user), {}).items():
                    assert torch.equal(found[name][i], value), (kind, name)
        assert sorted(seen) == sorted(chosen.tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_not_rounded_by_who_else_is_there(dtype: torch.dtype) -> None:
    """Sums in a stack of 40 and in one of 20 differ in the last digit, and that is 2⁻⁸."""
    torch.manual_seed(0)
    users, rows = 40, 3
    x, y = torch.randn(users * rows, 64).to(dtype), torch.randint(10, (users * rows,))
    starts = np.arange(users + 1) * rows
    task = FederatedTask("t", "table", tuple(range(users)), starts, x, y, x[:1], y[:1], 10)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(dtype)
    plan = Plan.fit(MinSeparation(1, 1, 1), mechanism="identity", noise_multiplier=1.0, unit="user")

    def updates(present: int) -> dict[int, dict[str, Tensor]]:
        found: dict[int, dict[str, Tensor]] = {}

        class Heard(Rounds):
            def receive(self, user: Any, delta: Any, **more: Any) -> str | None:
                found[user] = delta
                return super().receive(user, delta, **more)

        server = ServerOptimizer(
            model, plan, clip=0.01, cohort_size=users,
            optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0),
        )  # fmt: skip
        simulate(
            Heard(server), model, task, local=LocalTraining(learning_rate=0.1, steps=4, epochs=4),
            check_ins=lambda step: range(users), answers=lambda step, user: user < present,
        )  # fmt: skip
        return found

    everybody = updates(users)
    for present in (1, 3, 20):
        assert all(same(delta, everybody[user]) for user, delta in updates(present).items())
    with pytest.raises(Unsupported, match="vectorise=False"):
        takes_together(model, device=torch.device("cpu"), vectorise=True)


@pytest.mark.parametrize("kind", ["mlp", "small_cnn", "odd lstm", "odd transformer"])
def test_alone_is_the_plain_loop_up_to_rounding(kind: str) -> None:
    make, data = MODELS[kind]
    torch.manual_seed(0)
    model = make().double()
    parameters = dict(model.named_parameters())
    for local in LOCALS.values():
        for rows in (0, 1, 5):
            x, y = data(rows)
            x = x.double() if x.is_floating_point() else x
            slow = training_of(model, parameters, local=local)(x, y)
            fast = trained_alone(model, parameters, x, y, local=local)
            for name, value in slow.items():
                torch.testing.assert_close(fast[name], value, rtol=1e-9, atol=1e-11)


@given(examples=st.integers(0, 3000), batch=st.sampled_from([None, 1, 5, 16, 100]))
@settings(max_examples=200, deadline=None)
def test_widths(examples: int, batch: int | None) -> None:
    local = LocalTraining(learning_rate=1.0, batch_size=batch, epochs=2, steps=5)
    found = width(examples, local=local)
    largest = max((piece.stop - piece.start for piece in local.batches(examples)), default=0)
    assert largest <= found <= max(largest, math.floor(1.5 * largest))
    assert batch is None or found <= batch
    assert found in {0, batch, *(1 << k for k in range(13)), *(3 << k for k in range(12))}


def test_groups_are_of_one_width_and_no_larger_than_asked() -> None:
    local = LocalTraining(learning_rate=1.0)
    counts = np.array([5, 0, 6, 9, 5, 12, 0, 6])
    found = [counts[some].tolist() for some in groups(counts * 0, counts, local=local, at_once=3)]
    assert found == [[0, 0], [5, 5, 6], [6], [9, 12]]
    none = np.empty(0, dtype=np.int64)
    assert sum(len(some) for some in groups(none, none, local=local, at_once=3)) == 0


def test_bad_input() -> None:
    local, cpu = LocalTraining(learning_rate=1.0), torch.device("cpu")
    with pytest.raises(InvalidInput, match="one row per example"):
        trained_alone(nn.Linear(2, 2), {}, torch.zeros(2, 2), torch.zeros(1), local=local)
    with pytest.raises(Unsupported, match="vectorise=False"):
        takes_together(nn.GRU(2, 2), device=cpu, vectorise=True)
    assert not takes_together(nn.GRU(2, 2), device=cpu, vectorise=None)
    assert not takes_together(nn.Linear(2, 2), device=cpu, vectorise=False)


def test_what_torch_cannot_stack_is_one_line() -> None:
    """Such as a model that asks for values; alone it trains."""

    class ByValue(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.abs().max() < 9 else x / x.abs().max())

    model, x, y = ByValue(2, 2), torch.ones(3, 2), torch.zeros(3, dtype=torch.int64)
    start, local = dict(model.named_parameters()), LocalTraining(learning_rate=1.0)
    with pytest.raises(Unsupported, match="cannot be trained together"):
        trained_alone(model, start, x, y, local=local)
    assert training_of(model, start, local=local)(x, y).keys() == start.keys()

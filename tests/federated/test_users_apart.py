"""What one user holds, or how much, changes that user's delta and nobody else's."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from noshuffle import MinSeparation, Plan
from noshuffle.accounting import gaussian
from noshuffle.cli.federated_job import loss_of
from noshuffle.clipping.adaptive import QuantileClip, gradient_multiplier
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.federated import (
    LocalTraining,
    Rounds,
    ServerOptimizer,
    account_afterwards,
    local_train,
    simulate,
    statement_for,
)
from noshuffle.federated.clients import cross_entropy, squared_error
from noshuffle.federated.cohort import CONSTANT_CLIP
from noshuffle.federated.tasks import FederatedTask
from noshuffle.federated.vectorised import trained_alone
from noshuffle.noise import Source
from noshuffle.noise import test_source as a_source
from noshuffle.release.spending import ADAPTIVE_CLIP
from noshuffle.release.threshold import bit_noise_for
from noshuffle.strategies import tree

LOCAL = LocalTraining(learning_rate=5.0, steps=2, epochs=2)
USERS = tuple(f"user {i:02d}" for i in range(12))


class Frozen(nn.Module):
    """Keeps a mean of its data in a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.mean(0))
        return self.layer(x + self.mean)


class Attribute(nn.Module):
    """Is set up by the first batch that comes, as an ActNorm of public Glow code is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.detach().mean(0)
        return self.layer(x - self.mean)


class Running(nn.Module):
    """A loss that divides by a running mean of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, scores: Tensor, y: Tensor) -> Tensor:
        losses = cross_entropy(scores, y)
        self.mean = 0.5 * self.mean + 0.5 * losses.detach().mean()
        return losses / self.mean


class Called:
    """The same in an object that is no module."""

    def __init__(self) -> None:
        self.mean = torch.ones(())

    def __call__(self, scores: Tensor, y: Tensor) -> Tensor:
        return Running.forward(self, scores, y)  # type: ignore[arg-type]


def a_task(first: Tensor | None = None) -> FederatedTask:
    """Twelve users of three rows; the rows of the first may be others, and more."""
    g = torch.Generator().manual_seed(1)
    rows = [torch.randn(3, 4, generator=g) for _ in USERS]
    rows[0] = rows[0] if first is None else first
    counts = [len(own) for own in rows]
    labels = torch.cat([torch.zeros(counts[0], dtype=torch.int64), torch.arange(33) % 3])
    starts = np.concatenate([[0], np.cumsum(counts)])
    x = torch.cat(rows)
    return FederatedTask("rows", "table", USERS, starts, x, labels, x, labels, 3)


def the_sum(
    task: FederatedTask,
    model: nn.Module,
    *,
    vectorise: bool | None = False,
    source: Source | None = None,
    **more: Any,
) -> Tensor:
    """The sum of one round of everybody before its noise, as one vector."""
    plan = Plan.fit(MinSeparation(2, 1, 2), mechanism="identity", noise_multiplier=1.0, unit="user")
    server = ServerOptimizer(
        model, plan, clip=1.0, cohort_size=12, source=source,
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=0.0),
    )  # fmt: skip
    rounds, seen, plain = Rounds(server), [], server.step

    def step(total: Any, **given: Any) -> Any:
        seen.append(torch.cat([value.flatten() for value in total.values.values()]))
        return plain(total, **given)

    server.step = step  # type: ignore[method-assign]
    check_ins = lambda step: USERS  # noqa: E731
    options = {"local": LOCAL, "check_ins": check_ins, "vectorise": vectorise, **more}
    simulate(rounds, model, task, until=1, **options)
    return seen[0]


@pytest.mark.parametrize("kind", [Frozen, Attribute])
def test_what_a_model_keeps_of_one_user_does_not_reach_the_next(kind: type[nn.Module]) -> None:
    """It moved the sum by up to 4.9 clip norms, and stayed in the model of the caller."""
    torch.manual_seed(0)
    model = kind()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    whole = the_sum(a_task(), model)
    for other in (torch.full((3, 4), 1e3), torch.full((7, 4), -40.0), torch.zeros(0, 4)):
        assert (whole - the_sum(a_task(other), model)).norm() <= 2.0001
    silent = the_sum(a_task(), model, answers=lambda step, user: user != USERS[0])
    assert (whole - silent).norm() <= 1.0001
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert kind is not Attribute or model.mean is None


@pytest.mark.parametrize("kind", [Running, Called, "method"])
@pytest.mark.parametrize("vectorise", [False, True])
def test_what_a_loss_keeps_of_one_user_does_not_reach_the_next(vectorise: bool, kind: Any) -> None:
    torch.manual_seed(0)
    model, loss_fn = nn.Linear(4, 3), Called() if kind == "method" else kind()
    given = loss_fn.__call__ if kind == "method" else loss_fn
    more: Any = {"vectorise": vectorise, "loss_fn": given, "at_once": 1}
    whole = the_sum(a_task(), model, **more)
    for other in (torch.full((3, 4), 1e3), torch.full((7, 4), -40.0)):
        assert (whole - the_sum(a_task(other), model, **more)).norm() <= 2.0001
    assert float(loss_fn.mean) == 1.0


def test_a_client_begins_with_the_buffers_of_the_model_and_keeps_its_own() -> None:
    """Statistics go on over the local steps of one client, as before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    own = {name: value.detach() for name, value in model.named_parameters()}
    found = [local_train(model, own, x, y, local=LOCAL) for _ in range(2)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in own)
    assert int(model[0].num_batches_tracked) == 0


def test_a_model_that_cannot_be_copied_is_one_line() -> None:
    model = nn.Linear(4, 3)
    model.last = model(torch.ones(1, 4))  # type: ignore[assignment]
    with pytest.raises(Unsupported, match="every client trains a copy of its own, and Linear"):
        the_sum(a_task(), model)


@pytest.mark.parametrize("vectorise", [False, True])
def test_masks_of_clients_are_nobodys_to_know(vectorise: bool) -> None:
    """One generator serves all clients, so a user with more rows moves the masks of all others.

    Under a seed that somebody knows (torch's own, set or not) that was worth 4.1 clip norms.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def again(source: Source | None = None) -> Tensor:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        found = the_sum(a_task(), model, vectorise=vectorise, source=source)
        assert torch.equal(torch.get_rng_state(), before)  # a checkpoint holds it
        return found

    assert not torch.equal(again(), again())
    assert torch.equal(again(a_source(seed=3)), again(a_source(seed=3)))
    assert not torch.equal(again(a_source(seed=3)), again(a_source(seed=4)))


class Skipping(nn.Module):
    """Draws from Python's and NumPy's generators, as layers that are left out at random do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * random.random() + np.random.rand()  # noqa: NPY002


def test_draws_of_python_and_numpy_are_secret_too() -> None:
    def again(source: Source | None = None) -> Tensor:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        found = the_sum(a_task(), model, source=source, local=LocalTraining(learning_rate=0.01))
        assert (random.random(), np.random.rand()) == first  # noqa: NPY002
        return found

    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    first, model = (random.random(), np.random.rand()), Skipping()  # noqa: NPY002
    assert not torch.equal(again(), again())
    assert torch.equal(again(a_source(seed=3)), again(a_source(seed=3)))


def test_rounds_have_masks_of_their_own() -> None:
    plan = Plan.fit(MinSeparation(9, 1, 9), mechanism="tree", noise_multiplier=1.0, unit="user")
    seeds = set()
    for source in (None, None, a_source(seed=1)):
        server = ServerOptimizer(
            {"w": torch.zeros(2)}, plan, clip=1.0, cohort_size=2, source=source,
            optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0),
        )  # fmt: skip
        seeds |= {server.client_seed(step) for step in range(9)}
    assert len(seeds) == 27


def test_the_target_of_one_user_does_not_decide_how_others_are_learned() -> None:
    """A NaN, or a half, among whole numbers made a regression of everybody's classification."""
    x, y = torch.randn(6, 4), torch.tensor([0.0, 1, 2, 0, 1, 2])
    task = FederatedTask("rows", "table", (0, 1, 2), np.arange(4) * 2, x, y, x, y, 3)
    for value in (1.0, 0.5, math.nan, math.inf):
        other = y.clone()
        other[-1] = value
        near = replace(task, y=other)
        assert loss_of(near) is loss_of(task) is squared_error
        assert torch.equal(near.client(0)[1], task.client(0)[1])
        assert near.client(0)[1].dtype == task.client(0)[1].dtype
    assert loss_of(replace(task, y=y.long(), y_test=y.long())) is cross_entropy
    with pytest.raises(InvalidInput, match=r"classes are whole numbers, .* give y.long\(\)"):
        cross_entropy(torch.zeros(6, 3), y)
    shares = torch.full((6, 3), 1 / 3)
    assert cross_entropy(torch.zeros(6, 3), shares).tolist() == pytest.approx([math.log(3)] * 6)
    alone = {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)}
    trained_alone(nn.Linear(4, 3), alone, x, shares, local=LOCAL)


def test_rows_belong_to_one_user_and_users_have_one_place() -> None:
    """A row of two users counted twice; of a user who was named twice, rows were never used."""
    x, y = torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)

    def make(users: tuple[int, ...], starts: list[int]) -> FederatedTask:
        return FederatedTask("rows", "table", users, np.array(starts), x, y, x, y, 3)

    assert len(make((0, 1, 2), [0, 5, 5, 8])) == 3
    for starts in ([0, 5, 3, 8], [-2, 0, 4, 8]):
        with pytest.raises(InvalidInput, match="starts must rise from 0 on"):
            make((0, 1, 2), starts)
    with pytest.raises(InvalidInput, match="user 1 is named twice"):
        make((1, 0, 1), [0, 2, 4, 8])


def test_a_user_who_is_removed_gives_a_place_to_others() -> None:
    """Whose steps are others then: 14 places in 7 rounds (40 users, 20 rounds of 5) were, for 3."""
    limits = MinSeparation(20, 4, 3)
    more = {"mechanism": "tree", "noise_multiplier": 1.0, "unit": "user"}
    for neighbours in ("zero-out", "replace-one", "add-remove"):
        plan = Plan.fit(limits, neighbours=neighbours, **more)
        server = ServerOptimizer(
            {"w": torch.zeros(2)}, plan, clip=1.0, cohort_size=2,
            optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0),
        )  # fmt: skip
        if neighbours == "add-remove":
            with pytest.raises(Unsupported, match="another one is asked in the same round"):
                Rounds(server)
        else:
            Rounds(server)


@pytest.mark.parametrize("share", [0.1, 0.9])
@pytest.mark.parametrize("limits", [(20, 1), (10, 2), (8, 3), (2, 10), (1, 20)])
def test_counts_of_norms_are_paid_for_by_what_happened(
    limits: tuple[int, int], share: float
) -> None:
    """They were left out: 0.85 was stated where 0.93 (a tenth for the counts) or 1.39 was true."""
    planned = MinSeparation(20, 1, 20)
    plan = Plan.fit(planned, mechanism=tree(restart_every=4), epsilon=8.0, unit="user")
    clip = QuantileClip(initial=1.0, units=100, bit_noise=bit_noise_for(plan, share=share))
    seen = MinSeparation(20, *limits)
    held = replace(plan, participation=seen)
    ratio = math.sqrt(plan.sensitivity.squared / 20)
    own = gradient_multiplier(plan.noise_multiplier, bit_noise=clip.noise * ratio)
    mu = math.sqrt(held.sensitivity.squared / own**2 + seen.most / (2 * clip.noise) ** 2)
    said = account_afterwards(plan, seen, clip=clip)
    assert said.epsilon == pytest.approx(gaussian.epsilon(mu=mu, delta=plan.delta), rel=1e-9)
    assert ADAPTIVE_CLIP in said.assumptions
    constant = account_afterwards(plan, seen)
    assert CONSTANT_CLIP in constant.assumptions
    assert constant.epsilon <= said.epsilon * (1 + 1e-9)


def test_a_question_about_a_user_does_not_say_how_users_are_named() -> None:
    """It did, and a run that was asked about user 7 took no names any more."""
    plan = Plan.fit(MinSeparation(4, 2, 2), mechanism="tree", noise_multiplier=1.0, unit="user")
    server = ServerOptimizer(
        {"w": torch.zeros(2)}, plan, clip=1.0, cohort_size=2,
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0),
    )  # fmt: skip
    assert statement_for(server, 7).epsilon == 0.0
    rounds = Rounds(server)
    assert rounds.begin(["ada", "bob"]) is not None
    rounds.finish()
    with pytest.raises(InvalidInput, match="told its units apart by names"):
        statement_for(server, 7)
    with pytest.raises(InvalidInput, match="told its units apart by names"):
        rounds.begin([7])

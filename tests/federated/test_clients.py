"""Clipping of whole deltas, and local training against plain torch and against itself stacked."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.federated.clients import (
    NO_TARGET,
    LocalTraining,
    clip_delta,
    cross_entropy,
    local_train,
    training_of,
)
from noshuffle.federated.recurrent import unrolled
from noshuffle.federated.vectorised import can_vectorise, is_worth_it, pack, trained_many
from noshuffle.training.models import CharLSTM


def norm_of(values: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(v.double().square().sum()) for v in values.values()))


@given(
    seed=st.integers(0, 1000),
    scale=st.floats(1e-20, 1e15),
    clip=st.floats(1e-3, 1e3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@settings(max_examples=80, deadline=None)
def test_clip_bounds_the_whole_delta(
    seed: int, scale: float, clip: float, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(seed)
    shapes = [(3, 4), (), (5,), (0,)]
    delta = {str(i): (torch.randn(s, generator=g) * scale).to(dtype) for i, s in enumerate(shapes)}
    sent = clip_delta(delta, clip_norm=clip)
    full = norm_of(delta)
    assert sent.norm == pytest.approx(full, rel=1e-6)
    assert norm_of(sent.values) <= clip
    factor = min(1.0, clip / full)
    for name, value in delta.items():
        assert sent.values[name].shape == value.shape
        torch.testing.assert_close(
            sent.values[name].double(), value.double() * factor, rtol=3e-6, atol=0.0
        )
    again = clip_delta(sent.values, clip_norm=clip)  # the server's turn: not a bit changes
    assert all(torch.equal(again.values[n], v) for n, v in sent.values.items())


def test_a_scalar_parameter_cannot_escape() -> None:
    sent = clip_delta({"scale": torch.tensor(1000.0)}, clip_norm=1.0)
    assert 0.999 < float(sent.values["scale"]) <= 1.0


def test_zero_integers_and_nonfinite() -> None:
    zero = clip_delta({"w": torch.zeros(3)}, clip_norm=1.0)
    assert zero.norm == 0
    assert not zero.is_nonfinite
    assert not zero.values["w"].any()
    ints = clip_delta({"n": torch.tensor(5), "b": torch.tensor([True])}, clip_norm=1.0)
    assert ints.values == {}
    for bad in (math.nan, math.inf, -math.inf):
        sent = clip_delta({"w": torch.tensor([1.0, bad]), "v": torch.ones(2)}, clip_norm=1.0)
        assert sent.is_nonfinite
        assert not sent.values["w"].any()
        assert not sent.values["v"].any()
    huge = clip_delta({"w": torch.full((4,), 1e200, dtype=torch.float64)}, clip_norm=1.0)
    assert norm_of(huge.values) <= 1.0
    with pytest.raises(InvalidInput, match="clip_norm"):
        clip_delta({"w": torch.ones(1)}, clip_norm=0.0)


def small_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("proximal", [0.0, 0.7])
def test_local_training_is_sgd_of_torch(proximal: float) -> None:
    model, twin = small_model(), small_model()
    x, y = torch.randn(7, 4), torch.randint(0, 3, (7,))
    local = LocalTraining(learning_rate=0.3, steps=4, batch_size=3, epochs=2, proximal=proximal)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    delta = local_train(model, start, x, y, local=local)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.3)
    for rows in (slice(0, 3), slice(3, 6), slice(6, 7), slice(0, 3)):
        loss = nn.functional.cross_entropy(twin(x[rows]), y[rows])
        for name, p in twin.named_parameters():
            loss = loss + proximal / 2 * (p - start[name]).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, p in twin.named_parameters():
        torch.testing.assert_close(delta[name], p.detach() - start[name], rtol=1e-4, atol=1e-6)
        assert torch.equal(dict(model.named_parameters())[name], start[name])


def test_fedsgd_is_one_step_with_everything() -> None:
    model = small_model()
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    parameters = dict(model.named_parameters())
    delta = local_train(model, parameters, x, y, local=LocalTraining(learning_rate=0.5))
    nn.functional.cross_entropy(model(x), y).backward()
    for name, p in parameters.items():
        assert p.grad is not None
        torch.testing.assert_close(delta[name], -0.5 * p.grad, rtol=1e-5, atol=1e-6)


def test_no_examples_no_move() -> None:
    model = small_model()
    local = LocalTraining(learning_rate=0.5, steps=3, proximal=1.0)
    empty = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
    delta = local_train(model, dict(model.named_parameters()), *empty, local=local)
    assert not any(v.any() for v in delta.values())


def test_targets_left_out() -> None:
    scores = torch.randn(2, 5, 3)
    y = torch.tensor([[1, 2, NO_TARGET], [NO_TARGET] * 3])
    losses = cross_entropy(scores, y)
    expected = nn.functional.cross_entropy(scores[:1, :, :2], y[:1, :2])
    torch.testing.assert_close(losses, torch.stack([expected, torch.tensor(0.0)]))


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    steps=st.integers(1, 5),
    batch=st.sampled_from([None, 1, 3, 4]),
    epochs=st.integers(1, 2),
    proximal=st.sampled_from([0.0, 0.5]),
)
@settings(max_examples=25, deadline=None)
def test_all_at_once_is_one_by_one(
    sizes: list[int], steps: int, batch: int | None, epochs: int, proximal: float
) -> None:
    model = small_model()
    local = LocalTraining(
        learning_rate=0.2, steps=steps, batch_size=batch, epochs=epochs, proximal=proximal
    )
    stops = torch.tensor(sizes).cumsum(0).numpy()
    starts = stops - torch.tensor(sizes).numpy()
    x, y = torch.randn(sum(sizes) + 1, 4), torch.randint(0, 3, (sum(sizes) + 1,))
    rows, weights = pack(starts, stops, local=local)
    batches = [(x[rows[:, s]], y[rows[:, s]], weights[:, s]) for s in range(rows.shape[1])]
    parameters = dict(model.named_parameters())
    stacked = trained_many(model, parameters, batches, clients=len(sizes), local=local)
    for u, (start, stop) in enumerate(zip(starts, stops)):
        one = training_of(model, parameters, local=local)(x[start:stop], y[start:stop])
        for name, value in one.items():
            torch.testing.assert_close(stacked[name][u], value, rtol=1e-4, atol=1e-6)


def test_a_nan_stays_with_its_owner() -> None:
    model = small_model()
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    x[0] = math.nan
    local = LocalTraining(learning_rate=0.2, steps=3, batch_size=2)
    starts, stops = torch.tensor([0, 1]).numpy(), torch.tensor([1, 6]).numpy()
    rows, weights = pack(starts, stops, local=local)
    batches = [(x[rows[:, s]], y[rows[:, s]], weights[:, s]) for s in range(rows.shape[1])]
    parameters = dict(model.named_parameters())
    stacked = trained_many(model, parameters, batches, clients=2, local=local)
    assert all(torch.isfinite(v[1]).all() for v in stacked.values())
    assert not all(torch.isfinite(v[0]).all() for v in stacked.values())


def test_settings_are_checked() -> None:
    for wrong in ({"learning_rate": 0.0}, {"learning_rate": 1.0, "steps": 0}):
        with pytest.raises(InvalidInput):
            LocalTraining(**wrong)  # type: ignore[arg-type]
    local = LocalTraining(learning_rate=1.0)
    with pytest.raises(InvalidInput, match="one row per example"):
        local_train(small_model(), {}, torch.zeros(2, 4), torch.zeros(1), local=local)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_unrolled_lstm_is_the_lstm_of_torch(layers: int, bias: bool) -> None:
    torch.manual_seed(0)
    model = CharLSTM(7, embedding=3, hidden=5)
    model.lstm = nn.LSTM(3, 5, num_layers=layers, bias=bias, batch_first=True)
    model, twin = model.double(), unrolled(model).double()
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
    x, y = torch.randint(0, 7, (6, 2, 9)), torch.randint(0, 7, (6, 2, 9))
    local = LocalTraining(learning_rate=0.5, steps=2)
    parameters = dict(model.named_parameters())
    batches = [(x[:, :1], y[:, :1], torch.ones(6, 1)), (x[:, 1:], y[:, 1:], torch.ones(6, 1))]
    stacked = trained_many(twin, parameters, batches, clients=6, local=local)
    local = LocalTraining(learning_rate=0.5, steps=2, batch_size=1)
    for u in range(6):
        one = training_of(model, parameters, local=local)(x[u], y[u])
        for name, value in one.items():
            torch.testing.assert_close(stacked[name][u], value, rtol=1e-9, atol=1e-11)


def test_which_models_are_trained_together() -> None:
    cpu, lstm = torch.device("cpu"), CharLSTM(7)
    assert can_vectorise(lstm)
    assert not is_worth_it(lstm, device=cpu)
    assert is_worth_it(lstm, device=torch.device("cuda"))
    assert is_worth_it(small_model(), device=cpu)
    for other in (nn.GRU(2, 2), nn.LSTM(2, 2, bidirectional=True, batch_first=True)):
        assert not can_vectorise(other)
    assert not can_vectorise(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


class Counting(nn.Module):
    """Keeps a sum over its inputs in a buffer, as a layer of statistics does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.sum(0))
        scores: torch.Tensor = self.linear(x)
        return scores


@pytest.mark.parametrize("keeps", [nn.BatchNorm1d(3), Counting()])
def test_no_statistics_of_a_client_stay_in_the_model(keeps: nn.Module) -> None:
    model = nn.Sequential(keeps, nn.LazyLinear(2))
    model(torch.zeros(2, 3))
    before = {name: value.clone() for name, value in model.named_buffers()}
    x, y = 5 + torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1])
    local = LocalTraining(learning_rate=0.1, steps=2, epochs=2)
    local_train(model, dict(model.named_parameters()), x, y, local=local)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_a_model_that_counts_is_not_trained_with_others() -> None:
    model = Counting()
    batch = (torch.randn(3, 4, 3), torch.zeros(3, 4, dtype=torch.int64), torch.ones(3, 4))
    local = LocalTraining(learning_rate=0.1)
    with pytest.raises(Unsupported, match=r"changes its own buffers.*vectorise=False"):
        trained_many(model, dict(model.named_parameters()), [batch], clients=3, local=local)

"""Simulations: vectorised or not the same run, stopped or not the same run; the data by user."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.federated.blobs import a_model, a_task, killed
from torch import nn

from noshuffle import MinSeparation, Plan
from noshuffle.datasets.text import ENGLISH, GERMAN, encode
from noshuffle.errors import DataUnavailable, InvalidInput, ProbablyNotMeant, Unsupported
from noshuffle.federated import LocalTraining, Rounds, ServerOptimizer, simulate
from noshuffle.federated import tasks as tasks_module
from noshuffle.federated.char_models import build
from noshuffle.federated.clients import NO_TARGET
from noshuffle.federated.simulate import RoundProgress, evaluate, in_random_order, in_stream_order
from noshuffle.federated.tasks import FederatedTask, load_task, windows
from noshuffle.federated.vectorised import can_vectorise
from noshuffle.noise import test_source as a_source
from noshuffle.release.verify import verify
from noshuffle.training.models import CharLSTM

SHARED = Path(os.environ.get("NOSHUFFLE_SHARED", Path(__file__).parents[3] / "shared")) / "data"
needs_data = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"no data folder at {SHARED}; set NOSHUFFLE_SHARED"
)


@lru_cache
def a_plan(noise: float, steps: int) -> Plan:
    limits = MinSeparation(steps, 3, 3)
    return Plan.fit(limits, mechanism="blt", noise_multiplier=noise, unit="user")


def a_run(run: Path | None = None, *, noise: float = 0.3, steps: int = 12) -> Rounds:
    server = ServerOptimizer(
        a_model(),
        a_plan(noise, steps),
        clip=1.0,
        cohort_size=8,
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5),
        source=a_source(seed=2),
        run=run,
    )
    return Rounds(server)


LOCAL = LocalTraining(learning_rate=0.5, steps=3, batch_size=4, epochs=2, proximal=0.1)


def go(rounds: Rounds, **more: Any) -> Any:
    task = a_task()
    settings: dict[str, Any] = {"local": LOCAL, "check_ins": in_random_order(task.users, seed=1)}
    return simulate(rounds, a_model(), task, **{**settings, **more})


def test_vectorised_and_one_by_one_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the grid of the noise, on which a last place can make a whole step."""
    monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)
    slow = go(a_run(), vectorise=False)
    for at_once in (1, 3, 50):
        fast = go(a_run(), vectorise=True, at_once=at_once)
        for name, value in slow.parameters.items():
            torch.testing.assert_close(fast.parameters[name], value, rtol=1e-4, atol=1e-5)
    assert slow.rounds == 12
    assert slow.is_complete
    assert slow.statement.unit == "user"
    assert sum(s.users for s in slow.users) <= 30
    assert max(s.participations for s in slow.users) <= 3


@pytest.mark.parametrize("vectorise", [False, True])
def test_stopped_and_resumed_is_bit_identical(tmp_path: Path, vectorise: bool) -> None:
    def answers(step: int, user: object) -> bool:
        return hash((step, str(user)[-1] == "7")) % 3 != 0

    settings: dict[str, Any] = {"vectorise": vectorise, "answers": answers}
    expected = go(a_run(tmp_path / "a"), **settings).parameters
    killed(lambda: go(a_run(tmp_path / "b"), until=5, **settings))
    resumed = a_run(tmp_path / "b")
    assert resumed.resume() == ()
    got = go(resumed, **settings)
    assert got.rounds == 7
    assert all(torch.equal(got.parameters[n], v) for n, v in expected.items())
    resumed.close()
    assert verify(tmp_path / "b").refuted == ()


def test_it_learns_and_tells() -> None:
    seen: list[RoundProgress] = []
    rounds = a_run(noise=0.05)
    result = go(rounds, progress=seen.append)
    task, model = a_task(), a_model()
    before = evaluate(model, dict(model.named_parameters()), task)
    after = evaluate(model, result.parameters, task)
    assert after[1] > 0.9
    assert after[0] < before[0]
    assert [p.round for p in seen] == list(range(1, 13))
    assert all(a.epsilon <= b.epsilon for a, b in itertools.pairwise(seen))
    assert seen[-1].epsilon == result.statement.epsilon


def test_it_ends_early_when_nobody_is_free() -> None:
    result = go(a_run(steps=60))
    assert not result.is_complete
    assert {s.participations for s in result.users} == {3}


def test_streamed_population() -> None:
    order = in_stream_order(list("abcdef"), rounds=3)
    assert ["".join(order(t)) for t in range(4)] == ["abcdef", "cdefab", "efabcd", "efabcd"]


def test_recurrent_model_on_text() -> None:
    """A tiny text task end to end, by the loop."""
    texts = ["abab" * 9, "ab" * 30, "ba" * 11, "b", "abba" * 8]
    cuts = [windows(encode(t, alphabet="ab"), length=8, most=3, filler=2) for t in texts]
    x, y = (torch.from_numpy(np.concatenate([c[i] for c in cuts]).astype(np.int16)) for i in (0, 1))
    starts = np.cumsum([0, *(len(c[0]) for c in cuts)])
    task = FederatedTask("tiny", "text", tuple(range(5)), starts, x, y, x, y, 3)
    torch.manual_seed(1)
    model = CharLSTM(3, embedding=3, hidden=5)
    plan = Plan.fit(MinSeparation(6, 1, 6), mechanism="tree", noise_multiplier=0.01, unit="user")
    server = ServerOptimizer(model, plan, clip=1.0, cohort_size=5, source=a_source(seed=2),
                             optimizer_fn=lambda p: torch.optim.SGD(p, lr=2.0))  # fmt: skip
    before = evaluate(model, server.parameters(), task)
    local = LocalTraining(learning_rate=1.0, steps=2)
    result = simulate(
        Rounds(server), model, task, local=local, check_ins=in_random_order(task.users, seed=0)
    )
    assert evaluate(model, result.parameters, task)[0] < before[0]


def test_windows_and_alphabet() -> None:
    symbols = encode("Grüße, ſchöne Welt – „ja“!", alphabet=GERMAN)
    assert (symbols < len(GERMAN)).all()
    assert encode("u\u0308", alphabet=GERMAN).tolist() == [GERMAN.index("ü")]
    assert encode("漢😀", alphabet=GERMAN).tolist() == [len(GERMAN)] * 2
    assert len(set(GERMAN)) == len(GERMAN)
    for n in range(2, 40):
        x, y = windows(np.arange(n), length=5, most=4, filler=99)
        flat = [pair for row in zip(x.tolist(), y.tolist()) for pair in zip(*row)]
        used = min(n, 24)
        targets = [b for _, b in flat if b != NO_TARGET]
        assert all(b == a + 1 for a, b in flat if b != NO_TARGET)
        assert targets == [i for i in range(used) if i % 6]


@needs_data
def test_roles_and_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSHUFFLE_DATA", str(SHARED))
    plays = tasks_module.shakespeare(length=40, most_windows=2)
    assert 1200 <= len(plays) <= 1215
    assert plays.classes == 97
    x, y = plays.client("1henryiv/KING HENRY IV")
    assert x.shape == (2, 40)
    assert torch.equal(x[:, 1:], y[:, :-1])
    text = "So shaken as we are, so wan with care,\nFind we a time"
    assert x[0].tolist() == encode(text, alphabet=ENGLISH)[:40].tolist()
    digits = load_task("mnist_writers")
    assert len(digits) == 539
    assert digits.shape == (1, 28, 28)
    sizes = np.diff(digits.starts)
    assert sizes.min() == 19
    assert sizes.max() == 131
    assert sizes.sum() == 60_000
    x, y = digits.client(digits.users[3])
    assert len(x) == sizes[3]
    assert x.min() == -1
    assert x.max() <= 1


@needs_data
def test_german_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSHUFFLE_DATA", str(SHARED))
    drama = tasks_module.german_drama(length=40, most_windows=1)
    assert len(drama) == 10_080
    assert len(drama.x_test) == 1_120
    assert drama.years is not None
    assert (np.diff(drama.years) >= 0).all()
    unknown = float((drama.x == len(GERMAN)).float().mean())
    assert unknown < 1e-3


def test_places_of_many_users() -> None:
    task = a_task()
    users = list(reversed(task.users))
    assert task.places(iter(users)).tolist() == [task.place(user) for user in users]
    with pytest.raises(InvalidInput, match="has no user 'nobody'"):
        task.places([users[0], "nobody"])


def test_transformer_is_causal_and_can_be_stacked() -> None:
    torch.manual_seed(0)
    model = build("char_transformer", classes=9, length=12)
    assert can_vectorise(model)
    x = torch.randint(0, 9, (2, 12))
    before = model(x)
    assert before.shape == (2, 9, 12)
    for t in range(12):
        other = x.clone()
        other[:, t] = (x[:, t] + 1) % 9
        is_same = (model(other) - before).abs().amax((0, 1)) < 1e-6
        assert is_same[:t].all()
        assert not is_same[t]
    assert type(build("char_lstm", classes=9, length=12)) is CharLSTM
    with pytest.raises(InvalidInput, match="model must be one of"):
        build("gpt", classes=9, length=12)
    with pytest.raises(InvalidInput, match="12 characters at most"):
        model(torch.zeros(1, 13, dtype=torch.int64))


def test_unknown_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOSHUFFLE_DATA", raising=False)
    with pytest.raises(DataUnavailable, match="NOSHUFFLE_DATA"):
        tasks_module.shakespeare()
    with pytest.raises(InvalidInput, match="task must be one of"):
        load_task("reddit")
    with pytest.raises(InvalidInput, match="no user 'x'"):
        a_task().client("x")


def test_evaluation_is_of_the_model_in_use() -> None:
    """Dropout is off and statistics stay; every layer keeps the mode that it was in."""
    torch.manual_seed(0)
    kept = nn.BatchNorm1d(4).eval()
    dropped = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(4), kept, nn.Dropout(0.9), nn.Linear(4, 2))
    own = {name: value.detach() for name, value in dropped.named_parameters()}
    buffers = {name: value.clone() for name, value in dropped.named_buffers()}
    found = [evaluate(dropped, own, a_task()) for _ in range(5)]
    assert len(set(found)) == 1
    assert found[0] == evaluate(dropped.eval(), own, a_task())
    dropped.train()
    kept.eval()
    evaluate(dropped, own, a_task())
    assert [module.training for module in dropped] == [True, True, False, True, True]
    assert all(torch.equal(value, buffers[name]) for name, value in dropped.named_buffers())


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)]
)
def test_layers_that_learn_statistics_are_refused(norm: nn.Module) -> None:
    def server_of(model: nn.Module) -> ServerOptimizer:
        optimizer_fn = lambda p: torch.optim.SGD(p, lr=1.0)  # noqa: E731
        return ServerOptimizer(
            model, a_plan(0.3, 12), clip=1.0, cohort_size=8, optimizer_fn=optimizer_fn
        )

    with pytest.raises(Unsupported, match=r"'1' .*keeps statistics of users' data"):
        server_of(nn.Sequential(nn.Flatten(), norm, nn.Linear(4, 2)))
    server_of(nn.Sequential(nn.Flatten(), norm.eval(), nn.Linear(4, 2)))


@pytest.mark.parametrize("kind", ["image", "table"])
@pytest.mark.parametrize("vectorise", [True, False])
def test_features_in_floating_point_reach_the_model_as_they_are(kind: str, vectorise: bool) -> None:
    """They were scaled as pixels, or cut to whole numbers."""
    rng = np.random.default_rng(1)
    y = rng.integers(0, 2, 240)
    x = torch.from_numpy(rng.normal(size=(240, 4)) * 0.3 + (2 * y - 1)[:, None] * 0.4).float()
    labels, starts = torch.from_numpy(y), np.arange(31) * 6
    task = FederatedTask(
        "table", kind, tuple(range(30)), starts, x[:180], labels[:180], x[180:], labels[180:], 2
    )
    assert torch.equal(task.client(3)[0], x[18:24])
    assert task.client(3)[1].dtype == torch.int64
    rounds = a_run(noise=0.0)
    result = simulate(
        rounds, a_model(), task, local=LOCAL, vectorise=vectorise,
        check_ins=in_random_order(task.users, seed=1),
    )  # fmt: skip
    assert evaluate(a_model(), result.parameters, task)[1] > 0.9


@pytest.mark.parametrize(
    ("targets", "classes", "found"),
    [
        ([1.195, 0.5], 1, [1.195, 0.5]),  # a regression
        ([2.0, 0.0], 1, [2.0, 0.0]),
        ([0.25, 1.0], 2, [0.25, 1.0]),  # shares of a class
        ([1.0, 0.0], 2, [1.0, 0.0]),  # by their type, whatever the values are
        ([1, 0], 2, [1, 0]),
    ],
)
def test_targets_keep_their_values(targets: list[Any], classes: int, found: list[Any]) -> None:
    x, y = torch.tensor([[-62.09], [0.3]], dtype=torch.float64), torch.tensor(targets)
    task = FederatedTask("table", "table", (0, 1), np.arange(3), x, y, x, y, classes)
    got = torch.cat([task.client(user)[1] for user in task.users])
    assert got.tolist() == pytest.approx(found)
    assert got.is_floating_point() == isinstance(found[0], float)
    assert torch.equal(task.client(0)[0], x[:1])  # with its type


@pytest.mark.parametrize("vectorise", [False, True])
@pytest.mark.parametrize("label", [2, -1, 2**40])
def test_a_label_that_is_no_class_is_its_owners_loss_alone(vectorise: bool, label: int) -> None:
    """It ended everybody's training in an error of torch; now it counts as an update of NaN does:
    the others have the run in which its owner does not answer."""
    task = a_task()
    first = int(np.flatnonzero(np.diff(task.starts) > 1)[0])
    owner, y = task.users[first], task.y.clone()
    y[task.starts[first]] = label
    spoiled = replace(task, y=y)
    settings = {"local": LOCAL, "check_ins": lambda _: task.users, "vectorise": vectorise}
    with pytest.warns(ProbablyNotMeant, match=f"user {owner!r} contributes nothing to round 0"):
        found = simulate(a_run(), a_model(), spoiled, **settings)
    twin = simulate(a_run(), a_model(), task, answers=lambda _, user: user != owner, **settings)
    for name, value in twin.parameters.items():
        assert torch.equal(found.parameters[name], value)
    assert found.rounds == twin.rounds


@pytest.mark.parametrize("vectorise", [False, True])
def test_an_index_outside_a_table_says_whose_it_is(vectorise: bool) -> None:
    task = a_task()
    y = task.y.clone()
    y[0] = 7
    own = nn.CrossEntropyLoss(reduction="none")  # of torch, which ends in an error
    settings = {"local": LOCAL, "check_ins": lambda _: task.users, "vectorise": vectorise}
    words = "one of [0-9]+ users|user 'u" if vectorise else "in the data of user 'u[0-9]+'$"
    with pytest.raises(InvalidInput, match=words):
        simulate(a_run(), a_model(), replace(task, y=y), loss_fn=own, **settings)


@pytest.mark.parametrize("label", [2, -1, 2**40])
def test_a_held_out_label_that_is_no_class_is_one_line(label: int) -> None:
    """It ended in an IndexError of torch."""
    task, model = a_task(), a_model()
    y = task.y_test.long().clone()
    y[3] = label
    line = f"label {label} in row 3 of the held-out users is none of the model's 2 classes"
    with pytest.raises(InvalidInput, match=line):
        evaluate(model, dict(model.named_parameters()), replace(task, y_test=y), batch_size=2)
    own = nn.CrossEntropyLoss(reduction="none")
    with pytest.raises(InvalidInput, match=r"held-out users \(rows 2 to 3\)$"):
        evaluate(
            model, dict(model.named_parameters()), replace(task, y_test=y), batch_size=2,
            loss_fn=own,
        )  # fmt: skip
    y[3] = NO_TARGET
    evaluate(model, dict(model.named_parameters()), replace(task, y_test=y))

"""The client mod: one clipped delta leaves, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.federated.clients import clip_delta
from noshuffle.federated.timer import Timer

pytest.importorskip("flwr", reason="needs the extra 'federated'")

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from noshuffle.federated.flower_client import client_app, clip_mod, difference, partition_of
from noshuffle.federated.flower_wire import to_arrays, to_tensors

START = {"w": torch.tensor([1.0, -2.0, 0.5]), "scale": torch.tensor(2.0)}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _inside_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def a_context(**config: Any) -> Context:
    return Context(1, 5, {"partition-id": 3, **config}, RecordDict(), {})


def a_message(start: Tensors = START, kind: str = "train", **config: Any) -> Message:
    settings = {"step": 4, "clip-norm": 1.0, **config}
    content = RecordDict({"arrays": to_arrays(start), "config": ConfigRecord(settings)})
    return Message(content, 5, kind)


def trains(change: Callable[[Tensors], Tensors], **more: Any) -> ClientApp:
    """An app like any other on Flower: it returns its new parameters, and metrics."""

    def train(message: Message, context: Context) -> Message:
        now = change(dict(message.content["arrays"].to_torch_state_dict()))
        metrics = MetricRecord({"loss": 0.1, "num-examples": 10})
        content = RecordDict({"arrays": ArrayRecord(now), "metrics": metrics})
        return Message(content, reply_to=message)

    return client_app(train, **more)


def sent_by(change: Callable[[Tensors], Tensors], **more: Any) -> tuple[Tensors, ConfigRecord]:
    reply = trains(change, **more)(a_message(**{"wants-norm": True}), a_context())
    assert sorted(reply.content) == ["delta", "update"]  # no metrics
    return to_tensors(reply.content["delta"]), reply.content["update"]  # type: ignore[return-value]


def length(delta: Tensors) -> float:
    return math.sqrt(sum(float(v.double().square().sum()) for v in delta.values()))


def test_the_whole_delta_is_clipped_scalars_included() -> None:
    move = {"w": torch.tensor([3.0, 0.0, 0.0]), "scale": torch.tensor(4.0)}
    delta, update = sent_by(lambda p: {n: v + move[n] for n, v in p.items()})
    expected = clip_delta(move, clip_norm=1.0)
    for name, value in expected.values.items():
        torch.testing.assert_close(delta[name], value)
    assert delta["scale"].shape == ()
    assert 0.999 < length(delta) <= 1.0
    assert dict(update) == {"step": 4, "norm": pytest.approx(5.0), "user": 3}
    plain = trains(lambda p: p)(a_message(), a_context()).content["update"]
    assert dict(plain) == {"step": 4, "user": 3}  # a norm only where it is asked for
    small, _ = sent_by(lambda p: {n: v + 0.01 * move[n] for n, v in p.items()})
    torch.testing.assert_close(small["scale"], torch.tensor(0.04), rtol=1e-5, atol=1e-6)


def test_zero_nan_infinity_and_counters() -> None:
    delta, update = sent_by(lambda p: p)
    assert length(delta) == 0.0
    assert update["norm"] == 0.0
    for bad in (math.nan, math.inf):
        delta, update = sent_by(lambda p, bad=bad: {**p, "scale": torch.tensor(bad)})  # type: ignore[misc]
        assert length(delta) == 0.0
        assert not math.isfinite(float(str(update["norm"])))
    delta, _ = sent_by(lambda p: {**p, "seen": torch.tensor(9), "mask": torch.tensor(True)})
    assert sorted(delta) == ["scale", "w"]


def test_integer_tensors_that_were_sent_are_left_out() -> None:
    start = {**START, "steps": torch.tensor([1, 2])}
    app = trains(lambda p: {**p, "steps": p["steps"] + 1})
    delta = to_tensors(app(a_message(start), a_context()).content["delta"])
    assert sorted(delta) == ["scale", "w"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: {"w": p["w"]}, "must return 'scale' of shape"),
        (lambda p: {**p, "w": p["w"][:2]}, r"'w' of shape \(3,\), got shape \(2,\)"),
        (lambda p: {**p, "mean": torch.zeros(2)}, "'mean', which the server did not send"),
    ],
)
def test_other_names_and_shapes_do_not_leave(change: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        trains(change)(a_message(), a_context())


def test_half_precision_and_double() -> None:
    for dtype, sent in ((torch.float16, torch.float32), (torch.float64, torch.float64)):
        start = {name: value.to(dtype) for name, value in START.items()}
        app = trains(lambda p: {n: v + 3 for n, v in p.items()})
        delta = to_tensors(app(a_message(start), a_context()).content["delta"])
        assert {v.dtype for v in delta.values()} == {sent}
        assert length(delta) <= 1.0
    with pytest.raises(Unsupported, match="bfloat16"):
        to_arrays({"w": torch.zeros(2, dtype=torch.bfloat16)})
    wide = difference(START, {n: v.double() + 1 for n, v in START.items()})
    assert wide["scale"].dtype == torch.float64


def test_errors_and_other_messages_pass() -> None:
    mod = clip_mod()
    failed = mod(
        a_message(), a_context(), lambda m, c: Message(Error(code=2, reason="no"), reply_to=m)
    )
    assert failed.has_error()
    asked: list[str] = []

    def echo(message: Message, context: Context) -> Message:
        asked.append(message.metadata.message_type)
        return Message(RecordDict(), reply_to=message)

    mod(a_message(kind="evaluate"), a_context(), echo)
    mod(a_message(kind="query.other"), a_context(), echo)
    assert asked == ["evaluate", "query.other"]
    with pytest.raises(InvalidInput, match="must return its new parameters as one ArrayRecord"):
        mod(a_message(), a_context(), echo)
    plain = Message(RecordDict({"arrays": to_arrays(START)}), 5, "train")
    with pytest.raises(InvalidInput, match="PrivateStrategy"):
        mod(plain, a_context(), echo)


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, math.nan, math.inf])
def test_a_clip_norm_that_is_none(clip_norm: float) -> None:
    app = trains(lambda p: p)
    with pytest.raises(InvalidInput):
        app(a_message(**{"clip-norm": clip_norm}), a_context())


def test_the_handshake_is_answered() -> None:
    app = trains(lambda p: p)
    reply = app(a_message(kind="query.noshuffle"), a_context())
    assert dict(reply.content["identity"]) == {"user": 3}
    named = trains(lambda p: p, user_fn=lambda context: f"ward {context.node_config['ward']}")
    reply = named(a_message(kind="query.noshuffle"), a_context(ward=7))
    assert dict(reply.content["identity"]) == {"user": "ward 7"}
    for bad in ("3", 1.5, True):
        with pytest.raises(InvalidInput, match="must be a whole number, got"):
            partition_of(a_context(**{"partition-id": bad}))


def test_a_timer_declines_without_training(tmp_path: Path) -> None:
    trained: list[int] = []

    def change(parameters: Tensors) -> Tensors:
        trained.append(1)
        return parameters

    def timer(context: Context) -> Timer:
        return Timer(tmp_path / str(partition_of(context)), seconds=3600, most=2)

    app = trains(change, timer=timer)
    assert "delta" in app(a_message(), a_context()).content
    again = app(a_message(), a_context())
    assert sorted(again.content) == ["declined"]
    assert again.content["declined"]["step"] == 4
    assert "delta" in app(a_message(), a_context(**{"partition-id": 8})).content
    assert len(trained) == 2

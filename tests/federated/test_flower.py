"""The strategy with real messages and real client apps, carried by a grid in memory."""

from __future__ import annotations

import copy
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from tests.federated.blobs import a_task, fact, killed, saved
from torch import nn

from noshuffle import MinSeparation, Plan, Restarted
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput
from noshuffle.federated import LocalTraining, Rounds, ServerOptimizer, read_log, simulate
from noshuffle.federated.clients import cross_entropy
from noshuffle.federated.per_user import spending
from noshuffle.federated.simulate import in_random_order
from noshuffle.noise import test_source as a_source
from noshuffle.participation import Participation
from noshuffle.release.log import read
from noshuffle.release.spending import CLAIMED, REGISTERED, UNREGISTERED, user_note
from noshuffle.release.verify import verify

pytest.importorskip("flwr", reason="needs the extra 'federated'")

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from tests.runs import same

from noshuffle.federated import flower_replies
from noshuffle.federated.flower import (
    Handshake,
    PrivateStrategy,
    PublicKeys,
    UnregisteredKeys,
    client_app,
    read_public_keys,
    task_client,
)
from noshuffle.federated.flower_identity import name_of_key

STEPS, USERS = 8, 12
TASK = a_task(USERS, held_out=20, prefix=None)
LOCAL = LocalTraining(learning_rate=0.5, steps=3, batch_size=4, epochs=2)
Corrupt = Callable[[Message, Message], list[Message]]


@pytest.fixture(autouse=True)
def _inside_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only inside a task of a run."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What was written into Flower's log."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Keep()
    logging.getLogger("flwr").addHandler(handler)
    yield found
    logging.getLogger("flwr").removeHandler(handler)


class Model(nn.Module):
    """With a 0-d parameter and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scale * self.layer(x.flatten(1))
        return scores


@lru_cache
def a_plan(rule: Participation, mechanism: str = "blt") -> Plan:
    return Plan.fit(rule, mechanism=mechanism, noise_multiplier=0.4, unit="user")


LIMITS = MinSeparation(STEPS, 2, 3)


def a_run(run: Path | None = None, *, plan: Plan | None = None, **more: Any) -> Rounds:
    settings: dict[str, Any] = {"clip": 0.7, "cohort_size": 4, **more}
    at_least = settings.pop("at_least", 1)
    server = ServerOptimizer(
        Model(),
        plan or a_plan(LIMITS),
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5),
        source=a_source(seed=2),
        run=run,
        **settings,
    )
    return Rounds(server, at_least=at_least)


def an_app(**more: Any) -> ClientApp:
    return task_client(lambda _: (TASK, Model(), LOCAL, cross_entropy), **more)


class MemoryGrid(Grid):
    """Nodes in this process. `corrupt` may change or repeat or drop what a node answers."""

    def __init__(
        self,
        partitions: dict[int, Any],
        *,
        app: ClientApp | None = None,
        corrupt: Corrupt | None = None,
        before: Callable[[Message], None] | None = None,
    ) -> None:
        self.partitions = partitions
        self.app = app or an_app()
        self.corrupt = corrupt
        self.before = before
        self.pull_interval = 0.01
        self.sent: list[Message] = []
        self.replies: dict[str, list[Message]] = {}
        self.keys: dict[int, bytes] = {}

    def get_node_ids(self) -> list[int]:
        return list(self.partitions)

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=n, public_key=self.keys.get(n, b"")) for n in self.partitions]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = number = str(uuid4())
            if self.before is not None:
                self.before(message)
            self.sent.append(message)
            reply = self._answer(copy.deepcopy(message))
            found = [reply] if self.corrupt is None else self.corrupt(message, reply)
            if found:  # nobody waits for what was never sent
                ids.append(number)
            self.replies[number] = found[::-1]  # whoever comes last is heard first
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [reply for number in message_ids for reply in self.replies.pop(number, ())]

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        config = {"partition-id": self.partitions[node]}
        context = Context(1, node, config, RecordDict(), {})
        try:
            return self.app(message, context)
        except Exception as error:
            return Message(Error(code=2, reason=f"boom\n{error}"), reply_to=message)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **more: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], **more: Any) -> list[Message]:
        raise NotImplementedError


def nodes(run: int, users: Iterable[int] = range(USERS)) -> dict[int, int]:
    """Node ids, new in every run of Flower."""
    return {1000 * run + 7 * (100 - user): user for user in users}


def order(step: int) -> list[int]:
    return [int(u) for u in in_random_order(TASK.users, seed=3)(step)]


def strategy_of(rounds: Rounds, **more: Any) -> PrivateStrategy:
    settings = {"wait": 0.0, "poll": 0.01, "check_ins": order, **more}
    return PrivateStrategy(rounds, **settings)


def simulated(rounds: Rounds, **more: Any) -> dict[str, torch.Tensor]:
    settings = {"local": LOCAL, "check_ins": order, "vectorise": True, **more}
    return simulate(rounds, Model(), TASK, **settings).parameters


def test_it_is_the_simulation_bit_for_bit(lines: list[str]) -> None:
    rounds, seen = a_run(), []
    result = strategy_of(rounds, on_round=seen.append).start(MemoryGrid(nodes(1)))
    expected = simulated(a_run())
    assert same(rounds.server.parameters(), expected)
    assert same(dict(result.arrays.to_torch_state_dict()), expected)
    assert [report.step for report in seen] == list(range(STEPS))
    assert not [line for line in lines if "not used" in line or "left out" in line]
    assert result.train_metrics_clientapp == {}


@pytest.mark.parametrize("at", [1, 5])
def test_resumed_in_a_new_run_with_new_node_ids(tmp_path: Path, at: int) -> None:
    straight = a_run(tmp_path / "a")
    strategy_of(straight).start(MemoryGrid(nodes(1)))
    killed(lambda: strategy_of(a_run(tmp_path / "b")).start(MemoryGrid(nodes(2)), num_rounds=at))
    resumed = a_run(tmp_path / "b")
    strategy_of(resumed).start(MemoryGrid(nodes(3)))
    assert same(resumed.server.parameters(), straight.server.parameters())
    assert resumed.server.round == STEPS
    resumed.close()
    assert verify(tmp_path / "b").refuted == ()


def test_a_crash_after_sending_skips_the_round(tmp_path: Path, lines: list[str]) -> None:
    """Its row is in the log when the first message leaves; the noise is never used again."""

    def fail(message: Message) -> None:
        if message.metadata.message_type != "train":
            return
        step = int(str(message.content["config"]["step"]))
        assert [r["step"] for r in read(tmp_path / "log.jsonl") if r["kind"] == "step"][-1] == step
        assert message.content["config"]["clip-norm"] == 0.7
        if step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    killed(lambda: strategy_of(a_run(tmp_path)).start(MemoryGrid(nodes(1), before=fail)))
    resumed = a_run(tmp_path)
    strategy_of(resumed).start(MemoryGrid(nodes(2)))
    assert any("round 2: its outcome is unknown" in line for line in lines)
    reference = a_run()
    simulated(reference, until=2)
    assert reference.begin(order(2)) is not None
    reference.abandon()
    assert same(resumed.server.parameters(), simulated(reference))


def test_a_broken_off_start_can_be_called_again() -> None:
    rounds = a_run()
    grid = MemoryGrid(nodes(1), before=lambda m: _raise_at(m, 1))
    strategy = strategy_of(rounds)
    with pytest.raises(RuntimeError, match="network"):
        strategy.start(grid)
    grid.before = None
    strategy.start(grid)
    assert rounds.server.round == STEPS


def _raise_at(message: Message, step: int) -> None:
    if message.metadata.message_type == "train" and message.content["config"]["step"] == step:
        raise RuntimeError("the network is down")


def _with(reply: Message, *, delta: Any = None, **update: Any) -> Message:
    changed = copy.deepcopy(reply)
    if delta is not None:
        changed.content["delta"] = delta(changed.content["delta"])
    changed.content["update"].update(update)
    return changed


def _named(**values: torch.Tensor) -> Callable[[ArrayRecord], ArrayRecord]:
    def change(record: ArrayRecord) -> ArrayRecord:
        return ArrayRecord({**record.to_torch_state_dict(), **values})

    return change


def _unreadable(record: ArrayRecord) -> ArrayRecord:
    array = next(iter(record.values()))
    array.data = b"\x93NUMPY and then nothing of the kind"
    return record


BAD: dict[str, tuple[Callable[[Message, Message], list[Message]], str]] = {
    "error": (
        lambda m, r: [Message(Error(code=2, reason="out\nof memory"), reply_to=m)],
        "sent no update",
    ),
    "silent": (lambda m, r: [], ""),
    "shape": (lambda m, r: [_with(r, delta=_named(scale=torch.zeros(2)))], "must be floating"),
    "extra": (lambda m, r: [_with(r, delta=_named(more=torch.zeros(2)))], "unknown here"),
    "unreadable": (lambda m, r: [_with(r, delta=_unreadable)], "cannot be read"),
    "no delta": (
        lambda m, r: [Message(RecordDict({"update": r.content["update"]}), reply_to=m)],
        "named arrays were expected",
    ),
    "no norm": (lambda m, r: [_with(r, norm="big")], "no norm or no step"),
    "another round": (lambda m, r: [_with(r, step=99)], "answers round 99"),
    "another user": (lambda m, r: [_with(r, user=5)], "and now 5"),
    "empty": (lambda m, r: [Message(RecordDict(), reply_to=m)], "named arrays"),
    "only integers": (
        lambda m, r: [_with(r, delta=_named(scale=torch.tensor(3)))],
        "must be floating",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_replies_cost_nobody_else(what: str, lines: list[str]) -> None:
    corrupt_one, words = BAD[what]
    bad = order(1)[0]  # whoever is first in round 1; checked below to be asked

    def corrupt(message: Message, reply: Message) -> list[Message]:
        is_bad = message.metadata.dst_node_id == 1000 + 7 * (100 - bad)
        if message.metadata.message_type == "train" and is_bad:
            return corrupt_one(message, reply)
        return [reply]

    rounds, seen = a_run(), []
    grid = MemoryGrid(nodes(1), corrupt=corrupt)
    strategy_of(rounds, on_round=seen.append).start(grid, num_rounds=2)
    silent = {report.step: report.silent for report in seen}
    assert bad in {*silent[0], *silent[1]}
    assert set(silent[0]) | set(silent[1]) == {bad}
    expected = simulated(a_run(), until=2, answers=lambda step, user: user not in silent[step])
    assert same(rounds.server.parameters(), expected)
    told = [line for line in lines if line.startswith("round ") and f"user {bad}" in line]
    assert (not told) if what == "silent" else any(words in line for line in told), lines
    assert all("\n" not in line for line in told)


def test_second_answers_strangers_and_nan(lines: list[str]) -> None:
    def corrupt(message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train":
            return [reply]
        stranger = _with(reply)
        stranger.metadata.__dict__["_src_node_id"] = 4
        return [reply, _with(reply, delta=_named(scale=torch.tensor(9.0))), stranger]

    rounds = a_run()
    strategy_of(rounds).start(MemoryGrid(nodes(1), corrupt=corrupt), num_rounds=2)
    # The grid hands replies over in reverse: the changed one of each pair is heard first.
    # Whom a reply names as its sender counts for nothing: it answers the message of that pair.
    assert len([line for line in lines if "answers twice" in line]) == 16

    def poison(message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train":
            return [reply]
        nan = torch.full((2, 4), math.nan)
        return [_with(reply, delta=_named(**{"layer.weight": nan}))]

    seen: list[Any] = []
    quiet = a_run()
    strategy_of(quiet, on_round=seen.append).start(MemoryGrid(nodes(1), corrupt=poison))
    assert all(report.nonfinite == report.asked for report in seen)
    expected = simulated(a_run(), answers=lambda step, user: False)
    assert same(quiet.server.parameters(), expected)


def test_huge_deltas_are_clipped_again_by_the_server() -> None:
    def corrupt(message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train":
            return [reply]
        return [_with(reply, delta=_named(scale=torch.tensor(1e9)))]

    rounds = a_run(plan=Plan.fit(LIMITS, mechanism="tree", noise_multiplier=0.0, unit="user"))
    before = rounds.server.parameters()
    strategy_of(rounds).start(MemoryGrid(nodes(1), corrupt=corrupt), num_rounds=1)
    assert float((rounds.server.parameters()["scale"] - before["scale"]).abs()) <= 0.7


def test_limits_hold_under_adversarial_nodes() -> None:
    """Nodes that push, vanish, return under new ids and pose as others, for 150 rounds."""
    rng = np.random.default_rng(8)
    rule = MinSeparation(150, 5, 12)
    rounds = a_run(plan=a_plan(rule, "tree"), cohort_size=3)
    cohorts: list[tuple[int, list[int]]] = []

    def note(message: Message) -> None:
        if message.metadata.message_type == "train":
            step = int(str(message.content["config"]["step"]))
            cohorts.append((step, grid.partitions[message.metadata.dst_node_id]))

    grid = MemoryGrid({}, before=note, app=_echo_app())
    for step in range(150):
        online = rng.permutation(USERS)[: rng.integers(0, USERS + 1)]
        grid.partitions = {10_000 * step + i: int(user) for i, user in enumerate(online)}
        if len(online) > 1:
            grid.partitions[10_000 * step + 99] = int(online[0])  # poses as somebody
        strategy = strategy_of(rounds, check_ins=lambda _: [0, 0, 1, *range(USERS), 77])
        strategy.start(grid, num_rounds=min(step + 1, rounds.server.round + 1))
    by_user: dict[int, list[int]] = {}
    for step, user in cohorts:
        by_user.setdefault(user, []).append(step)
    assert max(len(steps) for steps in by_user.values()) <= 12
    assert min(int(np.diff(steps).min()) for steps in by_user.values() if len(steps) > 1) >= 5
    assert sum(map(len, by_user.values())) == sum(
        s.participations * s.users for s in spending(rounds.server)
    )
    assert rounds.server.round > 20


def _echo_app() -> ClientApp:
    return client_app(lambda m, c: Message(RecordDict({"arrays": m.content["arrays"]}), reply_to=m))


def test_it_waits_for_nodes_or_ends_early(lines: list[str]) -> None:
    rounds = a_run(at_least=3)
    grid = MemoryGrid(nodes(1, [0]))
    looks = 0

    class Slow(Handshake):
        def online(self, grid: Any, *, again: bool = False) -> Any:
            nonlocal looks
            looks += 1
            if looks == 4:
                grid.partitions = nodes(1)
            return super().online(grid, again=again)

    strategy_of(rounds, identities=Slow(), wait=60.0).start(grid, num_rounds=1)
    assert rounds.server.round == 1
    assert looks == 4
    grid.partitions = nodes(1, [0, 1])
    result = strategy_of(rounds).start(grid)
    assert rounds.server.round == 1
    assert any("too few users are free" in line for line in lines)
    assert same(dict(result.arrays.to_torch_state_dict()), rounds.server.parameters())


def test_evaluation_is_on_the_server_only() -> None:
    rounds, grid, seen = a_run(), MemoryGrid(nodes(1)), []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(number)
        return MetricRecord({"norm": float(arrays["scale"].numpy())})

    result = strategy_of(rounds).start(grid, num_rounds=2, evaluate_fn=evaluate)
    assert seen == [0, 1, 2] == list(result.evaluate_metrics_serverapp)
    assert {m.metadata.message_type for m in grid.sent} == {"train", "query.noshuffle"}
    strategy = strategy_of(rounds)
    assert strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), grid) == []
    assert strategy.aggregate_evaluate(1, []) is None
    assert strategy.aggregate_train(1, []) == (None, None)


def test_a_clip_norm_that_follows_a_quantile() -> None:
    rule = Restarted(MinSeparation(STEPS, 2, 3), every=2)
    plan = Plan.fit(rule, mechanism="tree", noise_multiplier=1.0, unit="user")
    clip = QuantileClip(initial=0.1, quantile=0.5, rate=0.5, bit_noise=4.0, units=4)
    rounds, twin = a_run(plan=plan, clip=clip), a_run(plan=plan, clip=clip)
    grid = MemoryGrid(nodes(1))
    strategy_of(rounds).start(grid)
    assert same(rounds.server.parameters(), simulated(twin))
    sent = {
        float(str(m.content["config"]["clip-norm"])) for m in grid.sent if "config" in m.content
    }
    assert len(sent) > 2


def test_forged_identities_are_refused(lines: list[str]) -> None:
    grid = MemoryGrid(
        {**nodes(1, range(4)), 1: 3, 2: 3, 3: 77, 4: "x", 5: -1.5, 6: True}, app=_echo_app()
    )
    grid.partitions.pop(next(n for n, user in nodes(1).items() if user == 3))
    identities = Handshake(known=range(USERS))
    own = {user: node for node, user in nodes(1, range(3)).items()}
    assert identities.online(grid) == own
    # Two say that they are 3; 77 does not exist; the others have no number to go by.
    assert len([x for x in lines if "2 nodes say that they are user 3" in x]) == 2
    assert any("node 3 is left out: there is no user 77" in x for x in lines)
    assert sum("does not say who it is" in x for x in lines) == 3
    # Somebody poses as user 0, who is online: the newcomer is left out, user 0 stays.
    grid.partitions[9] = 0
    for _ in range(2):
        assert identities.online(grid) == own
    assert sum("node 9 is left out: user 0 is another node" in x for x in lines) == 1
    grid.partitions.pop(9)
    # User 0 restarts its node and has a new id; the old one comes back later and is left out.
    old = own[0]
    grid.partitions[10] = 0
    assert identities.online(grid)[0] == old  # the SuperLink has not noticed yet
    grid.partitions.pop(old)
    assert identities.online(grid)[0] == 10
    grid.partitions[old] = 0
    assert identities.online(grid)[0] == 10
    assert any(f"node {old} is left out: user 0 is another node" in x for x in lines)
    # Of the two that said they were 3, one is left.
    grid.partitions.pop(1)
    assert identities.online(grid)[3] == 2
    # One node, two ids: it keeps the first, and its reply is refused.
    assert identities.why_not(10, 0) is None
    line = identities.why_not(10, 1)
    assert line is not None
    assert "user 0, and now 1" in line
    grid.partitions.pop(old)
    assert 0 not in identities.online(grid)


def test_nodes_that_say_nonsense() -> None:
    def say(value: Any) -> Corrupt:
        def corrupt(message: Message, reply: Message) -> list[Message]:
            record = ConfigRecord({"user": value})
            return [Message(RecordDict({"identity": record}), reply_to=message)]

        return corrupt

    for value in ("five", [1, 2], 1.0, b"1", True, 2**80):
        if value == 2**80:
            continue  # Flower itself cannot carry it
        grid = MemoryGrid({1: 0}, corrupt=say(value))
        assert Handshake().online(grid) == {}
    assert Handshake(kind=str).online(MemoryGrid({1: 0}, corrupt=say("ada"))) == {"ada": 1}
    assert Handshake(kind=str).online(MemoryGrid({1: 0}, corrupt=say(""))) == {}
    assert Handshake(kind=str).online(MemoryGrid({1: 0}, corrupt=say("x" * 300))) == {}
    with pytest.raises(InvalidInput, match="kind must be int or str"):
        Handshake(kind=float)  # type: ignore[arg-type]


def test_silent_nodes_are_asked_again_only_when_needed() -> None:
    grid = MemoryGrid(nodes(1, [0, 1]), corrupt=lambda m, r: [])
    identities = Handshake()
    assert identities.online(grid) == {}
    grid.corrupt = None
    assert identities.online(grid) == {}
    assert len(identities.online(grid, again=True)) == 2
    assert len(grid.sent) == 4


def test_public_keys_name_users_and_nobody_is_asked(lines: list[str]) -> None:
    keys = [ec.generate_private_key(ec.SECP384R1()).public_key() for _ in range(3)]
    pem = [
        key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        for key in keys
    ]
    grid = MemoryGrid({11: 0, 12: 1, 13: 2, 14: 3}, app=_echo_app())
    grid.keys = {11: pem[0], 12: pem[1], 13: b"\n" + pem[1].replace(b"\n", b"\r\n")}
    identities = PublicKeys(pem)
    users = identities.online(grid)
    assert users == {name_of_key(pem[0]): 11}
    assert any("node 14 is left out: the SuperLink knows no key" in x for x in lines)
    assert sum("2 nodes say that they are user" in x for x in lines) == 2
    grid.keys, grid.partitions = {21: pem[2], 22: pem[0]}, {21: 0, 22: 1}
    rounds = a_run()
    strategy = PrivateStrategy(rounds, identities=PublicKeys(pem), wait=0.0)
    strategy.start(grid, num_rounds=3)
    assert {m.metadata.message_type for m in grid.sent} == {"train"}
    assert rounds.server.round == 1  # both have taken part, and nobody else is there


@pytest.mark.parametrize(
    ("steps", "most"), [(1_000, 15), pytest.param(10_000, 150, marks=pytest.mark.slow)]
)
def test_thousands_of_rounds_with_adversarial_check_ins(steps: int, most: int) -> None:
    """The whole protocol, with everybody pushing: nobody exceeds what the plan admits."""
    separation = 37
    rule = MinSeparation(steps, separation, most)
    plan = Plan.fit(rule, mechanism="identity", noise_multiplier=1.0, unit="user")
    server = ServerOptimizer(
        {"w": torch.zeros(1)}, plan, clip=1.0, cohort_size=16, source=a_source(seed=1),
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=1e-3),
    )  # fmt: skip
    rounds, rng = Rounds(server, at_least=0), np.random.default_rng(5)
    last: dict[int, int] = {}
    count: dict[int, int] = {}
    for step in range(steps):
        kind = step % 4
        if kind == 0:
            users = np.arange(20)
        elif kind == 1:
            users = np.repeat(rng.integers(0, 2000, 5), 40)
        elif kind == 2:
            users = np.concatenate([np.arange(10), np.arange(10)[::-1], rng.integers(0, 50, 30)])
        else:
            users = rng.permutation(2000)[:80]
        work = rounds.begin(users)
        assert work is not None
        for user in work.users:
            assert isinstance(user, int)
            assert step - last.get(user, -separation) >= separation
            last[user], count[user] = step, count.get(user, 0) + 1
        rounds.finish()
    assert max(count.values()) <= most
    assert sum(count.values()) == sum(s.participations * s.users for s in spending(server))


# How users are told apart: a fact of the log, and an assumption of the statement.

ONCE = MinSeparation(4, 4, 1)


def two_at_once(run: Path | None, *, users: int = 2) -> Rounds:
    server = ServerOptimizer(
        {"w": torch.zeros(2)}, a_plan(ONCE, "identity"), clip=1.0, cohort_size=users, run=run,
        source=a_source(seed=2), optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0),
    )  # fmt: skip
    return Rounds(server)


def public_key() -> ec.EllipticCurvePublicKey:
    return ec.generate_private_key(ec.SECP384R1()).public_key()


def pem(key: ec.EllipticCurvePublicKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.PEM, form)


def openssh(key: ec.EllipticCurvePublicKey) -> bytes:
    form = serialization.PublicFormat.OpenSSH
    return key.public_bytes(serialization.Encoding.OpenSSH, form)


def constant_app() -> ClientApp:
    """Every client's model moves by one, whoever it is."""

    def train(message: Message, context: Context) -> Message:
        old = message.content["arrays"].to_torch_state_dict()
        new = ArrayRecord({name: value + 1.0 for name, value in old.items()})
        return Message(RecordDict({"arrays": new}), reply_to=message)

    return client_app(train)


def run_on(grid: MemoryGrid, rounds: Rounds, identities: Any) -> None:
    PrivateStrategy(rounds, identities=identities, wait=0.0).start(grid)


def test_a_device_that_names_itself_anew_joins_every_round_and_the_statement_says_so(
    tmp_path: Path,
) -> None:
    rounds = two_at_once(tmp_path)
    for step in range(ONCE.steps):  # one device: a new node and a new name at each check-in
        strategy = PrivateStrategy(rounds, wait=0.0)
        strategy.start(MemoryGrid({100 + step: step}, app=constant_app()), num_rounds=step + 1)
    assert rounds.server.round == ONCE.steps  # although a user takes part once
    rounds.close()
    assert fact(tmp_path) == CLAIMED
    assert "names itself anew each time is counted as several users" in saved(tmp_path)
    assert verify(tmp_path).refuted == ()


def test_keys_need_to_have_been_registered(tmp_path: Path, lines: list[str]) -> None:
    """A SuperNode that nobody registered makes up a key at each start: it would be a new user."""
    with pytest.raises(InvalidInput, match="needs the registered keys"):
        PublicKeys()
    known, restarted = public_key(), public_key()
    rounds = two_at_once(tmp_path)
    grid = MemoryGrid({11: 0, 12: 1}, app=constant_app())
    grid.keys = {11: pem(known), 12: pem(restarted)}
    run_on(grid, rounds, PublicKeys([openssh(known)]))
    assert rounds.server.round == 1
    assert [len(users) for users in read_log(tmp_path)] == [1]
    assert sum("node 12 is left out: its key" in x and "not registered" in x for x in lines) == 1
    rounds.close()
    assert fact(tmp_path) == REGISTERED
    assert user_note(REGISTERED) in saved(tmp_path)


def test_unregistered_keys_are_taken_by_name_only_and_the_statement_says_so(tmp_path: Path) -> None:
    rounds = two_at_once(tmp_path)
    for start in range(2):  # the same two people, restarted
        grid = MemoryGrid({10 * start + 1: 0, 10 * start + 2: 1}, app=constant_app())
        grid.keys = {node: pem(public_key()) for node in grid.partitions}
        run_on(grid, rounds, UnregisteredKeys())
    assert rounds.server.round == 2  # both took part twice
    rounds.close()
    assert fact(tmp_path) == UNREGISTERED
    assert "restarted has a new key and is counted as another user" in saved(tmp_path)


def test_keys_of_files(tmp_path: Path) -> None:
    keys = [public_key() for _ in range(4)]
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "a.pub").write_bytes(openssh(keys[0]) + b" somebody@somewhere\n")
    (folder / "b.pub").write_bytes(pem(keys[1]))
    (folder / "notes.txt").write_text("no key")
    (tmp_path / "list").write_bytes(b"# ours\n\n" + openssh(keys[2]) + b"\n" + openssh(keys[3]))
    (tmp_path / "blocks").write_bytes(pem(keys[2]) + pem(keys[3]))

    def users(found: Iterable[bytes], given: Iterable[bytes]) -> int:
        given = list(given)
        grid = MemoryGrid(dict.fromkeys(range(1, len(given) + 1), 0))
        grid.keys = dict(enumerate(given, start=1))
        return len(PublicKeys(list(found)).online(grid))

    assert users(read_public_keys(folder), map(pem, keys)) == 2
    assert users(read_public_keys(str(tmp_path / "list")), map(pem, keys[2:])) == 2
    assert users(read_public_keys(tmp_path / "blocks"), map(pem, keys[2:])) == 2
    (folder / "c.pub").write_text("not a key")
    with pytest.raises(InvalidInput, match="OpenSSH or PEM"):
        read_public_keys(folder)
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_public_keys(tmp_path / "nothing")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(InvalidInput, match="no public keys"):
        read_public_keys(tmp_path / "empty")
    with pytest.raises(InvalidInput, match="list of public keys"):
        PublicKeys(pem(keys[0]))  # type: ignore[arg-type]


def test_identities_of_an_app_say_where_they_come_from() -> None:
    class Badges:
        """Identities of an app's own, which say where they come from."""

        user_identity = "badge numbers"

        def online(self, grid: Any, *, again: bool = False) -> dict[int, int]:
            return {7: 1}

        def why_not(self, node: int, claimed: object) -> str | None:
            return None

    rounds = two_at_once(None)
    run_on(MemoryGrid({1: 7}, app=constant_app()), rounds, Badges())
    assert user_note("badge numbers") in rounds.server.statement().assumptions


def superlink_says(message: Message) -> Message:
    """What a SuperLink answers for a SuperNode that is gone: from node 1, to that message."""
    reply = Message(Error(code=3, reason="Node unavailable"), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = 1
    return reply


@pytest.mark.parametrize("gone", [11, 12])
def test_the_log_names_the_user_whose_node_died(gone: int, lines: list[str]) -> None:
    def corrupt(message: Message, reply: Message) -> list[Message]:
        is_gone = message.metadata.dst_node_id == gone and message.metadata.message_type == "train"
        return [superlink_says(message)] if is_gone else [reply]

    reports: list[Any] = []
    grid = MemoryGrid({11: 0, 12: 1}, app=constant_app(), corrupt=corrupt)
    PrivateStrategy(two_at_once(None), wait=0.0, on_round=reports.append).start(grid, num_rounds=1)
    user = {11: 0, 12: 1}[gone]
    assert [x for x in lines if "sent no update" in x] == [
        f"round 0: user {user} sent no update: 'Node unavailable'"
    ]
    assert reports[0].silent == (user,)


def test_the_log_names_the_node_that_does_not_say_who_it_is(lines: list[str]) -> None:
    def corrupt(message: Message, reply: Message) -> list[Message]:
        return [superlink_says(message)] if message.metadata.dst_node_id == 12 else [reply]

    grid = MemoryGrid({11: 0, 12: 1}, app=constant_app(), corrupt=corrupt)
    assert Handshake().online(grid) == {0: 11}
    assert any("node 12 does not say who it is" in line for line in lines)


def test_a_reply_that_cannot_be_read_ends_with_itself(lines: list[str]) -> None:
    """Flower 1.41 makes messages of bytes of clients within the Grid, which may raise anything.

    Inside of them a client may also say that it is another node.
    """

    class Strangers(MemoryGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            (number,) = message_ids
            (asked,) = [m for m in self.sent if m.metadata.message_id == number]
            found, node = super().pull_messages([number]), asked.metadata.dst_node_id
            if asked.metadata.message_type == "train" and node == 11:
                raise AttributeError("'RecordDict' object has no attribute 'metadata'")
            if node == 12:
                found[0].metadata.__dict__["_src_node_id"] = 13
            return found

    reports: list[Any] = []
    rounds = two_at_once(None, users=3)
    grid = Strangers({11: 0, 12: 1, 13: 2}, app=constant_app())
    PrivateStrategy(rounds, wait=0.0, on_round=reports.append).start(grid, num_rounds=1)
    assert (reports[0].silent, reports[0].answered) == ((0,), 2)
    assert [x for x in lines if x.startswith("round 0: user")] == [
        "round 0: user 0 sent no update: 'its reply cannot be read (AttributeError)'"
    ]


def test_parts_of_a_reply_that_never_come_hold_nobody_up(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's Grid waits for them for minutes, whatever the timeout of the round is."""
    monkeypatch.setattr(flower_replies, "PATIENCE", 0.05)
    never = threading.Event()

    class Half(MemoryGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            (number,) = message_ids
            (asked,) = [m for m in self.sent if m.metadata.message_id == number]
            if asked.metadata.message_type == "train" and asked.metadata.dst_node_id == 11:
                never.wait()
            return super().pull_messages([number])

    reports: list[Any] = []
    strategy = PrivateStrategy(two_at_once(None), wait=0.0, on_round=reports.append)
    strategy.start(Half({11: 0, 12: 1}, app=constant_app()), num_rounds=1, timeout=0.5)
    assert (reports[0].silent, reports[0].answered) == ((0,), 1)
    never.set()

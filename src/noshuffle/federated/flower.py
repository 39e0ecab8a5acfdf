"""PrivateStrategy: the rounds of `Rounds` on Flower, in a simulation or across machines.

    configure_train   users online → those the guard admits → row on the disk → one message each
    aggregate_train   every reply on its own: taken, or one line in the log → noise, update, saved
    start             from the round the log is at to the last one, or until nobody is free

No subclass of FedAvg, which weighs clients by their number of examples and so lets one count for
more than the clip norm. A run that was stopped goes on in a new run of Flower, under new node ids.
Clients' own metrics are not collected and federated evaluation is not done: both would release
functions of private data without noise. `evaluate_fn` of `start` evaluates the released parameters
on data that the server holds; keep those public, or held out from people outside the guarantee.

State: which node was asked for whom in the open round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from logging import INFO

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from noshuffle.errors import non_negative, positive, whole
from noshuffle.federated import flower_wire as wire
from noshuffle.federated.cohort import UserId
from noshuffle.federated.flower_client import (
    client_app,
    clip_mod,
    identify,
    partition_of,
    task_client,
)
from noshuffle.federated.flower_identity import (
    Handshake,
    Identities,
    PublicKeys,
    UnregisteredKeys,
    read_public_keys,
    tell,
)
from noshuffle.federated.flower_replies import ask
from noshuffle.federated.flower_wire import short
from noshuffle.federated.rounds import Invitation, RoundReport, Rounds
from noshuffle.federated.simulate import CheckIns, in_random_order
from noshuffle.federated.timer import Timer
from noshuffle.release.spending import GIVEN, USER_IDENTITY

__all__ = [
    "Handshake",
    "Identities",
    "PrivateStrategy",
    "PublicKeys",
    "Timer",
    "UnregisteredKeys",
    "client_app",
    "clip_mod",
    "identify",
    "partition_of",
    "read_public_keys",
    "task_client",
]

#: Released parameters of a round → metrics, or nothing; as in Flower.
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

#: Seconds by which the clocks of server and clients may differ.
CLOCKS = 600.0


class PrivateStrategy(Strategy):
    """Drive `Rounds` by Flower.

    Arguments:
        rounds: the protocol, with the server inside; `at_least` of it says how many users a round
            needs, otherwise a round goes on with whoever is there.
        identities: how nodes become users; by default each is asked for its partition id.
        check_ins: round → users in order of preference; those online and free are taken from the
            front. By default an order of its own every round, which a resumed run repeats.
        wait: seconds to wait for more nodes when too few users are free. Users who have reached
            their limits do not become free by waiting, so a simulation sets zero.
        poll: seconds between two looks while waiting.
        on_round: called after every round; what it gets is for whoever runs the server.
    """

    def __init__(
        self,
        rounds: Rounds,
        *,
        identities: Identities | None = None,
        check_ins: CheckIns | None = None,
        wait: float = 60.0,
        poll: float = 3.0,
        on_round: Callable[[RoundReport], None] | None = None,
    ) -> None:
        non_negative(wait=wait)
        positive(poll=poll)
        self.rounds = rounds
        self._identities = identities if identities is not None else Handshake()
        self._check_ins = check_ins
        self._wait = wait
        self._poll = poll
        self._on_round = on_round
        self._asked: dict[int, UserId] = {}
        self._timeout: float | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run up to round number `num_rounds` (the plan's last one, if not given), and save.

        Rounds are counted over all runs of Flower that used this run folder; those behind us are
        not repeated, and a round with unknown outcome is passed over. `timeout` is how long to
        wait for replies of a round; who has not answered by then counts as zero. `initial_arrays`
        and `evaluate_config` are Flower's and have no use here: the server has the parameters.
        """
        server = self.rounds.server
        last = server.plan.steps if num_rounds is None else num_rounds
        whole(at_least=0, at_most=server.plan.steps, num_rounds=last)
        positive(timeout=timeout)
        self._timeout = timeout
        self._recover()
        self.summary()
        if initial_arrays is not None:
            log(INFO, "initial_arrays are not used: the server goes on with its own parameters")
        result = Result(arrays=wire.to_arrays(server.parameters()))
        config = train_config if train_config is not None else ConfigRecord()
        self._evaluate(result, evaluate_fn)
        while server.round < last:
            number = server.round + 1
            messages = self.configure_train(number, result.arrays, config, grid)
            if not self.rounds.is_open:
                log(INFO, "round %i: too few users are free; the run ends here", server.round)
                break
            arrays, _ = self.aggregate_train(number, ask(grid, messages, timeout=timeout))
            if arrays is not None:
                result.arrays = arrays
            self._evaluate(result, evaluate_fn)
        if server.run is not None:
            self.rounds.save()
        return result

    def _recover(self) -> None:
        """After a crash, or a start() that was broken off: nothing is published twice."""
        rounds, server = self.rounds, self.rounds.server
        skipped: tuple[int, ...] = ()
        if rounds.is_open:
            skipped = (server.round - 1,)
            rounds.abandon()
        elif server.needs_resume:
            skipped = rounds.resume()
        for step in skipped:
            tell(f"round {step}: its outcome is unknown; its noise is skipped, its charge stays")

    def _evaluate(self, result: Result, evaluate_fn: EvaluateFn | None) -> None:
        number = self.rounds.server.round
        found = None if evaluate_fn is None else evaluate_fn(number, result.arrays)
        if found is not None:
            log(INFO, "after %i rounds: evaluation on the server: %s", number, dict(found))
            result.evaluate_metrics_serverapp[number] = found

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Choose users, charge them, and write to them; nothing if too few are free.

        Guarantees: when messages are returned, round and cohort are on the disk.
        """
        self._asked = {}
        server = self.rounds.server
        server.user_identity = getattr(self._identities, USER_IDENTITY, GIVEN)
        users = self._identities.online(grid)
        work = self._begin(users)
        end = time.monotonic() + self._wait
        while work is None and time.monotonic() < end:
            time.sleep(min(self._poll, max(0.0, end - time.monotonic())))
            users = self._identities.online(grid, again=True)
            work = self._begin(users)
        if work is None:
            return []
        self._asked = {users[user]: user for user in work.users}
        # A raw norm leaves a device only where it is used, for a count with noise of its own.
        own = {wire.WANTS_NORM: server.needs_norms, wire.CLIP_NORM: work.clip_norm}
        order = ConfigRecord({**config, **own, wire.STEP: work.step})
        arrays = wire.to_arrays(work.parameters)
        content = RecordDict({wire.ARRAYS: arrays, wire.CONFIG: order})
        # Who comes back after the round is over need not train for nothing.
        ttl = None if self._timeout is None else self._timeout + CLOCKS
        return [
            Message(content, node, MessageType.TRAIN, group_id=str(server_round), ttl=ttl)
            for node in self._asked
        ]

    def _begin(self, users: dict[UserId, int]) -> Invitation | None:
        order_fn = self._check_ins or in_random_order(sorted(users), seed=0)
        return self.rounds.begin([u for u in order_fn(self.rounds.server.round) if u in users])

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Sum what is valid, add noise, update. No metrics of clients are released.

        Guarantees: a reply that is an error, unreadable, from somebody who was not asked, a
        second one, for another round, of wrong names or shapes, or with NaN costs one line in the
        log and nobody else's contribution.
        """
        if not self.rounds.is_open:
            return None, None
        for reply in replies:
            line = self._take(reply)
            if line is not None:
                tell(line)
        report = self.rounds.finish()
        self._asked = {}
        # Rounds are counted from 0, as in the log and in every refusal; Flower's from 1.
        log(INFO, "round %i: asked %i, answered %i", report.step, report.asked, report.answered)
        if self._on_round is not None:
            self._on_round(report)
        return wire.to_arrays(report.parameters), None

    def _take(self, reply: Message) -> str | None:
        """One reply: None if it is used, else why not."""
        node = reply.metadata.src_node_id
        user = self._asked.get(node)
        where = f"round {self.rounds.server.round - 1}"
        if reply.has_error():
            who = f"user {short(user)}" if user is not None else f"node {node}"
            return f"{where}: {who} sent no update: {short(reply.error.reason)}"
        if user is None:
            return f"{where}: node {node} was not asked; the reply is not used"
        try:
            why = wire.section(reply, wire.DECLINED).get(wire.WHY)
            if why is not None:
                return f"{where}: user {short(user)} declines: {short(why)}"
            update = wire.section(reply, wire.UPDATE)
            line = self._identities.why_not(node, update.get(wire.USER))
            if line is not None:
                return f"{where}: the reply of user {short(user)} is not used, {line}"
            delta = wire.to_tensors(reply.content.get(wire.DELTA))
            # A reply without a step answers no round, and one without a norm cannot be counted.
            norm, step = update.get(wire.NORM), update.get(wire.STEP)
            known = norm if isinstance(norm, float) else None
            is_odd = known is None and (norm is not None or self.rounds.server.needs_norms)
            if is_odd or not isinstance(step, int):
                return f"{where}: the reply of user {short(user)} has no norm or no step"
            return self.rounds.receive(user, delta, norm=known, step=step)
        except Exception as error:
            # Whatever a stranger managed to break must not break the round of the others.
            return f"{where}: the reply of user {short(user)} is not used: {short(str(error))}"

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Nobody is asked: metrics of clients would be released without noise."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        """What this run promises, in the log."""
        server, plan = self.rounds.server, self.rounds.server.plan
        log(INFO, "PrivateStrategy at round %i of %i", server.round, plan.steps)
        noise = f"noise {plan.strategy.name}, multiplier {plan.noise_multiplier:.4g}"
        clip = f"clip norm {server.clip_norm:.4g}, {server.cohort_size} users a round"
        log(INFO, "%s, %s", noise, clip)
        log(INFO, "who may take part: %s", plan.participation)

"""Rounds: the protocol between a server and its clients, safe against crashes and bad replies.

    begin    check-ins → users that the guard admits → row on the disk → what to send
    receive  one reply: names, shapes, invitation, first answer? → clipped again → kept
    finish   sum in order of user id, unweighted → noise, update → checkpoint
    resume   last checkpoint; rounds behind it are passed over

The row of a round in the log has its number (= row of noise) and cohort. A row that no checkpoint
covers is passed over: somebody may have seen the model that came of it. Under a test source going
on is, bit for bit, the run that never stopped. Any engine drives this.
State: the open round with the replies so far, in memory only.

>>> from noshuffle import MinSeparation, Plan
>>> plan = Plan.fit(MinSeparation(8, 4, 2), mechanism="tree", noise_multiplier=1.0, unit="user")
>>> server = ServerOptimizer({"w": torch.zeros(2)}, plan, clip=1.0, cohort_size=2,
...     optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0))
>>> rounds = Rounds(server)
>>> rounds.begin(["ada", "bob", "eve"]).users
('ada', 'bob')
>>> rounds.receive("ada", {"w": torch.ones(2)})
>>> rounds.receive("eve", {"w": torch.ones(2)})
"round 0: user 'eve' was not asked; the reply is not used"
>>> rounds.finish().answered
1
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from noshuffle.clipping import ClippedSum
from noshuffle.errors import InvalidInput, Unsupported, instance_of, whole
from noshuffle.federated.clients import clip_flat
from noshuffle.federated.cohort import Cohort, UserId, Users, draw_cohort, plain
from noshuffle.federated.server import ServerOptimizer
from noshuffle.one_owner import in_turn

#: What a delta may be sent in.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Characters of a refusal: names in it are a stranger's, and may be megabytes.
_LONGEST = 300


@dataclass(frozen=True)
class Invitation:
    """What to send, and to whom. Everybody named here has been charged."""

    step: int
    users: tuple[UserId, ...]
    parameters: dict[str, Tensor]
    clip_norm: float


@dataclass(frozen=True)
class RoundReport:
    """A finished round. Counts and refusals are raw figures, for whoever runs the server only."""

    step: int
    parameters: dict[str, Tensor]
    asked: int
    answered: int
    nonfinite: int
    refused: tuple[str, ...]
    silent: tuple[UserId, ...] = ()  # asked, and no usable answer came


@dataclass
class _OpenRound:
    cohort: Cohort
    clip_norm: float
    asked: frozenset[UserId]
    replies: dict[UserId, tuple[Tensor, float, bool]] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


class Rounds:
    """One round after another.

    Arguments:
        server: the private half.
        at_least: with fewer admitted users, `begin` returns None and charges nobody.
        save_every: checkpoint after so many rounds; a crash costs the rounds since the last one.
    """

    def __init__(self, server: ServerOptimizer, *, at_least: int = 1, save_every: int = 1) -> None:
        instance_of(ServerOptimizer, server=server)
        if server.plan.neighbours == "add-remove" and not server.plan.participation.is_sampled:
            raise Unsupported(
                "without a user another one is asked in the same round, and then later than "
                "otherwise, so the steps of others do not stay as they are when one is removed; "
                'fit the plan for neighbours="zero-out", where a user stays and contributes zero'
            )
        whole(at_least=0, at_most=server.cohort_size, **{"at_least of Rounds": at_least})
        whole(save_every=save_every)
        self.server = server
        self._at_least = at_least
        self._save_every = save_every
        self._open: _OpenRound | None = None
        self._turn, self.check_owner = server._turn, server.check_owner

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @in_turn
    def begin(self, checked_in: Users) -> Invitation | None:
        """Open the next round with the first admitted users of the list; None to wait for more.

        Under a sampled plan the cohort is the secret draw, and the list must hold all of it.

        Guarantees: when this returns an invitation, round and cohort are on the disk; if it raises
        or returns None, nobody was charged.
        """
        server = self.server
        if server.run is not None and not server.run.saved():
            self.save()  # so that a run resumes from its own first model, whatever is given then
        if server.plan.participation.is_sampled:
            users = self._sampled(checked_in)
        else:
            units = server.units(checked_in)
            places = draw_cohort(server.guard, units, size=server.cohort_size)
            if len(places) < self._at_least:
                return None
            names = [*checked_in]
            users = [plain(names[i]) for i in places]
        clip_norm = server.clip_norm
        cohort = server.open(users)
        self._open = _OpenRound(cohort, clip_norm, frozenset(cohort.users))
        return Invitation(cohort.step, cohort.users, server.parameters(), clip_norm)

    def _sampled(self, checked_in: Users) -> list[UserId]:
        drawn: list[UserId] = self.server.drawn.draw(self.server.round).tolist()
        missing = set(drawn) - {plain(user) for user in checked_in}
        if missing:
            raise InvalidInput(
                f"{len(missing)} users of the secret draw of round {self.server.round} have not "
                "checked in; amplification by sampling needs all of them, so wait, or use a plan "
                "without sampling"
            )
        return drawn

    @in_turn
    def receive(
        self,
        user: UserId,
        delta: Mapping[str, Tensor],
        *,
        norm: float | None = None,
        step: int | None = None,
    ) -> str | None:
        """Take a reply. None if it was taken, else one line that says why it counts for nothing.

        `norm` is the delta's norm before the client clipped it (for a clip norm that follows a
        quantile); `step` the round that the client says it answers.

        Guarantees: what is kept has norm at most the clip norm, whatever the client did. A refusal
        changes nothing for anybody else. NaN or infinity count as a zero contribution.
        """
        if self._open is None:
            return f"no round is open; the reply of user {user!r} came too late and is not used"
        line = self._refusal(self._open, user, delta, norm, step)
        if line is None:
            flat = torch.cat([delta[name].detach().reshape(-1) for name in self.server.shapes])
            flat = flat.to(self.server.device, torch.promote_types(flat.dtype, torch.float32))
            kept, own, is_bad = clip_flat(flat, clip_norm=self._open.clip_norm)
            self._open.replies[user] = (kept, own if norm is None else _number(norm), is_bad)
            if is_bad:
                line = f"round {self._open.cohort.step}: the delta of user {user!r} has NaN or "
                line += "infinity and contributes zero"
        if line is not None:
            line = line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
            self._open.refused.append(line)
        return line

    def _refusal(
        self, now: _OpenRound, user: object, delta: object, norm: object, step: int | None
    ) -> str | None:
        """Nothing about a reply is trusted, not even its types."""
        where, end = f"round {now.cohort.step}", "the reply is not used"
        if step is not None and step != now.cohort.step:
            return f"{where}: user {user!r} answers round {step}; {end}"
        if not isinstance(user, str | int) or user not in now.asked:
            return f"{where}: user {user!r} was not asked; {end}"
        if user in now.replies:
            return f"{where}: user {user!r} answers twice; the second {end[4:]}"
        if not isinstance(delta, Mapping) or not isinstance(norm, float | int | None):
            return f"{where}: user {user!r} must send named tensors and a norm; {end}"
        shapes = self.server.shapes
        for name in shapes:
            if not isinstance(delta.get(name), Tensor):
                return f"{where}: the delta of user {user!r} lacks {name!r}; {end}"
        for name, value in delta.items():
            if name not in shapes:
                if isinstance(value, Tensor) and not value.is_floating_point():
                    continue  # a buffer that counts; nothing of it is used
                return f"{where}: the delta of user {user!r} has {name!r}, unknown here; {end}"
            is_dense = value.dtype in _FLOATS and value.layout == torch.strided
            if tuple(value.shape) != shapes[name] or not is_dense:
                return (
                    f"{where}: {name!r} of user {user!r} must be floating point of shape "
                    f"{shapes[name]}, got {value.dtype} of {tuple(value.shape)}; {end}"
                )
        return None

    @in_turn
    def finish(self) -> RoundReport:
        """Sum what came, release, save. Who did not answer counts as zero."""
        now = self._now()
        total = self._sum(now)
        parameters = self.server.step(total, cohort=now.cohort)
        self._open = None
        if self.server.run is not None and self.server.round % self._save_every == 0:
            self.save()
        return RoundReport(
            step=now.cohort.step,
            parameters=parameters,
            asked=len(now.asked),
            answered=len(now.replies),
            nonfinite=total.nonfinite,
            refused=tuple(now.refused),
            silent=tuple(user for user in now.cohort.users if user not in now.replies),
        )

    def _sum(self, now: _OpenRound) -> ClippedSum:
        """Unweighted, in order of user id, so that the bits do not depend on who came first.

        In double precision: in single, what one user adds would also change how the sums after it
        are rounded, by up to m·2⁻²⁴ of their length. They are rounded once, with their noise.
        """
        shapes = self.server.shapes
        sizes = [math.prod(shape) for shape in shapes.values()]
        total = torch.zeros(sum(sizes), dtype=torch.float64, device=self.server.device)
        parts = [now.replies[user] for user in now.cohort.users if user in now.replies]
        for flat, _, _ in parts:
            total += flat
        pieces = zip(shapes.items(), torch.split(total, sizes))
        return ClippedSum(
            values={name: piece.reshape(shape) for (name, shape), piece in pieces},
            bound=now.clip_norm,
            norms=torch.tensor([norm for _, norm, _ in parts], dtype=torch.float64, device="cpu"),
            losses=torch.empty(0, device="cpu"),
            bad=torch.tensor([is_bad for _, _, is_bad in parts], dtype=torch.bool, device="cpu"),
            present=torch.ones(len(parts), dtype=torch.bool, device="cpu"),
        )

    @in_turn
    def abandon(self) -> None:
        """Give the open round up: nothing is published, its noise is skipped, the charge stays."""
        self._now()
        self.server.abandon()
        self._open = None

    def _now(self) -> _OpenRound:
        if self._open is None:
            raise InvalidInput("no round is open; begin one first")
        return self._open

    @in_turn
    def save(self) -> None:
        """Checkpoint and statement into the run folder."""
        self.server.save()

    @in_turn
    def resume(self) -> tuple[int, ...]:
        """Load the newest checkpoint; the rounds behind it, which are passed over."""
        passed_over, run = self.server.resume(), self.server.run
        if run is not None:
            run.forget_metrics_after(self.server.round - len(passed_over))
        return passed_over

    @in_turn
    def close(self) -> None:
        """Save, and let go of the run folder; an open round is given up.

        A finished run ends: its secret is removed.
        """
        if self.server.is_open:
            self.server.abandon()
        self._open = None
        self.server.close()


def _number(norm: float) -> float:
    """A stranger's norm; a whole number beyond all floats is above every threshold."""
    try:
        return float(norm)
    except OverflowError:
        return math.inf

"""ServerOptimizer: from a sum of clipped client deltas to new parameters, with user-level privacy.

    ĝ_t = −(Σ_{u in cohort} clip(Δ_u) + row t of z·ζ·C⁻¹Z) / m,      θ_{t+1} = optimizer(θ_t, ĝ_t)

m is the planned cohort size, whoever answers. The optimizer sees released values only. The door is
`release.Release`, as in central training (Kairouz et al. 2021, arXiv 2103.00039, section 5).

`open` charges the cohort: the row of the round is on the disk when it returns, and only then may
work be sent. `step` takes the sum and releases; `abandon` gives a round up. A round whose process
died has no sum: `resume` passes over it, and it stays charged.

State: parameters, optimizer, the open round, and what `Release` keeps.

>>> from noshuffle import MinSeparation, Plan
>>> from noshuffle.noise import test_source
>>> plan = Plan.fit(MinSeparation(8, 4, 2), mechanism="tree", noise_multiplier=0.0, unit="user")
>>> server = ServerOptimizer({"w": torch.zeros(2)}, plan, clip=1.0, cohort_size=2,
...     optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0), source=test_source(seed=1))
>>> server.step({"w": torch.tensor([0.6, 0.8])}, cohort=["ada", "bob"])["w"]
tensor([0.3000, 0.4000])
>>> cohort = server.open(["eve"])
>>> server.step({"w": torch.tensor([0.2, 0.0])})["w"]
tensor([0.4000, 0.4000])
>>> server.step({"w": torch.zeros(2)}, cohort=["ada"])
Traceback (most recent call last):
    ...
noshuffle.errors.ParticipationViolation: user 'ada' may not take part in round 2: it took part in \
step 0, and with a separation of 4 it may come again from step 4 on; leave the user out
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from noshuffle.clipping import ClippedSum
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, ParticipationViolation
from noshuffle.federated import server_checks as checks
from noshuffle.federated.cohort import Cohort, Users, checked_users, plain
from noshuffle.noise import Source
from noshuffle.one_owner import OneOwner, in_turn
from noshuffle.optim.checks import check_optimizer
from noshuffle.plan import Plan
from noshuffle.plan.statement import PrivacyStatement
from noshuffle.release.account import Account
from noshuffle.release.folder import RunFolder
from noshuffle.release.open_run import Run
from noshuffle.release.release import Release, Ticket
from noshuffle.release.sampler import Sampler
from noshuffle.release.spending import GIVEN, INITIAL, USER_IDENTITY
from noshuffle.release.units import Guard, Ids

OptimizerFn = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class ServerOptimizer(OneOwner):
    """The private half of a federated server; knows nothing of how clients are reached.

    Arguments:
        parameters: a module (its trainable parameters) or named tensors; copied.
        clip: ζ, the bound on one user's delta, or a `QuantileClip` where the mechanism allows it.
        cohort_size: the planned number of users a round, by which every noisy sum is divided.
        optimizer_fn: makes the update rule from a list of parameters.
        source: where noise comes from; fresh keys of the operating system by default.
        run: a folder for secret, log and statement; None keeps them in memory.
        fork_of: a run that ends here, and whose cost this one adds to its own.
        budget: what all runs on the same users draw on (`noshuffle.Budget`).
    """

    def __init__(
        self,
        parameters: nn.Module | Mapping[str, Tensor],
        plan: Plan,
        *,
        clip: float | QuantileClip,
        cohort_size: int,
        optimizer_fn: OptimizerFn,
        source: Source | None = None,
        run: Run = None,
        fork_of: Run = None,
        budget: Account | None = None,
    ) -> None:
        checks.check_parts(plan, clip=clip, cohort_size=cohort_size, optimizer_fn=optimizer_fn)
        self.plan = plan
        self.cohort_size = cohort_size
        self._parameters = checks.own_parameters(parameters)
        self.device = next(iter(self._parameters.values())).device
        self.optimizer = optimizer_fn(list(self._parameters.values()))
        check_optimizer(self.optimizer, self._parameters)
        self._release = Release(
            plan,
            self.shapes,
            clip=clip,
            divisor=cohort_size,
            device=self.device,
            run=run,
            fork_of=fork_of,
            source=source,
            facts={"initial": INITIAL, "optimizer": checks.rule_of(self.optimizer)},
            budget=budget,
        )
        self._open: tuple[Cohort, Ticket] | None = None
        #: How users are told apart, a fact of the log from round 0 on; drivers set it.
        self.user_identity = GIVEN
        self.ancestors = self._release.ancestors
        #: Whether the run goes on from its folder, so that `resume` comes first.
        self.needs_resume = self.round > 0

    @property
    def run(self) -> RunFolder | None:
        return self._release.folder

    @property
    def guard(self) -> Guard:
        """Who took part when, and who may take part in the next round."""
        return self._release.guard

    @property
    def round(self) -> int:
        """How many rounds were opened: the number of the next one."""
        return self._release.step

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What a delta must look like, in the order it is flattened in."""
        return {name: tuple(p.shape) for name, p in self._parameters.items()}

    @property
    def clip_norm(self) -> float:
        """ζ in force for the coming round."""
        return self._release.threshold.clip.bound(tuple(self._parameters))

    @property
    def needs_norms(self) -> bool:
        """Whether the clip norm follows a quantile, for which `step` takes a `ClippedSum`."""
        return self._release.threshold.is_adaptive

    def parameters(self) -> dict[str, Tensor]:
        """Copies of the current parameters: released values, free to be sent to anybody."""
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    def client_seed(self, step: int) -> int:
        """For all that clients draw in a simulated round (dropout masks); nobody else knows it.

        One generator serves many of them, so how much one draws moves the draws of all after it.
        """
        return self._release.seed(step)

    def sampler(self, population: int) -> Sampler:
        """The secret draws of a sampled plan (users are 0 … population − 1)."""
        return self._release.sampler(population)

    @property
    def drawn(self) -> Sampler:
        """The sampler that was made last."""
        return self._release.drawn

    def units(self, users: Users) -> Ids:
        """The numbers by which the log knows users; a run names all by strings, or by integers.

        Strings are hashed under the secret of the run, so that a log does not give away who took
        part.
        """
        return self._release.identify(checked_users(users))

    @in_turn
    def open(self, users: Users) -> Cohort:
        """Charge a cohort for the next round; send work only after this has returned.

        Guarantees: raises, and charges nobody, if a user is outside the participation or named
        twice, if the plan is used up, or if an earlier round is still open or failed half-way. When
        it returns, round and users are on the disk (with a run folder).
        """
        self._check_between()
        release, step = self._release, self.round
        units = release.identify(checked_users(users))
        names = [plain(user) for user in users]
        if len(np.unique(units)) < len(units):
            raise ParticipationViolation(
                f"a user is named twice in round {step}; a cohort holds each user once"
            )
        order = sorted(range(len(names)), key=names.__getitem__)
        cohort = Cohort(step, tuple(names[i] for i in order), units[order])
        release.bind(USER_IDENTITY, self.user_identity)
        try:
            ticket = release.admit(cohort.units)
        except ParticipationViolation:
            why = checks.why_not(self.guard, cohort.users, cohort.units)
            raise ParticipationViolation(why) from None
        self._open = cohort, ticket
        release.flush()
        return cohort

    @property
    def is_open(self) -> bool:
        """Whether a round waits for its sum, or to be abandoned."""
        return self._open is not None and not self._open[1].is_used

    def _check_between(self) -> None:
        if self.is_open:
            raise InvalidInput(f"round {self.round - 1} is still open; finish or abandon it first")
        self._release.check_ready()

    @in_turn
    def step(
        self,
        sum_of_clipped_deltas: Mapping[str, Tensor] | ClippedSum,
        *,
        cohort: Cohort | Users | None = None,
    ) -> dict[str, Tensor]:
        """Release a round: add noise, divide by the planned cohort, update; the new parameters.

        `cohort` is what `open` gave, or None for the round that is open; a list of users is opened
        (charged) first.

        Guarantees: a sum with wrong names or shapes, with NaN or infinity, longer than the cohort
        could have made it, or clipped to another norm, is refused before the noise is touched.
        After that exactly one row of noise is used, whatever the sum is; zero gives noise alone.
        """
        given = sum_of_clipped_deltas
        if cohort is None and self._open is not None:
            cohort = self._open[0]
        if cohort is None:
            raise InvalidInput("no round is open; open(users) one first, or give cohort=users")
        if self.needs_norms and not isinstance(given, ClippedSum):
            raise InvalidInput("a clip norm that follows a quantile needs a ClippedSum with norms")
        users = len(cohort.users if isinstance(cohort, Cohort) else checked_users(cohort))
        values = checks.checked_sum(given, self.shapes, users=users, clip_norm=self.clip_norm)
        values = {name: value.to(self.device) for name, value in values.items()}
        ticket, sums = self._claim(cohort), [given] if isinstance(given, ClippedSum) else []
        self._release.close(ticket, values, sums=sums)
        for name, parameter in self._parameters.items():
            parameter.grad = values[name].neg_().to(parameter.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._release.finish(ticket)
        self._open = None
        return self.parameters()

    def _claim(self, cohort: Cohort | Users) -> Ticket:
        cohort = cohort if isinstance(cohort, Cohort) else self.open(cohort)
        if self._open is None or self._open[0] is not cohort:
            raise InvalidInput(
                f"round {cohort.step} is not open (any more); a round is released once, by the "
                "cohort that open() gave"
            )
        return self._open[1]

    @in_turn
    def abandon(self) -> None:
        """Give the open round up: nothing is published, its noise is thrown away, its charge stays.

        Later rounds have the noise that they would have had.
        """
        if self._open is None or self._open[1].is_used:
            self._check_between()
            raise InvalidInput("no round is open; open one first")
        self._release.pass_over(self._open[1])
        self._open = None

    def statement(self) -> PrivacyStatement:
        """The guarantee for every user of the rounds so far, those skipped included.

        With a clip norm that follows a quantile it is that of the whole plan from the first round
        on, since the noise makes room for the counts over all rounds.
        """
        return self._release.statement()

    @in_turn
    def save(self) -> None:
        """Checkpoint and statement into the run folder, between rounds."""
        self._check_between()
        state = {"model": self.parameters(), "optimizer": self.optimizer.state_dict()}
        self._release.save(state, secret={"random": torch.get_rng_state()})

    @in_turn
    def resume(self) -> tuple[int, ...]:
        """Load the newest checkpoint; the rounds behind it, which are passed over.

        Settings of the optimizer that were changed on the way (a schedule) are those that were
        saved. Rounds that were passed over publish nothing, and stay charged.
        """
        if self._open is not None:
            self._check_between()
        state, first = self._release.restore(), 0
        if state is not None:
            first = int(state["step"])
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(state["model"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["secret"]["random"])
        self.needs_resume = False
        return tuple(range(first, self.round))

    @in_turn
    def close(self) -> None:
        """Save, and let go of the run folder, which another process may then go on with.

        A finished run ends: its secret is removed. A round that is open, or that failed half-way,
        is left to whoever resumes the run.
        """
        is_whole = self._open is None and not self.needs_resume
        if self.run is not None and is_whole and not self._release.log.is_closed:
            self.save()
        self._release.close_run()

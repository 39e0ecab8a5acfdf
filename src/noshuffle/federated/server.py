"""ServerOptimizer: from a sum of clipped client deltas to new parameters, with user-level privacy.

    ĝ_t = −(Σ_{u in cohort} clip(Δ_u) + row t of z·ζ·C⁻¹Z) / m,      θ_{t+1} = optimizer(θ_t, ĝ_t)

m is the planned cohort size, whoever answers. The optimizer sees released values only. The door is
`release.Release`, as in central training (Kairouz et al. 2021, arXiv 2103.00039, section 5).

`open` charges the cohort: step and users are durable when it returns, and only then may work be
sent. `step` takes the sum and releases. A round whose result is unknown (a crash) is passed over by
`skip_unknown`: publishing anything else under its row could cancel its noise.

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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noshuffle.clipping import ClippedSum, Flat
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, NoshuffleError, ParticipationViolation, instance_of
from noshuffle.federated import server_checks as checks
from noshuffle.federated.cohort import Cohort, Users, checked_users, plain
from noshuffle.noise import Source
from noshuffle.one_owner import OneOwner, in_turn
from noshuffle.plan import Plan
from noshuffle.release.account import Account
from noshuffle.release.facts import (
    GIVEN,
    INITIAL,
    ROUND_PRINTS,
    USER_IDENTITY,
    check_optimizer,
    round_print,
)
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger import Admission, Ledger
from noshuffle.release.release import Release
from noshuffle.release.sampler import Sampler
from noshuffle.release.unit_ids import Ids
from noshuffle.statement import PrivacyStatement

OptimizerFn = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class ServerOptimizer(OneOwner):
    """The private half of a federated server; knows nothing of how clients are reached.

    Arguments:
        parameters: a module (its trainable parameters) or named tensors; copied.
        clip: ζ, the bound on one user's delta, or a `QuantileClip` where the mechanism allows it.
        cohort_size: the planned number of users a round, by which every noisy sum is divided.
        optimizer_fn: makes the update rule from a list of parameters.
        source: where noise comes from; fresh keys of the operating system by default.
        run: a folder for keys, ledger and statement; None keeps them in memory.
        initial: where the initial parameters come from, for the statement; not from the users.
        moved: without effect; a copied folder goes on under fresh keys.
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
        run: RunFolder | str | Path | None = None,
        initial: str = INITIAL,
        moved: bool = False,
        budget: Account | None = None,
    ) -> None:
        checks.check_parts(plan, clip=clip, cohort_size=cohort_size, optimizer_fn=optimizer_fn)
        self.plan = plan
        self.cohort_size = cohort_size
        self._parameters = checks.own_parameters(parameters)
        self.device = next(iter(self._parameters.values())).device
        self.optimizer = optimizer_fn(list(self._parameters.values()))
        check_optimizer(self.optimizer, self._parameters)
        self._built = checks.built_settings(self.optimizer)
        self._release = Release.begin(
            plan,
            self.shapes,
            clip=clip if isinstance(clip, QuantileClip) else Flat(float(clip)),
            divisor=cohort_size,
            device=self.device,
            run=run,
            source=source,
            facts=dict([ROUND_PRINTS, ("initial", initial)]),
            budget=budget,
        )
        self.run = self._release.folder
        self._open: tuple[Cohort, Admission] | None = None
        self._is_torn = False
        #: How users are told apart, a fact of the ledger from round 0 on; drivers set it.
        self.user_identity = GIVEN
        self.ancestors = self._release.ancestors
        self._statement: PrivacyStatement | None = None
        if not self.ledger.released:  # a folder has a statement from its beginning on
            self.write_statement()

    @property
    def ledger(self) -> Ledger:
        return self._release.ledger

    @property
    def round(self) -> int:
        """Rows of noise used so far: the number of the next round."""
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

    def units(self, users: Users) -> Ids:
        """The numbers by which the ledger knows users; a run names all by strings, or by integers.

        Strings are hashed under a secret of the run, so that a ledger does not give away who took
        part.
        """
        return self._release.identify(checked_users(users), is_question=True)

    @in_turn
    def open(self, users: Users) -> Cohort:
        """Charge a cohort for the next round; send work only after this has returned.

        Guarantees: raises, and charges nobody, if a user is outside the participation or named
        twice, if the plan is used up, or if an earlier round is still open or was torn. When it
        returns, step and users are on the disk (with a run folder).
        """
        self._check_ready()
        units = self._release.identify(checked_users(users))
        names = [plain(user) for user in users]
        if len(np.unique(units)) < len(units):
            raise ParticipationViolation(
                f"a user is named twice in round {self.round}; a cohort holds each user once"
            )
        order = sorted(range(len(names)), key=names.__getitem__)
        cohort = Cohort(self.round, tuple(names[i] for i in order), units[order])
        self._open = cohort, self._charge(cohort)
        return cohort

    def _check_whole(self) -> None:
        if self._is_torn:
            raise NoshuffleError("a round failed half-way; resume from the last checkpoint")

    def _check_ready(self) -> None:
        self._check_whole()
        if self._open is not None:
            raise InvalidInput(
                f"round {self._open[0].step} is still open; finish or abandon it first"
            )
        if self.round != self.ledger.released:
            raise InvalidInput(
                f"the ledger knows of {self.ledger.released} rounds, this server is at "
                f"{self.round}; call Rounds(server).resume(), or load its last state and "
                "skip_unknown()"
            )

    def _charge(self, cohort: Cohort) -> Admission:
        release = self._release
        what = round_print(cohort.step, cohort.units, secret=release.secret)
        try:
            admission = release.admit(cohort.step, cohort.units, what)
        except ParticipationViolation:
            why = checks.why_not(self.ledger, cohort.users, cohort.units)
            raise ParticipationViolation(why) from None
        self.ledger.bind(USER_IDENTITY, self.user_identity)
        release.open(admission)
        return admission

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
        admission = self._claim(cohort)
        self._is_torn = True
        counted = self._release.counted([given]) if isinstance(given, ClippedSum) else []
        self._release.close(admission, values, also=counted, is_open=True)
        for name, parameter in self._parameters.items():
            parameter.grad = values[name].neg_().to(parameter.dtype)
        if isinstance(given, ClippedSum):
            self._release.learn([given], step=admission.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._open, self._is_torn = None, False
        return self.parameters()

    def _claim(self, cohort: Cohort | Users) -> Admission:
        cohort = cohort if isinstance(cohort, Cohort) else self.open(cohort)
        if self._open is None or self._open[0] is not cohort:
            raise InvalidInput(
                f"round {cohort.step} is not open (any more); a round is released once, by the "
                "cohort that open() gave"
            )
        return self._open[1]

    @in_turn
    def skip_unknown(self) -> tuple[int, ...]:
        """Pass over rounds that were charged and whose result is unknown; returns their numbers.

        Guarantees: their rows of noise are drawn as they would have been (later rows depend on
        them) and thrown away; parameters and optimizer stay; the charges stay.
        """
        self._check_whole()
        rounds = tuple(self._release.skip() for _ in range(self.round, self.ledger.released))
        self._open = None
        return rounds

    def statement(self) -> PrivacyStatement:
        """The guarantee for every user of the rounds so far, those skipped included.

        With a clip norm that follows a quantile it is that of the whole plan from the first round
        on, since the noise makes room for the counts over all rounds.
        """
        return self._statement or self._release.statement()

    @in_turn
    def state_dict(self) -> dict[str, Any]:
        """Everything but the key, between rounds; goes into `release.checkpoint` as it is."""
        if self._is_torn or self._open is not None:
            raise InvalidInput("a state is taken between rounds; finish or abandon the open one")
        return {
            **self._release.state_dict(),
            "model": self.parameters(),
            "rule": type(self.optimizer).__name__,
            "built": self._built,
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }

    @in_turn
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; another plan, key, cohort, model or optimizer is refused.

        Settings of the optimizer that were changed on the way (a schedule) are those of the state.
        Rounds that the ledger knows of beyond it must then be passed over with `skip_unknown`.
        """
        instance_of(Mapping, state=state)
        self._release.check_state(state)
        rule = type(self.optimizer).__name__
        checks.check_state(state, self.shapes, rule=rule, built=self._built)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state["model"][name])
        self.optimizer.load_state_dict(dict(state["optimizer"]))
        self._release.load_state_dict(state)
        torch.set_rng_state(state["random"])
        self._open, self._is_torn = None, False

    @in_turn
    def save(self) -> None:
        self._release.save(self.state_dict())

    @in_turn
    def load(self) -> None:
        state = self._release.saved()
        if state is not None:
            self.load_state_dict(state)

    def write_statement(self) -> None:
        """Bring statement.json up to date with the ledger, if there is a run folder."""
        self._release.write_statement()

    @in_turn
    def close(self, *, keep_keys: bool = False) -> None:
        """Let go of the ledger and of the run folder, which another process may then go on with.

        A finished run is sealed: its keys are destroyed, unless `keep_keys`.
        """
        if self._statement is None:
            self._release.settle_budget()
            self._statement = self._release.statement()
            self._release.close_run(keep_keys=keep_keys)

"""ServerOptimizer: from a sum of clipped client deltas to new parameters, with user-level privacy.

    ĝ_t = −(Σ_{u in cohort} clip(Δ_u) + row t of z·ζ·C⁻¹Z) / m,      θ_{t+1} = optimizer(θ_t, ĝ_t)

m is the planned cohort size, whoever answers: drop-outs only make the sum smaller. The optimizer
is any of torch's (FTRL, SGD with momentum, Adam); it sees released values only, hence costs no
privacy. Plan, noise stream, threshold, ledger and statement are those of central training; only
the producer of the clipped sum differs (Kairouz et al. 2021, arXiv 2103.00039, section 5).

A round has two halves. `open` charges the cohort: the step (which is the number of its noise row)
and the users are durable in the ledger when it returns, and only then may work be sent. `step`
takes the sum and releases. A round that was opened and whose result is unknown (a crash) is passed
over by `skip_unknown`: its row of noise is drawn and thrown away, nothing is published, the charge
stays. Publishing anything else under that row could cancel its noise against the first time.

State: parameters, optimizer, noise buffers, threshold, step; the ledger keeps itself.

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
step 0 and the plan asks for 4 steps in between; leave the user out
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
from noshuffle.federated.cohort import Cohort, Roster, Users, checked_users
from noshuffle.federated.server_checks import (
    built_settings,
    check_parts,
    check_state,
    checked_sum,
    own_parameters,
    state_print,
    why_not,
)
from noshuffle.noise import NoiseStream, Source
from noshuffle.one_owner import OneOwner
from noshuffle.plan import Plan
from noshuffle.release import fingerprint
from noshuffle.release.facts import (
    ROUND_PRINTS,
    bind_facts,
    check_optimizer,
    keys_of,
    round_print,
)
from noshuffle.release.folder import RunFolder
from noshuffle.release.folder_lock import take
from noshuffle.release.ledger_location import open_ledger
from noshuffle.release.sampler import Sampler, make_sampler
from noshuffle.release.spending import FACTS, notes_of, spent
from noshuffle.release.threshold import threshold_for
from noshuffle.release.user_identity import GIVEN, USER_IDENTITY
from noshuffle.statement import PrivacyStatement

OptimizerFn = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class ServerOptimizer(OneOwner):
    """The private half of a federated server; knows nothing of how clients are reached.

    Arguments:
        parameters: a module (its trainable parameters) or named tensors; copied.
        plan: with unit="user".
        clip: ζ, the bound on one user's delta, or a `QuantileClip` where the mechanism allows it.
        cohort_size: the planned number of users a round, by which every noisy sum is divided.
        optimizer_fn: makes the update rule from a list of parameters.
        source: where noise comes from; a fresh key of the operating system by default.
        run: a folder for key, ledger and statement; None keeps them in memory.
        moved: the promise that a run folder found at another place was moved there, not copied.
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
        moved: bool = False,
    ) -> None:
        check_parts(plan, clip=clip, cohort_size=cohort_size, optimizer_fn=optimizer_fn)
        self.plan = plan
        self.cohort_size = cohort_size
        self.run = run if isinstance(run, RunFolder) or run is None else RunFolder(run)
        self._parameters = own_parameters(parameters)
        self.device = next(iter(self._parameters.values())).device
        self._keys = keys_of(self.run, plan, source, self.device)
        self._lock = None if self.run is None else take(self.run.path)
        self.ledger = open_ledger(self.run, plan, moved=moved)
        bound_to = clip if isinstance(clip, QuantileClip) else Flat(float(clip))
        bind_facts(self.ledger, plan, self._keys.source, clip=bound_to, batch_size=cohort_size)
        if not self.ledger.released:  # else another version may have written some of them
            self.ledger.bind(*ROUND_PRINTS)
        self._secret = fingerprint.secret_of(self._keys.source.key)
        self.roster = Roster(secret=self._secret, kind=self.ledger.meta("user_ids") or "")
        self._threshold = threshold_for(bound_to, plan, self._keys.source)
        self._noise = NoiseStream(
            plan.strategy.recipe(plan.steps),
            self._keys.source,
            self.shapes,
            scale=self._threshold.noise_scale(plan, tuple(self._parameters)),
            steps=plan.steps,
            device=self.device,
        )
        self.optimizer = optimizer_fn(list(self._parameters.values()))
        check_optimizer(self.optimizer, self._parameters)
        self._built = built_settings(self.optimizer)
        self._open: Cohort | None = None
        self._is_torn = False
        #: How users are told apart, a fact of the ledger from round 0 on; drivers set it.
        self.user_identity = GIVEN
        self.ancestors = self.run.ancestors() if self.run is not None else ()

    @property
    def round(self) -> int:
        """Rows of noise used so far: the number of the next round."""
        return self._noise.step

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What a delta must look like, in the order it is flattened in."""
        return {name: tuple(p.shape) for name, p in self._parameters.items()}

    @property
    def clip_norm(self) -> float:
        """ζ in force for the coming round."""
        return self._threshold.clip.bound(tuple(self._parameters))

    @property
    def needs_norms(self) -> bool:
        """Whether the clip norm follows a quantile, for which `step` takes a `ClippedSum`."""
        return self._threshold.is_adaptive

    def parameters(self) -> dict[str, Tensor]:
        """Copies of the current parameters: released values, free to be sent to anybody."""
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    def sampler(self, population: int) -> Sampler:
        """The secret draws of a sampled plan (users are 0 … population − 1)."""
        sampler = make_sampler(
            self.plan.participation, key=self._keys.sampling, population=population
        )
        self.ledger.bind("population", str(population))
        self.ledger.sampler = sampler
        return sampler

    def open(self, users: Users) -> Cohort:
        """Charge a cohort for the next round; send work only after this has returned.

        Guarantees: raises, and charges nobody, if a user is outside the participation or named
        twice, if the plan is used up, or if an earlier round is still open or was torn. When it
        returns, step and users are on the disk (with a run folder).
        """
        self._check_ready()
        units = self.roster.units(users)
        names = [user if isinstance(user, str) else int(user) for user in users]
        if len(np.unique(units)) < len(units):
            raise ParticipationViolation(
                f"a user is named twice in round {self.round}; a cohort holds each user once"
            )
        order = sorted(range(len(names)), key=names.__getitem__)
        units = units[order]
        cohort = Cohort(self.round, tuple(names[i] for i in order), units)
        self._admit(cohort)
        self._open = cohort
        return cohort

    def _check_ready(self) -> None:
        if self._is_torn:
            raise NoshuffleError("a round failed half-way; resume from the last checkpoint")
        if self._open is not None:
            raise InvalidInput(f"round {self._open.step} is still open; finish or abandon it first")
        if self.round != self.ledger.released:
            raise InvalidInput(
                f"the ledger knows of {self.ledger.released} rounds, this server is at "
                f"{self.round}; call Rounds(server).resume(), or load its last state and "
                "skip_unknown()"
            )

    def _admit(self, cohort: Cohort) -> None:
        what = round_print(cohort.step, cohort.units, secret=self._secret)
        settings = {"clip": self._threshold.settings(), "cohort_size": self.cohort_size}
        state = state_print(settings, self.optimizer, self._parameters)
        try:
            admission = self.ledger.admit(cohort.step, cohort.units, what, state=state)
        except ParticipationViolation:
            raise ParticipationViolation(why_not(self.ledger, cohort.users, cohort.units)) from None
        if self.roster.kind:
            self.ledger.bind("user_ids", self.roster.kind)
        if cohort.step == 0 or self.ledger.meta(USER_IDENTITY) is not None:
            self.ledger.bind(USER_IDENTITY, self.user_identity)  # version 0.1 did not write it
        self.ledger.record(admission)

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
        cohort = self._open if cohort is None else cohort
        if cohort is None:
            raise InvalidInput("no round is open; open(users) one first, or give cohort=users")
        if self.needs_norms and not isinstance(given, ClippedSum):
            raise InvalidInput("a clip norm that follows a quantile needs a ClippedSum with norms")
        users = len(cohort.users if isinstance(cohort, Cohort) else checked_users(cohort))
        values = checked_sum(given, self.shapes, users=users, clip_norm=self.clip_norm)
        values = {name: value.to(self.device) for name, value in values.items()}
        opened = self._claim(cohort)
        # A threshold that moves keeps the noise in its own units: sum/ζ + noise, then times ζ.
        norm = self.clip_norm if self.needs_norms else 1.0
        self._is_torn = True
        if norm != 1.0:
            for value in values.values():
                value.mul_(1.0 / norm)
        self._noise.add_(values, times=-norm / self.cohort_size)
        for name, parameter in self._parameters.items():
            parameter.grad = values[name].to(parameter.dtype)
        if isinstance(given, ClippedSum):
            self._threshold.learn([given], step=opened.step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._open, self._is_torn = None, False
        return self.parameters()

    def _claim(self, cohort: Cohort | Users) -> Cohort:
        if not isinstance(cohort, Cohort):
            return self.open(cohort)
        if self._open is not cohort:
            raise InvalidInput(
                f"round {cohort.step} is not open (any more); a round is released once, by the "
                "cohort that open() gave"
            )
        return cohort

    def skip_unknown(self) -> tuple[int, ...]:
        """Pass over rounds that were charged and whose result is unknown; returns their numbers.

        Guarantees: their rows of noise are drawn as they would have been (later rows depend on
        them) and thrown away; parameters and optimizer stay; the charges stay.
        """
        if self._is_torn:
            raise NoshuffleError("a round failed half-way; resume from the last checkpoint")
        rounds = tuple(range(self.round, self.ledger.released))
        for number in rounds:
            self.ledger.bind(f"skipped {number}", "yes")
            self._noise.add_(
                {n: torch.zeros(s, device=self.device) for n, s in self.shapes.items()}
            )
        self._open = None
        return rounds

    def statement(self) -> PrivacyStatement:
        """The guarantee for every user of the rounds so far, those skipped included.

        With a clip norm that follows a quantile it is that of the whole plan from the first round
        on: the noise makes room for the counts over all rounds, which a shorter run would divide
        differently.
        """
        notes = notes_of({name: self.ledger.meta(name) for name in FACTS})
        return spent(self.plan, self.ledger.released, ancestors=self.ancestors, notes=notes)

    def _identity(self) -> dict[str, Any]:
        return {
            "plan": self.plan.hash,
            "key": self._keys.source.fingerprint,
            "cohort_size": self.cohort_size,
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything but the key, between rounds; goes into `release.checkpoint` as it is."""
        if self._is_torn or self._open is not None:
            raise InvalidInput("a state is taken between rounds; finish or abandon the open one")
        return {
            **self._identity(),
            "step": self.round,
            "threshold": self._threshold.state_dict(),
            "model": self.parameters(),
            "rule": type(self.optimizer).__name__,
            "built": self._built,
            "optimizer": self.optimizer.state_dict(),
            "noise": self._noise.state_dict(),
            "random": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; another plan, key, cohort, model or optimizer is refused.

        Settings of the optimizer that were changed on the way (a schedule) are those of the state.
        Rounds that the ledger knows of beyond it must then be passed over with `skip_unknown`.
        """
        instance_of(Mapping, state=state)
        for name, own in self._identity().items():
            if state.get(name) != own:
                raise InvalidInput(
                    f"this state was saved with {name} = {state.get(name)}, the run has {own}; "
                    "build the server as it was, or fork the run"
                )
        rule = type(self.optimizer).__name__
        check_state(state, self.shapes, rule=rule, built=self._built)
        if int(state["step"]) > self.ledger.released:
            raise InvalidInput(
                f"this state was taken after {state['step']} rounds, the ledger knows of "
                f"{self.ledger.released}; give the run folder that saw them"
            )
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state["model"][name])
        self.optimizer.load_state_dict(dict(state["optimizer"]))
        self._noise.load_state_dict(state["noise"])
        self._threshold.load_state_dict(state["threshold"])
        torch.set_rng_state(state["random"])
        self._open, self._is_torn = None, False

    def close(self) -> None:
        """Let go of the ledger and of the run folder, which another process may then go on with."""
        self.ledger.close()
        self._lock = None

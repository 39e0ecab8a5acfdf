"""Release: the one way out for a noisy number. It owns keys, noise, guard, ledger and clip bound.

    admit    the units of a step, against the plan and all earlier steps           (guard, ledger)
    sum      whoever drives this makes the clipped sum, however fast he can
    commit   the row of the step is on the disk, with a keyed digest of the sum    (ledger)
    noise    add row t of z·ζ·C⁻¹Z on the grid, divide by the planned constant     (noise)

A driver never sees a key, never draws, and never writes a row. A step that was released before is
released again only if its sum has the same digest; otherwise it is passed over (`skip`): its noise
is drawn and thrown away, nothing is published, its charge stays. A digest may follow its row
(`Later`); a step whose digest never reached the disk is not repeated, only passed over.

State: that of the run (`run_state`), and the step whose noise may be used.

>>> import torch
>>> from noshuffle import Plan, SinglePass
>>> plan = Plan.fit(SinglePass(steps=3), mechanism="tree", noise_multiplier=0.0)
>>> release = Release.begin(plan, {"w": (2,)}, clip=Flat(1.0), divisor=4)
>>> admission = release.admit(0, release.identify([7, 8]))
>>> total = {"w": torch.tensor([0.6, 0.8])}
>>> release.close(admission, total)
>>> total["w"], release.released
(tensor([0.1500, 0.2000]), 1)
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.clipping import Clip, ClippedSum, Flat
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, NoshuffleError, ReplayRefused, positive
from noshuffle.noise import Source
from noshuffle.plan import Plan
from noshuffle.release import account, digest, tags
from noshuffle.release.ledger import Admission
from noshuffle.release.opening import Run, open_run
from noshuffle.release.run_state import RunState
from noshuffle.release.unit_ids import Ids, ids_and_kind
from noshuffle.triton_shim import is_capturing

#: A digest that is there, or one to wait for.
Later = bytes | Callable[[], bytes]


class Release(RunState):
    """The door of one run. Build it with `begin`.

    Guarantees: what leaves by `close` is (sum + noise of step t) / divisor for units that the plan
    admits, each clipped to the bound that the ledger names; its row is durable before its noise is
    used; the same noise never lies under two different sums, whatever is repeated, copied, rolled
    back or killed. If anything fails before the row is written, nothing was released; if something
    fails after it, the noise stream refuses to go on and the run continues from its last
    checkpoint.
    """

    @classmethod
    def begin(
        cls,
        plan: Plan,
        shapes: Mapping[str, Sequence[int]],
        *,
        clip: float | Clip | QuantileClip,
        divisor: float = 1,
        device: torch.device | str = "cpu",
        run: Run = None,
        source: Source | None = None,
        facts: Mapping[str, str] | None = None,
        budget: account.Account | None = None,
    ) -> Release:
        """Begin a run, or come back to the one in the folder `run`.

        Arguments:
            shapes: what is summed, by name.
            clip: the bound on one unit's contribution to one step.
            divisor: the planned constant that every noisy sum is divided by.
            source: where noise comes from; keys of the operating system by default.
            facts: further facts that the ledger is to hold; a different value later is refused.
            budget: what all runs on the same data draw on (`noshuffle.Budget`).
        """
        positive(divisor=divisor)
        # A checkpoint with numbers of NumPy could not be loaded again (torch, weights_only).
        divisor = divisor.item() if isinstance(divisor, np.generic) else divisor
        place = torch.device(device)
        bound = Flat(float(clip)) if isinstance(clip, int | float | np.number) else clip
        opened = open_run(plan, run=run, source=source, device=place, budget=budget)
        try:
            return cls(plan, opened, shapes, clip=bound, divisor=divisor, device=place, facts=facts)
        except BaseException as error:
            opened.give_up(plan, is_refused=isinstance(error, NoshuffleError))
            raise

    def seed(self, step: int, part: int = 0) -> int:
        """For the random layers of a model in one part of a step: the same in every replay."""
        data = f"{self._rng_seed} {step} {part}"
        made = hashlib.blake2b(data.encode(), key=self.mask_key(step), digest_size=7)
        return int.from_bytes(made.digest(), "little")

    def mask_key(self, step: int) -> bytes:
        """What masks and copies are drawn by; empty in runs of before that drew by a public seed.

        Of the life of the step, as its batch: two that go on from one folder share no draw.
        """
        if self._rng_seed != "secret":
            return b""
        newest = self._ring.lives[-1]  # as `of_step` would find it, without a call in every step
        return newest.sampling if newest.step <= step else self._ring.sampling_key(step)

    def identify(self, ids: Any, *, rows: int | None = None, is_question: bool = False) -> Ids:
        """Unit ids as numbers, one for each of `rows`, where that is given.

        A run takes integers in every step, or names in every step; of which kind, its first step
        says, and no question that was asked before (`is_question`).
        """
        if rows is not None and isinstance(ids, set | frozenset):
            raise InvalidInput("ids must be in the order of the examples, and a set has none")
        # what is refused leaves nothing on record
        found, kind = ids_and_kind(ids, secret=self.id_secret)
        if rows not in (None, len(found)):
            raise InvalidInput(f"ids must name each of the {rows} examples, got {len(found)} ids")
        self._know_by(kind, is_question=is_question)
        return found

    def _know_by(self, kind: str, *, is_question: bool = False) -> None:
        """Units are told apart by ids of this kind, and of no other from here on."""
        if kind and kind != self._kind_of_ids:
            if self._kind_of_ids:
                raise InvalidInput(
                    f"this run told its units apart by {self._kind_of_ids}, and now {kind} came; "
                    "5 and '5' would count as two units, so give the same kind in every step"
                )
            if not is_question:
                self.ledger.bind("ids", kind)
                self._kind_of_ids = kind

    def admit(
        self,
        step: int,
        ids: Ids | None,
        batch: bytes = b"",
        *,
        drop: bool = False,
        is_partial: bool = False,
    ) -> Admission:
        """Leave to sum these units, before anything of them is computed; see `Ledger.admit`."""
        return self.ledger.admit(step, ids, batch, drop=drop, is_partial=is_partial)

    def digest(self, values: Mapping[str, Tensor], also: Sequence[Tensor] = ()) -> Later:
        """The keyed digest of a clipped sum: at once in ordinary memory, later on a device.

        `also`: what else the noise of the step goes onto (a count). A clip norm that moves goes in
        too: the noise is a multiple of it.
        """
        group = [*(values[name] for name in sorted(values)), *also]
        if self.threshold.is_adaptive:
            norm = self.threshold.clip.bound(tuple(self._shapes))
            group.append(torch.tensor([norm], dtype=torch.float64, device=self._device))
        # Two types of two bytes give one row of bits two meanings; wider ones differ in size.
        narrow = " ".join(str(own.dtype) for own in group if own.element_size() < 4).encode()
        if not group or group[0].device.type == "cpu":
            return self.finished(tags.of_group(group, self.secret) + narrow)
        found = digest.begin_group(group, self.secret)
        return lambda: self.finished(found() + narrow)

    def finished(self, raw: bytes) -> bytes:
        """What the ledger holds of a digest: nobody without the secret learns anything from it."""
        return hmac.digest(self.secret, b"ns-sum" + raw, "sha256")[:16]

    def commit(self, admission: Admission, of_sum: Later) -> bool:
        """Write the row of a step, or compare a repeated one with its row; then use the noise.

        Returns False where a repeated sum differs from the released one: it must be passed over.

        Guarantees: when this returns True, the row is durable, and the noise of the step lies
        under this sum and no other.
        """
        self._check_turn(admission)
        if admission.is_replay:
            released = self.ledger.digest(admission.step)
            found = of_sum if isinstance(of_sum, bytes) else of_sum()
            if not released or not hmac.compare_digest(released, found):
                return False
            self.ledger.note("replay", step=admission.step)
        elif isinstance(of_sum, bytes):
            self.ledger.record(admission, of_sum)
        else:
            self.ledger.record(admission)
            self.ledger.expect_digest(admission.step, of_sum)
        self._leave = admission.step
        return True

    def open(self, admission: Admission) -> None:
        """Write the row of a step whose sum does not exist yet (a federated round); see `close`."""
        is_late = self.folder is None and admission.step < self.step  # noise was used without it
        if not is_late:
            self._check_turn(admission)
        self.ledger.record(admission)
        self._leave = -1 if is_late else admission.step

    def _check_turn(self, admission: Admission) -> None:
        """Leave for one step must not use the noise of another, which lies under another sum."""
        if not admission.is_replay and self.noise.step < self._fresh:
            raise ReplayRefused(
                f"the noise of step {self.step} was used before this run was put back, without a "
                "row that says for which sum; begin a new run"
            )
        if admission.step != self.noise.step:
            raise InvalidInput(
                f"leave was given for step {admission.step}, and the noise is that of step "
                f"{self.step}; ask for leave once a step: admit(release.step, ids)"
            )

    def close(
        self,
        admission: Admission,
        values: dict[str, Tensor],
        *,
        also: Sequence[Tensor] = (),
        is_open: bool = False,
    ) -> None:
        """From the clipped sum to the private mean, in place: digest, row, noise, division.

        `also`: see `digest`. `is_open`: the row was written by `open`; the digest follows it.

        Guarantees: raises `ReplayRefused`, with the sum as it was, where a repeated step does not
        have the released sum.
        """
        of_sum = self.digest(values, also)
        if is_open:
            self._check_turn(admission)
            self._check_leave()
            self.ledger.expect_digest(admission.step, of_sum)
        elif not self.commit(admission, of_sum):
            raise self.refusal(admission.step)
        self.add_noise_(values)

    def add_noise_(self, values: dict[str, Tensor]) -> None:
        """The noise of a committed step, and the division. A clip norm that moves keeps the noise
        in its own units: sum/ζ + noise, then times ζ.

        Guarantees: raises where the row of this step was not written, or its noise was used. (A
        run in memory, which nobody else can repeat, may do without rows until it is put back.)
        """
        # A graph that is captured adds and counts nothing.
        if not is_capturing(self._device):
            self._check_leave()
            self._leave = -1
        norm = 1.0
        if self.threshold.is_adaptive:
            norm = self.threshold.clip.bound(tuple(values))
            for value in values.values():
                value.mul_(1.0 / norm)
        self.noise.add_(values, times=norm / self.divisor)

    def _check_leave(self) -> None:
        step = self.noise.step
        is_new = self.folder is None and step >= max(self._fresh, self.ledger.released)
        if self._leave != step and not is_new:
            raise InvalidInput(
                f"the row of step {step} is not written by this process, so its noise may not "
                "be used; commit (or open) a step first, once for each use of noise"
            )

    def counted(self, sums: list[ClippedSum]) -> list[Tensor]:
        """What is counted of the norms of a step, for its digest."""
        if not self.threshold.is_adaptive:
            return []
        counts = self.threshold.count(sums)
        return [torch.tensor(counts, dtype=torch.float64, device=self._device)]

    def learn(self, sums: list[ClippedSum], *, step: int) -> None:
        """Take in the noisy counts of a step: a moving clip norm follows them."""
        if self.threshold.is_adaptive:
            self.threshold.learn(sums, step=step)

    def refusal(self, step: int) -> ReplayRefused:
        """Why a released step cannot be repeated."""
        why = "the digest of its sum did not reach the disk before the process ended"
        if self.ledger.digest(step):
            why = "its sum now differs from the one on record"
        return ReplayRefused(
            f"step {step} is on record as released, and {why}; the same noise under another sum "
            "would cancel in the difference; give it exactly what it had (data, order, model, "
            "loss), or pass it over: on_replay='skip', or private.skip()"
        )

    def skip(self) -> int:
        """Pass over the next step, which the ledger holds already; returns its number.

        Guarantees: its noise is drawn as it would have been (later rows depend on it) and thrown
        away; nothing is published; the charge stays.
        """
        step = self.step
        if step >= self.released:
            raise InvalidInput(f"step {step} was not released, so there is nothing to pass over")
        self.ledger.note("skip", step=step)
        self.noise.add_({n: torch.zeros(s, device=self._device) for n, s in self._shapes.items()})
        return step

    def check_in_step(self, index: int) -> None:
        """Raise if noise and steps, or the clip norms and those of the noise, have come apart."""
        if self.threshold.settled is not None:
            self.threshold.check_settled()
        if self.noise.step != index:
            raise NoshuffleError(
                f"step {index - 1 if self.noise.step < index else index} failed half-way and its "
                "noise is out of step; go on from the last checkpoint (private.resume)"
            )

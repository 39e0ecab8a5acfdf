"""Release: the one way out for a noisy number. It owns keys, noise, guard, ledger and clip bound.

    admit    the units of a step, against the plan and all earlier steps           (guard, ledger)
    sum      whoever drives this makes the clipped sum, however fast he can
    commit   the row of the step is on the disk, with a keyed digest of the sum    (ledger)
    noise    add row t of z·ζ·C⁻¹Z on the grid, divide by the planned constant     (noise)

A driver (a training step, its CUDA graphs, many ranks, a federated server, a convex solver, K runs
at once) never sees a key, never draws, and never writes a row. What was released is a fact of the
ledger, not an inference from what went in: a step that was released before is released again only
if its sum has the same digest, and that is written down too. Otherwise the step is passed over
(`skip`): its noise is drawn and thrown away, nothing is published, its charge stays.

A digest may follow its row (`Later`): a device need not be waited for. A step whose digest never
reached the disk is not repeated, only passed over.

State: the noise stream, the threshold, and the ledger's.

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
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from noshuffle.clipping import Clip, ClippedSum, Flat
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, NoshuffleError, ReplayRefused, Unsupported, positive
from noshuffle.noise import LazyNoise, NoiseStream, Source, lazy_noise
from noshuffle.one_owner import OneOwner
from noshuffle.plan import Plan
from noshuffle.release import account, checkpoint, digest, fingerprint
from noshuffle.release.facts import bind_facts, notes_of, statement_record
from noshuffle.release.folder import RunFolder
from noshuffle.release.ledger import Admission, Ledger
from noshuffle.release.opening import Opened, Run, folder_of, open_run
from noshuffle.release.sampler import Sampler, make_sampler
from noshuffle.release.seal import seal
from noshuffle.release.spending import ADAPTIVE_CLIP, spent
from noshuffle.release.threshold import Threshold, threshold_for
from noshuffle.release.units import Ids, as_ids, kind_of_ids
from noshuffle.statement import PrivacyStatement

#: A digest that is there, or one to wait for.
Later = bytes | Callable[[], bytes]


class Release(OneOwner):
    """The door of one run. Build it with `begin`.

    Guarantees: what leaves by `close` is (sum + noise of step t) / divisor for units that the plan
    admits, each clipped to the bound that the ledger names; its row is durable before its noise is
    used; the same noise never lies under two different sums, whatever is repeated, copied, rolled
    back or killed. If anything fails before the row is written, nothing was released; if something
    fails after it, the noise stream refuses to go on and the run continues from its last
    checkpoint.
    """

    def __init__(
        self,
        plan: Plan,
        opened: Opened,
        shapes: Mapping[str, Sequence[int]],
        *,
        clip: Clip | QuantileClip,
        divisor: float,
        device: torch.device,
        starts: Mapping[str, int] | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self.plan, self.divisor, self.folder = plan, divisor, opened.folder
        self.ledger: Ledger = opened.ledger
        self.ancestors = opened.ancestors
        self._ring, self._lock = opened.ring, opened.lock
        self.secret = opened.ring.secret
        self.charge, self.id_secret = opened.charge, opened.id_secret or opened.ring.secret
        self.threshold: Threshold = threshold_for(clip, plan, opened.ring)
        scale = self.threshold.noise_scale(plan, tuple(shapes))
        bind_facts(
            self.ledger,
            plan,
            self._ring,
            clip=clip,
            divisor=divisor,
            noise_scale=scale,
            more={"sums": names_of_sums(shapes), **(facts or {})},
        )
        self._device, self._shapes = device, {n: tuple(s) for n, s in shapes.items()}
        self.noise = NoiseStream(
            opened.recipe,
            self._ring.source,
            shapes,
            scale=scale,
            steps=plan.steps,
            device=device,
            starts=starts,
        )
        self._tables: dict[str, LazyNoise] = {}
        self._leave = -1  # the step whose row is written and whose noise is not used yet
        self._fresh = 0  # noise of earlier steps was used before the run was put back
        self._kind_of_ids = self.ledger.meta("ids") or ""
        if self.ledger.meta("rng_seed") is None:
            self.ledger.bind("rng_seed", str(torch.initial_seed()))
        self._rng_seed = self.ledger.meta("rng_seed")

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
        device = torch.device(device)
        bound = Flat(float(clip)) if isinstance(clip, int | float) else clip

        def make(path: Path | None) -> Ledger:
            return Ledger(plan.participation, path=path, unit=plan.unit)

        opened = open_run(plan, run=run, source=source, device=device, make=make, budget=budget)
        try:
            return cls(
                plan, opened, shapes, clip=bound, divisor=divisor, device=device, facts=facts
            )
        except BaseException:
            done = opened.ledger.released
            account.leave(opened.charge, plan, opened.ledger, opened.ancestors, released=done)
            opened.ledger.let_go()
            raise

    # -- what there is -------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The next step of this process (smaller than `released` in a replay)."""
        return self.noise.step

    @property
    def released(self) -> int:
        """How many steps the ledger holds: what the statement covers."""
        return self.ledger.released

    @property
    def is_test(self) -> bool:
        """Whether the noise comes from a named test seed."""
        return self._ring.is_test

    @property
    def name(self) -> str:
        """A public name of the run's keys."""
        return self._ring.name

    def seed(self, step: int, part: int = 0) -> int:
        """For the random layers of a model in one part of a step: the same in every replay."""
        data = f"{self._rng_seed} {step} {part}"
        return int.from_bytes(hashlib.blake2b(data.encode(), digest_size=7).digest(), "little")

    # -- one step ------------------------------------------------------------------------------

    def identify(self, ids: Any) -> Ids:
        """Unit ids as numbers; a run takes integers in every step, or names in every step."""
        kind = kind_of_ids(ids)
        if kind and kind != self._kind_of_ids:
            if self._kind_of_ids:
                raise InvalidInput(
                    f"this run told its units apart by {self._kind_of_ids}, and now {kind} came; "
                    "5 and '5' would count as two units, so give the same kind in every step"
                )
            self.ledger.bind("ids", kind)
            self._kind_of_ids = kind
        return as_ids(ids, secret=self.id_secret)

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

        `also`: what else the noise of the step goes onto (a count, rows of a sparse table). A clip
        norm that moves goes in too: the noise is a multiple of it.
        """
        group = [*(values[name] for name in sorted(values)), *also]
        if self.threshold.is_adaptive:
            norm = self.threshold.clip.bound(tuple(self._shapes))
            group.append(torch.tensor([norm], dtype=torch.float64, device=self._device))
        # Two types of two bytes give one row of bits two meanings; wider ones differ in size.
        narrow = " ".join(str(own.dtype) for own in group if own.element_size() < 4).encode()
        if not group or group[0].device.type == "cpu":
            return self.finished(fingerprint.of_group(group, self.secret) + narrow)
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
        if not admission.is_replay:
            if isinstance(of_sum, bytes):
                self.ledger.record(admission, of_sum)
            else:
                self.ledger.record(admission)
                self.ledger.expect_digest(admission.step, of_sum)
            self._leave = admission.step
            return True
        released = self.ledger.digest(admission.step)
        found = of_sum if isinstance(of_sum, bytes) else of_sum()
        if not released or not hmac.compare_digest(released, found):
            return False
        self.ledger.note("replay", step=admission.step)
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
        if not admission.is_replay and self.step < self._fresh:
            raise ReplayRefused(
                f"the noise of step {self.step} was used before this run was put back, without a "
                "row that says for which sum; begin a new run"
            )
        if admission.step != self.step:
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
        if not _is_captured(self._device):  # a graph that is captured adds and counts nothing
            self._check_leave()
            self._leave = -1
        norm = 1.0
        if self.threshold.is_adaptive:
            norm = self.threshold.clip.bound(tuple(values))
            for value in values.values():
                value.mul_(1.0 / norm)
        self.noise.add_(values, times=norm / self.divisor)

    def _check_leave(self) -> None:
        is_new = self.folder is None and self.step >= max(self._fresh, self.released)
        if self._leave != self.step and not is_new:
            raise InvalidInput(
                f"the row of step {self.step} is not written by this process, so its noise may not "
                "be used; commit (or open) a step first, once for each use of noise"
            )

    def counted(self, sums: list[ClippedSum]) -> list[Tensor]:
        """What a moving clip norm learns of a step, for its digest."""
        if not self.threshold.is_adaptive:
            return []
        count = self.threshold.count(sums)
        return [torch.tensor([count], dtype=torch.float64, device=self._device)]

    def learn(self, sums: list[ClippedSum], *, step: int) -> None:
        """Let a moving clip norm follow the noisy count of a step."""
        if self.threshold.is_adaptive:
            self.threshold.learn(sums, step=step)

    def refusal(self, step: int) -> ReplayRefused:
        """Why a released step cannot be repeated."""
        known = self.ledger.digest(step)
        why = (
            "its sum now differs from the one that was released"
            if known
            else "the digest of its sum did not reach the disk before the process ended"
        )
        return ReplayRefused(
            f"step {step} was released before, and {why}; the same noise under another sum would "
            "cancel in the difference; give it exactly what it had (data, order, model, loss), or "
            "pass it over: private.skip(), or on_replay='skip'"
        )

    def table(self, name: str, shape: Sequence[int], *, rates: Sequence[float] = ()) -> LazyNoise:
        """The lazy noise of one sparse table of this run (`noise.lazy`), for `SparseSGD`.

        Clip the rows of a table together with everything else, and give `close` the rows and their
        sums as `also`. A table cannot pass over a step: the noise of steps that a row sat out
        comes together, and would show a sum that was released with it before.
        """
        if self.threshold.is_adaptive:
            raise Unsupported("a sparse table needs a constant clip norm, this run's moves")
        if name in self._tables or name in self._shapes:
            raise InvalidInput(f"{name!r} has noise already; give every table a name of its own")
        if self.released and self.ledger.meta(f"table {name}") is None:
            # Under another name its released sums would get a second noise in a replay.
            raise InvalidInput(
                f"this run has released steps without a table {name!r}; make every table, by its "
                "old name, before the first step"
            )
        self.ledger.bind(f"table {name}", repr((tuple(shape), tuple(rates))))
        made = lazy_noise(
            self.plan.strategy.recipe(self.plan.steps),
            self._ring.source,
            tuple(shape),
            scale=self.noise.scale,
            steps=self.plan.steps,
            name=name,
            rates=tuple(rates),
            device=self._device,
        )
        self._tables[name] = made
        return made

    def skip(self) -> int:
        """Pass over the next step, which the ledger holds already; returns its number.

        Guarantees: its noise is drawn as it would have been (later rows depend on it) and thrown
        away; nothing is published; the charge stays.
        """
        step = self.step
        if step >= self.released:
            raise InvalidInput(f"step {step} was not released, so there is nothing to pass over")
        if self._tables:
            raise Unsupported(
                f"step {step} was released with a sparse table, which cannot pass over a step; "
                "repeat it exactly, or fork the run"
            )
        self.ledger.note("skip", step=step)
        self.noise.add_({n: torch.zeros(s, device=self._device) for n, s in self._shapes.items()})
        return step

    def check_in_step(self, index: int) -> None:
        """Raise if noise and steps have come apart."""
        if self.noise.step != index:
            raise NoshuffleError(
                f"step {index - 1 if self.noise.step < index else index} failed half-way and its "
                "noise is out of step; go on from the last checkpoint (private.resume)"
            )

    # -- secret samples ------------------------------------------------------------------------

    def sampler(self, population: int | None = None) -> Sampler:
        """The secret sampler of a sampled plan, from the current step on."""
        made = make_sampler(
            self.plan.participation, key=self._ring.sampling_key, population=population
        )
        self.ledger.bind("population", str(getattr(made, "population", "")))
        made.start = self.step
        self.ledger.sampler = made
        return made

    # -- what was promised ---------------------------------------------------------------------

    def statement(self) -> PrivacyStatement:
        """The guarantee of what was released so far, with all its assumptions."""
        notes = notes_of(self.ledger.facts())
        return spent(self.plan, self.released, ancestors=self.ancestors, notes=notes)

    def epsilon_after(self, steps: int) -> float:
        """ε of the first `steps` steps of this run, and of the runs it was forked from."""
        if not self.ancestors and not self.threshold.is_adaptive:
            return self.plan.epsilon_after(steps)
        notes = (ADAPTIVE_CLIP,) if self.threshold.is_adaptive else ()
        return spent(self.plan, steps, ancestors=self.ancestors, notes=notes).epsilon

    def write_statement(self) -> None:
        """Bring statement.json up to date with the ledger, if there is a run folder."""
        if self.folder is not None:
            self.folder.write_statement(statement_record(self.plan, self.ledger, self.statement()))

    # -- states --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, without its keys."""
        return {
            "step": self.step,
            "plan": self.plan.hash,
            "key": self.name,
            "batch_size": self.divisor,
            "threshold": self.threshold.state_dict(),
            "noise": self.noise.state_dict(),
            "tables": {name: own.state_dict() for name, own in self._tables.items()},
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another run, or one that knows of more steps than the ledger."""
        own = {"plan": self.plan.hash, "key": self.name, "batch_size": self.divisor}
        for name, value in own.items():
            if state.get(name) != value:
                raise InvalidInput(
                    f"this state was saved with {name} = {state.get(name)}, the run has {value}; "
                    "build the run as it was, or fork it"
                )
        if int(state["step"]) > self.released:
            raise InvalidInput(
                f"this state was taken after {state['step']} steps, the ledger knows of "
                f"{self.released}; give privatize the run folder that saw them"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; another plan, key or clipping is refused."""
        self.check_state(state)
        self._fresh, self._leave = max(self._fresh, self.step), -1
        is_first = int(state["step"]) == 0
        _load(self.noise, state["noise"], is_first=is_first)
        for name, own in self._tables.items():
            _load(own, state["tables"][name], is_first=is_first)
        self.threshold.load_state_dict(dict(state["threshold"]))
        if isinstance(self.ledger.sampler, Sampler):
            self.ledger.sampler.start = self.step

    def save(self, state: dict[str, Any]) -> Path:
        """Write a checkpoint, note its digests in the ledger, and bring the statement up to date.

        Guarantees: the ledger holds the digests of all steps that the checkpoint is made of before
        it is there, and those of its files.
        """
        folder = self.need_folder()
        self.ledger.flush()

        def note(files: checkpoint.Digests) -> None:
            self.ledger.note("checkpoint", step=int(state["step"]), files=files)

        path = checkpoint.save(state, folder.checkpoints, note=note)
        self.ledger.tidy()
        self.note_files()
        self.write_statement()  # names the newest row, so that none can be cut off
        return path

    def note_files(self) -> None:
        """Note the digests of the folder's other files in the ledger."""
        folder = self.need_folder()
        self.ledger.note("files", files=folder.published())

    def saved(self) -> dict[str, Any] | None:
        """The newest checkpoint, if there is one.

        Guarantees: raises where its files are not those that this run wrote: what a run goes on
        from must not depend on the data in any other way than by what it released.
        """
        found = checkpoint.saved(self.need_folder().checkpoints)
        if not found:
            return None
        state = checkpoint.load(found[-1])
        noted = {note["step"]: note["files"] for note in self.ledger.notes("checkpoint")}
        if name := checkpoint.changed(found[-1], noted.get(checkpoint.step_of(found[-1]), {})):
            raise InvalidInput(
                f"{found[-1] / name} is not what this run saved there; bring it back, or remove "
                "the checkpoint to go on from the one before"
            )
        return state

    def need_folder(self) -> RunFolder:
        """The run folder, or one line that there is none."""
        if self.folder is None:
            raise InvalidInput("there is no run folder; give run='runs/NAME'")
        return self.folder

    def close_run(self, *, keep_keys: bool = False) -> None:
        """Bring the evidence up to date and let go of it; a finished run is sealed.

        `keep_keys` leaves the keys of a finished run in its folder.
        """
        self.ledger.settle()
        self.settle_budget()
        if self.folder is not None:
            self.ledger.flush()
            self.note_files()
            self.write_statement()
        self.ledger.close()
        self._lock = None
        if self.folder is not None and self.released == self.plan.steps and not keep_keys:
            seal(self.folder)

    def settle_budget(self) -> None:
        """Charge what was released to the budget that the run draws on, if any."""
        done = max(self.released, self.step)
        account.leave(self.charge, self.plan, self.ledger, self.ancestors, released=done)

    def keep_in(self, run: Run) -> None:
        """Write keys and ledger of a run in memory into a new folder, where `begin` goes on.

        This object is not to be used afterwards: the folder has keys of its own from there on.
        """
        folder = folder_of(run)
        if folder is None or self.folder is not None:
            raise InvalidInput("keep_in takes a run in memory and a folder for it")
        folder.begin(self.plan, self._ring)
        self.ledger.copy_to(folder.ledger_file)


def names_of_sums(shapes: Mapping[str, Sequence[int]]) -> str:
    """What the noise of a run depends on beside its keys: the names of its sums (their hash, if
    they are many).

    A replay under other names would put a second noise on released sums, and the mean of many
    replays would show them.
    """
    names = json.dumps(sorted(shapes))
    return names if len(names) <= 200 else hashlib.sha256(names.encode()).hexdigest()


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _load(noise: NoiseStream | LazyNoise, state: Mapping[str, Any], *, is_first: bool) -> None:
    """A state of no steps goes on under any first key: none has drawn anything of it."""
    own = {"key": noise.state_dict()["key"]} if is_first else {}
    noise.load_state_dict({**state, **own})

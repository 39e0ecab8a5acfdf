"""What a run keeps between its steps: noise, clip norm and ledger; saved, resumed, closed.

    save       digests of all steps and files in the ledger → checkpoint → statement
    resume     files equal to their digests, plan and keys the same → noise, clip norm
    close_run  evidence up to date; keys destroyed where the run is finished (`seal`)

`Release` adds the steps. State: the noise stream, the threshold, and the ledger's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from noshuffle.clipping import Clip
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput
from noshuffle.noise import NoiseStream
from noshuffle.one_owner import OneOwner
from noshuffle.plan import Plan
from noshuffle.release import account, checkpoint
from noshuffle.release.facts import bind_facts, notes_of, write_statement
from noshuffle.release.folder import RunFolder
from noshuffle.release.opening import Opened, Run
from noshuffle.release.sampler import DRAWS, Sampler
from noshuffle.release.sampler_kinds import make_sampler
from noshuffle.release.seal import seal
from noshuffle.release.spending import ADAPTIVE_CLIP, spent
from noshuffle.release.threshold import Threshold, threshold_for
from noshuffle.statement import PrivacyStatement


class RunState(OneOwner):
    """The state of one run, and its evidence."""

    def __init__(
        self,
        plan: Plan,
        opened: Opened,
        shapes: Mapping[str, Sequence[int]],
        *,
        clip: Clip | QuantileClip,
        divisor: float,
        device: torch.device,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self.plan, self.divisor, self.folder = plan, divisor, opened.folder
        self.ledger, self.ancestors = opened.ledger, opened.ancestors
        self._ring, self._lock, self.secret = opened.ring, opened.lock, opened.ring.secret
        self._opened = replace(opened, lock=None)  # which is let go of with the run
        self.charge, self.id_secret = opened.charge, opened.ring.secret
        self._device, self._shapes = device, {n: tuple(s) for n, s in shapes.items()}
        self.threshold: Threshold = threshold_for(clip, plan, opened.ring)
        self.threshold.settle(tuple(shapes))
        scale = self.threshold.noise_scale(plan, tuple(shapes))
        more = {"sums": names_of_sums(shapes), **(facts or {})}
        bind_facts(
            self.ledger,
            plan,
            self._ring,
            clip=clip,
            more=more,
            divisor=divisor,
            noise_scale=scale,
        )
        self.noise = NoiseStream(
            opened.recipe,
            self._ring.source,
            shapes,
            scale=scale,
            steps=plan.steps,
            device=device,
        )
        self._leave = -1  # the step whose row is written and whose noise is not used yet
        self._fresh = 0  # noise of earlier steps was used before the run was put back
        self._kind_of_ids = self.ledger.meta("ids") or ""
        if self.ledger.meta("rng_seed") is None:
            # Where a neighbour has rows more or less, or one that all others are padded to, others
            # draw at other places: the draws of two runs are alike then, but not the same, and
            # nobody may know them. Runs of before may have a number here, torch's own seed.
            self.ledger.bind("rng_seed", "secret")
        self._rng_seed = self.ledger.meta("rng_seed")

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
        return self._ring.is_test

    @property
    def name(self) -> str:
        """A public name of the run's keys."""
        return self._ring.name

    def sampler(self, population: int | None = None) -> Sampler:
        """The secret sampler of a sampled plan, from the current step on."""
        # A run that has a sampler already draws as that one did, or its next batches, and those of
        # `verify`, would silently be others.
        is_begun = self.ledger.meta("population") is not None
        made = make_sampler(
            self.plan.participation,
            key=self._ring.sampling_key,
            population=population,
            by_count=not is_begun or self.ledger.meta(DRAWS[0]) == DRAWS[1],
        )
        if not is_begun:
            self.ledger.bind(*DRAWS)
        self.ledger.bind("population", str(getattr(made, "population", "")))
        made.start = self.step
        self.ledger.sampler = made
        return made

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
            write_statement(self.folder, self.plan, self.ledger)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            **self._identity(),
            "threshold": self.threshold.state_dict(),
            "noise": self.noise.state_dict(),
        }

    def _identity(self) -> dict[str, Any]:
        return {"plan": self.plan.hash, "key": self.name, "batch_size": self.divisor}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another run, or one that knows of more steps than the ledger."""
        for name, value in self._identity().items():
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
        # A state of no steps goes on under any first key: none has drawn anything of it.
        own = {"key": self.noise.state_dict()["key"]} if int(state["step"]) == 0 else {}
        self.noise.load_state_dict({**state["noise"], **own})
        self.threshold.load_state_dict(dict(state["threshold"]))
        if isinstance(self.ledger.sampler, Sampler):
            self.ledger.sampler.start = self.step

    def save(self, state: dict[str, Any]) -> Path:
        """Write a checkpoint, note its digests in the ledger, and bring the statement up to date.

        Guarantees: the ledger holds the digests of all steps that the checkpoint is made of before
        it is there, and those of its files.
        """
        self.check_owner()
        folder = self.need_folder()
        self.ledger.flush()

        def note(files: checkpoint.Digests) -> None:
            self.ledger.note("checkpoint", step=int(state["step"]), files=files)

        path = checkpoint.save(state, folder.checkpoints, note=note)
        self.ledger.tidy()
        self.note_files()
        self.write_statement()  # names the newest row, so that none can be cut off
        return path

    def bring_up_to_date(self) -> None:
        """Write down what is released so far, if there is a run folder."""
        if self.folder is not None:
            self.ledger.flush()
            self.note_files()
            self.write_statement()

    def note_files(self) -> None:
        folder = self.need_folder()
        self.ledger.note("files", files=folder.published())

    def saved(self) -> dict[str, Any] | None:
        """The newest checkpoint, if there is one.

        Guarantees: raises where its files are not those that this run wrote: what a run goes on
        from must not depend on the data in any other way than by what it released.
        """
        found = checkpoint.saved(self.need_folder().checkpoints)[-1:]
        state = checkpoint.load(found[0]) if found else None
        for file in checkpoint.foreign(found, self.ledger.notes("checkpoint")):
            raise InvalidInput(
                f"{file} is not what this run saved there; bring it back, or remove the checkpoint "
                "to go on from the one before"
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
        self.bring_up_to_date()
        self.ledger.close()
        self._lock = None
        if self.folder is not None and self.released == self.plan.steps and not keep_keys:
            seal(self.folder)

    def withdraw(self) -> None:
        """Take back a run that was begun by this object and is refused before its first step: its
        place in a budget is charged nothing, and its folder and keys are gone."""
        if not self.released and not self.step:
            self._opened.give_up(self.plan, is_refused=True)
            self._lock = None

    def settle_budget(self) -> None:
        """Charge what was released to the budget that the run draws on, if any."""
        done = max(self.released, self.step)
        account.leave(self.charge, self.plan, self.ledger, self.ancestors, released=done)

    def keep_in(self, run: Run) -> None:
        """Write keys and ledger of a run in memory into a new folder, where `begin` goes on.

        This object is not to be used afterwards: the folder has keys of its own from there on.
        """
        if run is None or self.folder is not None:
            raise InvalidInput("keep_in takes a run in memory and a folder for it")
        folder = RunFolder.of(run)
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

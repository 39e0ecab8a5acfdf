"""Release: the one way out for a noisy number. It owns the secret, the noise and the log of a run.

    admit    the units of a step, against the plan and all earlier steps; its row  → a Ticket
    …        whoever drives this makes the clipped sum, however he likes
    close    add row t of z·ζ·C⁻¹Z on the grid, divide by the planned constant
    finish   the step is over (after the optimizer's update); the run may be saved

A row comes before its sum and says nothing about it; the noise of a step is used once, by its
ticket. A row whose process died has no sum: it is passed over (its noise is drawn and thrown away)
and stays charged. Whatever goes wrong between admit and finish ends this object: the run is opened
again from its folder.

    begin    secret → plan.json → header and first start on the disk → statement
    go on    same plan and header → one walk over the log → a start with a fresh nonce → `restore`
    fork     the old run ends; a new one, with a secret of its own, states μ² = μ_old² + μ_new²
    end      a row, then everything secret is removed

State: log, guard, noise stream, threshold, and the ticket of the step in the making.

>>> from noshuffle.participation import SinglePass
>>> plan = Plan.fit(SinglePass(steps=3), mechanism="tree", noise_multiplier=0.0)
>>> release = Release(plan, {"w": (2,)}, clip=1.0, divisor=4)
>>> ticket = release.admit(release.identify([7, 8]))
>>> total = {"w": torch.tensor([0.6, 0.8])}
>>> release.close(ticket, total)
>>> release.finish(ticket)
>>> total["w"], release.step
(tensor([0.1500, 0.2000]), 1)
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.clipping import Clip, ClippedSum, Flat
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import (
    InvalidInput,
    NoshuffleError,
    ParticipationViolation,
    ReuseRefused,
    instance_of,
    positive,
)
from noshuffle.noise import NoiseStream, Source
from noshuffle.noise.step_plan import StepPlans, rows_used
from noshuffle.noise.stream import VERSION
from noshuffle.participation import Mask
from noshuffle.participation.base import InEpochs
from noshuffle.plan import Plan
from noshuffle.release.account import Account, Charge, check_budget
from noshuffle.release.files import make_folder, sync, write_bytes, write_json
from noshuffle.release.folder import RunFolder, digests, load, step_of
from noshuffle.release.history import FORMAT, History
from noshuffle.release.keys import Keys
from noshuffle.release.open_run import OpenRun, Run, ended, today
from noshuffle.release.sampler import Sampler
from noshuffle.release.spending import ADAPTIVE_CLIP, NO_IDS, Ancestor, spent
from noshuffle.release.threshold import Threshold, threshold_for
from noshuffle.release.units import NOBODY, Ids, ids_and_kind
from noshuffle.version import __version__


@dataclass(eq=False)
class Ticket:
    """Leave to use the noise of one step, once.

    `keep` is one truth value per row of the newest part (None: all of them are admitted).
    """

    step: int
    units: Ids = field(default_factory=lambda: NOBODY)
    keep: Mask | None = None
    is_used: bool = False
    #: Of a secret draw, the units that did not come yet.
    missing: Ids = field(default_factory=lambda: NOBODY)


class Release(OpenRun):
    """The releases of one run.

    Arguments:
        shapes: what is summed, by name.
        clip: the bound on one unit's contribution to one step.
        divisor: the planned constant that every noisy sum is divided by.
        run: a folder for the evidence; None keeps everything in memory.
        fork_of: a run that ends here, and whose cost this one adds to its own.
        source: where noise comes from; a secret of the operating system by default.
        facts: further facts that the log is to hold; a different value later is refused.
        budget: what all runs on the same data draw on (`noshuffle.Budget`).

    Guarantees: what leaves by `close` is (sum + noise of step t) / divisor for units that the plan
    admits; the row of the step is written before its noise is used, and no other sum ever gets this
    noise, whatever is copied, rolled back, run twice or killed. What `save` writes, and what
    `flush` returned before, no power cut takes from the log.
    """

    def __init__(
        self,
        plan: Plan,
        shapes: Mapping[str, Sequence[int]],
        *,
        clip: float | Clip | QuantileClip,
        divisor: float = 1,
        device: torch.device | str = "cpu",
        run: Run = None,
        fork_of: Run = None,
        source: Source | None = None,
        facts: Mapping[str, str] | None = None,
        budget: Account | None = None,
    ) -> None:
        positive(divisor=divisor)
        if budget is not None:
            check_budget(budget)
        if source is not None:
            instance_of(Source, **{"source (leave it out for a fresh secret)": source})
        # A checkpoint with numbers of NumPy could not be loaded again (torch, weights_only).
        self.divisor = divisor.item() if isinstance(divisor, np.generic) else divisor
        self.plan, self.folder = plan, None if run is None else RunFolder.of(run)
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._device, self.history = torch.device(device), History(plan)
        self.guard = self.history.guard
        self._sampler: Sampler | None = None
        self.charge: Charge | None = None
        self._ticket: Ticket | None = None
        #: The folders that are made for this run.
        self._made = [] if self.folder is None else self.folder.missing()
        self.log = self.open_log()
        self._is_new = not self.log.rows
        try:
            bound = Flat(float(clip)) if isinstance(clip, int | float | np.number) else clip
            self._open(bound, source, fork_of, dict(facts or {}), budget)
        except BaseException as error:
            self.log.close()
            if self._is_new and isinstance(error, NoshuffleError) and self.folder is not None:
                self.folder.withdraw(self._made)
            raise

    # -- begin, go on, fork --------------------------------------------------------------------

    def _open(
        self,
        clip: Clip | QuantileClip,
        source: Source | None,
        fork_of: Run,
        facts: dict[str, str],
        budget: Account | None,
    ) -> None:
        folder, plan = self.folder, self.plan
        if self._is_new:
            keys = Keys.new(source)
            kind = (source or Source(bytes(32))).on(self._device).kind
        else:
            keys, kind = self.known_keys(source), str(self.history.header["generator"])
        names = tuple(self._shapes)
        self.threshold: Threshold = threshold_for(clip, plan, names)
        scale = self.threshold.noise_scale(plan, names)
        header = {
            "format": FORMAT,
            "plan": plan.hash,
            "clip": repr(clip),
            "divisor": str(self.divisor),
            "noise_scale": repr(float(scale)),
            "adaptive_clip": "yes" if isinstance(clip, QuantileClip) else "no",
            "noise": str(VERSION),
            "generator": kind,
            "sums": _names_of_sums(self._shapes),
            "test_key": "yes" if keys.is_test else "no",
            **facts,
        }
        if self._is_new:
            ancestors = [] if fork_of is None else ended(RunFolder.of(fork_of), plan)
            if folder is not None:
                write_json(folder.secret_file, keys.to_dict(), mode=0o600)
                write_bytes(folder.plan_file, plan.to_json().encode())
            self.log.append(
                "run",
                **header,
                version=__version__,
                torch=torch.__version__,
                key="" if source is None else source.fingerprint,
                budget_name="" if budget is None else budget.name,
                order_seed=secrets.randbits(63) if source is None else _public_seed(source),
                ancestors=[one.to_dict() for one in ancestors],
            )
        else:
            if fork_of is not None:
                raise InvalidInput(f"fork_of= begins a new run, and {folder} holds one already")
            self.check_header(header)
        self.ancestors: tuple[Ancestor, ...] = self.history.ancestors()
        recipe = plan.strategy.recipe(plan.steps)
        row = rows_used(StepPlans.of(recipe), self.guard.steps)
        start = {"step": self.guard.steps, "row": row, "nonce": secrets.token_hex(16)}
        self.log.append("start", **start, day=today())
        self.log.flush()
        for earlier in self.history.of("start"):
            keys = keys.started(step=earlier["step"], row=earlier["row"], nonce=earlier["nonce"])
        self._keys = self.threshold.keys = keys
        self.noise = NoiseStream(
            recipe,
            keys.source(kind),
            self._shapes,
            scale=scale,
            steps=plan.steps,
            device=self._device,
        )
        self.reserve(budget)
        self._kind_of_ids = self._new_kind = self.fact("ids") or ""
        #: Whether the next step may begin as far as `restore` goes.
        self.is_restored = not self.guard.steps
        if folder is not None:
            sync(folder.path)
            self.write_statement()

    # -- facts ---------------------------------------------------------------------------------

    def sampler(self, population: int | None = None) -> Sampler:
        """The secret sampler of a sampled plan, from the current step on."""
        sampler = Sampler(
            self.plan.participation, key_fn=self._keys.draw_key, population=population
        )
        self.bind("population", str(sampler.population))
        sampler.start = self.step
        self._sampler = sampler
        return sampler

    @property
    def drawn(self) -> Sampler:
        """The sampler that was made last."""
        if self._sampler is None:
            raise ParticipationViolation(
                "a sampled plan takes its batches from our sampler; make one with "
                "sampler(population)"
            )
        return self._sampler

    # -- a step --------------------------------------------------------------------------------

    def identify(self, ids: Any, *, rows: int | None = None) -> Ids:
        """Unit ids as numbers, one for each of `rows`, where that is given.

        A run takes integers in every step, or names in every step.
        """
        if rows is not None and isinstance(ids, set | frozenset):
            raise InvalidInput("ids must be in the order of the examples, and a set has none")
        units, kind = ids_and_kind(ids, secret=self.secret)
        if rows not in (None, len(units)):
            raise InvalidInput(f"ids must name each of the {rows} examples, got {len(units)} ids")
        known = self._kind_of_ids
        if kind and known not in ("", NO_IDS, kind):
            raise InvalidInput(
                f"this run told its units apart by {known}, and now {kind} came; 5 and '5' would "
                "count as two units, so give the same kind in every step"
            )
        self._new_kind = kind or self._new_kind
        return units

    def check_ready(self) -> None:
        """Raise unless the next step may begin."""
        self.check_open()
        if self._ticket is not None:
            raise NoshuffleError(
                f"step {self._ticket.step} failed half-way, and this run object ended with it; "
                "open the run again from its folder, or begin a new one"
            )
        if not self.is_restored:
            raise InvalidInput(
                f"{self.step} steps of this run were released before; load its newest checkpoint "
                "first (resume)"
            )

    def admit(self, ids: Ids | None, *, drop: bool = False, is_partial: bool = False) -> Ticket:
        """Leave to release the next step from these units; its row is written when this returns.

        `ids=None`: nobody names the units, and each row counts as a new one. `drop`: see
        `Guard.take`. `is_partial`: further parts of the batch come by `add_part`.

        Guarantees: a batch that is refused writes no row and leaves the run as it was.
        """
        self.check_ready()
        step = self.step
        kind = NO_IDS if ids is None else (self._new_kind or self._kind_of_ids)
        if self._kind_of_ids and (kind == NO_IDS) != (self._kind_of_ids == NO_IDS):
            raise InvalidInput(
                "units must be named in every step of a run, or in none; give ids= in every step"
            )
        ticket = Ticket(step)
        if self.plan.participation.is_sampled and step < self.plan.steps:
            ids = self._take_drawn(ticket, ids, self.drawn.draw(step), is_partial=is_partial)
        ticket.units, ticket.keep = self.guard.take(ids, drop=drop)
        self._ticket = ticket
        if kind and kind != self._kind_of_ids:
            self.log.append("fact", name="ids", value=kind)
            self._kind_of_ids = kind
        self._write("step", ticket, None if ids is None else ticket.units)
        return ticket

    def add_part(self, ticket: Ticket, ids: Ids | None, *, drop: bool = False) -> None:
        """A further part of the batch of a step, before its sum; a unit in two parts is refused."""
        self._check_ticket(ticket)
        if (ids is None) != (self._kind_of_ids == NO_IDS):
            raise InvalidInput("every part of a batch must come with ids, or none; pass ids=")
        if self.plan.participation.is_sampled:
            ids = self._take_drawn(ticket, ids, ticket.missing, is_partial=True)
        ticket.units, ticket.keep = self.guard.take(ids, drop=drop, is_part=True)
        self._write("part", ticket, None if ids is None else ticket.units)

    def _write(self, kind: str, ticket: Ticket, units: Ids | None) -> None:
        if self.folder is None:
            return  # nobody reads it
        body: dict[str, Any] = {"step": ticket.step}
        if units is not None and not self.plan.participation.is_sampled:
            body["units"] = self.history.lists.encode(ticket.step, units)
        self.log.append(kind, **body)

    def _take_drawn(
        self, ticket: Ticket, ids: Ids | None, expected: Ids, *, is_partial: bool
    ) -> Ids:
        """The units of a batch, or of a part of it; raises unless they are those expected of the
        secret draw, all of them or, `is_partial`, some."""
        if ids is None:
            raise ParticipationViolation(
                f"step {ticket.step} has no ids, and a sampled plan must know that our sampler "
                "drew the batch; pass ids= the indices that private.sampler gave"
            )
        units = np.unique(ids)
        missing = np.setdiff1d(expected, units, assume_unique=True)
        is_repeated = len(units) < len(ids) and self.plan.unit != "user"
        is_drawn = len(missing) + len(units) == len(expected) and not is_repeated
        if not is_drawn or (len(missing) and not is_partial):
            raise ParticipationViolation(
                f"the batch of step {ticket.step} ({len(ids)} units) is not the one that the "
                f"secret sampler drew ({len(expected)} units that did not come yet); take the "
                "batches from private.sampler, in order"
            )
        ticket.missing = missing
        return units

    def _check_ticket(self, ticket: Ticket) -> None:
        self.check_open()
        if ticket is not self._ticket or ticket.is_used:
            raise ReuseRefused("the noise of a step is used once; admit the next step")

    def use(self, ticket: Ticket) -> None:
        """The noise of this step is about to be used, by `close` or by a captured graph.

        Guarantees: raises unless the row of the step was written by this process, and the second
        time.
        """
        self._check_ticket(ticket)
        if len(ticket.missing):
            raise ParticipationViolation(
                f"{len(ticket.missing)} units of the secret draw of step {ticket.step} did not "
                "come; a sampled batch must hold all of them"
            )
        if self.noise.step != ticket.step:
            raise NoshuffleError(f"the noise stands at step {self.noise.step}, not {ticket.step}")
        self.log.keep_up()
        ticket.is_used = True

    def close(
        self, ticket: Ticket, values: dict[str, Tensor], *, sums: Sequence[ClippedSum] = ()
    ) -> None:
        """From the clipped sum to the private mean, in place: noise and division.

        A clip norm that moves keeps the noise in its own units: sum/ζ + noise, then times ζ; it
        then follows the norms in `sums`.
        """
        self.use(ticket)
        norm = 1.0
        if self.threshold.is_adaptive:
            norm = self.threshold.clip.bound(tuple(values))
            for value in values.values():
                value.mul_(1.0 / norm)
        self.noise.add_(values, times=norm / self.divisor)
        if self.threshold.is_adaptive:
            self.threshold.learn(list(sums), step=ticket.step)

    def finish(self, ticket: Ticket) -> None:
        """The step is over, and what came of it is whole."""
        if ticket is not self._ticket or not ticket.is_used:
            raise ReuseRefused("finish ends the step that was closed last")
        self._ticket = None

    def pass_over(self, ticket: Ticket | None = None) -> int:
        """Give up a step: nothing is published, its noise is thrown away, its charge stays.

        That of `ticket`, which was not closed; by default the next one, without units. Returns
        its number.
        """
        if ticket is None:
            self.check_ready()
            units = None if self._kind_of_ids == NO_IDS else NOBODY
            self.guard.take(units)
            ticket = self._ticket = Ticket(self.step - 1)
            self._write("step", ticket, units)
        self._check_ticket(ticket)
        self._discard_noise(ticket.step + 1)
        self._ticket = None
        return ticket.step

    def pass_over_epoch(self) -> int:
        """Give up the steps up to the next border of an epoch; returns how many these were."""
        rule = self.plan.participation.base
        if not isinstance(rule, InEpochs):
            raise InvalidInput("this plan has no epochs; skip() passes over one step")
        count = -self.step % rule.steps_per_epoch
        for _ in range(count):
            self.pass_over()
        return count

    def _discard_noise(self, until: int) -> None:
        """Draw the noise of steps without a sum as it would have been: later rows depend on it."""
        while self.noise.step < until:
            self.noise.add_(
                {n: torch.zeros(s, device=self._device) for n, s in self._shapes.items()}
            )

    # -- what is kept --------------------------------------------------------------------------

    def epsilon_after(self, steps: int) -> float:
        """ε of the first `steps` steps of this run, and of the runs it was forked from."""
        if not self.ancestors and not self.threshold.is_adaptive:
            return self.plan.epsilon_after(steps)
        notes = (ADAPTIVE_CLIP,) if self.threshold.is_adaptive else ()
        return spent(self.plan, steps, ancestors=self.ancestors, notes=notes).epsilon

    def save(self, state: Mapping[str, Any], *, secret: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint of the last whole step, and bring the statement up to date.

        `state` has the "model" by names; `secret` is for the owner alone, and goes when the run
        ends.
        """
        self.check_ready()
        folder, at = self.need_folder(), self.log.head
        self.log.flush()

        def note(files: Mapping[str, str]) -> None:
            self.log.append("checkpoint", step=self.step, at=at, files=dict(files))
            self.log.flush()

        public = {**state, "step": self.step, "at": at, "threshold": self.threshold.state_dict()}
        hidden = {**(secret or {}), "at": at, "noise": self.noise.state_dict()}
        path = folder.save(public, secret=hidden, note=note)
        self.write_statement()
        return path

    def restore(self) -> dict[str, Any] | None:
        """The newest checkpoint (None without one); then the run goes on at the log's next step.

        Steps behind the checkpoint have no sum any more: they are passed over.

        Guarantees: raises where the checkpoint is not one that this log names: another branch's, or
        one that was changed.
        """
        self.check_open()
        checkpoints, state = self.need_folder().saved(), None
        if checkpoints:
            path, row = checkpoints[-1], self._row_of(checkpoints[-1])
            state = load(path, with_secret=True)
            if row is None or state["secret"].get("at") != row["at"]:
                raise InvalidInput(
                    f"{path} is not what this run saved there; bring it back, or remove it to go "
                    "on from the checkpoint before"
                )
            if step_of(path):
                self.noise.load_state_dict(state["secret"]["noise"])
                self.threshold.load_state_dict(state["threshold"])
        self._discard_noise(self.step)
        self.is_restored = True
        if self._sampler is not None:
            self._sampler.start = self.step
        return state

    def _row_of(self, path: Path) -> dict[str, Any] | None:
        """The row of a checkpoint, if its files are those that were noted."""
        files, step = digests(path), step_of(path)
        rows = reversed(self.history.of("checkpoint"))
        return next((row for row in rows if row["step"] == step and row["files"] == files), None)

    def keep_in(self, run: Path, steps: Sequence[Ids]) -> None:
        """Go on in a new folder with a run in memory, whose steps so far held these units.

        Guarantees: where it raises, the run goes on in memory, and nothing is left of the folder.
        """
        folder, before = RunFolder.of(run), vars(self).copy()
        folder.refuse_strangers()
        made = folder.missing()
        try:
            make_folder(folder.path)
            write_json(folder.secret_file, self._keys.to_dict(), mode=0o600)
            write_bytes(folder.plan_file, self.plan.to_json().encode())
            self.folder, self.history = folder, History(self.plan)
            self.log, self.guard = self.history.open_log(folder), self.history.guard
            for row in before["log"].rows:
                if row.get("name") != "ids":  # in memory nobody had named them
                    self.log.append(**row)
            self._kind_of_ids = ""
            for step, units in enumerate(steps):
                ticket = Ticket(step, *self.guard.take(units))
                self._write("step", ticket, ticket.units)
            self.write_statement()
        except BaseException:
            if self.log is not before["log"]:
                with suppress(NoshuffleError):  # a full disk
                    self.log.close()
            vars(self).update(before)
            folder.withdraw(made)
            raise

    # -- the end -------------------------------------------------------------------------------

    def close_run(self, *, may_end: bool = True) -> None:
        """Bring the evidence up to date and let go of it; a finished run ends (see `end`).

        `may_end=False` keeps the secret of a finished run, whose caller goes back to older states.
        """
        self.check_owner()
        if self.log.is_closed:
            return
        try:
            row = self.log.append("close", steps=self.step, day=today())
            self.settle(row.get("link", ""))
            if may_end and self._ticket is None and self.step == self.plan.steps:
                self.end()
            else:
                self.write_statement()
        finally:
            self.log.close()

    def withdraw(self) -> None:
        """Take back a run that was begun by this object and is refused before its first step."""
        if self._is_new and not self.step:
            self.settle("")
            self.log.close()
            if self.folder is not None:
                self.folder.withdraw(self._made)


def _names_of_sums(shapes: Mapping[str, Sequence[int]]) -> str:
    """Names and shapes of the sums, which the noise depends on (their hash, if they are many)."""
    names = json.dumps({name: list(shapes[name]) for name in sorted(shapes)})
    return names if len(names) <= 200 else hashlib.sha256(names.encode()).hexdigest()


def _public_seed(source: Source) -> int:
    """The order of a test run is the same in every process, as its noise is."""
    return secrets.randbits(63) if not source.is_test else int(source.fingerprint[:15], 16)

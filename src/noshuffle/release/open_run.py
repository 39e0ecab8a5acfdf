"""OpenRun: a run that this process has open: its folder, log, facts and budget; and its end.

A run goes on only as it was begun: plan, clip norm, divisor, names of sums and further facts stand
in the header of its log. Opening walks the log from its first row on. State: log and history.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from noshuffle.errors import InvalidInput
from noshuffle.noise import Source
from noshuffle.one_owner import OneOwner
from noshuffle.plan import Plan, PrivacyStatement
from noshuffle.release.account import Account, Charge
from noshuffle.release.files import make_folder, read_json
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History
from noshuffle.release.keys import Keys
from noshuffle.release.log import Log
from noshuffle.release.signature import private_key, write_signature
from noshuffle.release.spending import NO_IDS, TEST_SEED, Ancestor, spent
from noshuffle.release.units import Guard

Run = RunFolder | str | Path | None
#: Facts of a header that another process may differ in.
_OF_PROCESS = "kind", "link", "version", "torch", "order_seed", "ancestors", "key", "budget_name"


class OpenRun(OneOwner):
    """The evidence of one run, and its one writer."""

    plan: Plan
    folder: RunFolder | None
    history: History
    guard: Guard
    log: Log
    ancestors: tuple[Ancestor, ...]
    charge: Charge | None
    _keys: Keys

    @property
    def step(self) -> int:
        """The next step."""
        return self.guard.steps

    def open_log(self) -> Log:
        """The log of the run, walked from its first row on; locked for this process."""
        folder = self.folder
        if folder is not None:
            if not folder.is_started:
                folder.refuse_strangers()
            elif folder.plan() != self.plan:
                raise InvalidInput(
                    f"{folder.path} holds a run with another plan; use a new folder, or that plan"
                )
            make_folder(folder.path)
        return self.history.open_log(folder)

    def known_keys(self, source: Source | None) -> Keys:
        """The secret in the folder of a run that may go on."""
        folder, header = self.folder, self.history.header
        assert folder is not None
        if self.history.has_ended:
            folder.remove_secrets()  # its process may have been killed before it did that
            raise InvalidInput(
                f"{folder.path} holds a run that has ended: its secret is gone; begin a new run "
                "that adds up with it (fork_of=)"
            )
        if self.fact("ids") == NO_IDS and self.guard.steps:
            raise InvalidInput(
                f"nobody named the units of the run in {folder.path}, so those that come now could "
                "be counted as new ones; begin a new run that adds up with it (fork_of=), and give "
                "ids= or take batches(loader)"
            )
        if source is not None and source.fingerprint != header["key"]:
            raise InvalidInput(f"{folder.path} holds a run with another key; use a new folder")
        try:
            return Keys.from_dict(read_json(folder.secret_file))
        except FileNotFoundError:
            raise InvalidInput(
                f"{folder.secret_file} is missing; without its secret a run cannot go on: begin a "
                "new run that adds up with it (fork_of=)"
            ) from None

    def check_header(self, wanted: Mapping[str, str]) -> None:
        """What may not change while a run lives."""
        header = self.history.header
        known = {name: value for name, value in header.items() if name not in _OF_PROCESS}
        for name in {**known, **wanted}:
            if known.get(name) != wanted.get(name):
                raise InvalidInput(
                    f"this run was begun with {name} = {known.get(name)}, and now it is "
                    f"{wanted.get(name)}; build it as it was, or begin a new run (fork_of=)"
                )

    # -- facts ---------------------------------------------------------------------------------

    def fact(self, name: str) -> str | None:
        """What the run is held to under this name."""
        known: str | None = self.history.header.get(name)
        bound = [row["value"] for row in self.history.of("fact") if row["name"] == name]
        return bound[-1] if bound else known

    def bind(self, name: str, value: str) -> None:
        """Hold the run to a fact from here on; a different value later is refused."""
        known = self.fact(name)
        if known is None:
            self.log.append("fact", name=name, value=value)
        elif known != value:
            raise InvalidInput(
                f"this run was begun with {name} = {known}, and now {value} came; keep to one, or "
                "begin a new run (fork_of=)"
            )

    @property
    def order_seed(self) -> int:
        """A public number that the order of the data is drawn from."""
        return int(self.history.header["order_seed"])

    @property
    def is_test(self) -> bool:
        return self._keys.is_test

    @property
    def secret(self) -> bytes:
        """For numbers of names; whoever has it can take the noise off."""
        return self._keys.secret

    def seed(self, step: int, part: int = 0) -> int:
        """For the random layers of a model in one part of a step; nobody else knows it."""
        return self._keys.seed(step, part)

    # -- statement and end ---------------------------------------------------------------------

    def need_folder(self) -> RunFolder:
        """The run folder, or one line that there is none."""
        if self.folder is None:
            raise InvalidInput("there is no run folder; give run='runs/NAME'")
        return self.folder

    def check_open(self) -> None:
        """Raise where the run was closed, or where a fork inherited it."""
        self.check_owner()
        if self.log.is_closed:
            raise InvalidInput(
                "this run was closed; open it again from its folder, or begin a new one that adds "
                "up with it (without a folder their costs add up, too)"
            )

    def flush(self) -> None:
        """Wait until every row is on the disk, before what came of it is stored or sent."""
        self.log.flush()

    def statement(self) -> PrivacyStatement:
        """The guarantee of what was released so far, with all its assumptions."""
        return self.history.statement()

    def write_statement(self) -> None:
        """Bring statement.json up to date with the log, if there is a run folder."""
        if self.folder is not None:
            self.log.flush()
            self.folder.write_statement(self.history.statement_record(link=self.log.head))

    def end(self) -> None:
        """No step can be added: a row says so, then everything secret is removed.

        The noise cannot be taken off the model any more, by nobody.
        """
        if self.folder is not None:
            _end(self.folder, self.history, self.log)

    # -- budget --------------------------------------------------------------------------------

    def reserve(self, budget: Account | None) -> None:
        """Reserve the cost of the run; one that draws on a budget is not opened without it."""
        name, known = self.history.header["budget_name"], self.history.of("budget")
        if budget is None:
            if name:
                raise InvalidInput(
                    f"this run draws on the budget {name}, from which it would release more than "
                    "was charged; give budget="
                )
            return
        if name != budget.name:
            raise InvalidInput(
                f"this run draws on {f'the budget {name}' if name else 'no budget'}, got "
                f"{budget.name}; a run keeps to one from its beginning"
            )
        before = self._uncounted(budget.name)
        self.charge = budget.reserve(
            "run" if self.folder is None else f"run {self.folder.path.name}",
            spent(self.plan, self.plan.steps, ancestors=before, notes=self._void),
            plan=None if before else self.plan,
            steps=self.plan.steps,
            run=None if self.folder is None else self.folder.path.resolve(),
            origin=known[-1]["origin"] if known else None,
            links=[row["link"] for row in self.log.rows if "link" in row],
            parents=[one.budget for one in self.ancestors if one not in before],
            keeps_draws=self.plan.participation.keeps_draws,
        )
        self.log.append("budget", origin=self.charge.origin, words=self.charge.words())

    def settle(self, link: str) -> None:
        """Charge what was released, and note what the statement says of the budget.

        Counts of norms were paid for all steps at once, and what sampled steps cost is known for a
        number of them that was fixed beforehand: such a run is charged whole once it has begun.
        """
        if self.charge is None:
            return
        self.log.flush()  # a run that lost the link that its budget knows would be another branch
        before = self._uncounted(self.charge.origin.partition("/")[0])
        is_whole = self.fact("adaptive_clip") == "yes" or self.plan.participation.is_sampled
        steps = self.plan.steps if is_whole and self.step else self.step
        statement = spent(self.plan, steps, ancestors=before, notes=self._void)
        self.charge.settle(statement, plan=None if before else self.plan, steps=steps, link=link)
        self.log.append("budget", origin=self.charge.origin, words=self.charge.words())

    @property
    def _void(self) -> tuple[str, ...]:
        """Why no ε holds for this run."""
        return (TEST_SEED,) if self.is_test else ()

    def _uncounted(self, name: str) -> list[Ancestor]:
        """Runs that this one was forked from, as far as they do not draw on the same budget."""
        return [one for one in self.ancestors if one.budget.partition("/")[0] != name]


def ended(old: RunFolder, plan: Plan) -> list[Ancestor]:
    """End the run that a new one is forked from; it and its own ancestors.

    Guarantees: the old run can release nothing more, so its steps are all that there will ever be.
    Of a copy it is the copy that ends.
    """
    history = History(old.plan())
    with history.open_log(old) as log:
        history.facts()  # refuses a log without a header
        if history.plan.unit != plan.unit or history.plan.neighbours != plan.neighbours:
            raise InvalidInput(
                "a fork must keep the unit and the neighbours of the run it came from"
            )
        _end(old, history, log)
    return [*history.ancestors(), history.as_ancestor()]


def _end(folder: RunFolder, history: History, log: Log) -> None:
    if not history.has_ended:
        log.append("end", steps=history.steps)
        log.flush()
        folder.write_statement(history.statement_record(link=log.head))
    folder.remove_secrets()


def seal(run: RunFolder | str | Path, *, sign: str | Path | None = None) -> RunFolder:
    """End a run that nobody will go on with; with `sign`, a PEM file, say who vouches for it."""
    folder = RunFolder.of(run)
    history = History(folder.plan())
    key = None if sign is None else private_key(Path(sign))
    if not folder.is_started:
        raise InvalidInput(f"{folder.path} holds no log of a run; give a run folder")
    with history.open_log(folder) as log:
        _end(folder, history, log)
        if key is not None:
            write_signature(folder, history.plan, log.head, key)
    return folder


def today() -> str:
    """The day, and no finer time: how long a step took may depend on a secret draw."""
    return f"{datetime.now(UTC):%Y-%m-%d}"

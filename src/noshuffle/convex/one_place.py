"""OnePlace: the budget of a stream, in which all its phases have one place.

No unit lies in two phases, so what the first one is charged covers every later one. Within a
process they share its charge. A stream that is loaded asks for its place by the links of all its
logs: a copy or a backup that goes on by itself lacks the last one that the account noted (`save`
notes one), and is charged anew. State: none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noshuffle.plan import Plan, PrivacyStatement
from noshuffle.plan.statement import voids
from noshuffle.release.account import Account, Charge
from noshuffle.release.log import Damaged, read


@dataclass(frozen=True)
class OnePlace:
    """What a phase draws on.

    `charge` and `whole`: the charge of the phases before it in this process, and the largest of
    their statements, if there are any. `folder`: that of a saved stream.
    """

    account: Account
    charge: Charge | None
    whole: PrivacyStatement | None
    folder: Path | None

    @property
    def name(self) -> str:
        return self.account.name

    def reserve(
        self,
        what: str,
        statement: PrivacyStatement,
        *,
        plan: Plan | None = None,
        run: Path | None = None,
        links: Sequence[str] = (),
        **more: Any,
    ) -> Charge:
        """The place of the stream, with room for the largest of its phases."""
        if self.charge is not None:
            return _Share(self.charge, self.whole)
        if self.folder is not None:
            what, run = f"stream {self.folder.name}", self.folder.resolve()
            links = [*_links_of(self.folder), *links]
        said, plan = _larger(self.whole, statement), plan if self.whole is None else None
        charge = self.account.reserve(what, said, plan=plan, run=run, links=links, **more)
        return _Share(charge, self.whole)


@dataclass(frozen=True)
class _Share:
    """The charge of a phase: what the phases before it cost stays."""

    charge: Charge
    whole: PrivacyStatement | None

    @property
    def origin(self) -> str:
        return self.charge.origin

    def settle(
        self,
        statement: PrivacyStatement,
        *,
        plan: Plan | None = None,
        steps: int = 0,
        link: str = "",
    ) -> None:
        said, plan = _larger(self.whole, statement), plan if self.whole is None else None
        self.charge.settle(said, plan=plan, steps=steps, link=link)

    def words(self) -> str:
        return self.charge.words()


def _larger(whole: PrivacyStatement | None, own: PrivacyStatement) -> PrivacyStatement:
    if whole is None or whole.epsilon <= own.epsilon:
        return own
    return whole.with_assumptions(*voids(own.assumptions))


def _links_of(stream: Path) -> list[str]:
    """The links that the logs of all phases have."""
    found = []
    for log in sorted(stream.glob("phase-*/log.jsonl")):
        with suppress(Damaged):  # what is torn was not flushed: no account has noted it
            found += [row["link"] for row in read(log)]
    return found

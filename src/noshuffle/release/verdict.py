"""The four answers of `verify`, each with its reasons.

    PROVED        all that the folder can show was recomputed, and holds
    CONSISTENT    nothing contradicts the statement; what could not be checked is named, and why
    NOT PRIVATE   the evidence holds together, and says so itself (test seed, no noise)
    REFUTED       something contradicts the statement: the row or the file is named

>>> Verdict("runs/a", refuted=("step 3 lists a unit twice",)).answer
'REFUTED'
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from noshuffle.errors import VerificationFailed
from noshuffle.rounding import up

PROVED, CONSISTENT, NOT_PRIVATE, REFUTED = "PROVED", "CONSISTENT", "NOT PRIVATE", "REFUTED"
EXIT_CODES = {PROVED: 0, REFUTED: 1, CONSISTENT: 3, NOT_PRIVATE: 4}
UNSIGNED = (
    "that ledger and files were not all made anew together, only a signature could show (seal with "
    "sign=KEY)"
)


@dataclass(frozen=True)
class Verdict:
    """What was found in a run folder."""

    path: str
    refuted: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    not_private: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    is_signed: bool = False
    released: int = 0
    planned: int = 0
    lives: int = 0
    epsilon: float | None = None
    delta: float | None = None
    exposed: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """PROVED, CONSISTENT, NOT PRIVATE or REFUTED."""
        if self.refuted:
            return REFUTED
        if self.not_private:
            return NOT_PRIVATE
        return CONSISTENT if self.unchecked else PROVED

    @property
    def exit_code(self) -> int:
        """0 proved, 1 refuted, 3 consistent, 4 not private."""
        return EXIT_CODES[self.answer]

    @property
    def failures(self) -> tuple[str, ...]:
        return self.refuted

    @property
    def is_verified(self) -> bool:
        """Whether the stated guarantee is supported: proved, or consistent."""
        return self.answer in (PROVED, CONSISTENT)

    def words(self) -> str:
        lines = [f"{self.answer}: {self.path}"]
        if self.epsilon is not None and self.delta is not None and not self.refuted:
            lives = f" in {self.lives} lives" if self.lives > 1 else ""
            lines[0] = (
                f"{self.answer}: {self.released} of {self.planned} planned steps{lives}, "
                f"ε = {up(self.epsilon)} at δ = {up(self.delta)}"
            )
        lines += [f"  - {line}" for line in (*self.refuted, *self.not_private)]
        lines += [f"  (checked: {line})" for line in self.checked if not self.refuted]
        lines += [f"  (not checked: {line})" for line in self.unchecked]
        lines += [f"  (not to be published: {line})" for line in self.exposed]
        if not self.is_signed:
            lines.append(f"  ({UNSIGNED})")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        finite = self.epsilon is not None and math.isfinite(self.epsilon)
        return {
            "answer": self.answer,
            "verified": self.is_verified,
            "path": self.path,
            "failures": list(self.refuted),
            "not_private": list(self.not_private),
            "checked": list(self.checked),
            "unchecked": list(self.unchecked),
            "exposed": list(self.exposed),
            "signed": self.is_signed,
            "released_steps": self.released,
            "planned_steps": self.planned,
            "lives": self.lives,
            "epsilon": self.epsilon if finite else None,
            "delta": self.delta,
        }

    def check(self) -> None:
        """Raise unless the stated guarantee is supported."""
        if not self.is_verified:
            raise VerificationFailed(f"{self.path}: {(*self.refuted, *self.not_private)[0]}")

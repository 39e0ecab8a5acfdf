"""The three answers of an audit, and what every finding can do.

    HOLDS         (exit status 0)  everything that was looked at is covered by the claim
    REFUTED       (1)              an attack does better than the claim allows; it is named
    NOT DECIDED   (3)              neither was shown; what was left out is named

>>> combined(["HOLDS", "NOT DECIDED"]), combined(["NOT DECIDED", "REFUTED"]), combined([])
('NOT DECIDED', 'REFUTED', 'NOT DECIDED')
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from noshuffle.release.files import finite

HOLDS, REFUTED, UNDECIDED = "HOLDS", "REFUTED", "NOT DECIDED"
EXIT_CODES = {HOLDS: 0, REFUTED: 1, UNDECIDED: 3}


class Finding:
    """One part of an audit: a frozen record with an answer and words."""

    kind: ClassVar[str] = ""

    @property
    def answer(self) -> str:
        """HOLDS, REFUTED or NOT DECIDED."""
        raise NotImplementedError

    def words(self) -> str:
        """The finding as text."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain values."""
        own = asdict(self)  # type: ignore[call-overload]
        return {"kind": self.kind, "answer": self.answer, **own}


def combined(answers: Iterable[str]) -> str:
    """The answer of several parts: the worst of them; nothing is decided by no part."""
    given = set(answers)
    if REFUTED in given:
        return REFUTED
    return HOLDS if given == {HOLDS} else UNDECIDED


def record_of(findings: Sequence[Finding]) -> dict[str, Any]:
    """What is written to audit.json and printed by --json."""
    answer = combined(finding.answer for finding in findings)
    parts = [finite(finding.to_dict()) for finding in findings]
    return {"format": "noshuffle-audit/1", "answer": answer, "parts": parts}

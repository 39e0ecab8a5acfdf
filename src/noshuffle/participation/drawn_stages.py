"""Secret draws in stages: a run with secret positions or turns that was extended when it ended.

Every stage has secret draws of its own, independent of those before, and noise of its own
(`strategies.phases`), so stages compose as mechanisms of which each may depend on what the others
showed (docs/proofs.md, "Stages of secret draws"). No state.

>>> from noshuffle.participation import BallsInBins
>>> part = DrawnStages((BallsInBins(2, 10), BallsInBins(1, 5)))
>>> part.steps, part.most, part.at(20)
(25, 3, (1, 20, BallsInBins(epochs=1, steps_per_epoch=5)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from noshuffle.errors import InvalidInput
from noshuffle.participation.base import InStages, Participation
from noshuffle.participation.draws import BallsInBins, CyclicPoisson, SeparatedBins

_KINDS = {own.kind: own for own in (CyclicPoisson, BallsInBins, SeparatedBins)}


@dataclass(frozen=True)
class DrawnStages(InStages[Participation]):
    """Secret draws of one kind, one stage after another, each drawn anew."""

    kind: ClassVar[str] = "drawn-stages"
    is_sampled: ClassVar[bool] = True
    keeps_draws: ClassVar[bool] = True

    def __post_init__(self) -> None:
        stages = tuple(_read(own) if isinstance(own, dict) else own for own in self.stages)
        kinds = {type(own) for own in stages}
        if len(kinds) != 1 or not kinds <= set(_KINDS.values()):
            raise InvalidInput(
                "stages are one or more of CyclicPoisson, BallsInBins or SeparatedBins, all of one "
                f"kind, got {self.stages!r}"
            )
        object.__setattr__(self, "stages", stages)
        super().__post_init__()

    def at(self, step: int) -> tuple[int, int, Participation]:
        """(number, first step, draws) of the stage that a step lies in."""
        found = [(i, *own) for i, own in enumerate(self.starts()) if own[0] <= step]
        return found[-1]

    def words(self) -> str:
        said = "; then, drawn anew: ".join(own.words() for own in self.stages)
        return f"{len(self.stages)} stages, each with secret draws of its own: {said}"


def stages_of(part: Participation) -> tuple[Participation, ...]:
    """The stages of a participation with secret draws; one, if it is not in stages."""
    return part.stages if isinstance(part, DrawnStages) else (part,)


def _read(record: dict[str, Any]) -> Participation:
    fields = dict(record)
    kind = fields.pop("kind", None)
    if kind not in _KINDS:
        raise InvalidInput(f"stages are of kind {', '.join(_KINDS)}, got {kind!r}")
    return _KINDS[kind](**fields)

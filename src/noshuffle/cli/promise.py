"""What `noshuffle epsilon` and `noshuffle plan` ask for alike: a mechanism, who takes part, ε.

>>> Promise(mechanism="tree", epochs=2, steps_per_epoch=8).participation()
Epochs(epochs=2, steps_per_epoch=8)
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from noshuffle.cli.from_record import check_fields, setting
from noshuffle.cli.mechanisms import HELP
from noshuffle.errors import InvalidInput, positive, whole

if TYPE_CHECKING:
    from noshuffle.participation import Epochs, Participation

#: Help of options that several commands have.
JSON_HELP = "print JSON and nothing else"
DELTA_HELP = "δ, strictly between 0 and 1"
NOISE_HELP = "noise standard deviation / clip norm of one contribution"
TEST_SEED_HELP = "reproducible noise for tests: NOT PRIVATE"
SIGN_HELP = "sign the run that has ended with this Ed25519 private key (a PEM file)"
FORK_HELP = "end the run in this folder, and begin one that adds up with it"
FOLDER_HELP = "run folder (default runs/NAME-TIME)"


@dataclass(frozen=True, kw_only=True)
class Output:
    """How a command answers; every command has it."""

    json: bool = setting(False, JSON_HELP, "--json")


@dataclass(frozen=True, kw_only=True)
class Promise:
    """A mechanism, a participation, noise or ε, and what is protected."""

    mechanism: str = setting("blt", HELP)
    steps: int | None = setting(None, "number of steps (one pass, or with sampling)")
    epochs: int | None = setting(None, "passes in the same order", "--epochs")
    steps_per_epoch: int | None = setting(None, "steps in one pass")
    separation: int | None = setting(
        None, "least index difference between two steps of one unit (rounds between + 1)"
    )
    max_participations: int | None = setting(None, "most steps one unit may join")
    population: int | None = setting(None, "number of units", check=whole)
    batch_size: int | None = setting(None, "units per step", check=whole)
    noise_multiplier: float | None = setting(None, NOISE_HELP, check=positive)
    target_epsilon: float | None = setting(
        None, "find the least noise for this epsilon", check=positive
    )
    delta: float = setting(1e-5, DELTA_HELP)
    neighbours: str = setting("", "zero-out, add-remove or replace-one (default by participation)")
    unit: str = setting("example", "what is protected: example or user")

    def __post_init__(self) -> None:
        check_fields(self)

    def participation(self, *, poisson_rate: float | None = None) -> Participation:
        from noshuffle.participation import FixedSize, MinSeparation, Poisson, SinglePass

        order = self._order()
        horizon = order.steps if order is not None else self.steps
        if horizon is None:
            raise InvalidInput("give --steps, or --epochs with --steps-per-epoch")
        if self.max_participations is not None and self.separation is None:
            raise InvalidInput(
                "--max-participations needs --separation (1 means no gap is promised)"
            )
        if poisson_rate is not None:
            if self.separation is not None:
                raise InvalidInput("give either --poisson-rate or --separation, not both")
            return Poisson(horizon, poisson_rate)
        if self.separation is not None:
            whole_run = SinglePass(horizon).steps
            most = self.max_participations
            if most is None:
                most = math.ceil(whole_run / max(self.separation, 1))
            return MinSeparation(whole_run, self.separation, most)
        if order is not None:
            return order
        if self.population is not None and self.batch_size is not None:
            return FixedSize(horizon, self.batch_size, self.population)
        if self.population is not None or self.batch_size is not None:
            raise InvalidInput("give --population and --batch-size together")
        return SinglePass(horizon)

    def _order(self) -> Epochs | None:
        """Passes in one order, if the options speak of any."""
        from noshuffle.participation import Epochs

        per_epoch = self.steps_per_epoch
        if self.epochs is not None and per_epoch is None and self.population and self.batch_size:
            per_epoch = self.population // self.batch_size
            if per_epoch < 1:
                raise InvalidInput(
                    f"batch size must be at most the population ({self.population}), "
                    f"got {self.batch_size}"
                )
        if (self.epochs is None) != (per_epoch is None):
            raise InvalidInput("give --epochs and --steps-per-epoch together (or --population too)")
        if self.epochs is None or per_epoch is None:
            return None
        if self.steps is not None:
            raise InvalidInput("give either --steps or --epochs with --steps-per-epoch, not both")
        return Epochs(self.epochs, per_epoch)


def check_picture(path: Path, option: str) -> None:
    """Refuse a picture that could not be written, before the work that leads to it."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidInput(f"{option} must end in .png, .svg or .pdf, got {str(path)!r}")
    if not path.parent.is_dir():
        raise InvalidInput(f"{option} needs an existing folder, got {str(path.parent)!r}")


def print_json(record: object) -> None:
    """Strict JSON: an infinite ε or a score that is no number is null.

    Characters that the stream cannot write are escaped as JSON has it.
    """
    import json

    from noshuffle.release.files import finite

    told = finite(record)
    text = json.dumps(told, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(told, indent=2, allow_nan=False)
    print(text)

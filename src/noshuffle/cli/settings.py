"""Settings of a run, as `train` and `federated` share them, and options that are no settings of it.

Precedence: an option on the command line, then the TOML file, then the preset of the data. The
settings are written into the run folder, and a resumed run reads them from there (`run_home`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from noshuffle.cli import promise
from noshuffle.cli.budget import BUDGET_HELP
from noshuffle.cli.from_record import check_fields, setting, with_floats
from noshuffle.cli.run_home import check_new_folder, dated, kept_settings, read_toml
from noshuffle.errors import InvalidInput, non_negative, open_unit, positive, whole

#: Options by the heading of the help that they stand under.
privacy = partial(setting, heading="Privacy")
how = partial(setting, heading="How it runs")
folder = partial(setting, heading="Run folder")
DEFAULT_EPSILON = 8.0


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Every decision of a run that is not in its plan, as far as all kinds of runs have it.

    A kind of run names the setting that its presets go by, and gives new folders their names.
    """

    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    preset_by: ClassVar[str]

    mechanism: str = privacy("blt", "blt, tree, banded, … as in plan; or best")
    epsilon: float | None = privacy(
        None, f"target ε (default {DEFAULT_EPSILON:g})", "--epsilon", "--target-epsilon",
        check=positive,
    )  # fmt: skip
    noise_multiplier: float | None = privacy(
        None, f"instead of ε: {promise.NOISE_HELP}", check=non_negative
    )
    delta: float = privacy(1e-5, promise.DELTA_HELP, check=open_unit)
    device: str = how("cpu", "cpu or cuda")
    seed: int = how(0, "seed of the initial weights (public)", check=partial(whole, at_least=0))
    test_seed: str | None = how(None, promise.TEST_SEED_HELP)
    baseline: bool = how(
        False, "also train without privacy, for your eyes: shown here, kept nowhere"
    )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Fill what was not given from the preset; unknown names are refused."""
        names = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - names)
        if unknown:
            raise InvalidInput(
                f"unknown setting {unknown[0]!r}; expected one of {', '.join(sorted(names))}"
            )
        stated = {k: v for k, v in given.items() if v is not None}
        merged = {**cls.preset(stated), **stated}
        if merged.get("epsilon") is None and merged.get("noise_multiplier") is None:
            merged["epsilon"] = DEFAULT_EPSILON
        return cls(**with_floats(cls, merged))

    @classmethod
    def preset(cls, stated: Mapping[str, Any]) -> dict[str, Any]:
        """What goes with the data, or the task, that is asked for."""
        by = stated.get(cls.preset_by, cls.__dataclass_fields__[cls.preset_by].default)
        return cls.presets.get(by, {}) if isinstance(by, str) else {}

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise InvalidInput("give exactly one of epsilon and noise_multiplier")

    def folder_name(self) -> str:
        """How a new run folder begins its name."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Made = TypeVar("Made", bound=RunSettings)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a command that are no settings of its run."""

    config: Path | None = how(None, "TOML file with these settings")
    json: bool = how(False, promise.JSON_HELP, "--json")
    out: Path | None = folder(None, promise.FOLDER_HELP)
    resume: Path | None = folder(None, "go on with the run in this folder; give it alone")
    sign: Path | None = folder(None, promise.SIGN_HELP)
    budget: Path | None = privacy(None, BUDGET_HELP)

    @property
    def is_new(self) -> bool:
        """Whether a run is to be begun."""
        return self.resume is None

    def settings_and_folder(
        self, kind: str, record: type[Made], given: dict[str, Any]
    ) -> tuple[Made, Path]:
        """The settings of a run and its folder: a new one, or the one to go on in.

        `kind` is the command, and the table of the TOML file.
        """
        if self.resume is not None:
            if given or self.config or self.out:
                raise InvalidInput("--resume takes all settings from the run folder; give it alone")
            kept = kept_settings(self.resume, kind=kind, budget=self.budget)
            return record.of(kept), self.resume
        stated = read_toml(self.config, table=kind) if self.config is not None else {}
        if {"epsilon", "noise_multiplier"} & set(given):  # one that is typed replaces either
            stated = {k: v for k, v in stated.items() if k not in ("epsilon", "noise_multiplier")}
        settings = record.of({**stated, **given})
        out = self.out or dated(settings.folder_name())
        check_new_folder(out)
        return settings, out


def check_device(name: str) -> None:
    import torch

    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise InvalidInput(f"device must be cpu, cuda or cuda:NUMBER, got {name!r}")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise InvalidInput(f"device {name} is not available on this machine; use cpu")

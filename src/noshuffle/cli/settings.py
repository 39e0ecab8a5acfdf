"""TrainSettings: what `noshuffle train` was asked to do, from options, a TOML file and presets.

Precedence: an option on the command line, then the TOML file, then the preset of the data set. The
settings are written into the run folder, and a resumed run reads them from there.

>>> made = TrainSettings.of({"data": "digits", "epochs": 3})
>>> made.epochs, made.batch_size, made.model
(3, 120, 'small_cnn')
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from noshuffle.errors import InvalidInput, non_negative, one_of, open_unit, positive, whole

OPTIMIZERS = ("ftrl", "sgd", "adam", "adamw", "adafactor")
SAMPLINGS = ("none", "poisson", "fixed")

#: What suits each data set at ε = 8. digits and mnist come from small searches on training rows
#: that were held out; the others are starting points.
PRESETS: dict[str, dict[str, Any]] = {
    "digits": {"model": "small_cnn", "epochs": 20, "batch_size": 120, "lr": 0.2, "delta": 1e-4},
    "mnist": {"model": "tanh_cnn", "epochs": 20, "batch_size": 250, "lr": 0.15},
    "fashion_mnist": {"model": "tanh_cnn", "epochs": 20, "batch_size": 250, "lr": 0.15},
    "cifar10": {"model": "vgg", "epochs": 20, "batch_size": 500, "lr": 0.1},
    "shakespeare": {"model": "char_lstm", "epochs": 2, "batch_size": 64, "lr": 1.0, "delta": 1e-4},
    "adult": {"model": "linear", "epochs": 2, "batch_size": 250, "lr": 2.0},
    "bank_marketing": {"model": "linear", "epochs": 1, "batch_size": 250, "lr": 2.0},
}


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Every decision of a training run that is not in its plan."""

    data: str = "digits"
    model: str = ""
    mechanism: str = "blt_tapped"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    epochs: int = 10
    batch_size: int = 128
    clip_norm: float = 1.0
    optimizer: str = "ftrl"
    lr: float = 0.5
    momentum: float = 0.9
    cooldown: float = 0.25
    sampling: str = "none"
    unit: str = "example"
    device: str = "cpu"
    seed: int = 0
    test_seed: str | None = None
    checkpoint_every: int | None = None
    baseline: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TrainSettings:
        """Fill what was not given from the preset of the data set; unknown names are refused."""
        names = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - names)
        if unknown:
            raise InvalidInput(
                f"unknown setting {unknown[0]!r}; expected one of {', '.join(sorted(names))}"
            )
        preset = PRESETS.get(given.get("data", "digits"), {})
        merged = {**preset, **{k: v for k, v in given.items() if v is not None}}
        if merged.get("epsilon") is None and merged.get("noise_multiplier") is None:
            merged["epsilon"] = 8.0
        if given.get("data", "digits") not in PRESETS:
            merged.setdefault("baseline", False)  # somebody's own data: no run without privacy
        return cls(**merged)

    def __post_init__(self) -> None:
        positive(clip_norm=self.clip_norm, lr=self.lr)
        whole(epochs=self.epochs, batch_size=self.batch_size)
        whole(at_least=0, seed=self.seed)
        open_unit(delta=self.delta)
        non_negative(momentum=self.momentum, cooldown=self.cooldown)
        if self.momentum >= 1 or self.cooldown > 1:
            raise InvalidInput(
                "momentum must lie in [0, 1) and cooldown in [0, 1], "
                f"got {self.momentum} and {self.cooldown}"
            )
        one_of(OPTIMIZERS, optimizer=self.optimizer)
        one_of(SAMPLINGS, sampling=self.sampling)
        one_of(("example", "user"), unit=self.unit)
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise InvalidInput("give either epsilon or noise_multiplier, not both")
        if self.epsilon is not None:
            positive(epsilon=self.epsilon)
        if self.noise_multiplier is not None:
            positive(noise_multiplier=self.noise_multiplier)
        if self.checkpoint_every is not None:
            whole(checkpoint_every=self.checkpoint_every)
        if self.sampling != "none" and self.mechanism not in ("identity", "blt_tapped"):
            raise InvalidInput(
                f"sampling={self.sampling} needs mechanism identity (DP-SGD), "
                f"got {self.mechanism!r}; correlated noise takes the data in order"
            )
        if self.unit == "user" and self.sampling != "none":
            raise InvalidInput("unit user is trained in order only; leave sampling at none")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_toml(path: Path, *, table: str = "train") -> dict[str, Any]:
    """Settings from a TOML file: top-level keys, or a table of that name, [train]."""
    try:
        record = tomllib.loads(path.read_text(encoding="utf8"))
    except OSError as error:
        raise InvalidInput(f"--config {path} could not be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"--config {path} is not TOML: {error}") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"--config {path} is not TOML: it is not UTF-8 text") from None
    found = record.get(table, record)
    if not isinstance(found, dict):
        raise InvalidInput(f"--config {path}: {table} must be a table, [{table}]; got {found!r}")
    return dict(found)


def kept_settings(run: Path, *, kind: str) -> dict[str, Any]:
    """The settings that a run folder was started with, if `noshuffle KIND` made it."""
    file = run / "config.json"
    if not file.is_file():
        raise InvalidInput(f"{run} is not a run folder: it has no config.json")
    try:
        kept = json.loads(file.read_text(encoding="utf8"))
    except ValueError:
        kept = None
    if not isinstance(kept, dict):
        raise InvalidInput(f"{file} does not hold settings; the run folder is damaged")
    made_by = kept.get("kind", "train")
    if made_by == "fit":
        raise InvalidInput(f"{run} was made by noshuffle fit, which is not resumed; start anew")
    if made_by != kind:
        raise InvalidInput(f"{run} is another kind of run; use: noshuffle {made_by} --resume {run}")
    if "run_folder" in kept:  # a setting of the app in examples/federated
        raise InvalidInput(f"{run} was begun by an app on Flower; go on with the app's flwr run")
    return kept


def check_new_folder(out: Path) -> None:
    """Refuse to begin a run in a file or in a folder that holds something."""
    if out.exists() and not out.is_dir():
        raise InvalidInput(f"--out must be a new folder, {out} is a file; use another --out")
    if out.exists() and any(out.iterdir()):
        raise InvalidInput(f"{out} is not empty; go on with --resume {out}, or use another --out")

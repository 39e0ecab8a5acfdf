"""Settings of a run and its folder, as `train` and `federated` share them, and those of `train`.

Precedence: an option on the command line, then the TOML file, then the preset of the data. The
settings are written into the run folder, and a resumed run reads them from there.

>>> made = TrainSettings.of({"data": "digits", "epochs": 3})
>>> made.epochs, made.batch_size, made.model
(3, 120, 'small_cnn')
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from noshuffle.cli import promise
from noshuffle.cli.budget import BUDGET_HELP
from noshuffle.cli.from_record import check_fields, setting, with_floats
from noshuffle.cli.words import quoted
from noshuffle.errors import InvalidInput, non_negative, one_of, open_unit, positive, utf8, whole

if TYPE_CHECKING:
    from noshuffle.release.folder import RunFolder

#: Options by the heading of the help that they stand under.
privacy = partial(setting, heading="Privacy")
how = partial(setting, heading="How it runs")
folder = partial(setting, heading="Run folder")
training = partial(setting, heading="Training")
DEFAULT_EPSILON = 8.0
#: Largest learning rate and clip norm: noise and steps beyond it are no float32.
MOST = 1e30


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


OPTIMIZERS = ("ftrl", "sgd", "adam", "adamw", "adafactor")

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
#: … and a linear model on fixed features of their images (`--features`).
ON_FEATURES: dict[str, dict[str, Any]] = {
    "digits": {"model": "softmax", "lr": 0.15},
    "mnist": {"model": "softmax", "epochs": 40, "batch_size": 5000, "lr": 1.2},
    "fashion_mnist": {"model": "softmax", "epochs": 40, "batch_size": 5000, "lr": 1.2},
    "cifar10": {"model": "softmax", "epochs": 40, "batch_size": 5000, "lr": 1.2},
}


#: Kinds of secret draws to train with.
SAMPLINGS = ("none", "poisson", "truncated", "fixed", "cyclic", "separated", "bins")


@dataclass(frozen=True, kw_only=True)
class TrainSettings(RunSettings):
    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS
    preset_by: ClassVar[str] = "data"

    data: str = setting("digits", f"{', '.join(PRESETS)}, or module:function of your own")
    task: str = setting(
        "auto", "classification, regression, or module:function, a loss of your own"
    )
    features: str = setting(
        "",
        "fixed features of images under a linear model: patches[:COUNT], mirrored, scattering",
    )
    model: str = setting("", "tanh_cnn, vgg, small_cnn, linear, softmax, mlp or char_lstm")
    mechanism: str = privacy(
        "blt_tapped",
        "blt_tapped, blt, tree, identity, … as in plan; best; release_sums: each sum by itself",
    )
    clip_norm: float = privacy(1.0, "bound on one contribution", check=positive)
    norm_share: float = privacy(
        0.0, "share of the guarantee (say 0.01) for a private histogram of gradient norms",
        check=non_negative,
    )  # fmt: skip
    sampling: str = privacy(
        "none",
        "none; DP-SGD: poisson, truncated, fixed; banded noise: cyclic, separated; any: bins",
        check=partial(one_of, SAMPLINGS),
    )
    separation: int | None = privacy(
        None, "groups of cyclic, least distance of separated (default: an eighth of an epoch)",
        check=whole,
    )  # fmt: skip
    unit: str = privacy(
        "example", "protect an example or a user", check=partial(one_of, ("example", "user"))
    )
    restart_every: int | None = privacy(None, "steps of one tree (mechanism tree)", check=whole)
    completion: bool | None = privacy(None, "virtual empty steps before a restart (tree)")
    epochs: int = training(10, "passes over the data, in order", check=whole)
    batch_size: int = training(128, "examples a step", check=whole)
    optimizer: str = training("ftrl", ", ".join(OPTIMIZERS), check=partial(one_of, OPTIMIZERS))
    lr: float = training(0.5, "learning rate (not its inverse)", check=positive)
    momentum: float = training(0.9, "momentum of ftrl and sgd", check=non_negative)
    cooldown: float = training(0.25, "last part with a falling learning rate", check=non_negative)
    order: str = training(
        "file", "file, sorted, random-per-restart (tree) or module:function (data set → its rows)"
    )
    constraint: str = training("", "set of the weights (ftrl): l2:RADIUS, l1:RADIUS, box:LOW,HIGH")
    composite: str = training("", "regularizer (ftrl): l1:WEIGHT, elastic:L1,L2, group:WEIGHT")
    average: float = training(
        0.0, "decay of an average of iterates, told beside the last one", check=non_negative
    )
    augment: int | None = training(
        None, "copies of each image, moved by up to 4 pixels and mirrored (photographs)",
        check=whole,
    )  # fmt: skip
    checkpoint_every: int | None = folder(
        None, "steps between checkpoints (default: an epoch)", check=whole
    )

    @classmethod
    def preset(cls, stated: Mapping[str, Any]) -> dict[str, Any]:
        found = super().preset(stated)
        if not stated.get("features"):
            return found
        return {**found, **ON_FEATURES.get(stated.get("data", "digits"), {"model": "softmax"})}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_multiplier is not None:
            positive(noise_multiplier=self.noise_multiplier)
        if self.momentum >= 1 or self.cooldown > 1:
            raise InvalidInput(
                "momentum must lie in [0, 1) and cooldown in [0, 1], "
                f"got {self.momentum} and {self.cooldown}"
            )
        is_banded = self.sampling in ("cyclic", "separated")
        fine = ("identity", "blt_tapped", *(("banded", "best") if is_banded else ()))
        if self.sampling not in ("none", "bins") and self.mechanism not in fine:
            kind = "banded or identity" if is_banded else "identity (DP-SGD)"
            raise InvalidInput(
                f"sampling={self.sampling} needs mechanism {kind}, "
                f"got {self.mechanism!r}; other correlated noise takes bins, or the data in order"
            )
        if self.separation is not None and not is_banded:
            raise InvalidInput("separation belongs to sampling cyclic or separated")
        for name in ("lr", "clip_norm"):
            if (came := getattr(self, name)) > MOST:
                raise InvalidInput(f"{name} must be at most {MOST:g} (float32), got {came:g}")
        if self.features and self.augment is not None:
            raise InvalidInput("features are fixed: --augment goes with images, leave one out")
        if self.norm_share >= 1:
            raise InvalidInput(f"norm_share must lie in [0, 1), got {self.norm_share}")
        if self.average >= 1:
            raise InvalidInput(f"average must lie in [0, 1), got {self.average}")
        if self.optimizer != "ftrl" and (self.constraint or self.composite):
            raise InvalidInput("constraint and composite belong to optimizer ftrl")
        is_tree = self.mechanism == "tree" and self.sampling == "none"
        if not is_tree and (self.restart_every is not None or self.completion is not None):
            raise InvalidInput("restart_every and completion belong to mechanism tree")
        if self.order == "random-per-restart" and (not is_tree or self.restart_every is None):
            raise InvalidInput("order random-per-restart needs mechanism tree and restart_every")
        if self.order != "file" and (self.sampling != "none" or self.unit == "user"):
            raise InvalidInput("order belongs to unit example without sampling; leave it at file")
        if self.unit == "user" and self.sampling != "none":
            raise InvalidInput("unit user is trained in order only; leave sampling at none")

    def folder_name(self) -> str:
        return self.data.replace(":", "-").replace(".", "-")


@dataclass(frozen=True, kw_only=True)
class KeptTrainSettings(TrainSettings):
    """What config.json holds beside the options."""

    #: (steps, batch size) of a run that was extended; see `train_extension`.
    stages: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = ((int(steps), int(batch)) for steps, batch in self.stages)
        object.__setattr__(self, "stages", tuple(pairs))


def stages_of(settings: TrainSettings) -> tuple[tuple[int, int], ...]:
    """(steps, batch size) of the stages of a run that was extended; else none."""
    return settings.stages if isinstance(settings, KeptTrainSettings) else ()


Made = TypeVar("Made", bound=RunSettings)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a command that are no settings of its run."""

    config: Path | None = how(None, "TOML file with these settings")
    json: bool = how(False, promise.JSON_HELP, "--json")
    out: Path | None = folder(None, promise.FOLDER_HELP)
    resume: Path | None = folder(None, "go on with the run in this folder; give it alone")
    moved: bool = folder(
        False, "not needed any more: a moved or copied folder goes on under fresh keys", "--moved"
    )
    keep_keys: bool = folder(
        False, "do not destroy the keys when the run is finished", "--keep-keys"
    )
    sign: Path | None = folder(None, promise.SIGN_HELP)
    budget: Path | None = privacy(None, BUDGET_HELP)

    def __post_init__(self) -> None:
        if self.keep_keys and self.sign is not None:
            raise InvalidInput("--sign signs a sealed run; leave out --keep-keys")

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
            return record.of(kept_settings(self.resume, kind=kind)), self.resume
        stated = read_toml(self.config, table=kind) if self.config is not None else {}
        if {"epsilon", "noise_multiplier"} & set(given):  # one that is typed replaces either
            stated = {k: v for k, v in stated.items() if k not in ("epsilon", "noise_multiplier")}
        settings = record.of({**stated, **given})
        out = self.out or dated(settings.folder_name())
        check_new_folder(out)
        return settings, out


def read_toml(path: Path, *, table: str) -> dict[str, Any]:
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
    made_by = kept.pop("kind", "train")
    if made_by == "fit":
        raise InvalidInput(f"{run} was made by noshuffle fit, which is not resumed; start anew")
    if made_by != kind:
        again = f"noshuffle {made_by} --resume {quoted(run)}"
        raise InvalidInput(f"{run} is another kind of run; use: {again}")
    if "run_folder" in kept:  # a setting of the app in examples/federated
        raise InvalidInput(f"{run} was begun by an app on Flower; go on with the app's flwr run")
    return kept


def dated(name: str) -> Path:
    """A folder of this second that is not there yet."""
    path = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    others = (path.with_name(f"{path.name}-{i}") for i in count(2))
    return next(one for one in chain([path], others) if not one.exists())


def check_new_folder(out: Path, *, resumes: bool = True) -> None:
    """Refuse to begin a run in a file or in a folder that holds something."""
    utf8(out=out)
    if out.exists() and not out.is_dir():
        raise InvalidInput(f"--out must be a new folder, {out} is a file; use another --out")
    if out.exists() and any(file.name != ".lock" for file in out.iterdir()):
        is_run = resumes and (out / "config.json").exists()
        again = f"go on with --resume {quoted(out)}, or " if is_run else ""
        raise InvalidInput(f"{out} is not empty; {again}use another --out")


@contextmanager
def begun(home: RunFolder, config: dict[str, Any]) -> Iterator[None]:
    """Begin a run in here: its folder is this process's alone, and holds its settings.

    Those of a run that was refused are taken away again, keys included, and so are folders that
    were made for it. Another process that began in the same folder meanwhile keeps its own.
    """
    from noshuffle.release.files import read_json
    from noshuffle.release.folder import take

    made = [each for each in (home.path, *home.path.parents) if not each.exists()]
    home.path.mkdir(parents=True, exist_ok=True)
    lock = take(home.path)
    kept = read_json(home.config_file) if home.config_file.exists() else None
    if home.is_started or kept not in (None, json.loads(json.dumps(config))):
        raise InvalidInput(f"{home.path} holds another run, begun meanwhile; use another --out")
    home.write_config(config)
    try:
        yield
    except BaseException:
        if not home.is_started:
            home.config_file.unlink(missing_ok=True)
            home.destroy_keys()
            with suppress(OSError):  # somebody has put something into it
                if home.checkpoints.exists():
                    home.checkpoints.rmdir()
                if made:
                    (home.path / ".lock").unlink(missing_ok=True)
                for each in made:
                    each.rmdir()
        raise
    finally:
        del lock


def check_device(name: str) -> None:
    import torch

    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise InvalidInput(f"device must be cpu, cuda or cuda:NUMBER, got {name!r}")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise InvalidInput(f"device {name} is not available on this machine; use cpu")

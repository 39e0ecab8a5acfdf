"""TrainSettings: what `noshuffle train` was asked to do, with presets for the data that come along.

>>> made = TrainSettings.of({"data": "digits", "epochs": 3})
>>> made.epochs, made.batch_size, made.model
(3, 120, 'small_cnn')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from noshuffle.cli.from_record import setting
from noshuffle.cli.settings import RunSettings, folder, privacy
from noshuffle.errors import InvalidInput, fits_float32, non_negative, one_of, positive, whole

training = partial(setting, heading="Training")
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


#: Kinds of secret draws to train with, and the mechanism of each where none is named.
DEFAULT_MECHANISMS = {
    "none": "blt_tapped",
    "poisson": "identity",
    "truncated": "identity",
    "fixed": "identity",
    "cyclic": "banded",
    "bins": "blt_tapped",
}
SAMPLINGS = tuple(DEFAULT_MECHANISMS)


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
        "",
        "blt_tapped, blt, tree, identity, … as in plan; best; release_sums: each sum by itself "
        "(default blt_tapped; by --sampling: identity, of cyclic banded)",
    )
    clip_norm: float = privacy(1.0, "bound on one contribution", check=positive)
    sampling: str = privacy(
        "none",
        "none; DP-SGD: poisson, truncated, fixed; banded noise: cyclic; any: bins",
        check=partial(one_of, SAMPLINGS),
    )
    separation: int | None = privacy(
        None, "groups of cyclic (default: an eighth of an epoch)", check=whole,
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
                "momentum must lie in [0, 1) and cooldown= in [0, 1], "
                f"got {self.momentum} and {self.cooldown}"
            )
        if not self.mechanism:
            object.__setattr__(self, "mechanism", DEFAULT_MECHANISMS[self.sampling])
        is_banded = self.sampling == "cyclic"
        fine = ("identity", *(("banded", "best") if is_banded else ()))
        if self.sampling not in ("none", "bins") and self.mechanism not in fine:
            kind = "banded or identity" if is_banded else "identity (DP-SGD)"
            raise InvalidInput(
                f"sampling={self.sampling} needs mechanism {kind}, "
                f"got {self.mechanism!r}; other correlated noise takes bins, or the data in order"
            )
        if self.separation is not None and not is_banded:
            raise InvalidInput("separation belongs to sampling=cyclic")
        fits_float32(lr=self.lr, clip_norm=self.clip_norm)
        if self.features and self.augment is not None:
            raise InvalidInput("features are fixed: --augment goes with images, leave one out")
        if self.average >= 1:
            raise InvalidInput(f"average must lie in [0, 1), got {self.average}")
        if self.optimizer != "ftrl" and (self.constraint or self.composite):
            raise InvalidInput("constraint= and composite= belong to optimizer=ftrl")
        is_tree = self.mechanism == "tree" and self.sampling == "none"
        if not is_tree and (self.restart_every is not None or self.completion is not None):
            raise InvalidInput("restart_every= and completion= belong to mechanism=tree")
        if self.order == "random-per-restart" and (not is_tree or self.restart_every is None):
            raise InvalidInput("order=random-per-restart needs mechanism=tree and restart_every=")
        if self.order != "file" and (self.sampling != "none" or self.unit == "user"):
            raise InvalidInput("order belongs to unit=example without sampling=; leave it at file")
        if self.unit == "user" and self.sampling != "none":
            raise InvalidInput("unit=user is trained in order only; leave sampling= at none")

    def folder_name(self) -> str:
        return self.data.replace(":", "-").replace(".", "-")

"""TrainSettings: what `noshuffle train` was asked to do, from options, a TOML file and presets.

>>> made = TrainSettings.of({"data": "digits", "epochs": 3})
>>> made.epochs, made.batch_size, made.model
(3, 120, 'small_cnn')
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from noshuffle.cli.from_record import setting
from noshuffle.cli.run_settings import RunSettings, folder, privacy
from noshuffle.errors import InvalidInput, non_negative, one_of, positive, whole

OPTIMIZERS = ("ftrl", "sgd", "adam", "adamw", "adafactor")
training = partial(setting, heading="Training")

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
class TrainSettings(RunSettings):
    """Every decision of a training run that is not in its plan."""

    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS
    preset_by: ClassVar[str] = "data"

    data: str = setting("digits", f"{', '.join(PRESETS)}, or module:function of your own")
    model: str = setting("", "tanh_cnn, vgg, small_cnn, linear, mlp or char_lstm")
    mechanism: str = privacy("blt_tapped", "blt_tapped, blt, tree, identity, … as in plan; or best")
    clip_norm: float = privacy(1.0, "bound on one contribution", check=positive)
    sampling: str = privacy(
        "none", "none, or DP-SGD with poisson or fixed batches",
        check=partial(one_of, ("none", "poisson", "fixed")),
    )  # fmt: skip
    unit: str = privacy(
        "example", "protect an example or a user", check=partial(one_of, ("example", "user"))
    )
    epochs: int = training(10, "passes over the data, in order", check=whole)
    batch_size: int = training(128, "examples a step", check=whole)
    optimizer: str = training("ftrl", ", ".join(OPTIMIZERS), check=partial(one_of, OPTIMIZERS))
    lr: float = training(0.5, "learning rate (not its inverse)", check=positive)
    momentum: float = training(0.9, "momentum of ftrl and sgd", check=non_negative)
    cooldown: float = training(0.25, "last part with a falling learning rate", check=non_negative)
    checkpoint_every: int | None = folder(
        None, "steps between checkpoints (default: an epoch)", check=whole
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise_multiplier is not None:
            positive(noise_multiplier=self.noise_multiplier)
        if self.momentum >= 1 or self.cooldown > 1:
            raise InvalidInput(
                "momentum must lie in [0, 1) and cooldown in [0, 1], "
                f"got {self.momentum} and {self.cooldown}"
            )
        if self.sampling != "none" and self.mechanism not in ("identity", "blt_tapped"):
            raise InvalidInput(
                f"sampling={self.sampling} needs mechanism identity (DP-SGD), "
                f"got {self.mechanism!r}; correlated noise takes the data in order"
            )
        if self.unit == "user" and self.sampling != "none":
            raise InvalidInput("unit user is trained in order only; leave sampling at none")

    def folder_name(self) -> str:
        return self.data.replace(":", "-").replace(".", "-")

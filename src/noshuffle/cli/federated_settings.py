"""FederatedSettings: what `noshuffle federated` was asked to do, and what follows from it.

Precedence: an option on the command line, then the TOML file, then the preset of the task. The
settings are written into the run folder, and a resumed run reads them from there.

Limits that are not given are derived from U users, m asked a round, T rounds and the share p of
users that check in. After b − 1 rounds at most m(b − 1) users are waiting, and p times the rest
must fill a cohort on average:

    p (U − m(b − 1)) ≥ m   ⇔   b ≤ U/m − 1/p + 1

A user is asked a = mT/U times on average; k is two binomial standard deviations above that, and at
most ⌈T/b⌉, which nobody can exceed anyway:

    k = min(⌈T/b⌉, ⌈a + 2 √(a (1 − a/T))⌉)

A population that drifts by (order "year") is asked in a window of a tenth of it, hence b a tenth
of that; where everybody checks in, k = ⌈a⌉, which is how often the window meets a user.

>>> made = FederatedSettings.of({"rounds": 40, "clients_per_round": 48})
>>> made.task, made.model, limits_of(made, users=479).words()
('digits', 'mlp', 'separation 9 (derived), at most 5 participations (derived)')
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from noshuffle.errors import InvalidInput, non_negative, one_of, open_unit, positive, whole

TASKS = ("digits", "shakespeare", "drama", "writers")
TEXT_MODELS = ("lstm", "transformer")
IMAGE_MODELS = ("mlp", "cnn", "linear")
OPTIMIZERS = ("ftrl", "sgd", "momentum", "adam")
ORDERS = ("random", "year", "list")
ENGINES = ("process", "flower")
#: Names of independent noise: what DP-FedAvg adds, with or without amplification by sampling.
INDEPENDENT = ("identity", "dp-fedavg")
#: Share of the population that a drifting window covers.
_WINDOW = 10

#: Starting points at ε = 8; digits come from a small search, the others want one of their own.
PRESETS: dict[str, dict[str, Any]] = {
    "digits": {
        "model": "mlp",
        "rounds": 60,
        "clients_per_round": 95,
        "delta": 1e-4,
        "clip": "0.5",
        "server_lr": 0.5,
        "client_lr": 0.5,
        "local_epochs": 2,
        "baseline": True,
    },
    "shakespeare": {
        "model": "lstm",
        "rounds": 200,
        "clients_per_round": 50,
        "delta": 1e-4,
        "local_batch": 4,
        "local_steps": 4,
    },
    "drama": {
        "model": "lstm",
        "rounds": 1000,
        "clients_per_round": 100,
        "local_batch": 4,
        "local_steps": 4,
    },
    "writers": {
        "model": "cnn",
        "rounds": 100,
        "clients_per_round": 100,
        "delta": 1e-4,
        "client_lr": 0.1,
        "local_batch": 20,
    },
}


@dataclass(frozen=True, kw_only=True)
class FederatedSettings:
    """Every decision of a federated run that is not in its plan."""

    task: str = "digits"
    model: str = ""
    mechanism: str = "blt"
    amplified: bool = False
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    rounds: int = 100
    clients_per_round: int = 50
    separation: int | None = None
    max_participations: int | None = None
    clip: str = "1.0"
    server_optimizer: str = "ftrl"
    server_lr: float = 0.5
    server_momentum: float = 0.9
    cooldown: float = 0.25
    client_lr: float = 0.5
    local_epochs: int = 1
    local_steps: int | None = None
    local_batch: int | None = None
    proximal: float = 0.0
    order: str = "random"
    check_in_rate: float = 1.0
    drop_out: float = 0.0
    engine: str = "process"
    vectorise: bool | None = None
    device: str = "cpu"
    seed: int = 0
    test_seed: str | None = None
    evaluate_every: int | None = None
    checkpoint_every: int = 1
    baseline: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> FederatedSettings:
        """Fill what was not given from the preset of the task; unknown names are refused."""
        names = {field.name for field in fields(cls)}
        unknown = sorted(set(given) - names)
        if unknown:
            raise InvalidInput(
                f"unknown setting {unknown[0]!r}; expected one of {', '.join(sorted(names))}"
            )
        preset = PRESETS.get(given.get("task", "digits"), {})
        merged = {**preset, **{k: v for k, v in given.items() if v is not None}}
        if merged.get("epsilon") is None and merged.get("noise_multiplier") is None:
            merged["epsilon"] = 8.0
        if "clip" in merged:
            merged["clip"] = str(merged["clip"])  # TOML may hold a number
        return cls(**merged)

    def __post_init__(self) -> None:
        one_of(TASKS, task=self.task)
        is_text = self.task in ("shakespeare", "drama")
        one_of(TEXT_MODELS if is_text else IMAGE_MODELS, **{f"model for {self.task}": self.model})
        whole(rounds=self.rounds, clients_per_round=self.clients_per_round)
        whole(local_epochs=self.local_epochs, checkpoint_every=self.checkpoint_every)
        for name in ("separation", "max_participations", "local_steps", "local_batch"):
            if getattr(self, name) is not None:
                whole(**{name: getattr(self, name)})
        if self.evaluate_every is not None:
            whole(evaluate_every=self.evaluate_every)
        whole(at_least=0, seed=self.seed)
        open_unit(delta=self.delta)
        positive(server_lr=self.server_lr, client_lr=self.client_lr)
        non_negative(proximal=self.proximal, server_momentum=self.server_momentum)
        non_negative(cooldown=self.cooldown, drop_out=self.drop_out)
        if self.server_momentum >= 1 or self.cooldown > 1:
            raise InvalidInput("server_momentum must lie in [0, 1) and cooldown in [0, 1]")
        if self.drop_out >= 1 or not 0 < self.check_in_rate <= 1:
            raise InvalidInput("drop_out must lie in [0, 1) and check_in_rate in (0, 1]")
        one_of(OPTIMIZERS, server_optimizer=self.server_optimizer)
        one_of(ORDERS, order=self.order)
        one_of(ENGINES, engine=self.engine)
        if self.engine == "flower" and self.drop_out:
            raise InvalidInput("engine flower waits for all clients; leave out drop_out")
        clip_of(self.clip)
        self._check_privacy()

    def _check_privacy(self) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise InvalidInput("give exactly one of epsilon and noise_multiplier")
        if self.epsilon is not None:
            positive(epsilon=self.epsilon)
        if self.noise_multiplier is not None:
            non_negative(noise_multiplier=self.noise_multiplier)
        if self.order == "year" and self.task != "drama":
            raise InvalidInput(f"order year needs a task with years (drama), got {self.task!r}")
        if not self.amplified:
            return
        if self.mechanism not in INDEPENDENT:
            raise InvalidInput(
                f"amplified needs mechanism dp-fedavg, got {self.mechanism!r}; correlated noise "
                "takes users in any order and samples nobody"
            )
        if self.separation or self.max_participations or self.order != "random":
            raise InvalidInput(
                "amplified draws every cohort by secret coin flips; leave out separation, "
                "max_participations and order"
            )
        if self.check_in_rate < 1:
            raise InvalidInput("amplified needs everybody it draws; leave check_in_rate at 1")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Limits:
    """How often a user may be asked, and which of it was derived."""

    separation: int
    max_participations: int
    is_separation_derived: bool
    is_max_derived: bool
    shortage: int
    why: str

    def words(self) -> str:
        """Both limits, and which were derived."""
        b = f"separation {self.separation}{' (derived)' if self.is_separation_derived else ''}"
        k = f"at most {self.max_participations} participation"
        k += "s" if self.max_participations > 1 else ""
        return f"{b}, {k}{' (derived)' if self.is_max_derived else ''}"


def limits_of(settings: FederatedSettings, *, users: int) -> Limits:
    """The limits of a run without sampling; see the module for the derivation.

    `shortage` counts the invitations that the limits leave unfilled over the whole run at least.
    """
    asked, rounds = settings.clients_per_round, settings.rounds
    if asked > users:
        raise InvalidInput(
            f"clients_per_round must be at most the {users:,} users of {settings.task}, got {asked}"
        )
    b, k = settings.separation, settings.max_participations
    is_drift = settings.order == "year"
    if b is None:
        room = math.floor(users / asked - 1 / settings.check_in_rate + 1 + 1e-9)
        b = max(1, min(room // _WINDOW if is_drift else room, rounds))
    if k is None:
        mean = asked * rounds / users
        spread = 2 * math.sqrt(mean * max(0.0, 1 - mean / rounds))
        is_even = is_drift and settings.check_in_rate == 1
        k = math.ceil(mean if is_even else mean + spread)
    most = min(k, math.ceil(rounds / b))
    why = f"{users:,} users, {asked} asked a round, {rounds} rounds"
    if settings.check_in_rate < 1:
        why += f", {100 * settings.check_in_rate:g} % check in"
    why += ", a drifting window of a tenth of them" if is_drift else ""
    return Limits(
        separation=b,
        max_participations=most,
        is_separation_derived=settings.separation is None,
        is_max_derived=settings.max_participations is None,
        shortage=max(0, asked * rounds - users * most),
        why=why,
    )


def clip_of(text: str) -> tuple[float | None, float]:
    """`--clip` as (quantile or None, clip norm or where to start).

    >>> clip_of("0.3"), clip_of("adaptive"), clip_of("adaptive:0.8:2")
    ((None, 0.3), (0.5, 1.0), (0.8, 2.0))
    """
    name, *numbers = text.split(":")
    try:
        if name != "adaptive":
            positive(clip=float(text))
            return None, float(text)
        if len(numbers) > 2:
            raise ValueError
        quantile = float(numbers[0]) if numbers else 0.5
        start = float(numbers[1]) if len(numbers) > 1 else 1.0
    except InvalidInput:
        raise
    except ValueError:
        raise InvalidInput(
            "clip must be a number > 0, or adaptive, adaptive:QUANTILE, adaptive:QUANTILE:START; "
            f"got {text!r}"
        ) from None
    open_unit(**{"quantile of clip": quantile})
    positive(**{"start of clip": start})
    return quantile, start

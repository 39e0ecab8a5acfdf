"""FederatedSettings: what `noshuffle federated` was asked to do, and what follows from it.

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
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

from noshuffle.cli.from_record import setting
from noshuffle.cli.settings import RunSettings, folder, how, privacy
from noshuffle.errors import InvalidInput, non_negative, one_of, open_unit, positive, whole

TASKS = ("digits", "shakespeare", "drama", "writers", "stackoverflow")
TEXT_MODELS = ("lstm", "transformer", "word_lstm")
IMAGE_MODELS = ("mlp", "cnn", "linear")
OPTIMIZERS = ("ftrl", "sgd", "momentum", "adam")
ORDERS = ("random", "year", "list")
#: Names of independent noise: what DP-FedAvg adds, with or without amplification by sampling.
INDEPENDENT = ("identity", "dp-fedavg")
#: Share of the population that a drifting window covers.
_WINDOW = 10
#: Options by the heading of the help that they stand under.
users = partial(setting, heading="Rounds and users")
server = partial(setting, heading="Server")
clients = partial(setting, heading="Clients")

_TEXT = {"model": "lstm", "local_batch": 4, "local_steps": 4}
#: Starting points at ε = 8; digits come from a small search, the others want one of their own.
PRESETS: dict[str, dict[str, Any]] = {
    "digits": {
        "model": "mlp",
        "rounds": 60,
        "clients_per_round": 95,
        "delta": 1e-4,
        "clip": "0.5",
        "local_epochs": 2,
    },
    "shakespeare": {**_TEXT, "rounds": 200, "delta": 1e-4},
    "drama": {**_TEXT, "rounds": 1000, "clients_per_round": 100},
    "stackoverflow": {
        "model": "word_lstm",
        "rounds": 1600,
        "clients_per_round": 100,
        "delta": 1e-6,
        "server_lr": 3.0,
        "local_batch": 16,
    },
    "writers": {
        "model": "cnn",
        "clients_per_round": 100,
        "delta": 1e-4,
        "client_lr": 0.1,
        "local_batch": 20,
    },
}


@dataclass(frozen=True, kw_only=True)
class FederatedSettings(RunSettings):
    presets: ClassVar[dict[str, dict[str, Any]]] = PRESETS
    preset_by: ClassVar[str] = "task"

    task: str = setting(
        "digits",
        "digits (comes with scikit-learn, made-up users), shakespeare, drama, writers, "
        "stackoverflow, or module:function of your own",
    )
    model: str = setting("", f"text: {', '.join(TEXT_MODELS)}; images: {', '.join(IMAGE_MODELS)}")
    mechanism: str = privacy(
        "blt", "blt, tree, banded, … as in plan; best; dp-fedavg: independent noise"
    )
    amplified: bool = privacy(
        False, "dp-fedavg with secret Poisson sampling of users", "--amplified"
    )
    clip: str = privacy("1.0", "bound on a user's update; or adaptive[:QUANTILE[:START]]")
    rounds: int = users(100, "number of rounds", check=whole)
    clients_per_round: int = users(50, "users asked a round", check=whole)
    separation: int | None = users(
        None, "least difference of two rounds of one user (default: derived)", check=whole
    )
    max_participations: int | None = users(
        None, "most rounds one user may join (default: derived)", check=whole
    )
    order: str = users(
        "random", "who comes first: random, year (drama: a drifting population), list",
        check=partial(one_of, ORDERS),
    )  # fmt: skip
    check_in_rate: float = users(1.0, "share of users that check in, (0, 1]", check=positive)
    drop_out: float = users(
        0.0, "share of asked users that do not answer, [0, 1)", check=non_negative
    )
    server_optimizer: str = server(
        "ftrl", "ftrl, sgd, momentum or adam", check=partial(one_of, OPTIMIZERS)
    )
    server_lr: float = server(0.5, "learning rate of the server", check=positive)
    server_momentum: float = server(0.9, "momentum of ftrl and momentum", check=non_negative)
    cooldown: float = server(0.25, "last part with a falling server rate", check=non_negative)
    client_lr: float = clients(0.5, "learning rate of a client", check=positive)
    local_epochs: int = clients(1, "passes over a user's data", check=whole)
    local_steps: int | None = clients(None, "most steps of a client", check=whole)
    local_batch: int | None = clients(
        None, "examples of a client's step (all, if the task names none)", check=whole
    )
    proximal: float = clients(0.0, "μ of FedProx", check=non_negative)
    vectorise: bool | None = how(None, "train clients together (default: where quicker)")
    seed: int = how(
        0, "seed of initial weights and check-ins (public)", check=partial(whole, at_least=0)
    )
    evaluate_every: int | None = how(
        None, "rounds between evaluations (default: about 20 in all)", check=whole
    )
    checkpoint_every: int = folder(
        1, "rounds between checkpoints; a crash loses those since", check=whole
    )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """As for every run; TOML may hold a clip norm as a number."""
        clip = given.get("clip")
        return super().of(given if clip is None else {**given, "clip": str(clip)})

    @property
    def is_own(self) -> bool:
        """Whether the task is a function of the caller's, whose data nobody here knows."""
        return ":" in self.task

    def folder_name(self) -> str:
        return f"federated-{self.task.replace(':', '-')}"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_own:
            one_of(("", *TEXT_MODELS, *IMAGE_MODELS), model=self.model)
        else:
            one_of((*TASKS, "module:function"), task=self.task)
            is_text = self.task in ("shakespeare", "drama", "stackoverflow")
            kinds = TEXT_MODELS if is_text else IMAGE_MODELS
            one_of(kinds, **{f"model for {self.task}": self.model})
        if self.server_momentum >= 1 or self.cooldown > 1:
            raise InvalidInput("server_momentum must lie in [0, 1) and cooldown in [0, 1]")
        if self.drop_out >= 1 or self.check_in_rate > 1:
            raise InvalidInput("drop_out must lie in [0, 1) and check_in_rate in (0, 1]")
        clip_of(self.clip)
        if self.order == "year" and self.task != "drama" and not self.is_own:
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


@dataclass(frozen=True)
class Limits:
    """How often a user may be asked, and which of it was derived."""

    separation: int
    max_participations: int
    is_separation_derived: bool
    is_max_derived: bool
    shortage: int  # invitations that they leave unfilled over the whole run, at least
    why: str

    def words(self) -> str:
        b = f"separation {self.separation}{' (derived)' if self.is_separation_derived else ''}"
        k = f"at most {self.max_participations} participation"
        k += "s" if self.max_participations > 1 else ""
        return f"{b}, {k}{' (derived)' if self.is_max_derived else ''}"

    def to_record(self) -> dict[str, Any]:
        return {
            "separation": self.separation,
            "max_participations": self.max_participations,
            "separation_is_derived": self.is_separation_derived,
            "max_participations_is_derived": self.is_max_derived,
            "unfilled_invitations": self.shortage,
        }


def limits_of(settings: FederatedSettings, *, users: int) -> Limits | None:
    """The limits of a run, derived as the module says; None where cohorts are sampled."""
    asked, rounds = settings.clients_per_round, settings.rounds
    if asked > users:
        raise InvalidInput(
            f"clients_per_round must be at most the {users:,} users of {settings.task}, got {asked}"
        )
    if settings.amplified:
        return None
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
            quantile, start = None, float(text)
        else:
            quantile, start = (*map(float, numbers), *(0.5, 1.0)[len(numbers) :])
    except ValueError:
        raise InvalidInput(
            "clip must be a number > 0, or adaptive, adaptive:QUANTILE, adaptive:QUANTILE:START; "
            f"got {text!r}"
        ) from None
    if quantile is None:
        positive(clip=start)
        return None, start
    open_unit(**{"quantile of clip": quantile})
    positive(**{"start of clip": start})
    return quantile, start

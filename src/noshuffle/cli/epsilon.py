"""`noshuffle epsilon`: one number and every assumption behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from noshuffle.cli.from_record import setting, takes
from noshuffle.cli.mechanisms import check_options, mechanism_named
from noshuffle.cli.promise import Output, Promise, print_json
from noshuffle.cli.words import say
from noshuffle.errors import InvalidInput, unit_rate

if TYPE_CHECKING:
    from noshuffle.participation import Participation


@dataclass(frozen=True, kw_only=True)
class EpsilonSettings(Promise):
    variant: str = setting("honaker", "tree: plain, honaker or full")
    restart_every: str | None = setting(
        None, "tree: steps per tree, or epochs with the suffix e (2000, 20e)"
    )
    completion: bool = setting(False, "tree: virtual empty steps before a restart", "--completion")
    tree_accounting: str = setting(
        "tight", "tree: tight (noise that is released) or nodes (all nodes, as in older papers)"
    )
    bands: int | None = setting(None, "bands of banded mechanisms")
    buffers: int | None = setting(None, "buffers of a BLT")
    taps: int | None = setting(None, "epoch taps of a BLT")
    poisson_rate: float | None = setting(None, "independent sampling probability", check=unit_rate)
    accountant: str = setting("", "exact, rdp or fourier (default: the tightest that applies)")


@takes(EpsilonSettings, Output)
def epsilon(asked: EpsilonSettings, output: Output) -> None:
    """Epsilon of a run (or the noise for a target epsilon), with its assumptions.

    For example: noshuffle epsilon --steps 1600 --mechanism tree --noise-multiplier 1.13
    """
    plan = _plan(asked)
    statement = plan.statement()
    if output.json:
        print_json({**statement.to_dict(), "strategy": plan.strategy.name, "plan_hash": plan.hash})
    else:
        say(statement.words())


def _plan(asked: EpsilonSettings) -> Any:
    from noshuffle.participation import Epochs, Restarted
    from noshuffle.plan import Plan
    from noshuffle.strategies import tree

    if (asked.noise_multiplier is None) == (asked.target_epsilon is None):
        raise InvalidInput("give exactly one of --noise-multiplier and --target-epsilon")
    participation = asked.participation(poisson_rate=asked.poisson_rate)
    every = _restart_steps(asked.restart_every, participation)
    sizes = {"bands": asked.bands, "buffers": asked.buffers, "taps": asked.taps}
    mechanism = mechanism_named(asked.mechanism)
    check_options(
        mechanism,
        {
            **sizes,
            "variant": asked.variant != "honaker",
            "restart_every": every,
            "completion": asked.completion,
            "tree_accounting": asked.tree_accounting != "tight",
        },
    )
    chosen: Any = mechanism
    options: dict[str, Any] = {}
    if mechanism == "tree":
        chosen = tree(asked.variant, restart_every=every, completion=asked.completion)
        options = {"tree_accounting": asked.tree_accounting}
        if every is not None and isinstance(participation, Epochs) and every < participation.steps:
            # The order of an epoch may change when the tree restarts, which is the safe reading.
            participation = Restarted(participation, every)
    else:
        options = {name: value for name, value in sizes.items() if value is not None}
        gap = getattr(participation, "separation", getattr(participation, "steps_per_epoch", None))
        wide = asked.bands and gap and participation.most > 1 and asked.bands > gap
        if mechanism == "banded" and wide:
            raise InvalidInput(
                f"--bands must be at most the separation ({gap}), so that the columns of one unit "
                f"are orthogonal; got {asked.bands}"
            )
    return Plan.fit(
        participation,
        mechanism=chosen,
        epsilon=asked.target_epsilon,
        noise_multiplier=asked.noise_multiplier,
        delta=asked.delta,
        neighbours=asked.neighbours,
        unit=asked.unit,
        accountant=asked.accountant,
        **options,
    )


def _restart_steps(text: str | None, participation: Participation) -> int | None:
    """`--restart-every` in steps: a number of steps, or a number of epochs with the suffix e."""
    from noshuffle.participation import Epochs

    if text is None:
        return None
    digits = text.removesuffix("e")
    if not digits.isdigit() or int(digits) == 0:
        raise InvalidInput(
            f"--restart-every must be a number of steps (2000) or of epochs (20e), got {text!r}"
        )
    if digits == text:
        return int(digits)
    if not isinstance(participation, Epochs):
        raise InvalidInput("--restart-every in epochs needs --epochs and --steps-per-epoch")
    return int(digits) * participation.steps_per_epoch

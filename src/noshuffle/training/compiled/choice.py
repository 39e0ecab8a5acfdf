"""Which form of the clipped sum a program captures: the first in a fixed order that holds.

    truth     the eager engine on the same buffers, twice: a model that draws from outside torch's
              generators (or counts its calls) differs from itself and is not frozen into a graph
    agree     same rows marked as bad, and ‖sum − truth‖ ≤ 10⁻⁴·max(‖truth‖, c); TF32, half: 10⁻²;
              of half the rows norms differ by 5 % at most, as this batch may have none that is
              clipped, and later ones may

The order is that of speed on small models, last to first in `sum`; nothing is timed, so that two
runs of one model choose alike and end with the same bits. No state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from noshuffle.clipping import ModelLoss
from noshuffle.clipping.factor import SLACK, slack
from noshuffle.clipping.objective import Criterion
from noshuffle.clipping.products import HALF, repeatable
from noshuffle.errors import InvalidInput
from noshuffle.training.compiled.flat import Sums
from noshuffle.training.compiled.program import Program
from noshuffle.training.compiled.sum import candidates
from noshuffle.training.generators import generators

#: Part by which norms in two forms may differ: tolerances for rounding, and TF32.
MOST_APART = 0.05
#: Smaller norms are not compared: what vanishes in squares of single precision is most of them.
FAINTEST = 1e-8


def choose(
    program: Program,
    loss_fn: Criterion | ModelLoss,
    *,
    fuse: bool,
    say: Callable[[str], None],
) -> str | None:
    """Capture the best form that agrees, and name it."""
    parts, clip = program.parts, program.parts.threshold.clip
    bound = clip.bound(tuple(parts.parameters))
    is_half = any(p.dtype in HALF for p in parts.parameters.values())

    def eager() -> Sums:
        reseed(program)
        users = program.users
        own: dict[str, Any] = {}
        if users is not None:
            own = {"units": users.units, "reduce": parts.reduce}
        with repeatable():  # as the graph will be, in what it needs, too
            found = parts.engine.clipped_sum(
                parts.model, loss_fn, program.batch, clip=clip, weights=program.keep, **own
            )
        bad = found.bad.new_zeros(program.capacity)
        bad[: len(found.bad)] = found.bad
        return Sums(found.values, found.losses, found.norms, bad)

    truth = eager()
    if not agree(eager(), truth, bound=bound, is_half=is_half):
        say("two runs on the same batch differ, so the model draws from elsewhere: eager")
        return None
    builders = candidates(
        parts.engine,
        parts.model,
        loss_fn,
        program.batch,
        program.keep,
        clip=clip,
        fuse=fuse,
        show=program.show,
        users=program.users,
    )
    for name in reversed(builders):
        try:
            with repeatable():  # a form may run a batch to see what it is made of
                total = builders[name]()
            program.capture_sum(total)
            reseed(program)
            program.sum()
            program.report()
            assert program.sums is not None
            if not agree(program.sums, truth, bound=bound, is_half=is_half):
                raise InvalidInput("it differs from the eager sum")
        except Exception as error:
            line = " ".join(str(error).split())[:160]
            say(f"the sum by {name} was not taken ({type(error).__name__}: {line})")
            continue
        return name
    return None


def agree(found: Sums, truth: Sums, *, bound: float, is_half: bool = False) -> bool:
    """Whether two sums are equal but for rounding; TF32 keeps ten bits, bfloat16 eight."""
    aim = max(slack(value) for value in truth.values.values())
    is_cast = is_half or torch.is_autocast_enabled(truth.losses.device.type)
    tolerance = 1e-2 if is_cast or aim > SLACK else 1e-4
    if not torch.equal(found.bad, truth.bad):
        return False
    for name, value in truth.values.items():
        gap = (found.values[name].double() - value.double()).norm()
        if not bool(gap <= tolerance * max(float(value.double().norm()), bound)):
            return False
    return _have_norms(found, truth, least=min(FAINTEST, bound))


def _have_norms(found: Sums, truth: Sums, *, least: float) -> bool:
    """Whether most norms are those of the truth; of rows that cancel they are mostly tolerance.

    Of rows without a gradient (labels that are masked) they are nothing but tolerance.
    """
    own, wanted = found.norms[: len(truth.norms)].double(), truth.norms.double()
    seen = (wanted > least) & (wanted < torch.inf)
    gaps = ((own - wanted).abs() / wanted)[seen]
    return not gaps.numel() or bool(gaps.median() <= MOST_APART)


def reseed(program: Program) -> None:
    """The same random numbers again, for layers that draw; the caller restores the state."""
    for own in generators(program.device):
        own.manual_seed(0)

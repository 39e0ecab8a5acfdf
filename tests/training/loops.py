"""Training loops as somebody new to this would write them, each beside its twin.

A loop is `loss.backward(); private.optimizer.step()` in one of its many forms; its twin is written
by hand with `private.step` (or is the plain loop, where the loop only looks different), or with
nothing but autograd (`by_hand`). Both begin with the same weights and the same noise, so they must
end with the same weights, or the loop is refused by an error, or warned of. Never may a loop be
different and silent.

    python -m tests.training.loop_list > docs/loops.md          # all of them, and the page
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from noshuffle.errors import NoshuffleError
from noshuffle.noise import test_source
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import tree
from noshuffle.training import privatize
from noshuffle.training.check import ProbablyNotMeant
from noshuffle.training.heard_backward import hearing

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 6, generator=G), torch.randint(4, (24,), generator=G)
Z = torch.randn(24, 4, generator=G)  # targets of a regression, and a teacher's scores
IMAGES = X.reshape(24, 1, 2, 3).repeat(1, 1, 4, 3)
TOKENS = torch.randint(11, (24, 5), generator=G)
PADS = torch.tensor([2, 4, 5, 1, 3, 5, 4, 2] * 3)  # lengths
CE = nn.CrossEntropyLoss()
INTRODUCTION = """# Loops

Three lines make a training loop private, and everybody writes the others in their own way. Here are
loops as somebody new to this would write them, each run beside a twin that is written by hand with
`private.step`, or with plain autograd an example at a time: the same initial weights and the same
noise, so the same weights in the end, or a refusal, or a warning. None may be different and silent.
This page is written by

    python -m tests.training.loop_list > docs/loops.md

**equal**: the weights of the twin. **refused**: an error before anything is released, with the line
to change. **warned**: by Python's `warnings`; those that are different train something else than
their author may think, or have another guarantee.

Losses whose examples meet are found in the graph, and by trying the loss of steps 1, 2, 4, 8, …
with other rows; where that decides nothing (a test on the batch, numbers that Python made of it,
numbers that are not what they were in an earlier step) there is one warning. What no run can see is
in [sharp edges](sharp-edges.md) (22 to 24): rows that were mixed before the loop had them, weights
of rows that were made before the model was called, learning rates that follow the raw loss
(`ReduceLROnPlateau` on it), steps left out because of the data.
"""
KINDS = ("equal", "equal, warned", "refused", "different, warned", "different and silent")
PLAN = Plan(participation=SinglePass(steps=8), strategy=tree(), noise_multiplier=0.5)


@dataclass(frozen=True)
class Loop:
    """How a loop stands, its twin, and what is expected: one of `KINDS`, or words of an error."""

    group: str
    name: str
    run: Callable[[Any], None]
    twin: Callable[[Any], None]
    model: Callable[[], nn.Module]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    expected: str
    tolerance: float

    def is_met(self, found: str) -> bool:
        """Whether this is what was expected of it."""
        kind, _, why = found.partition(": ")
        return kind == self.expected or (kind == "refused" and self.expected in why)


LOOPS: list[Loop] = []


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


def rows(x: Any = X, y: Any = Y, size: int = 8) -> Any:
    return zip(x.split(size), y.split(size))


def by_step(loss_fn: Any = CE, x: Any = X, y: Any = Y, size: int = 8) -> Callable[[Any], None]:
    """The twin: `private.step` on every batch."""

    def twin(on: Any) -> None:
        for a, b in rows(x, y, size):
            on.private.step(loss_fn, a, b)

    return twin


def each(step: Callable[..., Any], *data: Any) -> Callable[[Any], None]:
    """A twin that calls `step(on, number, *batch)` for every batch."""

    def twin(on: Any) -> None:
        for number, batch in enumerate(zip(*(one.split(8) for one in data or (X, Y)))):
            step(on, number, *batch)

    return twin


def loop(
    group: str,
    name: str,
    *,
    twin: Callable[[Any], None] | None = None,
    model: Callable[[], nn.Module] = mlp,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    expected: str = "equal",
    tolerance: float = 1e-5,
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Add a loop to the list. It is given `on`: model, private, optimizer."""

    def add(run: Callable[[Any], None]) -> Callable[[Any], None]:
        own = twin or by_step()
        LOOPS.append(Loop(group, name, run, own, model, optimizer, expected, tolerance))
        return run

    return add


class Forward(nn.Module):
    """A model of layers and a forward that is a function of them."""

    def __init__(self, forward: Any, **layers: nn.Module) -> None:
        super().__init__()
        self.own = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own(self, *args, **kwargs)


def sequence(cell: Any) -> Any:
    return lambda: Forward(
        lambda m, t: m.out(m.cell(m.embed(t))[0][:, -1]),
        embed=nn.Embedding(11, 8),
        cell=cell(8, 8, batch_first=True),
        out=nn.Linear(8, 4),
    )


def one_loss(model: Any, x: Any, y: Any) -> Any:
    return CE(model(x), y)


def by_hand(own: Callable[..., Any] = one_loss, *data: Any, size: int = 8) -> Any:
    """A twin of plain autograd: Σ_i clip(∇ own(model, row i)), and the noise of an empty step."""

    def twin(on: Any) -> None:
        optimizer = on.private._parts.optimizer
        for batch in zip(*(one.split(size) for one in data or (X, Y))):
            own_parameters = [p for g in optimizer.param_groups for p in g["params"]]
            total = [torch.zeros_like(p) for p in own_parameters]
            for i in range(len(batch[0])):
                loss = own(on.model, *(one[i : i + 1] for one in batch))
                grads = torch.autograd.grad(loss, own_parameters, allow_unused=True)
                held = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, total)]
                norm = float(torch.stack([g.norm() for g in held]).norm())
                for t, g in zip(total, held):
                    t += g * min(1.0, 0.8 / max(norm, 1e-30))
            on.private._listener.forget()
            on.private.step(CE, *(one[:0] for one in batch), ids=[])
            rates = [g["lr"] for g in optimizer.param_groups for _ in g["params"]]
            with torch.no_grad():
                for p, t, lr in zip(own_parameters, total, rates):
                    p -= lr * t / 8

    return twin


def plain(on: Any, loss_fn: Any = CE, x: Any = X, y: Any = Y) -> None:
    for a, b in rows(x, y):
        on.optimizer.zero_grad()
        loss_fn(on.model(a), b).backward()
        on.optimizer.step()


def every(group: str, name: str, loss: Any, *data: Any, **more: Any) -> None:
    """A plain loop with this loss of model and rows, beside `by_hand` with that of one example."""
    more.setdefault("twin", by_hand(loss, *data))

    @loop(group, name, **more)
    def run(on: Any) -> None:
        for batch in zip(*(one.split(8) for one in data or (X, Y))):
            on.optimizer.zero_grad()
            loss(on.model, *batch).backward()
            on.optimizer.step()


def losses(group: str, name: str, loss_fn: Any, own: Any = None, y: Any = Y, **more: Any) -> None:
    """A plain loop with this loss; `own` is that of one example, if it is written otherwise."""

    @loop(group, name, twin=by_step(own or loss_fn, X, y), **more)
    def run(on: Any) -> None:
        for a, b in rows(X, y):
            on.optimizer.zero_grad()
            loss_fn(on.model(a), b).backward()
            on.optimizer.step()


def models(name: str, model: Callable[[], nn.Module], x: Any = X, **more: Any) -> None:
    """A plain loop with this model."""

    @loop("models", name, twin=by_step(CE, x), model=model, **more)
    def run(on: Any) -> None:
        for a, b in rows(x):
            CE(on.model(a), b).backward()
            on.optimizer.step()
            on.optimizer.zero_grad()


def optimizers(name: str, optimizer: Callable[[Any], Any], **more: Any) -> None:
    """A plain loop with this optimizer."""

    @loop("optimizers", name, optimizer=optimizer, **more)
    def run(on: Any) -> None:
        for a, b in rows():
            CE(on.model(a), b).backward()
            on.optimizer.step()


def started(one: Loop) -> Any:
    """A model in private training, as the loop wants it; every call begins alike."""
    torch.manual_seed(1)
    model = one.model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ProbablyNotMeant)
        private = privatize(
            model,
            one.optimizer(model),
            PLAN,
            clip_norm=0.8,
            batch_size=8,
            source=test_source(seed=1),
        )
    return SimpleNamespace(model=model, private=private)


def outcome(one: Loop) -> str:
    """What becomes of a loop: "equal", "refused: WHY", "equal, warned: WHY", …"""
    before = {id(one) for one in hearing()}
    try:
        return _outcome(one)
    finally:  # nothing that a loop has left open goes on hearing
        for own in hearing():
            if id(own) not in before:
                own.stop()


def _outcome(one: Loop) -> str:
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            on = started(one)
            on.optimizer = on.private.optimizer
            torch.manual_seed(2)
            one.run(on)
    except NoshuffleError as error:
        return f"refused: {error}"
    said = [str(w.message) for w in told if issubclass(w.category, ProbablyNotMeant)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin = started(one)
        torch.manual_seed(2)
        one.twin(twin)
    assert on.private.steps_released == twin.private.steps_released > 0, one.name
    pairs = zip(on.model.parameters(), twin.model.parameters(), strict=True)
    close = {"rtol": one.tolerance, "atol": one.tolerance}
    is_equal = all(torch.allclose(p.double(), q.double(), **close) for p, q in pairs)
    kind = "equal" if is_equal else "different" if said else "different and silent"
    return f"{kind}, warned: {said[0]}" if said else kind


def table() -> str:
    """Every loop and what became of it, as docs/loops.md has it."""
    groups = list(dict.fromkeys(one.group for one in LOOPS))
    own = sorted(LOOPS, key=lambda one: groups.index(one.group))
    found = [(one, outcome(one)) for one in own]
    lines = []
    for group, each in itertools.groupby(found, key=lambda pair: pair[0].group):
        lines += [
            f"## {group.capitalize()}",
            "",
            "| a loop with | what becomes of it |",
            "|---|---|",
        ]
        lines += [f"| {one.name} | {_short(text)} |" for one, text in each]
        lines.append("")
    kinds = [text.partition(":")[0] for _, text in found]
    count = "; ".join(f"{kind}: {kinds.count(kind)}" for kind in KINDS)
    return "\n".join([INTRODUCTION, f"{len(found)} loops. {count}.", "", *lines]).rstrip()


def _short(text: str) -> str:
    """An answer in one cell."""
    kind, _, why = text.partition(": ")
    why = re.sub(r"\w+\.py:\d+", "this line", " ".join(why.replace("|", "/").split()))
    cut = why if len(why) <= 110 else why[:110].rsplit(" ", 1)[0] + " …"
    return f"**{kind}**: {cut}" if why else kind

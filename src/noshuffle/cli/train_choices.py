"""What `noshuffle train` may vary beside its plan, from words: order of rows, sets, regularizers.

    --order       file · sorted (by label) · random-per-restart · module:function
    --constraint  l2:RADIUS · l1:RADIUS · box:LOW,HIGH          (of the weights, optimizer ftrl)
    --composite   l1:WEIGHT · elastic:L1,L2 · group:WEIGHT      (in every step, optimizer ftrl)

The guarantee is the same for any order that repeats in every pass: the noise is not told of it. An
order that changes at the restarts of a tree is a participation of its own (`Restarted`). All of
this is fixed before the first step; a random order is drawn from the public seed. No state.

>>> constraint_of("box:-1,1"), composite_of("")
(Box(low=-1.0, high=1.0), None)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from noshuffle.datasets import DataSet
from noshuffle.errors import InvalidInput, imported
from noshuffle.optim.composite import Composite, ElasticNet, GroupLasso, lasso
from noshuffle.optim.constraints import Box, Constraint, L1Ball, L2Ball
from noshuffle.release.sampler import in_order

PER_RESTART = "random-per-restart"
_SETS: dict[str, tuple[int, Callable[..., Constraint]]] = {
    "l2": (1, L2Ball),
    "l1": (1, L1Ball),
    "box": (2, Box),
}
_REGULARIZERS: dict[str, tuple[int, Callable[..., Composite]]] = {
    "l1": (1, lasso),
    "elastic": (2, lambda l1, l2: ElasticNet(l1=l1, l2=l2)),
    "group": (1, GroupLasso),
}


def _made(kind: str, text: str, known: dict[str, tuple[int, Callable[..., Any]]]) -> Any:
    name, _, rest = text.partition(":")
    try:
        count, build = known[name]
        numbers = [float(part) for part in rest.split(",")]
        if len(numbers) != count:
            raise ValueError
    except (KeyError, ValueError):
        forms = ", ".join(f"{one}:{','.join('N' * n)}" for one, (n, _) in known.items())
        raise InvalidInput(f"{kind} must be one of {forms} (N a number); got {text!r}") from None
    try:
        return build(*numbers)
    except InvalidInput as error:
        raise InvalidInput(f"--{kind} {text}: {error}") from None


def constraint_of(text: str) -> Constraint | None:
    """The set that the weights stay in."""
    return _made("constraint", text, _SETS) if text else None


def composite_of(text: str) -> Composite | None:
    """The regularizer of every step."""
    return _made("composite", text, _REGULARIZERS) if text else None


def rows_in_order(
    data: DataSet, order: str, *, batch: int, blocks: int = 1, seed: int = 0
) -> list[NDArray[np.int64]]:
    """Batches of one pass, or for `random-per-restart` of one pass for each of `blocks` restarts.

    Guarantees: every row is in at most one batch of a pass; a rest that fills none is left out.
    """
    rows = len(data)
    if order == "file":
        return list(in_order(rows, batch))
    if order == PER_RESTART:
        rng = np.random.default_rng(seed)
        passes = [rng.permutation(rows) for _ in range(blocks)]
    elif order == "sorted":
        passes = [np.argsort(data.y_train.reshape(rows, -1)[:, 0].numpy(), kind="stable")]
    else:
        passes = [_own_order(order, data)]
    return [one[cut] for one in passes for cut in in_order(rows, batch)]


def _own_order(name: str, data: DataSet) -> NDArray[np.int64]:
    """The order of `module:function`, which is given the data set."""
    if ":" not in name:
        raise InvalidInput(
            f"order must be file, sorted, {PER_RESTART} or module:function, got {name!r}"
        )
    found = imported(order=name)
    try:
        inspect.signature(found).bind(data)
    except TypeError as error:
        raise InvalidInput(
            f"order {name!r} must be a function of the data set: {error}; it returns the numbers "
            "of its rows, in their order"
        ) from None
    told = found(data)
    rows = np.asarray(list(told) if isinstance(told, Iterator) else told)
    is_list = rows.ndim == 1 and rows.dtype.kind in "iuf"
    if not is_list or not np.array_equal(np.sort(rows), np.arange(len(data))):
        raise InvalidInput(f"{name} must return every row of the data once, {len(data)} of them")
    return rows.astype(np.int64)

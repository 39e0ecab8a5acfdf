"""Numbers that a loss has from elsewhere: read from the batch before, or changed since last time.

What leaves torch (`.item()`, `.numpy()`) comes back as a number without a past. A constant k that a
loss was called with is explained by a number r that was read before, if

    k = r,   k = a·r^p  (p = ±1, ±1/2, ±2),   k = a ± r,   k = a·e^±r,   k = a·log r

for an a of at most three digits, to within 10⁻¹² (10⁻⁷ for a = 1: NumPy may have computed in single
precision), and is then computed again with other rows (`loss_replay`). r may also be one of the
`STATISTICS` of the model's inputs. Digits that many numbers have (0.5, 3) prove nothing. What is
not explained is compared with earlier losses of the same calls: what has changed may be a
schedule, or come from a batch.

Guarantees: a number that is explained was read, but for chances of 10⁻⁶; of others nothing is said.
State: the numbers of earlier losses.

>>> import torch
>>> r = torch.tensor([2.7364512], dtype=torch.float64)
>>> again = explained(1 / r, r)
>>> round(float(again(2 * r) * r), 9), explained(torch.tensor([0.3141592]).double(), r)
(0.5, None)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from noshuffle.training.loss_branches import line_of
from noshuffle.training.loss_rows import Call

#: Entries of a tensor that was read which a single number is looked for in.
MOST_ENTRIES = 64
#: What is left of k once r is out, and k from both.
FORMS: tuple[tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]], ...] = (
    *(
        (lambda k, r, p=p: k / r.pow(p), lambda a, r, p=p: a * r.pow(p))
        for p in (1.0, -1.0, 0.5, -0.5, 2.0, -2.0)
    ),
    (lambda k, r: k - r, lambda a, r: a + r),
    (lambda k, r: k + r, lambda a, r: a - r),
    (lambda k, r: k / r.exp(), lambda a, r: a * r.exp()),
    (lambda k, r: k * r.exp(), lambda a, r: a * (-r).exp()),
    (lambda k, r: k / r.log(), lambda a, r: a * r.log()),
)


#: What a factor of a batch may be computed by, of its inputs, before the model is called.
STATISTICS: tuple[Callable[[Tensor], Tensor], ...] = (
    Tensor.mean, Tensor.sum, Tensor.std, Tensor.var, Tensor.amax, Tensor.amin, Tensor.norm,
    lambda t: t.abs().amax(), lambda t: t.abs().mean(),
    lambda t: t.mean(0), lambda t: t.std(0), lambda t: t.var(0), lambda t: t.amax(0),
    lambda t: t.amin(0), lambda t: t.abs().amax(0), lambda t: t.norm(dim=0),
)  # fmt: skip
#: Numbers of inputs that statistics are taken of.
MOST_NUMBERS = 1 << 22


def digits(numbers: Tensor, most: int) -> Tensor:
    """Which of these have more significant digits than `most`, in single precision."""
    return ~_is_close(numbers, _rounded(numbers, most), 6e-8)


def _rounded(numbers: Tensor, places: int) -> Tensor:
    power = torch.pow(10.0, numbers.abs().clamp(min=1e-300).log10().floor() - (places - 1))
    return (numbers / power).round() * power


def _is_close(a: Tensor, b: Tensor, share: float) -> Tensor:
    return (a - b).abs() <= share * torch.maximum(a.abs(), b.abs())


def explained(k: Tensor, r: Tensor) -> Callable[[Tensor], Tensor] | None:
    """k as a function of r (flat, float64), where it is one of `FORMS`."""
    if k.numel() == 1 and 1 < r.numel() <= MOST_ENTRIES:
        for i in range(r.numel()):
            found = explained(k, r[i : i + 1])
            if found is not None:
                return lambda new, i=i, found=found: found(new[i : i + 1])  # type: ignore[misc]
        return None
    if k.shape != r.shape:
        return None
    if bool(_is_close(k, r, 3e-7).all()) and bool(digits(k, 2).any()):
        return lambda new: new
    if not (bool(digits(k, 4).any()) and bool(digits(r, 4).any())):
        return None
    for rest, made in FORMS:
        a = rest(k, r)
        is_short = bool(_is_close(a, _rounded(a, 3), 1e-12).all())
        is_one = bool(_is_close(a, torch.ones_like(a), 3e-7).all())
        if bool(a.isfinite().all()) and (is_one or is_short):
            return lambda new, made=made, a=a: made(a, new)  # type: ignore[misc]
    return None


def values(what: Any) -> Tensor | None:
    """Numbers, an array or a tensor, flat and in double precision; None for anything else."""
    try:
        found = what.detach() if isinstance(what, Tensor) else what
        return torch.as_tensor(found, dtype=torch.float64, device="cpu").flatten().clone()
    except (TypeError, ValueError, RuntimeError):
        return None


def shaped(new: Tensor, like: Any) -> Any:
    """Flat values as what they stand for: a number, a tensor or an array."""
    if isinstance(like, Tensor):
        is_whole = not like.is_floating_point()
        return new.reshape(like.shape).to(like.device, None if is_whole else like.dtype)
    if is_number(like):
        return float(new)
    return new.reshape(like.shape).numpy().astype(like.dtype)


def may_be_other(numbers: Tensor) -> Tensor:
    """Numbers that none of these is equal to."""
    return 1.3 * numbers + 0.01 * (numbers == 0.0)


class Constant(NamedTuple):
    """A number, an array or a tensor without rows that a call was given: the `order`-th call of
    those that a loss is made of, the `call`-th of all."""

    order: int
    call: int
    func: str
    line: str
    place: int
    what: Any
    values: Tensor

    @property
    def key(self) -> float | int:
        """What it is known by in a repetition: its value, or its id."""
        return float(self.what) if is_number(self.what) else id(self.what)

    @property
    def is_telling(self) -> bool:
        """Whether its digits are not those of a constant that somebody wrote down."""
        return bool(digits(self.values, 4).any())

    def __str__(self) -> str:
        is_one = len(self.values) == 1
        shown = f"{float(self.values):.6g}" if is_one else f"an array of {len(self.values)}"
        return f"{shown} in {self.func} ({self.line})"


def is_number(what: Any) -> bool:
    """Whether this is a number of Python or NumPy, truth values apart."""
    is_array = isinstance(what, Tensor) or bool(getattr(what, "ndim", 0))
    return not is_array and not isinstance(what, bool | str) and hasattr(what, "__float__")


def constants_of(
    order: int, number: int, call: Call, is_known: Callable[[Call, Tensor], bool]
) -> Iterator[Constant]:
    """The constants of the arguments of a call; `is_known`: tensors that are none."""
    for place, one in enumerate(tree_leaves((call.args, call.kwargs))):
        if isinstance(one, Tensor):
            is_one = not isinstance(one, nn.Parameter) and not is_known(call, one)
        elif is_number(one):
            is_whole = isinstance(one, int) or not hasattr(one, "is_integer")
            is_one = not is_whole or call.is_arithmetic
        else:
            is_one = hasattr(one, "__array__")
        found = values(one) if is_one else None
        if found is not None:
            yield Constant(order, number, call.name, line_of(call.sites), place, one, found)


class EarlierNumbers:
    """The constants of earlier losses of a run, by the calls that these are made of."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[tuple[int, int], list[tuple[float, ...]]]] = {}

    def changed(self, calls: tuple[str, ...], constants: list[Constant]) -> list[Constant]:
        """Those that were never as they are now, where the same loss was there before."""
        is_known, found = hash(calls) in self._seen, list[Constant]()
        own = self._seen.setdefault(hash(calls), {})
        for one in constants:
            known = own.setdefault((one.order, one.place), [])
            now = (len(one.values), float(one.values.sum()), float(one.values.square().sum()))
            if now not in known:
                found += [one] if is_known else []
                known[:] = [*known[-7:], now]
        return found

"""PrivateSum: private running sums of numbers, the object that DP-FTRL is made of.

    increment_t = Σ_units clip(g_t) + (z·ζ·C⁻¹Z)_t,          total_t = Σ_{s ≤ t} increment_s

Give the contributions g_t of a step, one row per unit (numbers, arrays, tensors, or tensors by
name); get the private increment and the private running total. Each unit is clipped here to norm ζ,
over all its tensors together. The noise is correlated over time so that totals stay accurate: their
error grows like log n with a tree or a BLT, and like √n with independent noise (Kairouz et al.
2021; Denisov et al. 2022). Every total is released: look at all of them, whenever you like.

State: the totals, and that of `Release`; a killed sum goes on at the log's next step.

>>> from noshuffle import Plan, SinglePass
>>> plan = Plan.fit(SinglePass(steps=3), mechanism="tree", noise_multiplier=0.0)
>>> sums = PrivateSum(plan, clip=1.0)
>>> round(sums.add([0.5, 3.0], ids=[7, 8]), 6)          # the 3.0 of unit 8 counts as 1.0
1.5
>>> sums.add([0.25], ids=[9]), round(sums.total, 6), sums.step
(0.25, 1.75, 2)
>>> sums.add([1.0], ids=[7])
Traceback (most recent call last):
    ...
noshuffle.errors.ParticipationViolation: unit 7 may not take part in step 2: it already took \
part in step 0 and the plan allows one step; keep the order of the plan, or use on_violation='drop'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noshuffle.clipping import Flat
from noshuffle.clipping.factor import FINE_SLACK, clip_factor
from noshuffle.errors import InvalidInput, one_of, positive
from noshuffle.noise import Source
from noshuffle.one_owner import OneOwner, in_turn
from noshuffle.plan import Plan
from noshuffle.plan.statement import PrivacyStatement
from noshuffle.release.account import Account
from noshuffle.release.batches import PrivateBatches, RowNames
from noshuffle.release.folder import RunFolder
from noshuffle.release.release import Release
from noshuffle.release.sampler import Sampler
from noshuffle.strategies.error import error

#: The name of a sum that was given none.
VALUE = "value"


class PrivateSum(OneOwner):
    """Private running sums under a plan.

    Arguments:
        plan: participation, mechanism and noise; `Plan.fit` makes one.
        clip: ζ, the bound on the norm of what one unit adds in one step.
        shape: of one contribution: () for a number, (d,) for a vector, or a mapping from names to
            shapes. None takes it from the first step.
        ids are needed where units may come more than once or be told apart (see `add`);
            `batches(loader)` names rows by their place in a data set.
        on_violation: "refuse" stops at a unit outside its participation, "drop" leaves it out.
        run: a folder for log, checkpoints and statement; None keeps them in memory.
        fork_of: a run that ends here, and whose cost this one adds to its own.
        source: where noise comes from; keys of the operating system by default.
        budget: what all runs on the same data draw on (`noshuffle.Budget`).

    Guarantees: what `add` returns, and all totals, are covered by `statement()`. A contribution
    with NaN or infinity counts as zero. Answers lie on a public grid of about 2⁻¹⁰ of the noise.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        clip: float,
        shape: Sequence[int] | Mapping[str, Sequence[int]] | None = None,
        on_violation: str = "refuse",
        run: RunFolder | str | Path | None = None,
        fork_of: RunFolder | str | Path | None = None,
        source: Source | None = None,
        device: torch.device | str = "cpu",
        budget: Account | None = None,
    ) -> None:
        positive(clip=clip)
        one_of(("refuse", "drop"), on_violation=on_violation)
        self.plan, self._clip, self._drop = plan, float(clip), on_violation == "drop"
        self._begin: dict[str, Any] = {"run": run, "source": source, "device": device}
        self._begin |= {"fork_of": fork_of, "budget": budget}
        self._device = torch.device(device)
        self._release: Release | None = None
        self._names: RowNames | None = None
        self._statement: PrivacyStatement | None = None
        self._totals: dict[str, Tensor] = {}
        self._is_named = isinstance(shape, Mapping)
        self._kind = "tensor"
        self._errors: Any = None
        if shape is not None:
            self._open({VALUE: shape} if not isinstance(shape, Mapping) else shape)

    @property
    def clip(self) -> float:
        """The bound on what one unit adds to one step; its noise is made for it, so it stays."""
        return self._clip

    def _open(self, shapes: Mapping[str, Sequence[int]]) -> Release:
        shapes = {name: tuple(int(n) for n in own) for name, own in shapes.items()}
        self._release = release = Release(self.plan, shapes, clip=Flat(self.clip), **self._begin)
        self._names = RowNames(release)
        self._totals = {
            name: torch.zeros(own, dtype=torch.float64, device=self._device)
            for name, own in shapes.items()
        }
        if release.folder is not None and (state := release.restore()) is not None:
            self._totals = {n: state["model"][n].to(self._device) for n in self._totals}
        return release

    @property
    def release(self) -> Release:
        if self._release is None:
            raise InvalidInput("give shape=, or add the first step; nothing is known of the sums")
        return self._release

    @property
    def step(self) -> int:
        """How many steps were released: the index of the next one."""
        return 0 if self._release is None else self._release.step

    @property
    def total(self) -> Any:
        """The private sum of all steps so far, as it was given (a number, an array, tensors)."""
        if self._release is None:
            raise InvalidInput(
                "nothing was added yet, so the shape of the total is not known; add() first, or "
                "give shape="
            )
        return self._as_given(self._totals)

    def go_on_from(self, total: Any) -> None:
        """Take up a total that this run released and that was kept elsewhere.

        Whoever writes down every total loses no step to a kill since the last `save`.
        """
        before = self._totals[VALUE]
        released = torch.as_tensor(total, dtype=before.dtype, device=before.device)
        self._totals[VALUE] = released.reshape(before.shape)

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise in one coordinate of the total; without the clipping."""
        return self.deviation_after(self.step)

    def deviation_after(self, steps: int) -> float:
        """The same after `steps` steps."""
        if not steps:
            return 0.0
        if self._errors is None:
            self._errors = error(self.plan.strategy, self.plan.steps).per_step
        return float(self._errors[steps - 1]) * self.plan.noise_multiplier * self.clip

    @in_turn
    def add(self, contributions: Any, *, ids: Any = None) -> Any:
        """Take the contributions of the next step, one row per unit; the private increment.

        A single number is the contribution of one unit.
        `ids` names the unit of every row, and so does `batches`; without names each row counts as a
        new unit, and the statement says that participation was not checked. Of a plan with
        unit="user", rows of one user are added up before they are clipped. An empty step releases
        noise alone. Returns a number for numbers, an array for arrays, tensors for tensors.
        """
        if self._statement is not None:
            raise InvalidInput("this sum was closed; open its folder again to go on with it")
        rows, kind = _rows(contributions)
        if self._release is None:
            self._is_named = isinstance(contributions, Mapping)
            self._open({name: tuple(value.shape[1:]) for name, value in rows.items()})
        self._kind = kind
        release = self.release
        expected = {name: tuple(value.shape) for name, value in self._totals.items()}
        shapes = {name: tuple(value.shape[1:]) for name, value in rows.items()}
        if expected != shapes:
            raise InvalidInput(
                f"every contribution must have the shape {expected}, got {shapes}; give one row "
                "per unit"
            )
        size = len(next(iter(rows.values())))
        assert self._names is not None
        if self._names.are_places:
            ids = self._names.take(ids, rows=size)
        units = None if ids is None else release.identify(ids, rows=size)
        if units is None and self.plan.unit == "user":
            raise InvalidInput("a plan with unit='user' needs to know whose each row is; pass ids=")
        ticket = release.admit(units, drop=self._drop)
        keep = None if ticket.keep is None else torch.from_numpy(ticket.keep)
        groups = units if self.plan.unit == "user" else None
        values = self._clipped(rows, keep, groups)
        release.close(ticket, values)
        for key, value in values.items():
            self._totals[key] += value
        release.finish(ticket)
        release.flush()
        return self._as_given(values)

    def _clipped(
        self, rows: dict[str, Tensor], keep: Tensor | None, groups: Any
    ) -> dict[str, Tensor]:
        """Σ_u g_u·min(1, ζ/‖g_u‖) in double precision, over the rows that count."""
        shapes = {name: total.shape for name, total in self._totals.items()}
        columns = [  # a mapping may come in another order
            rows[name].to(self._device, torch.float64).reshape(len(rows[name]), shape.numel())
            for name, shape in shapes.items()
        ]
        flat = torch.cat(columns, dim=1)
        if keep is not None:
            flat = flat[keep.to(self._device)]
            groups = None if groups is None else groups[keep.numpy()]
        if groups is not None and len(flat):
            _, whose = np.unique(groups, return_inverse=True)
            index = torch.from_numpy(whose).to(self._device)
            flat = flat.new_zeros(int(index.max()) + 1, flat.shape[1]).index_add_(0, index, flat)
        total = clipped_rows(flat, self.clip).sum(0)
        parts = torch.split(total, [shape.numel() for shape in shapes.values()])
        return {name: part.reshape(shapes[name]).clone() for name, part in zip(shapes, parts)}

    def _as_given(self, values: Mapping[str, Tensor]) -> Any:
        """In the form in which contributions came."""
        forms: dict[str, Any] = {name: value.clone() for name, value in values.items()}
        if self._kind != "tensor":
            forms = {name: value.cpu().numpy() for name, value in forms.items()}
        if self._kind == "number":
            forms = {name: value if value.ndim else float(value) for name, value in forms.items()}
        return forms if self._is_named else forms[VALUE]

    def batches(self, loader: Any) -> PrivateBatches:
        """The batches of a DataLoader, each row of which is named by its place in the data set.

            for x in sums.batches(loader):
                sums.add(contributions(x))        # one row for each row of x, in the same order

        They go on at the next step of the run, and end with the pass; see `Private.batches`. The
        sums must have a `shape`.
        """
        self.release.check_ready()
        assert self._names is not None
        return self._names.batches(loader).named()

    def sampler(self, population: int | None = None) -> Sampler:
        """The secret sampler of a sampled plan; pass its indices on as `ids`."""
        return self.release.sampler(population)

    def statement(self) -> PrivacyStatement:
        """The guarantee of what was released so far; after `close`, of all of it."""
        return self._statement or self.release.statement()

    @property
    def epsilon(self) -> float:
        """ε so far; `statement()` says what it means."""
        return self.release.epsilon_after(self.step)

    @in_turn
    def save(self) -> Path:
        """Write a checkpoint and the statement into the run folder."""
        return self.release.save({"model": dict(self._totals)})

    @in_turn
    def skip(self) -> None:
        """Pass over the next step: it is charged, and releases nothing."""
        self.release.pass_over()

    @in_turn
    def pass_over(self, *, to: str = "epoch") -> int:
        """Pass over the steps up to the next border of an epoch; returns how many these were."""
        one_of(("epoch",), to=to)
        return self.release.pass_over_epoch()

    @in_turn
    def close(self) -> None:
        """Save, bring the evidence up to date, let go of it; a finished run ends."""
        if self._statement is not None:
            return
        try:
            if self.release.folder is not None:
                self.save()
        finally:  # a sum that failed within a step cannot be saved, and lets go of its folder
            self.release.close_run()
        self._statement = self.release.statement()


def clipped_rows(rows: Tensor, clip: float) -> Tensor:
    """Rows scaled to norm at most `clip`; a row with NaN or infinity becomes zero."""
    largest = rows.abs().amax(1, keepdim=True) if rows.shape[1] else rows.new_zeros(len(rows), 1)
    is_fine = torch.isfinite(largest)
    rows = torch.where(is_fine, rows, torch.zeros_like(rows))
    # Divided by the largest entry first: squares of huge entries would overflow.
    unit = torch.where(is_fine & (largest > 0), largest, torch.ones_like(largest))
    norms = (rows / unit).square().sum(1, keepdim=True).sqrt() * unit
    return rows * clip_factor(norms, clip, slack=FINE_SLACK)


def _rows(contributions: Any) -> tuple[dict[str, Tensor], str]:
    """Contributions as tensors by name, and in what form they came."""
    if isinstance(contributions, Mapping):
        if not contributions:
            raise InvalidInput("contributions by name must hold at least one name, got none")
        parts = {str(name): _tensor(value) for name, value in contributions.items()}
        if len(parts) < len(contributions):
            names = list(contributions)
            raise InvalidInput(f"names must differ as text, got {names}; rename one of them")
        sizes = {name: len(value) for name, (value, _) in parts.items()}
        if len(set(sizes.values())) > 1:
            raise InvalidInput(f"every name must have one row per unit, got {sizes}")
        return {name: value for name, (value, _) in parts.items()}, next(iter(parts.values()))[1]
    value, kind = _tensor(contributions)
    return {VALUE: value}, kind


def _tensor(value: Any) -> tuple[Tensor, str]:
    kind = "tensor"
    if not isinstance(value, Tensor):
        kind = "array" if isinstance(value, np.ndarray) else "number"
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise InvalidInput(f"contributions must be one row per unit, got {error}") from None
        if array.dtype.kind not in "fiub":
            raise InvalidInput(
                f"contributions must be real numbers, got {array.dtype}; give one row per unit"
            )
        array = np.ascontiguousarray(array, dtype=np.float64)
        # pandas 3 hands out arrays that may not be written to, of which torch warns.
        value = torch.from_numpy(array if array.flags.writeable else array.copy())
    if value.is_complex():
        raise InvalidInput("contributions must be real numbers, got complex ones")
    if value.layout is not torch.strided or value.is_quantized:
        kind = "quantized" if value.is_quantized else str(value.layout)
        raise InvalidInput(
            f"contributions must be a dense tensor, got {kind}; use to_dense() or dequantize()"
        )
    return value.detach().reshape(1) if value.dim() == 0 else value.detach(), kind

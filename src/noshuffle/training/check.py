"""Before the first step is charged: what a run will meet, in one table.

    print(private.check(loader, loss_fn))

reads the first batch (random states are put back), compares order, number and size of the
batches with the plan, tries the loss on it, and says what is slow, probably not meant, or refused
later. `first_look` says the free part after the first step, by `warnings`. No state.

>>> row = CheckFinding("order", "the sampler shuffles", "refused", "give shuffle=False")
>>> print(LoaderCheck((row,)))
order  REFUSED  the sampler shuffles
                give shuffle=False
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch.utils.data import (
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from noshuffle.clipping.objective import ModelLoss, batch_size, cuttable
from noshuffle.errors import InvalidInput, NoshuffleError, ProbablyNotMeant
from noshuffle.participation import AnyOrderEpochs, Epochs, FixedSize
from noshuffle.participation.patterns import OPEN
from noshuffle.plan import Plan
from noshuffle.release.named_loader import (
    DRAWN,
    OF_CALLER,
    look_through,
    turn_of,
    why_no_places,
)
from noshuffle.release.sampler import Sampler
from noshuffle.training.batches import as_batch, batches_of
from noshuffle.training.generators import seeded
from noshuffle.training.hooks import at_work
from noshuffle.training.rng import restore_rng, rng_state
from noshuffle.user_warnings import warn_user

#: Columns for the words of a table, beside its names and verdicts.
MIN_WORDS = 32
#: How `fallbacks` begin where the whole model, or every example, is done by itself.
SLOW = ("whole model", "one example at a time")


@dataclass(frozen=True)
class CheckFinding:
    """One line of the table: what was found, "ok", "warning" or "refused", and what to do."""

    name: str
    found: str
    verdict: str = "ok"
    advice: str = ""


@dataclass(frozen=True)
class LoaderCheck:
    """What `private.check` found."""

    findings: tuple[CheckFinding, ...]

    @property
    def is_fine(self) -> bool:
        """Whether nothing would be refused."""
        return all(f.verdict != "refused" for f in self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {"is_fine": self.is_fine, "findings": [asdict(f) for f in self.findings]}

    def __str__(self) -> str:
        wide = max((len(f.name) for f in self.findings), default=0)
        wider = max((len(f.verdict) for f in self.findings), default=0)
        # On a narrow terminal the words stand below the name and the verdict, not beside them.
        left, columns = wide + wider + 4, shutil.get_terminal_size().columns
        is_narrow = columns < left + MIN_WORDS
        left, lines = 2 if is_narrow else left, list[str]()
        for f in self.findings:
            verdict = f.verdict if f.verdict == "ok" else f.verdict.upper()
            room = max(1, min(72, columns - left))
            text = [*textwrap.wrap(f.found, room), *textwrap.wrap(f.advice, room)]
            first = "" if is_narrow or not text else text.pop(0)
            lines.append(f"{f.name:{wide}}  {verdict:{wider}}  {first}".rstrip())
            lines += [" " * left + line for line in text]
        return "\n".join(lines)


def check_loader(private: Any, loader: Iterable[Any], loss_fn: Any = None) -> LoaderCheck:
    """The table for a loader, and for a loss if one is given; see the head of this file."""
    parts, plan = private._parts, private.plan
    before = rng_state()
    try:
        found = list(_findings(private, plan, parts, loader, loss_fn))
    finally:
        restore_rng(before)
    return LoaderCheck(tuple(found))


def _findings(
    private: Any, plan: Plan, parts: Any, loader: Iterable[Any], loss_fn: Any
) -> Iterator[CheckFinding]:
    yield _count(plan, loader)
    if isinstance(loader, Iterator):
        yield order_of(plan, loader)
        yield CheckFinding("data", "can be read once, so they were not looked at")
        return
    first = next(iter(loader), None)
    if first is None:
        yield CheckFinding("batches", "the loader is empty", "refused", "give it data")
        return
    batch = as_batch(first)
    is_named = batch.ids is not None or plan.unit == "user" or plan.participation.is_sampled
    by_place = [] if is_named or why_no_places(loader) else _by_place(private, loader)
    yield by_place[0] if by_place else order_of(plan, loader)
    try:
        data = cuttable(batch.data)
        size = batch_size(data)
    except InvalidInput as error:
        yield CheckFinding("data", str(error), "refused")
        return
    yield size_finding(size, parts.planned_batch)
    yield by_place[1] if by_place else _ids(plan, batch.ids, size)
    yield delta_finding(plan, records_of(plan, parts.planned_batch, loader))
    if loss_fn is not None:
        yield _loss(private, loss_fn, data)
    if parts.release.charge is None:
        advice = "give privatize(budget=noshuffle.Budget(…)) if this is one of several"
        yield CheckFinding(
            "budget", "none: other runs and searches on these data add up", "ok", advice
        )
    else:
        yield CheckFinding("budget", "the run draws on one")


def _count(plan: Plan, loader: Any) -> CheckFinding:
    rule = plan.participation.base
    planned = rule.steps_per_epoch if isinstance(rule, Epochs) else plan.steps
    try:
        count = len(loader)
    except TypeError:
        return CheckFinding("batches", f"of unknown number; the plan has {planned} a pass")
    if isinstance(rule, Epochs) and count != planned:
        advice = "leave out the last batch (drop_last=True), or fit the plan for this number"
        return CheckFinding("batches", f"{count} a pass, the plan has {planned}", "refused", advice)
    if count > planned:
        advice = "training stops when the plan ends; fit it for more steps"
        return CheckFinding("batches", f"{count}, the plan has {planned} steps", "warning", advice)
    return CheckFinding("batches", f"{count} a pass, {plan.steps} steps in all")


def _sampler(loader: Any) -> Any:
    # A loader with a batch_sampler has a sampler of its own as well, which it does not use.
    inner = getattr(loader, "batch_sampler", None)
    return getattr(inner, "sampler", None) or getattr(loader, "sampler", None)


def _is_shuffled(loader: Any) -> bool:
    """Whether a loader has another order in every epoch."""
    return isinstance(_sampler(loader), RandomSampler | SubsetRandomSampler)


def order_of(plan: Plan, loader: Any) -> CheckFinding:
    """Whether a loader brings its data in an order that the plan allows."""
    inner, sampler = getattr(loader, "batch_sampler", None), _sampler(loader)
    order = getattr(loader, "order", None)
    if plan.participation.is_sampled:
        is_ours = any(isinstance(one, Sampler) for one in (inner, sampler, order))
        is_fixed = isinstance(plan.participation, FixedSize)
        if is_ours and getattr(loader, "collate_fn", None) is default_collate and not is_fixed:
            text = "drawn by the secret sampler of the run; a draw may be empty, which torch's "
            advice = "give data = with_ids(data) and collate_fn=data.collate (noshuffle.training)"
            return CheckFinding("order", f"{text}own collate_fn fails on", "warning", advice)
        if is_ours:
            return CheckFinding("order", "drawn by the secret sampler of the run")
        advice = "give DataLoader(…, batch_sampler=private.sampler(population))"
        return CheckFinding("order", "not drawn by the secret sampler", "refused", advice)
    rule = plan.participation.base
    if isinstance(sampler, WeightedRandomSampler) or getattr(sampler, "replacement", False):
        advice = "give a sampler that takes every row once"
        return CheckFinding("order", "the loader draws rows more than once", "refused", advice)
    if _is_shuffled(loader) and isinstance(rule, Epochs) and rule.epochs > 1:
        text = "the loader shuffles its data anew in every epoch"
        if isinstance(plan.guarded, AnyOrderEpochs):
            return CheckFinding("order", f"{text}, which independent noise does not mind")
        advice = (
            "give shuffle=False, or take private.batches(loader), which keeps to one order; the "
            "same order in every epoch is what the plan counts on (AnyOrderEpochs takes any)"
        )
        return CheckFinding("order", text, "refused", advice)
    return CheckFinding("order", "as it comes")


def _by_place(private: Any, loader: Any) -> list[CheckFinding]:
    """Order and names of the rows of a loader as `private.batches` reads it."""
    try:
        order, plan = batches_of(private, loader).order, private.plan
        look_through(loader.dataset)
    except InvalidInput as error:
        return [order_of(private.plan, loader), CheckFinding("ids", str(error), "refused")]
    orders = {turn_of(plan, number) for number in range(2 * plan.steps // order.batches)}
    each = "a new one for each epoch" if len(orders) > 1 else "one for all epochs"
    words = f"{order.kind}, {each}" if order.kind == DRAWN else order.kind
    found = order_of(plan, loader) if order.kind == OF_CALLER else CheckFinding("order", words)
    text = "the place of each row, by private.batches(loader) or fit_model"
    advice = "a loop that reads the loader itself counts every row as a new unit"
    return [found, CheckFinding("ids", text, "ok", advice)]


def size_finding(size: int, planned: int) -> CheckFinding:
    text = f"{size} examples; sums are divided by {planned}"
    if size >= 2 * planned:
        advice = "the steps are larger by that factor; give privatize the real batch_size"
        return CheckFinding("batch size", text, "warning", advice)
    if 2 * size <= planned:  # as it should be where several make a step
        advice = "steps are smaller by that factor, unless parts are added up (accumulate)"
        return CheckFinding("batch size", text, "ok", advice)
    return CheckFinding("batch size", text)


def _ids(plan: Plan, ids: Any, size: int) -> CheckFinding:
    if ids is None and (plan.unit == "user" or plan.participation.is_sampled):
        why = "protects users" if plan.unit == "user" else "samples"
        advice = "pass ids= to private.step, or let the loader give noshuffle.training.Batch"
        return CheckFinding("ids", f"none, and the plan {why}", "refused", advice)
    if ids is None:
        text = "none: every row counts as a new unit, and the statement says so"
        advice = "take private.batches(loader), or pass ids=, to have each example followed"
        return CheckFinding("ids", text, "warning", advice)
    found = len(ids)
    verdict = "ok" if found == size else "refused"
    return CheckFinding("ids", f"{found} ids for {size} examples", verdict)


def records_of(plan: Plan, planned: int, loader: Any) -> int:
    """How many examples there are, as far as it can be known, else 0."""
    data: Any = getattr(loader, "dataset", None)
    if hasattr(data, "__len__"):
        return len(data)
    is_unknown = plan.participation.is_sampled or plan.steps == OPEN
    return 0 if is_unknown else planned * _per_pass(plan)


def delta_finding(plan: Plan, records: int) -> CheckFinding:
    delta = plan.delta
    if delta is not None and records and delta > 1.0 / records:
        advice = "δ above 1/n allows the release of one whole record; take one well below"
        return CheckFinding("δ", f"{delta:g} with {records} records", "warning", advice)
    return CheckFinding("δ", f"{delta:g} with {records} records" if records else f"{delta:g}")


def _loss(private: Any, loss_fn: Any, data: tuple[Any, ...]) -> CheckFinding:
    """Try the loss on the first batch, on all of it: no other one of its kind is tried later."""
    parts = private._parts
    try:
        with at_work(private.recorder), seeded(0, parts.device):
            parts.engine.clipped_sum(parts.model, loss_fn, data, clip=parts.threshold.clip)
    except NoshuffleError as error:
        return CheckFinding("loss", str(error), "refused")
    except Exception as error:  # what the first step would end in, by model, loss or torch
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return CheckFinding("loss", why, "refused", _form_advice(loss_fn, data))
    slow = slow_notes(private.fallbacks)
    if slow:
        advice = "correct, and slow: ModelLoss(fn, by_row=True) or layers with rules are faster"
        return CheckFinding("loss", "; ".join(slow), "warning", advice)
    return CheckFinding("loss", private.why)


def _form_advice(loss_fn: Any, data: tuple[Any, ...]) -> str:
    """How model and loss are called, for batches of this form."""
    if isinstance(loss_fn, ModelLoss):
        return f"ModelLoss calls fn(model, *batch), and this batch has {len(data)} part(s)"
    if isinstance(data[0], dict):
        names = ", ".join(map(repr, data[0]))
        return (
            f"the model is called on the whole dictionary ({names}); say what is whose: "
            "ModelLoss(lambda model, batch: loss(model(batch['x']), batch['y']))"
        )
    return "the model is called on the first part of a batch, the loss on its answer and the rest"


def first_look(private: Any, size: int) -> None:
    """After the first step: warn of what is legal and probably not meant."""
    planned = private._parts.planned_batch
    found = [size_finding(size, planned)]
    found.append(delta_finding(private.plan, records_of(private.plan, planned, None)))
    slow = slow_notes(private.fallbacks)
    if slow:
        found.append(CheckFinding("speed", "; ".join(slow), "warning", "see private.fallbacks"))
    for one in found:
        if one.verdict == "warning":
            warn_user(f"{one.name}: {one.found}; {one.advice}", ProbablyNotMeant)


def slow_notes(fallbacks: Iterable[str]) -> list[str]:
    """The fallbacks that cost time."""
    return [note for note in fallbacks if note.startswith(SLOW)]


def _per_pass(plan: Plan) -> int:
    """Steps of one pass."""
    rule = plan.participation.base
    return int(rule.steps_per_epoch) if isinstance(rule, Epochs) else plan.steps

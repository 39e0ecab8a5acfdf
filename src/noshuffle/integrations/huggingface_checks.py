"""What a Trainer would do that the guarantee does not cover, and what its data set says of rows.

    participation_of(args, dataset)   once in every epoch, as the arguments cut it into steps
    refuse(trainer, plan, …)          arguments that order, scale, sample or skip rows otherwise

Used by `huggingface.PrivateTrainer`. No state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from noshuffle.errors import InvalidInput, ProbablyNotMeant, Unsupported
from noshuffle.participation import Epochs, MinSeparation, SinglePass
from noshuffle.plan import Plan
from noshuffle.training.batches import refuse_passes
from noshuffle.training.rng import restore_rng, rng_state
from noshuffle.user_warnings import warn_user


def participation_of(
    args: transformers.TrainingArguments, dataset: Any
) -> Epochs | SinglePass | MinSeparation:
    """What one example may do in a training with these arguments: once in every epoch.

    Where the last epoch is cut short (`max_steps`, epochs like 1.5), the steps that are taken and
    no more: a plan for all of that epoch would have more noise than they need.
    """
    per_epoch = steps_per_epoch(args, dataset)
    steps = args.max_steps
    if steps <= 0:
        steps = math.ceil(args.num_train_epochs * per_epoch)
    epochs, rest = divmod(steps, per_epoch or 1)  # Epochs says that none are too few
    if not rest:
        return Epochs(epochs=epochs, steps_per_epoch=per_epoch)
    return MinSeparation(steps, per_epoch, epochs + 1) if epochs else SinglePass(steps)


def steps_per_epoch(args: transformers.TrainingArguments, dataset: Any) -> int:
    """Steps in which the data are read once."""
    size = part_size(args) * args.gradient_accumulation_steps
    rows = len(dataset)
    if args.dataloader_drop_last:
        rows -= rows % part_size(args)
    return -(-rows // size)


def part_size(args: transformers.TrainingArguments) -> int:
    """Examples of one batch."""
    return int(args.per_device_train_batch_size)


def is_indexable(data: Any) -> bool:
    """Whether rows are read by number, and so in order; a stream with a length may shuffle."""
    return hasattr(data, "__len__") and not isinstance(data, IterableDataset)


def spread_rows(data: Any) -> list[int]:
    """Numbers of up to eight rows all over a data set, the first and the last among them."""
    return sorted({i * (len(data) - 1) // 7 for i in range(8)}) if len(data) else []


def refuse_mixed_rows(loader: Any, *, has_units: bool) -> None:
    """Raise where the collator makes a row of several examples, or (`has_units`) of another one.

    Tried on the first rows: with one of them exchanged, one row may change, and with all of them
    moved on by one place, rows move on as well. Of a collator that draws nothing is said.
    """
    data, before = loader.dataset, rng_state()
    if not is_indexable(data) or (size := min(8, len(data), loader.batch_size or 8)) < 2:
        return
    order = range(size)

    def collated(places: list[int]) -> tuple[Any, list[bytes]]:
        made = loader.collate_fn([data[i] for i in places])  # which may write to them: new ones
        leaves = tree_leaves(dict(made) if isinstance(made, Mapping) else made)
        own = [one for one in leaves if isinstance(one, Tensor) and one.shape[:1] == (size,)]
        flat = [one.cpu().reshape(size, one[0].numel()).contiguous() for one in own]
        rows = [b"".join(one[i].view(torch.uint8).numpy().tobytes() for one in flat) for i in order]
        return [one.shape for one in own], rows

    try:
        shapes, rows = collated([*order])
        if collated([*order]) != (shapes, rows):
            return
        others = [collated([i, *order[1:]]) for i in order[1:4]]
        changed = [Counter(new) - Counter(rows) for shape, new in others if shape == shapes]
        is_mixed = any(one.total() > 1 for one in changed)
        is_sorted = has_units and collated([*order[1:], 0])[1] != [*rows[1:], rows[0]]
    finally:
        restore_rng(before)
    if is_mixed or is_sorted:
        what = "mixes examples" if is_mixed else "changes the order of examples"
        raise InvalidInput(
            f"the collator {what}, so that it cannot be told whose a row is; let row i be made of "
            "example i alone"
        )


def is_changed(trainer: Any, name: str, base: type) -> bool:
    """Whether a subclass, or an attribute of the object, stands before a method of `base`."""
    return getattr(getattr(trainer, name), "__func__", None) is not getattr(base, name)


def refuse(trainer: Any, plan: Plan, *, is_own_loss: bool, readers: Mapping[str, type]) -> None:
    """Raise where the Trainer would do something that the guarantee does not cover.

    `readers` are the methods that decide which rows a step reads, and the classes they are of.
    """
    args, units = trainer.args, trainer._units
    grouped = args.train_sampling_strategy in ("group_by_length", "batch_rebalance")
    reasons = {
        "train_sampling_strategy orders examples by what is in them; use 'sequential'": grouped,
        "fp16 scales the loss of a batch; use bf16": args.fp16,
        "several devices (DataParallel); this version trains on one, set CUDA_VISIBLE_DEVICES": (
            args.n_gpu > 1
        ),
        "several processes; this version trains on one device": args.world_size > 1,
        "DeepSpeed and FSDP; this version trains on one device": bool(
            args.deepspeed or getattr(args, "fsdp", None)
        ),
        "parallelism_config; this version trains on one device": bool(
            getattr(args, "parallelism_config", None)
        ),
        "label_smoothing_factor is a mean over the batch; put it into loss_fn": (
            args.label_smoothing_factor > 0 and is_own_loss
        ),
        "compute_loss_func is of the whole batch; give loss_fn=ModelLoss(fn, by_row=True)": (
            trainer.compute_loss_func is not None
        ),
        "torch.compile; clipping needs the calls of the layers": args.torch_compile,
        "a compute_loss of its own, which it would not call; give loss_fn=": (
            is_changed(trainer, "compute_loss", transformers.Trainer)
        ),
        "plans that sample: they need private.sampler; use private.step": (
            plan.participation.is_sampled
        ),
        "auto_find_batch_size; the batch size is part of the plan": args.auto_find_batch_size,
        "ignore_data_skip, which reads rows again that were released; leave it out": (
            args.ignore_data_skip
        ),
        "include_num_input_tokens_seen: numbers of tokens are raw data; leave it out": (
            args.include_num_input_tokens_seen not in ("no", False)
        ),
    }
    for name, base in readers.items():
        text = f"a {name} of its own: rows are known by their place in train_dataset"
        reasons[text] = is_changed(trainer, name, base)
    for reason, applies in reasons.items():
        if applies:
            raise Unsupported(f"PrivateTrainer does not take {reason}")
    if trainer.eval_dataset is not None and trainer.eval_dataset is trainer.train_dataset:
        warn_user(
            "eval_dataset is train_dataset: what evaluation finds, and all that is chosen by it "
            "(the best model, an early stop), is raw data; give rows that are not trained on",
            ProbablyNotMeant,
        )
    data, rule = trainer.train_dataset, plan.participation.base
    if hasattr(data, "__len__"):
        wanted, per_epoch = participation_of(args, data), steps_per_epoch(args, data)
        planned, drops = per_epoch, trainer._options.get("on_violation") == "drop"
        if isinstance(rule, Epochs):
            planned = rule.steps_per_epoch
        elif isinstance(rule, MinSeparation) and wanted.steps > per_epoch and not drops:
            planned = max(per_epoch, rule.separation)  # a smaller one allows more
        if wanted.steps > plan.steps or planned != per_epoch:
            raise InvalidInput(
                f"the Trainer makes {wanted.steps} steps, {per_epoch} an epoch; the plan has "
                f"{plan.steps}, {planned} an epoch; fit it for participation_of(args, dataset)"
            )
        if is_indexable(data) and not drops:
            advice = "fit it for participation_of(args, dataset)"
            refuse_passes(plan, steps=wanted.steps, per_pass=per_epoch, advice=advice)
    if units is not None and is_indexable(data) and len(units) != len(data):
        raise InvalidInput(
            f"units must say whose each row of train_dataset is: {len(data)}, got {len(units)}"
        )
    if plan.unit == "user" and units is None:
        raise InvalidInput("a plan with unit='user' needs units=: whose each example is")

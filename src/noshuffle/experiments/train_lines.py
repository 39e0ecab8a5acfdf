"""Train the runs of one cell side by side: one line of a task, several ε, rates or trials.

    order    rows of the file, pass after pass, in one order; sampled lines: the secret draws of the
             study's release, which refuses any other batch
    noise    that of `fitted` for the line's participation at ε; none, and no clip, if not private
    scores   accuracy of the last iterate, and of the average of iterates (decay 0.99), on rows that
             were not trained on: held-out training rows in a search, test rows in the end

Guarantees: each run by itself is private with its ε: the rows come as its participation says, by
construction; sampled ones are checked, and the record says what the runs of one strategy cost
`together`. What all cells cost, and choosing among them, is not counted (docs/studies.md).
State: the data on the device.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noshuffle.datasets import load
from noshuffle.errors import DataUnavailable, InvalidInput
from noshuffle.experiments import fitted
from noshuffle.experiments.figure import Request
from noshuffle.experiments.lines import StudyLine, StudyTask
from noshuffle.experiments.runner import to_stderr
from noshuffle.features import fixed
from noshuffle.release.unit_ids import Ids
from noshuffle.strategies import identity
from noshuffle.strategies.workload import cooldown
from noshuffle.training.augment import Augment, mean_over_copies
from noshuffle.training.many import Setting, Study, accuracies
from noshuffle.training.models import build

DECAY = 0.99
#: Rows whose features are told of by a digest.
DIGESTED = 100
#: Inputs, targets, weights of rows (0: padding), and ids where they are checked.
StudyBatch = tuple[Tensor, Tensor, Tensor | None, Ids | None]
#: Clip norm of runs without privacy.
UNCLIPPED = 1e6


class StudyRows:
    """The rows that a cell trains and scores on, on its device."""

    def __init__(self, task: StudyTask, asked: Request, *, is_search: bool) -> None:
        data = _data(task.data, task.stands_in, asked.device, task.features)
        self.name, self.classes, self.features = data[:3]
        x, y, x_test, y_test = data[3:]
        self.shape = tuple(x.shape[1:])
        whole = task.rows or len(x)
        if not task.held_out < whole <= len(x):
            raise InvalidInput(f"{task.name} needs {whole} training rows, {len(x)} are there")
        cut = whole - task.held_out if is_search else whole
        self.x, self.y = x[:cut], y[:cut]
        self.scored = (x[cut:whole], y[cut:whole]) if is_search else (x_test, y_test)


@cache
def _data(name: str, stands_in: str, device: str, features: str) -> tuple[Any, ...]:
    """Name, classes, features and tensors of a data set, or of the one that stands in for it.

    Features are told with a digest: that searches and final figures had the same ones.
    """
    try:
        found = load(name)
    except DataUnavailable:
        if not stands_in:
            raise
        found = load(stands_in)
    x, y, x_test, y_test = (
        part.to(device) for part in (found.x_train, found.y_train, found.x_test, found.y_test)
    )
    if features:
        channels, side = x.shape[1:3]
        transform = fixed(features, channels=channels, side=side, device=device, say=to_stderr)
        x, x_test = transform(x), transform(x_test)
        told = hashlib.sha256(x[:DIGESTED].cpu().numpy().tobytes()).hexdigest()[:16]
        features = f"{features}, {x[0].numel()} numbers, {told}"
    return found.name, found.classes, features, x, y, x_test, y_test


def train(
    task: StudyTask,
    line: StudyLine,
    runs: Sequence[tuple[float, float, int]],
    asked: Request,
    *,
    is_search: bool,
) -> dict[str, Any]:
    """Train (ε, learning rate, trial) for every run; scores and how they were made, as JSON."""
    began, settings = time.perf_counter(), asked.settings
    names = list(dict.fromkeys(line.fit_at(epsilon) for epsilon, *_ in runs))
    if len(names) > 1:  # a strategy for every ε: one study each
        parts = [[run for run in runs if line.fit_at(run[0]) == name] for name in names]
        found = [train(task, line, part, asked, is_search=is_search) for part in parts]
        together = {"runs": [run for one in found for run in one["runs"]]}
        for key in ("strategy", "together"):
            together[key] = [one[key] for one in found]
        return {**found[0], **together, "seconds": round(time.perf_counter() - began, 2)}
    rows = StudyRows(task, asked, is_search=is_search)
    epochs, per_epoch = task.layout(len(rows.x), line.times)
    steps, batch = epochs * per_epoch, task.batch * line.times
    seed = settings["search_seed"] if is_search else settings["first_seed"]
    share = batch / len(rows.x)
    how = {"epochs": epochs, "per_epoch": per_epoch, "delta": settings["delta"], "rate": share}
    plans = [fitted.plan(names[0], **how, epsilon=e) if line.fit else None for e, *_ in runs]
    strategy = plans[0].strategy if plans[0] else identity()
    levels = [plan.noise_multiplier if plan else 0.0 for plan in plans]
    made = [
        Setting(
            plan=plan if line.is_sampled else None,
            noise_multiplier=None if line.is_sampled else z,
            learning_rate=rate,
            momentum=line.momentum,
            clip_norm=settings["clip_norm"] if line.fit else UNCLIPPED,
            seed=seed + trial,
        )
        for plan, z, (_, rate, trial) in zip(plans, levels, runs)
    ]
    is_fast = asked.device.startswith("cuda")
    if is_fast:
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = not task.half  # forms are compared in full precision
    augment = Augment(copies=task.augment) if task.augment else None
    loss_fn = nn.CrossEntropyLoss()
    chosen = Study(
        lambda: build(task.model, rows.shape, rows.classes),
        made,
        steps=steps,
        batch_size=batch,
        strategy=strategy,
        loss_fn=loss_fn if augment is None else mean_over_copies(loss_fn),
        learning_rates=cooldown(steps, last=settings["cooldown"]),
        device=asked.device,
        in_turn=task.in_turn and is_fast,
        half=task.half and is_fast,
    )
    batches = in_order(rows, steps=steps, batch=batch)
    if line.is_sampled:
        size = int(batch + settings["room"] * batch**0.5) // 8 * 8 + 8 if is_fast else 0
        batches = drawn(rows, chosen.sampler(len(rows.x)), size=size)
    average = {name: value.clone() for name, value in chosen.params.items()}
    for place, (x, y, weights, ids) in enumerate(batches):
        chosen.step(x if augment is None else augment(x), y, weights=weights, ids=ids)
        decay = min(DECAY, place / (place + 10))
        torch._foreach_lerp_(list(average.values()), list(chosen.params.values()), 1.0 - decay)
    network = chosen._chosen()
    last, mean = (
        accuracies(network, params, *rows.scored, chunk=1000).cpu().tolist()
        for params in (chosen.params, average)
    )
    why, fallbacks = chosen.why, chosen.fallbacks
    said = chosen.statement().headline() if line.is_sampled else ""
    del chosen, network, average
    gc.collect()  # a captured graph refers to itself, and its memory is large
    if is_fast:
        torch.cuda.empty_cache()
    return {
        "runs": [
            {
                "epsilon": epsilon,
                "learning_rate": rate,
                "trial": trial,
                "seed": seed + trial,
                "noise_multiplier": z,
                "noise_rms": fitted.predicted(plan, momentum=line.momentum) if plan else 0.0,
                "accuracy": found,
                "averaged": averaged,
            }
            for (epsilon, rate, trial), plan, z, found, averaged in zip(
                runs, plans, levels, last, mean
            )
        ],
        "title": task.title,
        "data": rows.name,
        "features": rows.features,
        "rows": len(rows.x),
        "steps": steps,
        "batch": batch,
        "epochs": epochs,
        "delta": settings["delta"],
        "strategy": strategy.words(),
        "together": said,
        "form": why,
        "fallbacks": fallbacks,
        "seconds": round(time.perf_counter() - began, 2),
    }


def in_order(rows: StudyRows, *, steps: int, batch: int) -> Iterator[StudyBatch]:
    """Batches in the order of the file, pass after pass; a rest that fills none is left out."""
    usable = len(rows.x) // batch * batch
    for step in range(steps):
        begin = step * batch % usable
        yield rows.x[begin : begin + batch], rows.y[begin : begin + batch], None, None


def drawn(rows: StudyRows, draws: Iterable[Ids], *, size: int) -> Iterator[StudyBatch]:
    """Secret draws, padded to `size` with rows of weight 0: graphs have one size."""
    for chosen in draws:
        padded = np.pad(chosen, (0, max(0, size - len(chosen))))
        index = torch.from_numpy(padded).to(rows.x.device)
        weights = torch.arange(len(padded), device=rows.x.device) < len(chosen)
        yield rows.x[index], rows.y[index], weights.float(), padded

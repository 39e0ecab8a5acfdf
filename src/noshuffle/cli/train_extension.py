"""`noshuffle train --extend RUN`: more epochs for a run, other batches if one likes, one guarantee.

The run goes on from where it stands. Its noise goes on too, where the keys are still there and no ε
was asked for; otherwise the new steps are a phase of their own (`Plan.extended`). What was used is
kept in config.json: `stages` lists (steps, batch size) of what was trained so far and of what is to
come.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from noshuffle.cli import promise
from noshuffle.cli.from_record import check_fields
from noshuffle.cli.run_home import kept_settings
from noshuffle.cli.settings import RunOptions, folder
from noshuffle.cli.train_settings import KeptTrainSettings
from noshuffle.errors import InvalidInput, Unsupported, one_of

#: What may be said together with --extend.
MAY_CHANGE = ("epochs", "epsilon", "mechanism", "batch_size", "clip_norm")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Options of `noshuffle train`."""

    extend: Path | None = folder(
        None,
        "go on with this run for --epochs more, under one ε (--epsilon: of all of it); "
        "--batch-size, --clip-norm and --mechanism may change",
    )

    on_replay: str = folder(
        "auto", f"{promise.REPLAY_HELP}; auto: skip on cuda, else refuse",
        check=partial(one_of, ("auto", "refuse", "skip")),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)

    @property
    def is_new(self) -> bool:
        return super().is_new and self.extend is None


def extend_run(run: TrainOptions, stated: dict[str, Any]) -> tuple[KeptTrainSettings, Path]:
    """Extend the run in its folder; its new settings."""
    from noshuffle import datasets
    from noshuffle.cli.train_parts import participation_of
    from noshuffle.participation import Epochs, MinSeparation, Stages, stages_of
    from noshuffle.participation.base import InEpochs
    from noshuffle.release.extension import extend, finish
    from noshuffle.release.folder import RunFolder
    from noshuffle.release.opening import steps_in_files
    from noshuffle.release.seal import finish_seal

    assert run.extend is not None
    if run.config or run.out or run.resume:
        raise InvalidInput("--extend names the run folder; leave out --config, --out and --resume")
    if others := sorted(set(stated) - set(MAY_CHANGE)):
        raise InvalidInput(f"--extend keeps {others[0]} as it is; it takes {', '.join(MAY_CHANGE)}")
    if "epochs" not in stated:
        raise InvalidInput("--extend needs --epochs, how many more")
    home, more = RunFolder(run.extend), int(stated["epochs"])
    settings = KeptTrainSettings.of(kept_settings(run.extend, kind="train", budget=run.budget))
    finish(home)
    finish_seal(home)  # of a process that was killed at the end of the run
    plan, done = home.plan(), steps_in_files(home)
    batch = int(stated.get("batch_size", settings.batch_size))
    clip = float(stated.get("clip_norm", settings.clip_norm))
    data = datasets.load(settings.data)
    part, longer = plan.participation, replace(settings, epochs=more, batch_size=batch)
    how: dict[str, Any] = {"steps": more * (len(data) // batch)}
    if isinstance(part, Epochs | Stages) or isinstance(stages_of(part)[0], InEpochs):
        how = {"epochs": more, "steps_per_epoch": len(data) // batch}
    elif batch != settings.batch_size:
        raise Unsupported(f"another batch size goes with epochs in order, this run has {part.kind}")
    elif isinstance(part, MinSeparation):
        local = participation_of(longer, data)
        around = participation_of(replace(longer, epochs=settings.epochs + more), data)
        assert isinstance(local, MinSeparation)
        assert isinstance(around, MinSeparation)
        if around.separation < part.separation:  # a single pass did not see its own end
            raise Unsupported(
                f"where the order begins again, two steps of a user lie {around.separation} apart "
                f"and the plan promised {part.separation}; start another run, and count both in a "
                "Budget"
            )
        how["max_participations"] = local.max_participations
    is_same = home.key_file.exists() and "epsilon" not in stated and batch == settings.batch_size
    mechanism = stated.get("mechanism") or ("continue" if is_same else "blt")
    try:
        new = plan.extended(**how, after=done, mechanism=mechanism, epsilon=stated.get("epsilon"))
    except Unsupported:
        if mechanism != "continue" or "mechanism" in stated:
            raise
        new = plan.extended(**how, after=done, mechanism="blt")
    before = settings.stages or ((plan.steps, settings.batch_size),)
    settings = replace(
        settings,
        epochs=settings.epochs + more,
        batch_size=batch,
        clip_norm=clip,
        stages=(*_cut(before, done), (new.steps - done, batch)),
    )
    norm = clip if "clip_norm" in stated else None  # another clip than a flat one stays
    extend(home, new, batch_size=batch, clip_norm=norm, config=settings.to_dict())
    return settings, run.extend


def _cut(stages: tuple[tuple[int, int], ...], steps: int) -> tuple[tuple[int, int], ...]:
    """(steps, batch size) of the first so many steps."""
    out = []
    for length, batch in stages:
        if steps > 0:
            out.append((min(length, steps), batch))
        steps -= length
    return tuple(out)

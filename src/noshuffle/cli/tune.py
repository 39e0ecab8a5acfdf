"""`noshuffle tune`: the best learning rate and clip norm of a training, the search paid for.

What a search releases is in memory until it is written, and no second search finds it again: where
its folder cannot be written (a full disk) it goes elsewhere, and where nothing can, it waits.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noshuffle.cli.budget import BUDGET_HELP, opened
from noshuffle.cli.from_record import check_fields, given, setting, takes
from noshuffle.cli.promise import FOLDER_HELP, Output, print_json
from noshuffle.cli.run_home import check_new_folder, dated
from noshuffle.cli.settings import check_device
from noshuffle.cli.train_settings import TrainSettings
from noshuffle.cli.words import say
from noshuffle.errors import InvalidInput, positive

if TYPE_CHECKING:
    from noshuffle.budget import Budget, Trial, Tuned


#: Seconds between two attempts to write where no disk takes the model.
PAUSE = 10.0


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What is searched, and how."""

    learning_rates: str | None = setting(None, "learning rates to try, a,b,c (default: around lr)")
    clip_norms: str | None = setting(None, "clip norms to try, a,b,c (default: that of train)")
    repeats: float = setting(10.0, "how many runs on average", check=positive)
    law: str = setting("geometric", "law of their number: geometric, logarithmic, poisson; or all")
    budget: Path | None = setting(None, BUDGET_HELP)
    out: Path | None = setting(None, FOLDER_HELP)

    def __post_init__(self) -> None:
        check_fields(self)


@takes(given(TrainSettings), TuneOptions, Output)
def tune(stated: dict[str, Any], search: TuneOptions, output: Output) -> None:
    """Find learning rate and clip norm of noshuffle train within one ε, the search included.

    A random number of runs is made, each with one of the settings at random; the best by its
    accuracy on held-out examples (with noise, unless they are public) is kept, and nothing else.
    ε is a bound on all of it (Papernot and Steinke 2022).
    """
    settings = TrainSettings.of(stated)
    if settings.epsilon is None or settings.sampling != "none" or settings.unit != "example":
        raise InvalidInput("tune takes --epsilon, --sampling none and --unit example")
    if settings.baseline or settings.test_seed is not None:
        raise InvalidInput("tune has neither --baseline nor --test-seed: give them to train")
    check_device(settings.device)
    out = search.out or dated(f"tune-{settings.folder_name()}")
    check_new_folder(out, resumes=False)
    choices = [
        replace(settings, lr=rate, clip_norm=norm)
        for rate in _numbers(search.learning_rates, [settings.lr * f for f in (0.25, 0.5, 1, 2, 4)])
        for norm in _numbers(search.clip_norms, [settings.clip_norm])
    ]
    own = opened(search.budget)
    out.mkdir(parents=True, exist_ok=True)  # what cannot be kept is not searched for
    try:
        # A δ that was not asked for is a tenth of the budget's.
        delta = settings.delta if own is None or "delta" in stated else None
        found = _search(settings, choices, search, own, delta)
    except BaseException:
        with suppress(OSError):
            out.rmdir()
        raise
    out = _kept(found, out)
    record = {"run": str(out), "settings_tried": len(choices), "score": found.score}
    best = {"lr": found.setting.lr, "clip_norm": found.setting.clip_norm} if found.setting else None
    if output.json:
        print_json({**record, "best": best, "statement": found.statement.to_dict()})
        return
    print(f"best of {len(choices)} settings: {best}; score {found.score:.4f}\n")
    say(found.statement.words())
    print(f"\nmodel: {out / 'model.safetensors'}")


def _numbers(text: str | None, default: list[float]) -> list[float]:
    try:
        found = default if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInput(
            f"learning rates and clip norms are numbers a,b,c; got {text!r}"
        ) from None
    for number in found:
        positive(**{"every learning rate and clip norm": number})
    return found


def _search(
    settings: TrainSettings,
    choices: list[TrainSettings],
    search: TuneOptions,
    own: Budget | None,
    delta: float | None,
) -> Tuned:
    from noshuffle.budget import tune as best_of
    from noshuffle.cli.job import train_quietly
    from noshuffle.cli.train_parts import loaded, make_plan, right_answers

    data = loaded(settings)
    if settings.task != "auto" or data.y_train.is_floating_point():
        raise InvalidInput("tune compares accuracies; it takes data with classes, and no --task")
    strategy: list[Any] = []

    def run(chosen: TrainSettings, trial: Trial) -> tuple[Any, Any]:
        asked = replace(chosen, epsilon=trial.epsilon, delta=trial.delta)
        plan = make_plan(asked, data, strategy[0] if strategy else None)
        strategy.append(plan.strategy)  # fitted once: it depends on no setting that is tried
        model = train_quietly(asked, data, plan, budget=trial)
        right = right_answers(model, data.x_test, data.y_test)
        return model.state_dict(), float(right.mean()) if data.is_test_public else right.numpy()

    return best_of(
        run,
        choices,
        epsilon=float(settings.epsilon or 0.0),
        delta=delta,
        repeats=search.repeats,
        law=search.law,
        score_share=0.0 if data.is_test_public else 0.1,
        budget=own,
    )


def _kept(found: Tuned, out: Path) -> Path:
    """The folder that holds what a search releases: `out`, or the first one that can be written."""
    said = ""
    while True:
        try:
            _write(found, out)
            return out
        except OSError as error:
            why = f"{error.filename or out}: {error.strerror or error}"
        for place in _elsewhere():
            with suppress(OSError):
                folder = Path(tempfile.mkdtemp(prefix=f"{out.name}-", dir=place))
                _write(found, folder)
                _warn(f"{why}; the model, which is paid for, is in {folder} instead")
                return folder
        if not said:
            said = f"{why}, nor is there room elsewhere; the model, which is paid for, is kept in "
            _warn(f"{said}memory and tried again every {PAUSE:g} s: free some space (ctrl-C: lost)")
        time.sleep(PAUSE)


def _elsewhere() -> list[Path]:
    """Folders on other disks, perhaps; the last one is memory."""
    found = [Path.cwd(), Path.home(), Path("/dev/shm")]
    with suppress(OSError):  # it tries to write there
        found.insert(2, Path(tempfile.gettempdir()))
    return found


def _warn(line: str) -> None:
    print(f"noshuffle: {line}", file=sys.stderr)


def _write(found: Tuned, out: Path) -> None:
    """What a search releases: the model, its settings, the statement; all of it, or nothing."""
    from safetensors.torch import save

    from noshuffle.release.files import as_json, write_bytes

    files = {"statement.json": as_json(found.statement.to_dict())}
    if found.setting is not None:
        model = {name: value.contiguous() for name, value in found.result.items()}
        files["config.json"] = as_json({"kind": "tune", **found.setting.to_dict()})
        files["model.safetensors"] = save(model)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_bytes(out / name, data)
    except OSError:
        for name in files:
            (out / name).unlink(missing_ok=True)
        with suppress(OSError):
            out.rmdir()
        raise

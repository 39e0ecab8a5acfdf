"""Golden commands: the JSON of every command, run in this process in a folder of its own.

Commands that need a folder of another one are told as a story, in one entry. Exit statuses are kept
with what is printed. `DROPPED` has the keys that are not, and why.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.golden.entries import Entry

#: Key: why it is not kept, at any depth.
DROPPED = {
    **dict.fromkeys(
        ("run", "report", "csv", "path", "budget", "picture", "what", "table", "sealed", "plot"),
        "names of files and folders",
    ),
    **dict.fromkeys(("seconds", "fit_seconds", "began", "rounds_per_second"), "times"),
    **dict.fromkeys(("plan_hash", "name", "format", "version", "digest", "link"), "forms, digests"),
    **dict.fromkeys(
        ("assumptions", "unchecked", "not_private", "words", "why", "notes", "found"),
        "sentences, which are written anew",
    ),
    **dict.fromkeys(
        (
            "individual", "pure", "baseline_accuracy", "settings",
            "progressive_score_not_private", "reserved_epsilon",
        ),
        "parts that go, and settings of which many go",
    ),
}  # fmt: skip
#: Accuracies of small models move by a few rows, and what is printed of fits where optimizers end.
FITTED = 2e-3
ACCURACY = {"test_accuracy": 0.1, "test_loss": 0.05}
TABLE = "a,b,label\n" + "".join(
    f"{7 * i % 120 / 120},{i % 7},{int(7 * i % 120 / 120 + 0.1 * (i % 7) > 0.8)}\n"
    for i in range(120)
)
USERS = "a,who\n" + "".join(f"{7 * i % 120 / 120},u{i % 40}\n" for i in range(120))


def kept(value: Any) -> Any:
    """What is stable of a command's JSON."""
    if isinstance(value, dict):
        return {key: kept(own) for key, own in value.items() if key not in DROPPED}
    return [kept(own) for own in value] if isinstance(value, list) else value


def called(line: str) -> Any:
    """One command in the current folder, and its exit status."""
    from noshuffle.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = main([*line.split(), "--json"])
    told = kept(json.loads(out.getvalue()))
    assert status != 2, f"{line}: {told}"  # refused: the line is wrong
    if line.startswith("audit"):  # what is left draws noise of its own
        told["parts"] = [part for part in told["parts"] if part["kind"] == "plan"]
    if line.startswith("predict"):
        told = told[:8]
    if line.startswith("plan"):  # in an order by error, which may be a tie
        told = {f"{row['mechanism']} {row.get('sampling', '')}".strip(): row for row in told}
    return {"status": status, "json": told}


def story(*lines: str) -> dict[str, Any]:
    """Commands one after the other in a folder of their own."""
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        Path("t.csv").write_text(TABLE, "utf8")
        Path("users.csv").write_text(USERS, "utf8")
        return {f"{i} {line.split()[0]}": called(line) for i, line in enumerate(lines)}


EPSILONS = {
    "tree": "--steps 1600 --mechanism tree --noise-multiplier 1.13 --delta 1e-6",
    "tree by nodes": "--steps 64 --mechanism tree --noise-multiplier 2 --tree-accounting nodes",
    "tree, restarts by epochs": "--epochs 4 --steps-per-epoch 8 --mechanism tree "
    "--restart-every 2e --noise-multiplier 2",
    "target": "--steps 64 --mechanism sqrt --target-epsilon 1",
    "identity": "--epochs 4 --steps-per-epoch 8 --mechanism identity --noise-multiplier 3",
    "separation": "--steps 64 --separation 10 --max-participations 3 --mechanism banded_inverse "
    "--bands 4 --noise-multiplier 3",
    "users": "--epochs 2 --steps-per-epoch 8 --mechanism bsr --bands 4 --noise-multiplier 3 "
    "--unit user --neighbours replace-one",
    "poisson": "--steps 64 --mechanism identity --poisson-rate 0.05 --noise-multiplier 1",
    "poisson, rdp": "--steps 64 --mechanism identity --poisson-rate 0.05 --noise-multiplier 1 "
    "--accountant rdp",
}
PLANS = {
    "tree": "--steps 16 --mechanism tree",
    "identity": "--epochs 2 --steps-per-epoch 8 --mechanism identity --target-epsilon 4",
    "sqrt, momentum": "--steps 32 --mechanism sqrt --momentum 0.9 --target-epsilon 2",
    "blt": "--epochs 2 --steps-per-epoch 8 --mechanism blt --target-epsilon 4",
    "banded": "--epochs 2 --steps-per-epoch 8 --mechanism banded --target-epsilon 4",
    "usual and sampling": "--epochs 2 --steps-per-epoch 8 --target-epsilon 4 --sampling poisson",
}
_TRAIN = "train --epochs 1 --batch-size 240 --model mlp --test-seed golden --out one"
STORIES: dict[str, tuple[str, ...]] = {
    "tables": (
        "sum t.csv --columns a,b --clip 2 --batch 20 --mechanism tree --epsilon 2 --delta 1e-4 "
        "--test-seed golden --out sums",
        "fit t.csv --target label --classes 0,1 --bounds 0,9 --delta 1e-4 --test-seed golden "
        "--out model",
        "predict model t.csv",
        "verify model",
        "verify sums",
        "audit sums",
    ),
    "sums of users": (
        "sum users.csv --columns a --id who --max-participations 2 --clip 1 --batch 30 "
        "--mechanism identity --delta 1e-5 --test-seed golden --out sums",
    ),
    "regression": (
        "fit t.csv --target b --task linear --solver sums --bounds 0,9 --target-bounds 0,6 "
        "--mechanism tree --epsilon 4 --test-seed golden --out model",
        "predict model t.csv",
    ),
    "training": (
        f"{_TRAIN} --mechanism tree",
        "verify one",
        "audit one/plan.json",
        "report one",
        "seal one",
    ),
    "training, noise given": (f"{_TRAIN} --mechanism identity --noise-multiplier 2 --lr 0.1",),
    "a private run": (  # of real keys: nothing of its values is told
        "budget all --epsilon 9 --delta 1e-3",
        "sum t.csv --columns a --clip 1 --batch 20 --mechanism tree --out sums --delta 1e-4 "
        "--budget all",
        "verify sums",
        "budget all",
    ),
    "federated": (
        "federated --rounds 2 --mechanism tree --test-seed golden --out users",
        "verify users",
    ),
}


def private_run(*lines: str) -> dict[str, Any]:
    """A story of a run whose noise nobody knows: its totals are left out."""
    found = story(*lines)
    del found["1 sum"]["json"]["totals"]
    return found


SECTION: dict[str, Entry] = {}
for _name, _line in EPSILONS.items():
    SECTION[f"epsilon, {_name}"] = Entry(
        partial(story, f"epsilon {_line}"), rtol=FITTED if "separation" in _name else 1e-6
    )
for _name, _line in PLANS.items():
    SECTION[f"plan, {_name}"] = Entry(partial(story, f"plan {_line}"), rtol=FITTED)
for _name, _lines in STORIES.items():
    SECTION[_name] = Entry(
        partial(private_run if _name == "a private run" else story, *_lines),
        rtol=1e-5,
        atol=1e-7,
        by_key=ACCURACY,
    )

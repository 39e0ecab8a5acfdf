"""`make mutants`: plants every privacy bug in a copy of src/ and runs the tests that must notice.

    python -m tests.mutants                   all mutants, a table, exit status 1 if one survives
    python -m tests.mutants --only restart    those whose name or fault has this word
    python -m tests.mutants --clean 100       the same tests without a bug, so many times

A mutant is dead when a test fails (pytest's exit status 1). One that cannot be imported, or whose
tests are not found, is an error of the list, not a kill. Before the mutants, all tests that are to
kill them run once on the clean tree and must pass.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.listed import MUTANTS
from tests.mutants.mutant import ROOT, Mutant

WORDS = {0: "SURVIVED", 1: "killed"}


def run_tests(by: Sequence[str], source: Path, *, seconds: int = 900) -> tuple[int, str]:
    """pytest's exit status over these tests with `source` in front of the path, and its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*command, "-m", "slow or not slow", *by], cwd=ROOT, env=environment,
            capture_output=True, text=True, timeout=seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return -1, f"not done within {seconds} s"
    return done.returncode, done.stdout + done.stderr


def killer(output: str) -> str:
    """The first test that failed."""
    lines = [line for line in output.splitlines() if line.startswith("FAILED ")]
    return lines[0].removeprefix("FAILED ").split(" - ")[0] if lines else ""


def try_one(mutant: Mutant) -> tuple[str, str, float]:
    """What became of a mutant: the word, which test noticed, seconds."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        code, output = run_tests(mutant.by, mutant.copy_to(Path(folder)))
    word = WORDS.get(code, f"ERROR {code}")
    told = killer(output) if code == 1 else output[-400:] if code else ""
    if code == 1 and not told:  # an error at import fails without a test's name
        word, told = "ERROR 1", output[-400:]
    return word, told, time.monotonic() - started


def clean(times: int, by: Sequence[str]) -> int:
    """How many of so many runs without a bug raise an alarm."""
    alarms = 0
    environment = os.environ.pop("CI", None)  # other keys in every run
    for number in range(times):
        code, output = run_tests(by, ROOT / "src", seconds=3600)
        alarms += code != 0
        print(f"clean run {number + 1} of {times}: {killer(output) or 'no alarm'}", flush=True)
        if code not in WORDS:
            print(output[-2000:])
    if environment is not None:
        os.environ["CI"] = environment
    return alarms


def table(chosen: Sequence[Mutant], jobs: int) -> int:
    """Runs the mutants, prints a row for each as it ends; returns how many were not killed."""
    left = 0
    print(
        "| # | mutant | fault | file | | killed by | s |\n|---|---|---|---|---|---|---|", flush=True
    )
    with ThreadPoolExecutor(jobs) as pool:
        for number, (mutant, result) in enumerate(
            zip(chosen, pool.map(try_one, chosen), strict=True), start=1
        ):
            word, told, seconds = result
            left += word != "killed"
            kind = "" if mutant.quick else " (slow)"
            shown = told.replace("\n", " ").replace("|", "/")
            print(
                f"| {number} | {mutant.name} | {mutant.fault} | {mutant.file} | {word}{kind} "
                f"| {shown} | {seconds:.0f} |",
                flush=True,
            )
    print(f"\n{len(chosen)} mutants, {len(chosen) - left} killed, {left} not")
    return left


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="a word of the name, the file or the fault")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--clean", type=int, default=0, metavar="TIMES")
    asked = parser.parse_args()
    chosen = [m for m in MUTANTS if asked.only in f"{m.name} {m.file} {m.fault}"]
    by = sorted({test for mutant in chosen for test in mutant.by})
    if asked.clean:
        alarms = clean(asked.clean, by)
        print(f"{alarms} false alarms in {asked.clean} clean runs of {len(by)} tests")
        return int(alarms > 0)
    code, output = run_tests(by, ROOT / "src", seconds=3600)
    if code:
        print(f"the tests do not pass without a mutant (exit status {code}):\n{output[-3000:]}")
        return 2
    return int(table(chosen, asked.jobs) > 0)


if __name__ == "__main__":
    sys.exit(main())

"""`make mutants`: plants every privacy bug in a copy of src/ and runs the tests that must notice.

    python -m tests.mutants                   all mutants, a table, exit status 1 if one survives
    python -m tests.mutants --only restart    those whose name, file or promise has this word
    python -m tests.mutants --log FILE        results go to FILE; what stands there is not run again
    python -m tests.mutants --clean 100       the same tests without a bug, so many times
    python -m tests.mutants --clean 100 --of test_covariance,test_laws        those of them alone

A mutant is dead when a test fails (pytest's exit status 1). One that cannot be imported, or whose
tests are not found, is an error of the list, not a kill. The quick tests are asked first, the slow
ones only about what they let live. Before the mutants, all tests that are to kill them run once on
the clean tree and must pass.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis  # noqa: F401 (imported here for the forks)
import pytest
import scipy.stats  # noqa: F401
import torch  # noqa: F401
from tests.mutants.listed import MUTANTS
from tests.mutants.mutant import ROOT, Mutant

WORDS = {0: "SURVIVED", 1: "killed", 5: "SURVIVED"}  # 5: no test of this kind
QUICK, SLOW, ALL = "not slow", "slow", "slow or not slow"


def run_tests(
    by: Sequence[str], source: Path, *, seconds: int = 900, which: str = ALL
) -> tuple[int, str]:
    """pytest's exit status over these tests with `source` in front of the path, and its output.

    In a fork of this process, which has imported what takes long and nothing of this package.
    """
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if not child:
            os.setsid()
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            os.chdir(ROOT)
            os.environ |= {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
            sys.path.insert(0, str(source))
            code = 3
            try:
                code = pytest.main(["-qx", "-n0", "-pno:cacheprovider", "-m", which, *by])
            finally:
                sys.stdout.flush()
                os._exit(int(code))
        code, end = None, time.monotonic() + seconds
        while code is None:
            time.sleep(0.2)
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return -1, f"not done within {seconds} s"
        output.seek(0)
        return code, output.read().decode(errors="replace")


def killer(output: str) -> str:
    """The first test that failed, or whose fixture did; not a file that cannot be imported."""
    lines = [line.partition(" - ")[0].split(" ", 1) for line in output.splitlines()]
    found = [line[1] for line in lines if line[0] in ("FAILED", "ERROR") and "::" in line[-1]]
    return found[0] if found else ""


def try_one(mutant: Mutant) -> dict[str, Any]:
    """What became of a mutant: the word, which test of which suite noticed, seconds."""
    started = time.monotonic()
    suite = "quick"
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        source = mutant.copy_to(Path(folder))
        code, output = run_tests(mutant.by, source, which=QUICK)
        if WORDS.get(code) == "SURVIVED":
            suite = "slow"
            code, output = run_tests(mutant.by, source, which=SLOW)
    word = WORDS.get(code, f"ERROR {code}")
    told = killer(output) if code == 1 else output[-400:] if word != "SURVIVED" else ""
    if code == 1 and not told:  # an error at import fails without a test's name
        word, told = "ERROR 1", output[-400:]
    seconds = round(time.monotonic() - started, 1)
    return {"word": word, "suite": suite, "by": told, "seconds": seconds}


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


def table(chosen: Sequence[Mutant], jobs: int, log: Path | None) -> int:
    """Runs the mutants, prints a row for each as it ends; returns how many were not killed."""
    lines = log.read_text().splitlines() if log and log.exists() else []
    known = {entry["patch"]: entry for entry in map(json.loads, lines)}

    def result(mutant: Mutant) -> dict[str, Any]:
        patch = repr(mutant)
        if known.get(patch, {}).get("word") != "killed":
            known[patch] = {"patch": patch, **try_one(mutant)}
            if log:
                with log.open("a") as file:
                    file.write(json.dumps(known[patch]) + "\n")
        return known[patch]

    left = 0
    print(
        "| # | mutant | promise | file | | killed by | suite | s |\n" + "|---" * 8 + "|", flush=True
    )
    with ThreadPoolExecutor(jobs) as pool:
        for number, (mutant, told) in enumerate(zip(chosen, pool.map(result, chosen)), start=1):
            left += told["word"] != "killed"
            shown = told["by"].replace("\n", " ").replace("|", "/")
            print(
                f"| {number} | {mutant.name} | {mutant.promise} | {mutant.file} | {told['word']} "
                f"| {shown} | {told['suite']} | {told['seconds']:.0f} |",
                flush=True,
            )
    print(f"\n{len(chosen)} mutants, {len(chosen) - left} killed, {left} not")
    return left


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="a word of the name, the file or the promise")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--clean", type=int, default=0, metavar="TIMES")
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="results so far; goes on from them"
    )
    parser.add_argument("--unchecked", action="store_true", help="without the clean run before")
    parser.add_argument("--of", default="", metavar="WORDS", help="tests named by one of a,b,c")
    asked = parser.parse_args()
    chosen = [m for m in MUTANTS if asked.only in f"{m.name} {m.file} {m.promise}"]
    by = sorted({test for mutant in chosen for test in mutant.by})
    by = [test for test in by if any(word in test for word in asked.of.split(","))]
    if asked.clean:
        alarms = clean(asked.clean, by)
        print(f"{alarms} false alarms in {asked.clean} clean runs of {len(by)} tests")
        return int(alarms > 0)
    code, output = (0, "") if asked.unchecked else run_tests(by, ROOT / "src", seconds=3600)
    if code:
        print(f"the tests do not pass without a mutant (exit status {code}):\n{output[-3000:]}")
        return 2
    return int(table(chosen, asked.jobs, asked.log) > 0)


if __name__ == "__main__":
    sys.exit(main())

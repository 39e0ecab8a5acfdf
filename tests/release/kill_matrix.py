"""Drivers × what they were at when they were killed, as a table.

    python -m tests.release.kill_matrix 30            so many kills of every driver and command
    python -m tests.release.kill_matrix 30 noshuffle  of those whose name has this word

Each run is killed at up to two random instants (SIGKILL, between any two calls of Python), then
brought to its end, and must be PROVED: every step on record once, none released with two values, ε
that of the plan. Commands (`kill_commands`) must end as they do when nobody kills them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.kills import PLACES
from tests.release.contract import DRIVERS
from tests.release.kill_commands import COMMANDS, killed

COLUMNS = [*PLACES, "elsewhere"]


def row(name: str, count: int) -> str:
    if why := DRIVERS[name]().absent.get("kill"):
        return f"| {name} | {why} |"
    with tempfile.TemporaryDirectory() as folder:
        command, asked = [sys.executable, "-m", "tests.release.contract"], [name, folder, count]
        done = subprocess.run(
            command, input=json.dumps(asked), capture_output=True, text=True, check=True
        )
    results, epsilon = json.loads(done.stdout.splitlines()[-1])
    found = Counter(place for one in results for place in one["places"])
    good = sum(
        (one["answer"], one["twice"], one["epsilon"], one["steps"]) == ("PROVED", [], epsilon, 8)
        for one in results
    )
    cells = [str(found[place] or "") for place in COLUMNS]
    return f"| {name} | {' | '.join(cells)} | {found.total()} | {good} of {len(results)} |"


def command_row(name: str, count: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        places, good, runs = killed(name, Path(folder), count)
    found = Counter(places)
    cells = [str(found[place] or "") for place in COLUMNS]
    return f"| {name} | {' | '.join(cells)} | {len(places)} | {good} of {runs} |"


if __name__ == "__main__":
    print(
        f"| driver | {' | '.join(COLUMNS)} | kills | proved |\n" + "|---" * (len(COLUMNS) + 3) + "|"
    )
    asked, word = int(sys.argv[1]), "".join(sys.argv[2:])
    for each in DRIVERS:
        if word in each:
            print(row(each, asked), flush=True)
    for each in COMMANDS:
        if word in each:
            print(command_row(each, asked), flush=True)

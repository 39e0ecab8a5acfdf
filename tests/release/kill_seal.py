"""Kills while a run with secret draws is being sealed, spread over all of its calls.

    python -m tests.release.kill_seal FOLDER COUNT        a line of JSON about each kill

Each seal is of a fresh copy of one finished run, in a fork that gets SIGKILL at its instant. What
`verify` says then, and what it says and the files show after the seal was asked for once more.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from tests.kills import child
from tests.release import positions

from noshuffle.release.seal import seal
from noshuffle.release.verify import verify


def main(folder: Path, count: int) -> None:
    drawn = positions.finished(folder / "run", keep_keys=True)

    def sealed(name: str, instant: int | None) -> int | str:
        copy = shutil.copytree(folder / "run", folder / name)
        return child(lambda: seal(copy) and None, instant)

    # What is computed once is computed here, so that all forks have the same calls before them.
    verify(folder / "run")
    seal(shutil.copytree(folder / "run", folder / "warm"))
    calls = sealed("whole", None)
    assert isinstance(calls, int), calls
    for number in range(count):
        path = folder / f"copy{number}"
        said = sealed(path.name, 1 + (2 * number + 1) * calls // (2 * count))
        then = verify(path)
        seal(path)
        verdict = verify(path)
        record = {
            "said": said,
            "then": then.answer,
            "failures": then.failures,
            "answer": verdict.answer,
            "words": verdict.words(),
            "shown": positions.shown(path, drawn),
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

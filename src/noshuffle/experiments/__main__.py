"""`python -m noshuffle.experiments FIGURE`: compute the cells of a figure, draw nothing.

For a machine with little installed: it needs torch, NumPy and SciPy. `noshuffle reproduce FIGURE
--out FOLDER` then makes table, pictures and claims of the same folder, anywhere.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from noshuffle.errors import NoshuffleError
from noshuffle.experiments import FIGURES, run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m noshuffle.experiments")
    parser.add_argument("figure", choices=sorted(FIGURES))
    parser.add_argument("--data", type=Path, help="folder of the data files ($NOSHUFFLE_DATA)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--trials", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--within", type=float, help="seconds after which no cell is begun")
    parser.add_argument("--only", nargs="*", default=[], help="cells whose key begins so")
    parser.add_argument("--out", type=Path, help="folder of the results (reproduced/FIGURE)")
    asked = vars(parser.parse_args(arguments))
    figure, out = asked.pop("figure"), asked.pop("out")
    try:
        store, outcome = run(figure, out or Path("reproduced") / figure, **asked)
    except NoshuffleError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{outcome.done} of {outcome.total} cells in {store.path}; {outcome.stopped}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`noshuffle verify` and `noshuffle report`: what a run folder proves, and how it looks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from noshuffle.cli import options as o

Run = Annotated[Path, typer.Argument(help="a run folder, as train, federated and fit make")]


def verify(run: Run, json: o.Json = False) -> int:
    """Recompute the guarantee of a run from its folder: VERIFIED, or what does not hold.

    RUN is a run folder, as train, federated and fit make. Exit status 0: verified, 1: not.
    """
    import json as encoder

    from noshuffle.errors import InvalidInput
    from noshuffle.release.verify import verify as check

    if not run.is_dir():
        raise InvalidInput(
            f"{run} is not a folder; give a run folder, as train, federated and fit make"
        )
    verdict = check(run)
    if json:
        print(encoder.dumps(verdict.to_dict(), indent=2, ensure_ascii=False))
    else:
        print(verdict.words())
    return 0 if verdict.is_verified else 1


def report(run: Run, json: o.Json = False) -> None:
    """Draw report.html of a run again from its files.

    RUN is a run folder, as train, federated and fit make.
    """
    import json as encoder

    from noshuffle.report import write_report

    path = write_report(run)
    print(encoder.dumps({"report": str(path)}) if json else f"report: {path}")

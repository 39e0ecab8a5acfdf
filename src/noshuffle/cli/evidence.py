"""`noshuffle verify` and `noshuffle report`: what a run folder proves, and how it looks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from noshuffle.cli.from_record import argument, takes
from noshuffle.cli.promise import Output, print_json
from noshuffle.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class FolderArgument:
    """The folder that a command reads."""

    run: Path = argument("a run folder, as train, federated and fit make")


@takes(FolderArgument, Output)
def verify(given: FolderArgument, output: Output) -> int:
    """Recompute the guarantee of a run from its folder: VERIFIED, or what does not hold.

    RUN is a run folder, as train, federated and fit make. Exit status 0: verified, 1: not.
    """
    from noshuffle.release.verify import verify as check

    if not given.run.is_dir():
        raise InvalidInput(
            f"{given.run} is not a folder; give a run folder, as train, federated and fit make"
        )
    verdict = check(given.run)
    if output.json:
        print_json(verdict.to_dict())
    else:
        print(verdict.words())
    return 0 if verdict.is_verified else 1


@takes(FolderArgument, Output)
def report(given: FolderArgument, output: Output) -> None:
    """Draw report.html of a run again from its files.

    RUN is a run folder, as train, federated and fit make.
    """
    from noshuffle.report import write_report

    path = write_report(given.run)
    if output.json:
        print_json({"report": str(path)})
    else:
        print(f"report: {path}")

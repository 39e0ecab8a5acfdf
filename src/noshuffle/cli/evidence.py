"""`noshuffle verify`, `seal` and `report`: what a run shows, how it ends, how it looks."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from noshuffle.cli.from_record import argument, setting, takes
from noshuffle.cli.promise import SIGN_HELP, Output, print_json
from noshuffle.cli.words import in_options, quoted, say
from noshuffle.errors import InvalidInput

_RUN = "a run folder, as train, federated, fit and sum make"


@dataclass(frozen=True, kw_only=True)
class FolderArgument:
    run: Path = argument(_RUN)

    def __post_init__(self) -> None:
        if not self.run.is_dir():
            raise InvalidInput(f"{self.run} is not a folder; give {_RUN}")


@dataclass(frozen=True, kw_only=True)
class VerifySettings(FolderArgument):
    public_key: str | None = setting(
        None, "PEM file (or 64 hex digits) of the Ed25519 key that must have signed the run"
    )
    modules: list[str] | None = setting(
        None, "module that registers a mechanism of one's own; repeatable", "--import"
    )


@takes(VerifySettings, Output)
def verify(asked: VerifySettings, output: Output) -> int:
    """Recompute the guarantee of a run from its folder.

    VERIFIED (exit status 0): plan, log and statement agree, and ε is what follows from them; what a
    folder cannot show is named below. NOT PRIVATE (4): test seed, no noise. REFUTED (1): a line or
    a file contradicts the statement. Exit status 2: nothing is known of the guarantee, since
    something could not be read, the folder is no run, or its mechanism is not known here (see
    --import).
    """
    from noshuffle.release.verify import verify as check

    for name in asked.modules or ():
        try:
            import_module(name)
        except Exception as error:
            raise InvalidInput(f"--import {name!r} could not be imported: {error}") from error
    verdict = check(asked.run, public_key=asked.public_key)
    if output.json:
        print_json(verdict.to_dict())
    else:
        say(in_options(verdict.words(), {"public_key": "--public-key"}))
    return verdict.exit_code


@dataclass(frozen=True, kw_only=True)
class SealSettings(FolderArgument):
    sign: Path | None = setting(None, SIGN_HELP)


@takes(SealSettings, Output)
def seal(asked: SealSettings, output: Output) -> None:
    """End a run for good: its secret is removed, so that nobody can take the noise off again.

    An unfinished run cannot go on afterwards; one that adds up with it can be begun (train --fork,
    sum --fork). Finished runs of train, federated and sum end by themselves.
    """
    from noshuffle.release.open_run import seal as end

    end(asked.run, sign=asked.sign)
    is_signed = asked.sign is not None
    if output.json:
        print_json({"sealed": str(asked.run), "signed": is_signed})
        return
    print(f"sealed: {asked.run} has ended, and its secret is removed")
    if is_signed:
        print(f"signed: {asked.run / 'signature.json'}")
    print(f"check the evidence: noshuffle verify {quoted(asked.run)}")


@dataclass(frozen=True, kw_only=True)
class ReportSettings(FolderArgument):
    output: Path | None = setting(None, "the page (default: report.html in the run folder)")


@takes(ReportSettings, Output)
def report(asked: ReportSettings, output: Output) -> None:
    """Draw report.html of a run again from its files.

    A signed run is left as it is (use --output).
    """
    from noshuffle.release.files import write_bytes
    from noshuffle.release.folder import RunFolder
    from noshuffle.report import page, read_run, write_report

    folder, own = RunFolder(asked.run), asked.run / "report.html"
    path = asked.output or own
    if path.resolve() != own.resolve():
        write_bytes(path, page(read_run(asked.run)).encode())
    elif folder.signature_file.exists():
        raise InvalidInput(
            f"{asked.run} is signed, its report.html included; draw the page elsewhere with "
            "--output FILE"
        )
    else:
        path = write_report(asked.run)
    if output.json:
        print_json({"report": str(path)})
    else:
        print(f"report: {path}")

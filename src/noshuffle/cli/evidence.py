"""`noshuffle verify`, `seal` and `report`: what a run proves, how it is closed, how it looks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from noshuffle.cli.from_record import argument, setting, takes
from noshuffle.cli.promise import SIGN_HELP, Output, print_json
from noshuffle.cli.words import in_options, quoted, say
from noshuffle.errors import InvalidInput

if TYPE_CHECKING:
    pass


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


@takes(VerifySettings, Output)
def verify(asked: VerifySettings, output: Output) -> int:
    """Recompute the guarantee of a run from its folder.

    PROVED (exit status 0): all that the folder can show was recomputed. CONSISTENT (3): nothing
    contradicts it; what could not be checked is named. NOT PRIVATE (4): test seed, no noise.
    REFUTED (1): a row or a file contradicts the statement. Exit status 2: plan, statement or
    ledger could not be read, the folder is no run, or none has begun in it: nothing is known of
    the guarantee.
    """
    from noshuffle.release.verify import verify as check

    verdict = check(asked.run, public_key=asked.public_key)
    if output.json:
        print_json(verdict.to_dict())
    else:
        say(in_options(verdict.words(), ("sign", "public_key")))
    return verdict.exit_code


@dataclass(frozen=True, kw_only=True)
class SealSettings(FolderArgument):
    sign: Path | None = setting(None, SIGN_HELP)
    keep_positions: bool = setting(
        False, "keep who was drawn when in the ledger of a sampled run", "--keep-positions"
    )


@takes(SealSettings, Output)
def seal(asked: SealSettings, output: Output) -> None:
    """Destroy the keys of a run for good, so that nobody can take the noise off again.

    What only the keys can show is checked first and written down. Of a run with secret draws the
    lists of who was drawn are removed too. An unfinished run cannot go on afterwards. Finished
    runs of train, federated and sum are sealed by themselves.
    """
    from noshuffle.release.folder import RunFolder
    from noshuffle.release.ledger_tables import Evidence
    from noshuffle.release.seal import seal as close

    checked = close(asked.run, sign=asked.sign, keep_positions=asked.keep_positions)
    is_signed = asked.sign is not None
    if output.json:
        print_json({"sealed": str(asked.run), "checked": list(checked), "signed": is_signed})
        return
    print(f"sealed: the keys of {asked.run} are destroyed")
    with closing(Evidence(RunFolder(asked.run).ledger_file)) as evidence:
        if any(row.is_removed for row in evidence.rows()):
            print("  who was drawn in which step is removed from its ledger")
    for line in checked:
        print(f"  (checked before: {line})")
    if is_signed:
        print(f"signed: {asked.run / 'signature.json'}")
    print(f"check the evidence: noshuffle verify {quoted(asked.run)}")


@dataclass(frozen=True, kw_only=True)
class ReportSettings(FolderArgument):
    output: Path | None = setting(None, "the page (default: report.html in the run folder)")


@takes(ReportSettings, Output)
def report(asked: ReportSettings, output: Output) -> None:
    """Draw report.html of a run again from its files.

    The ledger gets the digest of the new page; a signed run is left as it is (use --output).
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
        path = write_report(asked.run)  # the ledger is told
    if output.json:
        print_json({"report": str(path)})
    else:
        print(f"report: {path}")

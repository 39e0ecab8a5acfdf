"""`noshuffle watch`: a running training in the terminal, and as a page that loads itself again."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from noshuffle.cli.evidence import FolderArgument
from noshuffle.cli.from_record import check_fields, setting, takes
from noshuffle.cli.promise import Output, print_json
from noshuffle.errors import InvalidInput, positive


@dataclass(frozen=True, kw_only=True)
class WatchSettings(FolderArgument):
    every: float = setting(2.0, "seconds between two looks", check=positive)
    once: bool = setting(False, "look once and end", "--once")
    page: Path | None = setting(None, "an .html file to keep up to date as well, not in the run")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if self.page is not None and self.page.resolve().is_relative_to(self.run.resolve()):
            raise InvalidInput(
                f"--page {self.page} lies in the run folder, whose files are evidence; write it "
                "somewhere else"
            )


@takes(WatchSettings, Output)
def watch(asked: WatchSettings, output: Output) -> None:
    """Look on while a run goes on: steps, ε, speed, accuracy on held-out data.

    Reads what the folder publishes, nothing raw, and holds nobody up. Ends with the run, or with
    ctrl-C. --json looks once.
    """
    from noshuffle.release.files import write_bytes
    from noshuffle.report.live import live_page, snapshot, status_lines

    shown = 0
    while True:
        now = snapshot(asked.run)
        if asked.page is not None:
            write_bytes(asked.page, live_page(asked.run, every=asked.every).encode())
        if output.json:
            return print_json(now.to_dict())
        width = shutil.get_terminal_size((80, 24)).columns
        lines = status_lines(now, width=width)
        if sys.stdout.isatty():  # over the lines of the last look
            print("\r" + (f"\033[{shown}A" if shown else "") + "\033[J" + "\n".join(lines))
            shown = sum(1 + max(0, len(line) - 1) // width for line in lines)
        else:
            print("\n".join(lines), flush=True)
        if now.is_done or asked.once:
            return None
        time.sleep(asked.every)

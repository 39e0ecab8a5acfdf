"""What `noshuffle train` and `noshuffle federated` share: options, and how they become settings.

Both begin a run folder or go on with one. An option on the command line comes before the TOML file;
a resumed run takes everything from its folder. The headings are those of the help.

>>> given_settings({"epochs": 3, "lr": None, "json": True, "out": None})
{'epochs': 3}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

PRIVACY, HOW, FOLDER = "Privacy", "How it runs", "Run folder"

Made = TypeVar("Made")


def option(heading: str, text: str, *names: str) -> Any:
    """An option under a heading of the help."""
    return typer.Option(*names, help=text, rich_help_panel=heading)


Delta = Annotated[float | None, option(PRIVACY, "δ, strictly between 0 and 1")]
Device = Annotated[str | None, option(HOW, "cpu (default) or cuda")]
TestSeed = Annotated[str | None, option(HOW, "reproducible noise for tests: NOT PRIVATE")]
Config = Annotated[Path | None, option(HOW, "TOML file with these settings")]
Json = Annotated[bool, option(HOW, "print JSON and nothing else", "--json")]
Resume = Annotated[Path | None, option(FOLDER, "go on with the run in this folder; give it alone")]
Moved = Annotated[
    bool, option(FOLDER, "with --resume: the folder was moved, not copied", "--moved")
]

#: Arguments of a command that are no settings of its run.
_OWN = ("config", "json", "out", "resume", "moved")


def given_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Of the arguments of a command (its `locals()`), the settings that were given."""
    return {k: v for k, v in arguments.items() if k not in _OWN and v is not None}


def settings_and_folder(
    make: Callable[[dict[str, Any]], Made],
    given: dict[str, Any],
    *,
    kind: str,
    config: Path | None,
    out: Path | None,
    resume: Path | None,
    name: Callable[[Made], str],
) -> tuple[Made, Path]:
    """The settings of a run and its folder: a new one, or the one to go on in.

    `kind` is the command, and the table of the TOML file; `name` gives a new folder its name.
    """
    from datetime import datetime

    from noshuffle.cli.settings import check_new_folder, kept_settings, read_toml
    from noshuffle.errors import InvalidInput

    if resume is not None:
        if given or config or out:
            raise InvalidInput("--resume takes all settings from the run folder; give it alone")
        kept = kept_settings(resume, kind=kind)
        kept.pop("kind", None)
        return make(kept), resume
    from_file = read_toml(config, table=kind) if config is not None else {}
    if {"epsilon", "noise_multiplier"} & set(given):  # one on the command line replaces either
        from_file = {k: v for k, v in from_file.items() if k not in ("epsilon", "noise_multiplier")}
    settings = make({**from_file, **given})
    out = out or Path("runs") / f"{name(settings)}-{datetime.now():%Y%m%d-%H%M%S}"
    check_new_folder(out)
    return settings, out

"""Help pages as plain text: from the list of commands, and from the records that commands take.

`noshuffle --help` and `noshuffle COMMAND --help` print them before typer, rich and NumPy are
imported, which is most of what those would take.

>>> print(_columns([("--cups INTEGER", "how many"), ("--json", "print JSON")], 60))
  --cups INTEGER  how many
  --json          print JSON
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Sequence

from noshuffle.cli.commands import COMMANDS, command
from noshuffle.cli.from_record import CommandOption
from noshuffle.cli.mechanisms import PLACEHOLDER, mechanism_names

ABOUT = "Train with differential privacy, without sampling or shuffling."
VERSION_HELP = "Print the version."
_HELP = ("--help", "Show this message and exit.")
#: Longest left column; what is longer gets a line of its own.
_LEFT = 30


def help_for(arguments: Sequence[str]) -> str | None:
    """The page that these arguments ask for, and nothing else; None: they ask for more."""
    match list(arguments):
        case ["--help" | "-h"]:
            return all_commands()
        case [name, "--help" | "-h"] if name in COMMANDS:
            return one_command(name)
    return None


def print_version() -> None:
    from noshuffle.version import __version__

    print(f"noshuffle {__version__}")


def all_commands() -> str:
    """What `noshuffle --help` prints."""
    width = _width()
    parts = [
        "Usage: noshuffle [OPTIONS] COMMAND [ARGS]...",
        textwrap.indent(textwrap.fill(ABOUT, width - 2), "  "),
        "Options:\n" + _columns([("--version", VERSION_HELP), _HELP], width),
        "Commands:\n" + _columns([(name, own.line) for name, own in COMMANDS.items()], width),
    ]
    return "\n\n".join(parts)


def one_command(name: str) -> str:
    """What `noshuffle NAME --help` prints: options under the headings that they have."""
    own, width = command(name), _width()
    options = own.options()
    usage = f"Usage: noshuffle {name} [OPTIONS]"
    for one in options:
        if one.is_argument:
            usage += f" {one.metavar}" if one.is_required else f" [{one.metavar}]"
    paragraphs = inspect.cleandoc(own.__doc__ or "").split("\n\n")
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for one in options:
        heading = "Arguments" if one.is_argument else one.heading or "Options"
        sections.setdefault(heading, []).append((_flags(one), _text(one)))
    sections["Options"].append(_HELP)
    return "\n\n".join(
        [
            usage,
            *(textwrap.indent(textwrap.fill(text, width - 2), "  ") for text in paragraphs),
            *(f"{head}:\n{_columns(lines, width)}" for head, lines in sections.items() if lines),
        ]
    )


def _flags(one: CommandOption) -> str:
    if one.is_argument:
        return one.metavar
    both = " / " if one.is_switch else ", "
    return both.join(one.flags) + (f" {one.metavar}" if one.metavar else "")


def _text(one: CommandOption) -> str:
    text = one.text
    if PLACEHOLDER in text:
        text = text.replace(PLACEHOLDER, ", ".join(mechanism_names()))
    return f"{text} [required]" if one.is_required else text


def _columns(lines: Sequence[tuple[str, str]], width: int) -> str:
    """Two columns, the right one wrapped."""
    left = max((len(name) for name, _ in lines if len(name) <= _LEFT), default=_LEFT)
    out = []
    for name, text in lines:
        first, *rest = textwrap.wrap(text, max(width - left - 4, 20), break_on_hyphens=False)
        if len(name) > left:
            out.append(f"  {name}")
            name = ""
        out.append(f"  {name:<{left}}  {first}")
        out += [f"{'':{left + 4}}{line}" for line in rest]
    return "\n".join(out)


def _width() -> int:
    """Columns of the terminal, as far as lines stay readable."""
    return max(min(shutil.get_terminal_size().columns, 100), 50)

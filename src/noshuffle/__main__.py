"""`noshuffle` and `python -m noshuffle`: the command line, stopped in one line while it is loaded.

Most of what a quick command takes is imports, so that is where a ctrl-C often comes.
"""

from __future__ import annotations

import sys


def run() -> None:
    """The command as a process of its own."""
    try:
        from noshuffle import cli
    except KeyboardInterrupt:
        print("noshuffle: stopped", file=sys.stderr)
        raise SystemExit(130) from None
    cli.run()


if __name__ == "__main__":
    run()

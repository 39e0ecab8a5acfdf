"""`python -m noshuffle` is the command `noshuffle`."""

from noshuffle.cli import run

if __name__ == "__main__":
    run()

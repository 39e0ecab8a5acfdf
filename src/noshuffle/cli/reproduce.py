"""`noshuffle reproduce`: an experiment of the paper again: table, picture, claims."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from noshuffle.cli.from_record import argument, setting, takes
from noshuffle.cli.promise import Output, print_json
from noshuffle.cli.settings import check_device
from noshuffle.cli.words import say as tell
from noshuffle.errors import InvalidInput, one_of, positive
from noshuffle.experiments import FIGURES

if TYPE_CHECKING:
    from noshuffle.experiments.figure import Checked, Results


@dataclass(frozen=True, kw_only=True)
class FigureSettings:
    figure: str = argument(f"what to reproduce: {', '.join(FIGURES)}")
    data: Path | None = setting(None, "folder of the data files (default: $NOSHUFFLE_DATA)")
    device: str = setting("cpu", "cpu or cuda")
    trials: int | None = setting(None, "seeds of every final result (default: as in its settings)")
    quick: bool = setting(False, "small sizes: minutes on two cores, the same orderings", "--quick")
    within: float | None = setting(None, "stop cleanly after so many seconds; call again to go on")
    only: list[str] | None = setting(None, "only cells whose key begins so; repeatable")
    out: Path | None = setting(None, "folder of the results (default: reproduced/FIGURE)")
    draw: bool = setting(False, "compute nothing: table, pictures and claims of what is there")


@takes(FigureSettings, Output)
def reproduce(asked: FigureSettings, output: Output) -> None:
    """Compute an experiment of the paper, and say which of the paper's claims hold.

    A folder gets results.json (seeds, ε, settings, versions, wall time), table.md, claims.md,
    figure.svg and figure.png. A study that was killed goes on when the command is given again.
    """
    one_of(tuple(FIGURES), FIGURE=asked.figure)  # an argument, not --figure
    if asked.within is not None:
        positive(within=asked.within)
    check_device(asked.device)
    from noshuffle import experiments

    folder = asked.out or Path("reproduced") / asked.figure
    say = None if output.json else experiments.to_stderr
    if asked.draw:
        store, stopped = experiments.open_store(asked.figure, folder, quick=asked.quick), ""
    else:
        store, outcome = experiments.run(
            asked.figure,
            folder,
            quick=asked.quick,
            trials=asked.trials,
            device=asked.device,
            only=asked.only or (),
            within=asked.within,
            data=asked.data,
            say=say,
        )
        stopped = outcome.stopped
    results = store.results
    if asked.draw and not results:
        raise InvalidInput(
            f"{store.path} has no results to draw; give the --out that has them, or compute them "
            "without --draw"
        )
    try:
        text, claims, pictures = _written(asked.figure, results, folder)
    except (KeyError, IndexError, TypeError, AttributeError) as e:
        raise InvalidInput(
            f"{store.path} holds results that cannot be drawn ({type(e).__name__}: {e}), of "
            "another version or damaged; compute them again with another --out"
        ) from e
    lines = "\n".join(str(claim) for claim in claims)
    if output.json:
        record = {**store.record, "claims": [asdict(claim) for claim in claims]}
        print_json({**record, "seconds": store.seconds, "pictures": [str(p) for p in pictures]})
        return
    print(f"{text}\n")
    tell(f"{lines}\n")
    print(f"{store.seconds:.0f} s of work in {folder}" + (f"; {stopped}" if stopped else ""))


def _written(name: str, results: Results, folder: Path) -> tuple[str, list[Checked], list[Path]]:
    """The table and the claims of results, written down with their pictures."""
    from noshuffle.experiments import figure
    from noshuffle.release.files import write_bytes

    shown = figure(name)
    text, claims = shown.table(results), shown.checked(results)
    lines = "\n".join(str(claim) for claim in claims)
    write_bytes(folder / "table.md", f"{text}\n".encode())
    write_bytes(folder / "claims.md", f"{lines}\n".encode())
    pictures = [folder / "figure.svg", folder / "figure.png"] if results else []
    for path in pictures:
        shown.draw(results, path)
    return text, claims, pictures

"""`noshuffle reproduce`: an experiment of the paper again: table, picture, claims."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from noshuffle.cli.from_record import argument, setting, takes
from noshuffle.cli.promise import Output, print_json
from noshuffle.cli.settings import check_device
from noshuffle.cli.words import say as tell
from noshuffle.errors import one_of, positive
from noshuffle.experiments import FIGURES


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
    from noshuffle.release.files import write_bytes

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
    shown = experiments.figure(asked.figure)
    results = store.results
    text, claims = shown.table(results), shown.checked(results)
    lines = "\n".join(str(claim) for claim in claims)
    write_bytes(folder / "table.md", f"{text}\n".encode())
    write_bytes(folder / "claims.md", f"{lines}\n".encode())
    pictures = [folder / "figure.svg", folder / "figure.png"] if results else []
    for path in pictures:
        shown.draw(results, path)
    if output.json:
        record = {**store.record, "claims": [asdict(claim) for claim in claims]}
        print_json({**record, "seconds": store.seconds, "pictures": [str(p) for p in pictures]})
        return
    print(f"{text}\n")
    tell(f"{lines}\n")
    print(f"{store.seconds:.0f} s of work in {folder}" + (f"; {stopped}" if stopped else ""))

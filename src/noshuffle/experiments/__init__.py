"""The experiments of Kairouz et al. 2021 (arXiv 2103.00039) and past them, each one command.

    noshuffle reproduce FIGURE                 compute, table, pictures, claims
    python -m noshuffle.experiments FIGURE     compute alone: needs torch, NumPy and SciPy only

A figure joins by one entry of `FIGURES`: its module has `FIGURE`, a `figure.Figure`. Settings ship
as TOML in `settings/`; results, seeds, versions and wall time are kept in one JSON file.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from noshuffle.errors import one_of
from noshuffle.experiments.figure import Figure, Request, only_keys, shipped
from noshuffle.experiments.runner import HowFar, Say, compute, to_stderr
from noshuffle.experiments.store import Store

__all__ = ["FIGURES", "Request", "figure", "open_store", "run", "to_stderr"]

#: Figures by name, and the module that each is in, imported when it is asked for.
FIGURES: dict[str, str] = {
    "figure2": "noshuffle.experiments.figure2",
    "order": "noshuffle.experiments.order",
    "figure1": "noshuffle.experiments.figure1",
    "beyond": "noshuffle.experiments.beyond",
    "rates": "noshuffle.experiments.rates",
    "sampling": "noshuffle.experiments.sampling",
}


def figure(name: str) -> Figure:
    """The figure of that name."""
    one_of(tuple(FIGURES), figure=name)
    found: Figure = importlib.import_module(FIGURES[name]).FIGURE
    return found


def open_store(name: str, folder: Path, *, quick: bool = False) -> Store:
    """The results of a figure in a folder, new or as far as they came."""
    settings = {**shipped(name, quick=quick), "is_quick": quick}
    return Store(folder / "results.json", name, settings)


def run(
    name: str,
    folder: Path,
    *,
    quick: bool = False,
    trials: int | None = None,
    device: str = "cpu",
    only: Sequence[str] = (),
    within: float | None = None,
    data: Path | None = None,
    say: Say | None = to_stderr,
) -> tuple[Store, HowFar]:
    """Compute what is missing of a figure; its results and how far they are.

    Data files are looked up in the folder `data`, or in $NOSHUFFLE_DATA.
    """
    from noshuffle.datasets.store import looked_up_in  # torch: half of this package needs none

    asked = Request(settings=shipped(name, quick=quick), quick=quick, trials=trials, device=device)
    with looked_up_in(data):
        cells = only_keys(figure(name).cells(asked), only)
        with open_store(name, folder, quick=quick).alone():
            store = open_store(name, folder, quick=quick)  # as it is now
            return store, compute(cells, store, device=device, within=within, say=say)

"""Results of a figure on the disk: one JSON file, rewritten whole after every cell.

    {figure, settings, versions, cells: {key: {result, seconds, finished, on, versions}}}

A killed study goes on where it stopped, on another machine too: what is in the file is not computed
again, and every cell says what it was computed with (`versions` of the file: the last one). Results
that were made with other settings are refused, so that one table never mixes two protocols, and one
process at a time computes in a folder. State: the file, which is one complete version at any
instant (`release.files`).
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from noshuffle.errors import InvalidInput
from noshuffle.release.files import alone_in, read_json, write_json
from noshuffle.version import __version__


class Store:
    """The results of one figure under one set of settings, in one file."""

    def __init__(self, path: Path, figure: str, settings: Mapping[str, Any]) -> None:
        self.path = path
        plain = json.loads(json.dumps(settings))
        self.record: dict[str, Any] = {"figure": figure, "settings": plain, "cells": {}}
        if path.parent.exists() and not path.parent.is_dir():
            raise InvalidInput(f"--out must be a folder, {path.parent} is a file")
        if path.exists():
            try:
                kept = read_json(path)
            except InvalidInput as error:
                raise InvalidInput(f"{error}; bring it back, or use another --out") from None
            if not isinstance(kept, dict) or kept.get("figure") != figure:
                raise InvalidInput(f"{path} does not hold results of {figure}; use another --out")
            if kept.get("settings") != plain:
                raise InvalidInput(f"{path} was made with {_other(kept, plain)}, or remove it")
            if not _are_cells(kept.get("cells")):
                raise InvalidInput(
                    f"{path} is damaged: its cells are not results with their seconds; bring it "
                    "back, or use another --out"
                )
            self.record = kept

    @property
    def results(self) -> dict[str, Any]:
        """What every finished cell returned, by key."""
        return {key: cell["result"] for key, cell in self.record["cells"].items()}

    @property
    def seconds(self) -> float:
        """Wall time of all finished cells."""
        return float(sum(cell["seconds"] for cell in self.record["cells"].values()))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else computes in the folder meanwhile: one would write over what another found."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with alone_in(self.path.parent):
                yield
        except BlockingIOError:
            raise InvalidInput(
                f"another process computes in {self.path.parent}; wait for its end, or use another "
                "--out"
            ) from None

    def put(self, key: str, result: Any, *, seconds: float, device: str) -> None:
        """Keep the result of a cell, durably."""
        self.record["cells"][key] = {
            "result": result,
            "seconds": round(seconds, 3),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "on": machine(device),
            "versions": versions(),
        }
        self.record["versions"] = versions()
        write_json(self.path, self.record)


def _other(kept: Mapping[str, Any], plain: Mapping[str, Any]) -> str:
    """In which settings kept results differ, and what to do."""
    is_quick = (kept.get("settings") or {}).get("is_quick")
    if isinstance(is_quick, bool) and is_quick != plain.get("is_quick"):
        return f"{'--quick' if is_quick else 'no --quick'}; give the same, use another --out"
    return "other settings (of another version?); use another --out"


def _are_cells(cells: Any) -> bool:
    return isinstance(cells, dict) and all(
        isinstance(cell, dict) and "result" in cell and isinstance(cell.get("seconds"), int | float)
        for cell in cells.values()
    )


def versions() -> dict[str, str]:
    """The versions that results depend on."""
    found = {"noshuffle": __version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "triton"):
        module = sys.modules.get(name)
        if module is not None:
            found[name] = str(getattr(module, "__version__", ""))
    return found


def machine(device: str) -> str:
    """The processor in words."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()} cpu"

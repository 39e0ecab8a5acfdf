"""Results of a figure on the disk: one JSON file, rewritten whole after every cell.

    {figure, settings, versions, cells: {key: {result, seconds, finished, on, versions}}}

A killed study goes on where it stopped, on another machine too: what is in the file is not computed
again, and every cell says what it was computed with (`versions` of the file: the last one). Results
that were made with other settings are refused, so that one table never mixes two protocols. State:
the file, which is one complete version at any instant (`release.files`).
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from noshuffle.errors import InvalidInput
from noshuffle.release.files import read_json, write_json
from noshuffle.version import __version__


class Store:
    """The results of one figure under one set of settings, in one file."""

    def __init__(self, path: Path, figure: str, settings: Mapping[str, Any]) -> None:
        self.path = path
        plain = json.loads(json.dumps(settings))
        self.record: dict[str, Any] = {"figure": figure, "settings": plain, "cells": {}}
        if path.is_file():
            kept = read_json(path)
            if not isinstance(kept, dict) or kept.get("figure") != figure:
                raise InvalidInput(f"{path} does not hold results of {figure}; use another --out")
            if kept.get("settings") != plain:
                raise InvalidInput(
                    f"{path} was made with other settings; use another --out, or remove it"
                )
            self.record = kept
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def results(self) -> dict[str, Any]:
        """What every finished cell returned, by key."""
        return {key: cell["result"] for key, cell in self.record["cells"].items()}

    @property
    def seconds(self) -> float:
        """Wall time of all finished cells."""
        return float(sum(cell["seconds"] for cell in self.record["cells"].values()))

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

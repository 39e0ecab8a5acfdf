"""A live stream on the disk: go on in another process, and never put one noise row on two sums.

    FOLDER/model.pkl     the estimator as pickle gives it: released numbers only
           stream.pt     unfinished sum, noise buffers, units (mode 0600): a secret
           phase-1/ …    the run folders of its phases: plan, ledger, keys

What was released since the last save is in the ledger of its phase, with a digest of every sum: a
process that was killed is given these rows once more, and they leave again only if their sums are
the same. Every process that loads the folder draws fresh keys for all noise that was not used yet
(`release.keys`), so a copy, a snapshot or a restored backup that goes on is at worst a second
release, and nothing cancels. Phases before the current one are sealed: their keys are destroyed.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from noshuffle.convex.stream import LearningStream
from noshuffle.errors import InvalidInput
from noshuffle.release.files import write_bytes
from noshuffle.release.folder import RunFolder
from noshuffle.release.seal import seal

FORMAT = "noshuffle-stream/2"
MODEL, STREAM = "model.pkl", "stream.pt"


def write_stream(folder: Path, stream: LearningStream, **more: Any) -> None:
    """Replace stream.pt atomically; it is readable by its owner only from the first byte on."""
    buffer = io.BytesIO()
    torch.save({**stream.state(), **more, "format": FORMAT}, buffer)
    write_bytes(folder / STREAM, buffer.getvalue(), mode=0o600)
    for number in range(1, len(stream.phases)):
        finished = RunFolder(folder / f"phase-{number}")
        if finished.key_file.exists():
            seal(finished)


def read_stream(folder: Path) -> dict[str, Any]:
    """The state of a saved stream."""
    for name in (MODEL, STREAM):
        if not (folder / name).is_file():
            raise InvalidInput(f"{folder} holds no saved stream ({name} is missing)")
    # Tensors and plain values only: loading runs no code.
    state: dict[str, Any] = torch.load(folder / STREAM, map_location="cpu", weights_only=True)
    if state.get("format") != FORMAT:
        raise InvalidInput(f"{folder / STREAM} is not a {FORMAT} file")
    return state

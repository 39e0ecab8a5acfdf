"""A live stream on the disk: go on in another process, and never put one noise row on two sums.

    FOLDER/model.pkl     the estimator as pickle gives it: released numbers only
           stream.pt     unfinished sum, noise buffers, units (mode 0600): a secret
           phase-1/ …    the run folders of its phases: plan, log, secret

What was released since the last save is in the log of its phase, and its sums are gone with the
process: these steps are passed over. Their rows stay charged and nothing is learned from them;
`n_rows_` counts them, and rows that come go behind them. stream.pt carries the link of a row of the
log, and is taken only where that row stands. Every process that loads the folder draws fresh keys
for all noise that was not used yet (`release.keys`), so a copy, a snapshot or a restored backup
that goes on is at worst a second release, and nothing cancels. Phases before the current one end
with a save: their secrets are removed. Parameters that a stream was made with stay as they are:
`load` makes it from them again.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from sklearn.utils.validation import check_is_fitted

from noshuffle.convex.stream import LearningStream
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.one_owner import in_turn
from noshuffle.release.files import make_folder, write_bytes
from noshuffle.release.folder import RunFolder, read_state
from noshuffle.release.open_run import seal

FORMAT = "noshuffle-stream/1"
MODEL, STREAM = "model.pkl", "stream.pt"
#: Parameters that may change while a stream goes on (weights: no further than its largest one).
_FREE = frozenset(
    ("verbose", "test_seed", "budget", "max_weight", "class_weight", "classes", "solver")
)


def write_stream(folder: Path, stream: LearningStream, progress: Any) -> None:
    """Replace stream.pt atomically; it is readable by its owner only from the first byte on."""
    buffer, state = io.BytesIO(), stream.state()  # which sums, and scores, the rows that wait
    torch.save({**state, "progress": dict(vars(progress)), "format": FORMAT}, buffer)
    for left in folder.glob(f".{STREAM}.*.tmp"):  # of a process that was killed at this
        left.unlink()
    write_bytes(folder / STREAM, buffer.getvalue(), mode=0o600)
    for number in range(1, len(stream.phases)):
        finished = RunFolder(folder / f"phase-{number}")
        if finished.secret_file.exists():
            seal(finished)


def read_stream(folder: Path) -> dict[str, Any]:
    """The state of a saved stream."""
    for name in (MODEL, STREAM):
        if not (folder / name).is_file():
            raise InvalidInput(f"{folder} holds no saved stream ({name} is missing)")
    try:
        state = read_state(folder / STREAM)
    except UnpicklingError as error:
        raise InvalidInput(f"{folder / STREAM} is damaged ({error}); bring it back") from None
    if state.get("format") != FORMAT:
        raise InvalidInput(f"{folder / STREAM} is not a {FORMAT} file")
    return state


class Saveable:
    """An estimator whose stream can go on in another process."""

    _stream: LearningStream
    _progress: Any
    _fixed: dict[str, Any]

    if TYPE_CHECKING:  # of the estimator

        def get_params(self, deep: bool = True) -> dict[str, Any]: ...

    def _fixed_settings(self) -> dict[str, Any]:
        """Parameters that a stream was made with: rows, statement and `load` go by them."""
        own: dict[str, Any] = self.get_params(deep=False)
        return {name: value for name, value in own.items() if name not in _FREE}

    def _check_fixed(self) -> None:
        """Refuse to go on after such a setting was changed."""
        for name, given in self._fixed.items():
            now = self.__dict__[name]
            if now is given:
                continue
            if repr(now) != repr(given) and not np.array_equal(now, given):
                raise InvalidInput(
                    f"{name} of this stream is {given!r} since its first row, got {now!r} now; set "
                    "it back, or begin a new stream"
                )
            self._fixed[name] = now

    def _revive(self, path: Path, state: dict[str, Any]) -> None:
        """Take up the stream that wrote `state`."""
        raise NotImplementedError

    @in_turn
    def save(self, folder: str | Path) -> Self:
        """Write the model and its live stream into a folder, from which `load` goes on.

        Guarantees: from here on this model, and every process that loads the folder, writes a row
        before the noise of a step is used, and no step on record is released again (see `saved`).
        The folder holds the secret of the noise: keep it as secret as the data. To give a model
        away, pickle it instead.
        """
        check_is_fitted(self, "privacy_")
        stream, path = getattr(self, "_stream", None), Path(folder).absolute()
        if stream is None:
            raise InvalidInput("this model was pickled or copied and has no stream; pickle it")
        if stream.is_observed:
            raise Unsupported("this stream keeps its evidence in a run folder already")
        self._check_fixed()  # `load` makes the stream from them
        if stream.folder is None:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise InvalidInput(f"{path} is not an empty folder; save a stream into its own")
            make_folder(path, mode=0o700)
            stream.move_into(path)
        elif stream.folder.resolve() != path.resolve():
            raise InvalidInput(f"this stream lives in {stream.folder}; save it there again")
        write_bytes(path / MODEL, pickle.dumps(self), mode=0o644)
        write_stream(path, stream, self._progress)
        return self

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The model that `save` wrote, ready for partial_fit with the row after `n_rows_`.

        Steps that were released after that save are passed over: `n_rows_` counts their rows, and
        an id that took part in one is refused from here on. Load only folders you wrote: the model
        is a pickle. A folder that was copied or restored goes on under keys of its own.
        """
        path = Path(folder).absolute()
        state = read_stream(path)
        model = pickle.loads((path / MODEL).read_bytes())
        if not isinstance(model, cls):
            raise InvalidInput(f"{path} holds a {type(model).__name__}, not a {cls.__name__}")
        model._revive(path, state)
        return model

"""What a command does not wait for: fits that were made before, boxes around help, scikit-learn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from noshuffle.cli import kept_fit
from noshuffle.datasets.images import _shipped_digits
from noshuffle.participation import Epochs
from noshuffle.strategies.fit import fit

RULE = Epochs(2, 4)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("NOSHUFFLE_CACHE", str(folder))
    return folder


def test_a_fit_is_searched_for_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kept_fit.kept_fit("tree", RULE)
    assert first == fit("tree", RULE).strategy
    monkeypatch.delattr(kept_fit, "fit")
    assert kept_fit.kept_fit("tree", RULE) == first
    with pytest.raises(NameError):  # another question is another search
        kept_fit.kept_fit("tree", Epochs(2, 5))


@pytest.mark.parametrize("text", ["", "{", '{"type": "nothing"}', "[1]"])
def test_a_damaged_file_is_written_again(cache: Path, text: str) -> None:
    first = kept_fit.kept_fit("tree", RULE)
    (file,) = cache.glob("*.json")
    whole = file.read_text()
    file.write_text(text)
    assert kept_fit.kept_fit("tree", RULE) == first
    assert file.read_text() == whole


def test_help_imports_neither_torch_nor_boxes() -> None:
    code = (
        "import sys; from noshuffle.cli import main; main(['--help']); "
        "print([n for n in ('torch', 'numpy', 'rich.markdown') if n in sys.modules])"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert said.splitlines()[-1] == "[]"
    assert "reproduce" in said


def test_the_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    for own, theirs in zip(_shipped_digits(), load_digits(return_X_y=True)):
        assert np.array_equal(own, theirs)

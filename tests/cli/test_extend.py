"""noshuffle train --extend: more epochs, other batches, one ε."""

import json
from pathlib import Path

import pytest

from noshuffle.cli import main
from noshuffle.cli.train_extension import TrainOptions, extend_run
from noshuffle.release import extension
from noshuffle.release.verify import verify

BRIEF = ["--model", "linear", "--mechanism", "identity", "--epochs", "1", "--batch-size", "400"]


def test_a_run_is_extended_killed_and_brought_to_its_end(tmp_path, monkeypatch, capsys):
    run = str(tmp_path / "run")
    assert main(["train", *BRIEF, "--epsilon", "4", "--out", run]) == 0
    more = {"epochs": 1, "batch_size": 700, "mechanism": "blt"}

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(extension, "_apply", killed)
        with pytest.raises(KeyboardInterrupt):
            extend_run(TrainOptions(extend=Path(run)), more)
    assert main(["train", "--resume", run]) == 0
    found = verify(run)
    assert (found.answer, found.released, found.planned) == ("PROVED", 5, 5)
    assert found.epsilon > 4.2  # a unit is in both
    kept = json.loads((tmp_path / "run" / "config.json").read_text())
    assert kept["stages"] == [[3, 400], [2, 700]]
    capsys.readouterr()
    for wrong, words in (
        (["--lr", "2", "--epochs", "1"], "keeps lr as it is"),
        ([], "needs --epochs"),
        (["--epochs", "1", "--epsilon", "1"], "give a larger epsilon"),
        (["--epochs", "1", "--out", "x"], "leave out"),
    ):
        assert main(["train", "--extend", run, *wrong]) == 2
        assert words in capsys.readouterr().err

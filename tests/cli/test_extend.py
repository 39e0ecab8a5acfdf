"""noshuffle train --extend: more epochs, other batches, one ε."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tests.kills import child

from noshuffle.cli import main
from noshuffle.cli.train_extension import TrainOptions, extend_run
from noshuffle.release import extension
from noshuffle.release.seal import seal
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


def is_write(frame, event):
    names = {"end", "note", "write_bytes", "destroy_keys"}
    return event == "return" and frame.f_code.co_name in names


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("again", ["--resume", "--extend"])
def test_a_run_that_was_killed_while_it_was_sealed_goes_on(tmp_path, again):
    """After every write: nothing refuted, and both commands bring the seal to its end first."""
    assert main(["train", *BRIEF, "--epsilon", "4", "--keep-keys", "--out", str(tmp_path)]) == 0
    more = ["--epochs", "1", "--mechanism", "identity", "--batch-size", "700"]
    for kill in range(1, 12):
        run = shutil.copytree(tmp_path, tmp_path.with_name(f"{tmp_path.name}-{again}-{kill}"))
        said = child(lambda: seal(run), kill, counts=is_write)  # noqa: B023
        assert verify(run).answer in ("PROVED", "CONSISTENT"), kill
        if kill in (1, 3, 5):
            assert main(["train", again, str(run), *(more if again == "--extend" else [])]) == 0
            assert verify(run).answer == "PROVED"
        if not str(said).startswith("killed"):
            break
    assert not isinstance(said, str), said


def comes_first_and_last():
    """Six batches of two rows; user 0 in the first and in the last one."""
    from noshuffle.datasets import DataSet

    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    units = torch.tensor([0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 0])
    y = (x[:, 0] > 0).long()
    return DataSet("seam", "table", x, y, x, y, classes=2, units=units)


def test_an_extension_that_the_order_of_users_breaks_changes_nothing(tmp_path, capsys):
    """A single pass promised 5 steps between two; over its end user 0 comes in the next step."""
    run = str(tmp_path / "run")
    task = ["--data", f"{__name__}:comes_first_and_last", "--unit", "user", "--batch-size", "2"]
    quick = ["--epochs", "1", "--mechanism", "identity", "--epsilon", "4"]
    assert main(["train", *task, *quick, "--out", run]) == 0
    assert main(["train", "--extend", run, "--epochs", "1"]) == 2
    assert "two steps of a user lie 1 apart" in capsys.readouterr().err
    assert (verify(run).answer, verify(run).planned) == ("PROVED", 6)

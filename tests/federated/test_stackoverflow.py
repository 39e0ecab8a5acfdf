"""StackOverflow from files of the published form, and tasks of one's own by module:function."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest
import torch

from noshuffle.cli.federated_parts import assemble
from noshuffle.cli.federated_settings import FederatedSettings
from noshuffle.errors import DataUnavailable, InvalidInput
from noshuffle.federated.clients import NO_TARGET
from noshuffle.federated.stackoverflow import (
    feature_bytes,
    read_groups,
    read_sqlite,
    stackoverflow,
    vocabulary,
)
from noshuffle.federated.tasks import load_task
from noshuffle.federated.word_models import WordLSTM

SAID = {
    "train": {"7": ["how do i sort a list", "thanks"], "12": ["a list of lists"], "9": []},
    "test": {"3": ["how do i sort qwxyz"]},
}
WORDS = ["a", "list", "how", "do", "i", "sort", "of"]


def message(number: int, content: bytes) -> bytes:
    """A length-delimited field; lengths beyond 127 take two bytes."""
    size = len(content)
    length = bytes([size]) if size < 128 else bytes([size % 128 + 128, size // 128])
    return bytes([number << 3 | 2]) + length + content


def example(**features: str) -> bytes:
    """A tf.train.Example with features of bytes, and one of integers before them."""
    score = message(1, message(1, b"score") + message(2, message(3, bytes([8, 42]))))
    entries = [
        message(1, message(1, name.encode()) + message(2, message(1, message(1, text.encode()))))
        for name, text in features.items()
    ]
    return message(1, score + b"".join(entries))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = sqlite3.connect(tmp_path / "stackoverflow.sqlite")
    base.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, "
                 "serialized_example_proto BLOB)")  # fmt: skip
    base.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INT)")
    for split, users in SAID.items():
        for user, sentences in users.items():
            base.execute(
                "INSERT INTO client_metadata VALUES (?, ?, ?)", (user, split, len(sentences))
            )
            for text in sentences:
                record = example(title="no" * 80, tokens=text, type="answer")
                base.execute("INSERT INTO examples VALUES (?, ?, ?)", (split, user, record))
    base.commit()
    base.close()
    counts = "\n".join(f"{word} {100 - i}" for i, word in enumerate(WORDS))
    (tmp_path / "stackoverflow.word_count").write_text(counts + "\n", encoding="utf8")
    monkeypatch.setenv("NOSHUFFLE_DATA", str(tmp_path))
    return tmp_path


def test_rows_by_user_in_symbols(folder: Path) -> None:
    task = stackoverflow(length=5, words=len(WORDS))
    assert task.users == ("12", "7")  # in order of the id as text; who said nothing is left out
    assert task.starts.tolist() == [0, 1, 3]
    begin, end, unknown = 8, 9, 10
    x, y = task.client("7")
    assert x.tolist() == [[begin, 3, 4, 5, 6], [begin, unknown, end, 0, 0]]
    assert y.tolist() == [[3, 4, 5, 6, 1], [unknown, end, NO_TARGET, NO_TARGET, NO_TARGET]]
    assert task.x_test.tolist() == [[begin, 3, 4, 5, 6]]
    assert task.y_test.tolist() == [[3, 4, 5, 6, NO_TARGET]]  # an unknown word is no target
    assert task.classes == 11
    scores = WordLSTM(task.classes, embedding=4, hidden=6)(x)
    assert scores.shape == (2, 11, 5)
    assert len(stackoverflow(length=5, words=7, most_users=1)) == 1


def test_at_most_so_many_sentences(folder: Path) -> None:
    found = dict(read_sqlite(folder / "stackoverflow.sqlite", "train", most_sentences=1))
    assert found == {"12": ["a list of lists"], "7": ["how do i sort a list"], "9": []}


def test_the_hdf5_form_reads_alike(tmp_path: Path) -> None:
    users = SAID["train"]
    groups = {u: {"tokens": np.array([t.encode() for t in said])} for u, said in users.items()}
    assert dict(read_groups({"examples": groups}, most_sentences=9)) == users
    with pytest.raises(InvalidInput, match="examples"):
        next(read_groups({}, most_sentences=1))
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for user, group in groups.items():
            if len(group["tokens"]):
                file[f"examples/{user}/tokens"] = group["tokens"]
    with h5py.File(tmp_path / "a.h5") as file:
        assert dict(read_groups(file, most_sentences=9)) == {u: s for u, s in users.items() if s}


def test_what_is_missing_or_damaged_is_one_line(folder: Path) -> None:
    for record in (b"\x0a\xff\x01", b"\x0a\x02\x0a\x09", b"\x0f", example(title="x")):
        with pytest.raises(InvalidInput, match="tokens"):
            feature_bytes(record, "tokens")
    with pytest.raises(InvalidInput, match="10,000 different words, got 7"):
        vocabulary(folder / "stackoverflow.word_count", words=10_000)
    (folder / "stackoverflow.sqlite").write_bytes(b"not a database" * 99)
    with pytest.raises(InvalidInput, match="published SQLite"):
        stackoverflow(words=7)
    (folder / "stackoverflow.sqlite").unlink()
    with pytest.raises(DataUnavailable, match="neither stackoverflow"):
        stackoverflow(words=7)


OWN = """
import numpy as np, torch
from noshuffle.federated.tasks import FederatedTask

def mine():
    x = torch.randn(40, 3)
    y = (x[:, 0] > 0).long()
    return FederatedTask("mine", "image", tuple(range(20)), np.arange(0, 41, 2), x, y, x, y, 2)

def wrong():
    return 7
"""


def test_a_task_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_users.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    made = FederatedSettings.of(
        {"task": "own_users:mine", "rounds": 4, "clients_per_round": 5, "epsilon": 8.0}
    )
    assert made.is_own
    assert made.folder_name() == "federated-own_users-mine"
    job, _ = assemble(made, None)
    assert len(job.task) == 20
    assert job.model(torch.zeros(1, 3)).shape == (1, 2)
    job.rounds.close()
    for name, words in (("own_users:wrong", "must return"), ("own_users:no", "imported"),
                        ("nothing_there:x", "imported"), (":", "imported")):  # fmt: skip
        with pytest.raises(InvalidInput, match=words):
            load_task(name)
    text = FederatedSettings.of({"task": "own_users:mine", "model": "lstm"})
    with pytest.raises(InvalidInput, match="model for image"):
        assemble(text, None)

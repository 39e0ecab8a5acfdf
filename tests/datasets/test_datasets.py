from __future__ import annotations

import gzip
import hashlib
import http.server
import os
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from noshuffle.datasets import NAMES, DataSet, images, load
from noshuffle.datasets.images import _read_idx
from noshuffle.datasets.store import Remote, fetch
from noshuffle.errors import DataUnavailable, InvalidInput

SHARED = Path(os.environ.get("NOSHUFFLE_SHARED", Path(__file__).parents[3] / "shared")) / "data"
needs_data = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"no data folder at {SHARED}; set NOSHUFFLE_SHARED"
)


def test_digits_need_no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOSHUFFLE_DATA", raising=False)
    data = load("digits")
    assert data.x_train.min() >= -1
    assert data.x_train.max() <= 1
    assert len(data) + len(data.x_test) == 1797


@needs_data
@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in ("digits", "cifar10", "emnist_bymerge")]
)
def test_every_set_loads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOSHUFFLE_DATA", str(SHARED))
    data = load(name)
    assert len(data) > 1000
    assert torch.isfinite(data.x_train.float()).all()
    assert int(data.y_train.max()) < data.classes
    if data.kind == "table":
        assert float(data.x_train.norm(dim=1).max()) <= 1 + 1e-6


def test_an_own_set_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom noshuffle.datasets import DataSet\n"
        "def data():\n    x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)\n"
        "    return DataSet('mine', 'table', x, y, x, y, 2)\n"
        "def wrong():\n    return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert len(load("mine:data")) == 4
    for name in ("mine:wrong", "mine:none", "nowhere:data", "wishes"):
        with pytest.raises(InvalidInput):
            load(name)


def test_lengths_must_agree() -> None:
    x = torch.zeros(4, 2)
    with pytest.raises(InvalidInput):
        DataSet("odd", "table", x, torch.zeros(3), x, torch.zeros(4), 2)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A publisher on the loopback interface."""
    folder = tmp_path / "published"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as publisher:
        thread = threading.Thread(target=publisher.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{publisher.server_address[1]}/", folder
        publisher.shutdown()


def test_downloads_are_checked_and_cached(server: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = server
    content = os.urandom(200_000)
    (folder / "file.bin").write_bytes(content)
    cache = tmp_path / "cache"
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    remote = Remote("file.bin", address + "file.bin", md5)
    assert fetch(remote, folder=cache).read_bytes() == content
    (folder / "file.bin").unlink()
    assert fetch(remote, folder=cache).read_bytes() == content  # from the cache
    (folder / "file.bin").write_bytes(b"something else")
    (cache / "file.bin").write_bytes(b"damaged")
    with pytest.raises(DataUnavailable, match="checksum"):
        fetch(remote, folder=cache)
    assert [p.name for p in cache.iterdir()] == ["file.bin"]  # no half-written file is left


def test_what_cannot_be_had_says_what_to_do(
    server: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, _ = server
    with pytest.raises(DataUnavailable, match="NOSHUFFLE_DATA"):
        fetch(Remote("gone", address + "gone", "0" * 32), folder=tmp_path)
    monkeypatch.setenv("NOSHUFFLE_DATA", str(tmp_path))
    with pytest.raises(DataUnavailable, match="NOSHUFFLE_DATA"):
        load("shakespeare")


def test_idx_files(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    header = bytes([0, 0, 8, 3]) + np.array(values.shape, ">u4").tobytes()
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(header + values.tobytes()))
    assert np.array_equal(_read_idx(path), values)


def test_emnist_is_read_from_the_published_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same layout, fewer rows: images stand on their side there, and every file is checked."""
    monkeypatch.setenv("NOSHUFFLE_DATA", str(tmp_path))
    with pytest.raises(DataUnavailable, match=r"gzip\.zip"):
        load("emnist_bymerge")
    image = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as archive:
        for part, rows in (("train", 3), ("test", 2)):
            for kind, values in (
                ("images-idx3", np.repeat(image, rows, 0)),
                ("labels-idx1", np.arange(rows, dtype=np.uint8)),
            ):
                header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
                packed = gzip.compress(header + values.tobytes())
                archive.writestr(f"gzip/emnist-bymerge-{part}-{kind}-ubyte.gz", packed)
    with pytest.raises(DataUnavailable, match="checksum"):
        load("emnist_bymerge")
    own = hashlib.md5((tmp_path / "gzip.zip").read_bytes()).hexdigest()
    monkeypatch.setattr(images, "_EMNIST", replace(images._EMNIST, md5=own))
    with pytest.raises(InvalidInput, match="expected"):
        load("emnist_bymerge")
    monkeypatch.setattr(images, "_BY_MERGE", (3, 2, 3))
    data = load("emnist_bymerge")
    expected = torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]) / 127.5 - 1
    torch.testing.assert_close(data.x_train[2, 0], expected)
    assert (data.classes, data.y_test.tolist()) == (3, [0, 1])

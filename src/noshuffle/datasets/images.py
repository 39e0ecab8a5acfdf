"""Image sets: digits (inside scikit-learn), MNIST and its relatives, CIFAR-10, in file order.

Pixels are scaled to [−1, 1] by fixed constants; nothing is measured on the data.
"""

from __future__ import annotations

import gzip
import pickle
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noshuffle.datasets.record import DataSet
from noshuffle.datasets.store import Remote, checked, fetch, local
from noshuffle.errors import DataUnavailable, InvalidInput

_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_IDX = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_SUMS = {
    "mnist": (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    "fashion_mnist": (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
}
_CIFAR = Remote(
    "cifar-10-python.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    "c58f30108f718f92721af3b95e74349a",
)

_EMNIST = Remote(
    "gzip.zip",
    "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
    "58c8d27c78d21e728a6bc7b3cc06412e",
)
#: Training rows, test rows and classes of EMNIST by merge (Cohen et al. 2017, arXiv 1702.05373).
_BY_MERGE = (697_932, 116_323, 47)

Bytes = NDArray[np.uint8]


def digits() -> DataSet:
    """1,797 handwritten digits of 8 × 8 pixels; the last 360 rows are held out."""
    x, y = _shipped_digits()
    images = torch.tensor(x, dtype=torch.float32, device="cpu").reshape(-1, 1, 8, 8) / 8 - 1
    labels = torch.tensor(y, dtype=torch.int64, device="cpu")
    train, held = slice(0, 1437), slice(1437, None)
    return DataSet("digits", "image", images[train], labels[train], images[held], labels[held], 10)


def _shipped_digits() -> tuple[Any, Any]:
    """What load_digits gives, read from its file; scikit-learn takes 1.3 s to import."""
    found = find_spec("sklearn")
    for folder in found.submodule_search_locations or () if found else ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return x, y


def mnist() -> DataSet:
    """60,000 + 10,000 digits; units are the writers where the file names them."""
    return _idx_set("mnist", _MNIST)


def fashion_mnist() -> DataSet:
    """60,000 + 10,000 pieces of clothing."""
    return _idx_set("fashion_mnist", _FASHION)


def emnist_bymerge() -> DataSet:
    """697,932 + 116,323 handwritten characters in 47 classes, from the publisher's gzip.zip.

    Half a gigabyte, so it is not fetched unasked: put the file into $NOSHUFFLE_DATA. Images are
    stored column by column there, and are turned here.
    """
    path = local(_EMNIST.name)
    if path is None:
        raise DataUnavailable(
            f"{_EMNIST.name} is not in $NOSHUFFLE_DATA; fetch it (0.5 GB) from {_EMNIST.url}"
        )
    checked(path, _EMNIST)
    files = []
    with zipfile.ZipFile(path) as archive:
        for part in ("train", "test"):
            for kind in ("images-idx3", "labels-idx1"):
                name = f"gzip/emnist-bymerge-{part}-{kind}-ubyte.gz"
                values = _idx(gzip.decompress(archive.read(name)))
                files.append(values.transpose(0, 2, 1) if values.ndim == 3 else values)
    found = len(files[0]), len(files[2]), int(files[1].max()) + 1
    if found != _BY_MERGE or len(files[1]) != found[0] or len(files[3]) != found[1]:
        raise InvalidInput(f"{path} holds {found} rows and classes, expected {_BY_MERGE}")
    return _images("emnist_bymerge", *files, classes=_BY_MERGE[2])


def cifar10() -> DataSet:
    """50,000 + 10,000 colour photographs in ten classes."""
    paths = [local(f"cifar10_{part}.npz") for part in ("train_a", "train_b", "test")]
    parts = [_decode(path) for path in paths if path is not None]
    if len(parts) < len(paths):
        parts = _cifar_archive(fetch(_CIFAR))
    x, y = (np.concatenate(arrays) for arrays in zip(*parts[:-1]))
    return _images("cifar10", x, y, *parts[-1])


def _images(
    name: str,
    x: Bytes,
    y: Bytes,
    x_test: Bytes,
    y_test: Bytes,
    *,
    units: Bytes | None = None,
    classes: int = 10,
) -> DataSet:
    def scaled(pixels: Bytes) -> torch.Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(pixels)).to(torch.float32)
        return (tensor if tensor.ndim == 4 else tensor.unsqueeze(1)) / 127.5 - 1

    def labels(values: Bytes) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64))

    ids = None if units is None else labels(units)
    arrays = scaled(x), labels(y), scaled(x_test), labels(y_test)
    return DataSet(name, "image", *arrays, classes, units=ids)


def _idx_set(name: str, base: str) -> DataSet:
    path = local(f"{name}.npz")
    if path is not None:
        with np.load(path) as file:
            units = file["writer_train"] if "writer_train" in file.files else None
            arrays = [file[key] for key in ("x_train", "y_train", "x_test", "y_test")]
        return _images(name, *arrays, units=units)
    files = []
    for stem, md5 in zip(_IDX, _SUMS[name]):
        remote = Remote(f"{name}-{stem}-ubyte.gz", f"{base}{stem}-ubyte.gz", md5)
        files.append(_read_idx(fetch(remote)))
    return _images(name, *files)


def _read_idx(path: Path) -> Bytes:
    return _idx(gzip.decompress(path.read_bytes()))


def _idx(raw: bytes) -> Bytes:
    """An IDX file: two zero bytes, type, rank, big-endian sizes, then the bytes themselves."""
    rank = raw[3]
    shape = np.frombuffer(raw, ">u4", count=rank, offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(tuple(int(s) for s in shape))


def _decode(path: Path) -> tuple[Bytes, Bytes]:
    """Undo the difference coding (rows, columns, then red and blue against green)."""
    with np.load(path) as file:
        planes = file["d"].cumsum(2, dtype="u1").cumsum(3, dtype="u1")
        planes[0] += planes[1]
        planes[2] += planes[1]
        return planes.transpose(1, 0, 2, 3), file["y"]


def _cifar_archive(path: Path) -> list[tuple[Bytes, Bytes]]:
    """Parts of the publisher's archive, the held-out one last. Its checksum has been verified,
    so that its pickled dictionaries may be loaded.
    """
    parts: dict[str, tuple[Bytes, Bytes]] = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            stem = Path(member.name).name
            if stem.startswith(("data_batch", "test_batch")):
                file = archive.extractfile(member)
                assert file is not None
                record = pickle.load(file, encoding="bytes")
                pixels = np.asarray(record[b"data"], np.uint8).reshape(-1, 3, 32, 32)
                parts[stem] = pixels, np.asarray(record[b"labels"], np.uint8)
    return [*(parts[f"data_batch_{i}"] for i in range(1, 6)), parts["test_batch"]]

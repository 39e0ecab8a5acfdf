"""Where noise comes from: a secret key, and one normal stream per (row, tensor name).

Element i of the stream (row, name) is a function of (key, kind, row, name, i) and of nothing else:
not of the order of parameters, the sharding, the chunking, the threads, the processes or how often
the run was restarted. So a past draw can be made again instead of being stored.

    seed(name) = BLAKE2b(name; key = secret, person = kind)      256 bits, once per name
    words      = generator(seed(name); row, block)               row and block in own fields
    normals    = Box–Muller over tiles of 1024 words             see `gaussian`

Two generators, one interface: `aes` (AES-256 in counter mode, a cipher, and the fastest on a CPU)
and `philox` (Philox4x32-10, the fastest on a GPU; strong but no cipher). `auto` takes aes for
tensors in ordinary memory and philox on accelerators. torch's own generators are never used: on a
CPU they keep 32 bits of a seed, and seeding them per step repeats noise.

>>> source = test_source(seed=7)
>>> whole, part = torch.empty(5), torch.empty(2)
>>> source.normal_(whole, row=3, name="weight")
>>> source.normal_(part, row=3, name="weight", start=2)
>>> bool((whole[2:4] == part).all()), source.is_test
(True, True)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from noshuffle.errors import InvalidInput, one_of
from noshuffle.noise import native
from noshuffle.noise.aes import AesWords
from noshuffle.noise.constants import CPU_CHUNK, DEVICE_CHUNK, TILE
from noshuffle.noise.grid import add_on_grid_, grid_step, jitters_
from noshuffle.noise.layout import Chunk, Layout
from noshuffle.noise.loops import normals_
from noshuffle.noise.philox_words import PhiloxWords
from noshuffle.noise.workers import share

KINDS = ("auto", "aes", "philox")
KEY_BYTES = 32


class Drawer(Protocol):
    """Draws rows of the standard normal matrix Z for chunks that it was prepared for."""

    def draw_(
        self, out: Tensor, *, chunk: int, row: int, weight: float, accumulate: bool, worker: int
    ) -> None:
        """out = weight·z_row, or out += weight·z_row (tiles × 1024). Workers share nothing."""

    def jitters_(self, out: Tensor, *, step: float, worker: int) -> None:
        """The coins (see `grid`) that the row which this worker drew last has to spare."""


class AnySource(Protocol):
    """What a noise stream asks of a source; `Source` is the one for real use."""

    @property
    def kind(self) -> str: ...
    @property
    def is_test(self) -> bool: ...
    @property
    def fingerprint(self) -> str: ...
    def on(self, device: torch.device) -> AnySource: ...
    def check_names(self, names: Iterable[str]) -> None: ...
    def drawer(self, chunks: Sequence[Chunk], *, device: torch.device, workers: int) -> Drawer: ...


def new_key() -> bytes:
    """A fresh secret of 256 bits from the operating system. Keep it as you keep the data."""
    return os.urandom(KEY_BYTES)


@dataclass(frozen=True)
class Source:
    """The noise of one run, as a function of (row, name, element).

    Guarantees: streams of different (row, name) never share a generator input. Rows and elements
    sit in separate counter fields, values beyond a field are refused, and `check_names` refuses a
    set of names of which two derived the same seed. Nothing is seeded from time, process or order.
    With kind `aes` the normals are those of a cipher under a 256-bit key; with `philox` they pass
    statistical tests but are not claimed to resist an adversary who sees raw draws. A test source
    is reproducible by anyone who knows its seed, hence not private, and says so by `is_test`.
    """

    key: bytes = field(repr=False)
    kind: str = "auto"
    is_test: bool = False

    def __post_init__(self) -> None:
        one_of(KINDS, kind=self.kind)
        if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:
            raise InvalidInput(f"key must be {KEY_BYTES} bytes, as new_key() makes; got another")

    @property
    def fingerprint(self) -> str:
        """A public name of the key: recognises it, reveals nothing about it."""
        return self._hash(b"", b"noshuffle:public", 16).hex()

    def seed(self, name: str) -> bytes:
        """The 256-bit seed of a tensor name under this source's kind."""
        return self._hash(name.encode(), f"noshuffle:{self.kind}".encode(), 32)

    def _hash(self, data: bytes, person: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, key=self.key, person=person, digest_size=size).digest()

    def on(self, device: torch.device) -> Source:
        """The same source with `auto` decided for a device."""
        if self.kind != "auto":
            return self
        return replace(self, kind="aes" if device.type == "cpu" else "philox")

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse names that would share a stream (first 128 bits of the seed, all kinds)."""
        owners: dict[bytes, str] = {}
        for name in names:
            other = owners.setdefault(self.seed(name)[:16], name)
            if other != name:  # pragma: no cover - probability below 2^-100
                raise InvalidInput(f"names {other!r} and {name!r} derive one seed; rename one")

    def drawer(self, chunks: Sequence[Chunk], *, device: torch.device, workers: int) -> Drawer:
        """Prepare to draw rows for the chunks of a layout."""
        fixed = self.on(device)
        if device.type == "cpu":
            native.library()  # built here, once, rather than by the first threads that draw
        seeds = {piece.name: b"" for chunk in chunks for piece in chunk.pieces}
        seeds = {name: fixed.seed(name) for name in seeds}
        words: AesWords | PhiloxWords
        if fixed.kind == "aes":
            words = AesWords(chunks, seeds=seeds)
        else:
            words = PhiloxWords(chunks, seeds=seeds, device=device)
        largest = max((chunk.tiles for chunk in chunks), default=0)
        shape = (workers, largest, TILE)
        return _Drawer(words, torch.empty(shape, dtype=torch.int32, device=device))

    def normal_(self, out: Tensor, *, row: int, name: str, start: int = 0) -> None:
        """Fill a contiguous float32 tensor with elements [start, start + numel) of a stream."""
        if out.dtype != torch.float32 or not out.is_contiguous():
            raise InvalidInput(
                f"out must be a contiguous float32 tensor, got {out.dtype}, strides {out.stride()}"
            )
        device = out.device
        tiles = CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK
        layout = Layout.of({name: (out.numel(),)}, starts={name: start}, chunk_tiles=tiles)
        chunks = layout.chunks
        workers = min(torch.get_num_threads() if device.type == "cpu" else 1, max(1, len(chunks)))
        drawer = self.drawer(chunks, device=device, workers=workers)
        largest = max((chunk.tiles for chunk in chunks), default=0)
        shape = (workers, largest, TILE)
        flat, rooms = out.view(-1), torch.empty(shape, dtype=torch.float32, device=device)

        def fill(worker: int, index: int) -> None:
            room = rooms[worker, : chunks[index].tiles]
            drawer.draw_(room, chunk=index, row=row, weight=1.0, accumulate=False, worker=worker)
            for span in chunks[index].spans:
                part = room.view(-1)[span.at : span.at + span.end - span.begin]
                flat[span.begin : span.end].copy_(part)

        with torch.no_grad():
            share(fill, items=len(chunks), workers=workers)

    def noisy(self, value: float, *, row: int, name: str, scale: float) -> float:
        """One number plus scale times the first element of a stream, rounded to the grid.

        Guarantees: the result is a multiple of g = `grid_step(scale)`, a function of value + noise
        and of a coin that does not depend on the value: its low bits say nothing about the value.
        """
        cpu = torch.device("cpu")
        chunks = Layout.of({name: (1,)}, chunk_tiles=1).chunks
        drawer = self.drawer(chunks, device=cpu, workers=1)
        shape = (2, chunks[0].tiles, TILE)
        noise, coins = torch.empty(shape, dtype=torch.float32, device=cpu).unbind()
        drawer.draw_(noise, chunk=0, row=row, weight=scale, accumulate=False, worker=0)
        step, at = grid_step(scale), chunks[0].spans[0].at
        drawer.jitters_(coins, step=step, worker=0)
        released = torch.tensor([value], dtype=torch.float64, device=cpu)
        own = slice(at, at + 1)
        add_on_grid_(released, noise.view(-1)[own], jitters=coins.view(-1)[own], step=step)
        return float(released)


@dataclass(frozen=True)
class _Drawer:
    words: AesWords | PhiloxWords
    room: Tensor

    def draw_(
        self, out: Tensor, *, chunk: int, row: int, weight: float, accumulate: bool, worker: int
    ) -> None:
        words = self.room[worker, : out.shape[0]]
        self.words.fill_(words, chunk=chunk, row=row)
        normals_(out, words=words, weight=weight, accumulate=accumulate)

    def jitters_(self, out: Tensor, *, step: float, worker: int) -> None:
        jitters_(out, words=self.room[worker, : out.shape[0]], step=step)


def test_source(*, seed: int | str, kind: str = "auto") -> Source:  # noqa: PT028
    """A source that anyone can reproduce from its named seed: for tests, never private."""
    key = hashlib.blake2b(f"noshuffle test seed {seed!r}".encode(), digest_size=KEY_BYTES).digest()
    return Source(key=key, kind=kind, is_test=True)


test_source.__test__ = False  # type: ignore[attr-defined]  # a builder, not a test to collect

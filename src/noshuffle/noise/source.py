"""Where noise comes from: a ring of secret keys, and one normal stream per (row, tensor name).

Element i of the stream (row, name) is a function of (key of the row, kind, row, name, i) and of
nothing else: not of the order of parameters, the sharding, the chunking, the threads or the
processes. So a past draw can be made again instead of being stored.

    key(row)        = the last key of the ring whose first row is <= row
    seed(name, key) = BLAKE2b(name; key = secret, person = kind)    256 bits, once per name and key
    words           = generator(seed; row, block)                   row and block in separate fields
    normals         = Box–Muller over tiles of 1024 words           see `gaussian`

A run has one key per life of its process. `rekeyed(first_row, key)` gives all rows from `first_row`
on, which no released step has drawn (`step_plan.rows_used`), a fresh key. Rows that were used can
be drawn again; two continuations of one snapshot have independent noise, and nothing cancels.

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
>>> renewed = Source(bytes(32)).rekeyed(2, bytes(range(32)))
>>> [renewed.segment(row) for row in range(4)], renewed.fingerprint == Source(bytes(32)).fingerprint
([0, 0, 1, 1], True)
"""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from noshuffle.errors import InvalidInput, one_of
from noshuffle.noise.gaussian import DEVICE_CHUNK, HALF, TILE, TORCH_CHUNK, normals_
from noshuffle.noise.grid import grid_step, jitter, jitters_
from noshuffle.noise.layout import Chunk, Layout
from noshuffle.noise.words import AesWords, PhiloxWords

KINDS = ("auto", "aes", "philox")
KEY_BYTES = 32


class AnySource(Protocol):
    """What a noise stream asks of a source; `Source` is the one for real use."""

    @property
    def kind(self) -> str: ...
    @property
    def is_test(self) -> bool: ...
    @property
    def ring(self) -> tuple[tuple[int, str], ...]: ...
    def on(self, device: torch.device) -> AnySource: ...
    def check_names(self, names: Iterable[str]) -> None: ...
    def drawer(self, chunks: Sequence[Chunk], *, device: torch.device) -> Any: ...


def new_key() -> bytes:
    """A fresh secret of 256 bits from the operating system. Keep it as you keep the data."""
    return os.urandom(KEY_BYTES)


@dataclass(frozen=True)
class Drawer:
    """Draws rows of the standard normal matrix Z for the chunks that it was prepared for."""

    words_of: Callable[[int], AesWords | PhiloxWords]
    segment_of: Callable[[int], int]
    scratch: Tensor

    def draw_(self, out: Tensor, *, chunk: int, row: int, weight: float, accumulate: bool) -> None:
        """out = weight·z_row, or out += weight·z_row (tiles × 1024)."""
        words = self.scratch[: out.shape[0]]
        self.words_of(self.segment_of(row)).fill_(words, chunk=chunk, row=row)
        normals_(out, words=words, weight=weight, accumulate=accumulate)

    def jitters_(self, out: Tensor, *, step: float) -> None:
        """The coins (see `grid`) that the row which was drawn last has to spare."""
        jitters_(out, words=self.scratch[: out.shape[0]], step=step)


class NumberNoise(NamedTuple):
    """The noise of one number, drawn before the number is known; see `Source.noisy`."""

    noise: float
    coin: float
    middle: float

    def __call__(self, value: float) -> float:
        return ((value + self.noise + self.coin) + self.middle) - self.middle


@dataclass(frozen=True)
class Source:
    """The noise of one run, as a function of (row, name, element).

    `later` holds (first row, key) pairs with increasing first rows: a row is drawn under the last
    key whose first row it has reached, rows before the first pair under `key`.

    Guarantees: streams of different (row, name) never share a generator input. Rows and elements
    sit in separate counter fields, values beyond a field are refused, and `check_names` refuses a
    set of names of which two derived the same seed. A row keeps its key, and so its numbers,
    whatever is added to the ring at rows above it. Nothing is seeded from time, process or order.
    With kind `aes` the normals are those of a cipher under a 256-bit key; with `philox` they pass
    statistical tests but are not claimed to resist an adversary who sees raw draws. A test source
    is reproducible by anyone who knows its seed, hence not private, and says so by `is_test`.
    """

    key: bytes = field(repr=False)
    kind: str = "auto"
    is_test: bool = False
    later: tuple[tuple[int, bytes], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        one_of(KINDS, kind=self.kind)
        for key in self._keys:
            if not isinstance(key, bytes) or len(key) != KEY_BYTES:
                raise InvalidInput(
                    f"key must be {KEY_BYTES} bytes, as new_key() makes; got another"
                )
        firsts = [-1, *(first for first, _ in self.later)]
        if any(not isinstance(first, int) or first <= low for low, first in pairwise(firsts)):
            raise InvalidInput(f"later must have increasing first rows >= 0, got {firsts[1:]}")
        if self.is_test and self.later:
            raise InvalidInput("a test source has one key, its named seed; use a Source for a ring")

    @property
    def _keys(self) -> tuple[bytes, ...]:
        return self.key, *(key for _, key in self.later)

    @property
    def ring(self) -> tuple[tuple[int, str], ...]:
        """(first row, public name) of every key, in order; the names reveal nothing."""
        names = [_keyed_hash(b"", key, b"noshuffle:public", 16).hex() for key in self._keys]
        return tuple(zip((0, *(first for first, _ in self.later)), names))

    @property
    def fingerprint(self) -> str:
        """The public name of the first key, which names the run: recognises, reveals nothing."""
        return self.ring[0][1]

    def rekeyed(self, first_row: int, key: bytes) -> Source:
        """The same source with a fresh key for every row from `first_row` on.

        Guarantees: rows below `first_row` keep their numbers. Keys that began at `first_row` or
        later are dropped; the caller knows that no released step has used them.
        """
        if self.is_test:
            raise InvalidInput("a test source keeps its named seed; only a real one takes new keys")
        kept = tuple(pair for pair in self.later if pair[0] < first_row)
        return replace(self, later=(*kept, (first_row, key)))

    def segment(self, row: int) -> int:
        """Which key a row is drawn under: 0 for `key`, i for the i-th of `later`."""
        return bisect_right(self.later, row, key=itemgetter(0))

    @property
    def segments(self) -> int:
        return 1 + len(self.later)

    def seed(self, name: str, segment: int = 0) -> bytes:
        """The 256-bit seed of a tensor name under this source's kind and one of its keys."""
        return _keyed_hash(
            name.encode(), self._keys[segment], f"noshuffle:{self.kind}".encode(), 32
        )

    def on(self, device: torch.device) -> Source:
        """The same source with `auto` decided for a device."""
        if self.kind != "auto":
            return self
        return replace(self, kind="aes" if device.type == "cpu" else "philox")

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse names that would share a stream (first 128 bits of the seed, all kinds).

        Seeds of different segments may meet: a row has one segment, so their counters do not.
        """
        owners: dict[tuple[int, bytes], str] = {}
        for name in names:
            for segment in range(self.segments):
                other = owners.setdefault((segment, self.seed(name, segment)[:16]), name)
                if other != name:  # pragma: no cover - probability below 2^-100
                    raise InvalidInput(f"names {other!r} and {name!r} derive one seed; rename one")

    def drawer(self, chunks: Sequence[Chunk], *, device: torch.device) -> Drawer:
        fixed = self.on(device)
        names = dict.fromkeys(piece.name for chunk in chunks for piece in chunk.pieces)

        @cache  # old keys are rarely asked for: their tables are built when used
        def words_of(segment: int) -> AesWords | PhiloxWords:
            seeds = {name: fixed.seed(name, segment) for name in names}
            if fixed.kind == "aes":
                return AesWords(chunks, seeds=seeds)
            return PhiloxWords(chunks, seeds=seeds, device=device)

        words_of(fixed.segments - 1)
        largest = max((chunk.tiles for chunk in chunks), default=0)
        scratch = torch.empty((largest, TILE), dtype=torch.int32, device=device)
        return Drawer(words_of, fixed.segment, scratch)

    def normal_(self, out: Tensor, *, row: int, name: str, start: int = 0) -> None:
        """Fill a contiguous float32 tensor with elements [start, start + numel) of a stream."""
        if out.dtype != torch.float32 or not out.is_contiguous():
            raise InvalidInput(
                f"out must be a contiguous float32 tensor, got {out.dtype}, strides {out.stride()}"
            )
        device = out.device
        tiles = TORCH_CHUNK if device.type == "cpu" else DEVICE_CHUNK
        layout = Layout.of({name: (out.numel(),)}, starts={name: start}, chunk_tiles=tiles)
        drawer, flat = self.drawer(layout.chunks, device=device), out.view(-1)
        with torch.no_grad():
            for index, chunk in enumerate(layout.chunks):
                z = torch.empty((chunk.tiles, TILE), dtype=torch.float32, device=device)
                drawer.draw_(z, chunk=index, row=row, weight=1.0, accumulate=False)
                for piece in chunk.pieces:
                    flat[piece.begin : piece.end].copy_(z.view(-1)[piece.place])

    def noisy(self, value: float, *, row: int, name: str, scale: float) -> float:
        """One number plus scale times the first element of a stream, rounded to the grid.

        Guarantees: the result is a multiple of g = `grid_step(scale)`, a function of value + noise
        and of a coin that does not depend on the value: its low bits say nothing about the value.
        """
        return self.adders(name=name, scale=scale)(row)(value)

    def adders(self, *, name: str, scale: float) -> Callable[[int], NumberNoise]:
        """`noisy` in turns: by row, its noise drawn now for a number that is known later."""
        cpu = torch.device("cpu")
        chunks = Layout.of({name: (1,)}, chunk_tiles=1).chunks
        drawer = self.drawer(chunks, device=cpu)
        noise = torch.empty(chunks[0].tiles, TILE, dtype=torch.float32, device=cpu)
        words, drawn = drawer.scratch[0].numpy(), noise[0].numpy()  # read faster than tensors
        step, first = grid_step(scale), chunks[0].pieces[0].place.start
        middle = step * 1.5 * 2.0**52  # as `add_on_grid_` in float64

        def of_row(row: int) -> NumberNoise:
            drawer.draw_(noise, chunk=0, row=row, weight=scale, accumulate=False)
            coin = jitter(int(words[first]), int(words[HALF + first]), step=step) if step else 0.0
            return NumberNoise(float(drawn[first]), coin, middle)

        return of_row


def _keyed_hash(data: bytes, key: bytes, person: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, key=key, person=person, digest_size=size).digest()


def check_ring(state: Mapping[str, Any], ring: Sequence[tuple[int, str]], *, used: int) -> None:
    """Refuse a saved state of which this ring would draw one of the `used` first rows otherwise.

    The state lists (first row, public name) of its keys but the first under `later`. Keys from row
    `used` on have drawn nothing of it, and may be others.
    """
    saved = [(int(first), name) for first, name in state["later"]]
    if [k for k in saved if k[0] < used] != [k for k in ring[1:] if k[0] < used]:
        raise InvalidInput(
            f"the saved noise state has drawn {used} rows under other later keys than this run has "
            "for them; resume with the ring of keys of the run that was saved"
        )


def test_source(*, seed: int | str, kind: str = "auto") -> Source:  # noqa: PT028
    """A source that anyone can reproduce from its named seed: for tests, never private."""
    key = hashlib.blake2b(f"noshuffle test seed {seed!r}".encode(), digest_size=KEY_BYTES).digest()
    return Source(key=key, kind=kind, is_test=True)


test_source.__test__ = False  # type: ignore[attr-defined]  # a builder, not a test to collect

"""Fingerprints of tensors where they lie: 256 bits back from the device instead of the data.

A group of tensors is a row of unsigned words m (32 bits each; 16 or 8 for narrower types), cut into
blocks of 2,048. With secret random keys k and κ of 64 bits, in four lanes, modulo 2⁶⁴,

    d[b, l] = (Σ_i k[l, i] · m[b, i]) >> 32            D[o] = Σ_b Σ_l κ[b, l, o] · d[b, l]

(multilinear hashing: Carter and Wegman 1979; Dietzfelbinger 1996; Lemire and Kaser 2014). Order
counts, since every place has a key of its own. Zeros behind the end change nothing, so a padded
batch has the digest of its own rows; type and shape go into the fingerprint beside the digest.

Collisions. Let two messages differ in a word by δ = 2ʲ·odd, j ≤ 31. The difference of their sums in
a lane is uniform over the multiples of 2ʲ, and the upper halves agree only if it lies within 2³² of
zero: probability at most 2⁻³¹, hence 2⁻¹²⁴ for four lanes; different d then meet in D with at most
2⁻³³ a lane. Together below 2⁻¹²⁰, for data that was chosen without knowledge of the key. A ledger
never holds D itself but a cryptographic hash of it (`fingerprint`), which says nothing about keys
or data. Arithmetic is exact: the bits do not depend on device or order of additions.

State: the keys, made from the secret as far as they are needed.

>>> keys = Keys(b"secret", device="cpu")
>>> rows, padded = torch.arange(3.0), torch.zeros(9)
>>> padded[:3] = rows
>>> digests = [Printer(keys, [[t]]).run_() for t in (rows, padded, rows.flip(0))]
>>> torch.equal(digests[0], digests[1]), torch.equal(digests[0], digests[2])
(True, False)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from noshuffle.device_copy import DeviceCopy
from noshuffle.errors import InvalidInput, NoshuffleError
from noshuffle.release import digest_kernel as kernel
from noshuffle.triton_shim import tl

LANES, BLOCK = 4, 2048
_MASKS = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}
_SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
#: Blocks that the plain version takes at a time: 8 MiB of products a lane.
_CHUNK = 512
#: Looks at a digest that has not come before the host lets the device tell.
_PATIENCE = 2**22


class Keys:
    """The keys of one run on one device; more second keys are made when a longer row asks."""

    def __init__(self, secret: bytes, *, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._secret = secret
        self.first = self._expand(b"words", LANES * BLOCK).reshape(LANES, BLOCK)
        self._second = torch.zeros((0, LANES, LANES), dtype=torch.int64, device=self.device)

    def second(self, blocks: int) -> Tensor:
        """At least `blocks` rows of keys; earlier rows stay what they were."""
        if blocks > len(self._second):
            rows = max(64, 1 << (blocks - 1).bit_length())
            self._second = self._expand(b"blocks", rows * LANES * LANES).reshape(-1, LANES, LANES)
        return self._second

    def _expand(self, name: bytes, count: int) -> Tensor:
        data = hashlib.shake_256(b"ns-print " + name + b" " + self._secret).digest(8 * count)
        return torch.from_numpy(np.frombuffer(data, dtype="<i8").copy()).to(self.device)


def width(value: Tensor) -> int:
    """Bytes of one word of a tensor: 4, or 2 or 1 for narrower types."""
    return min(value.element_size(), 4)


def words(value: Tensor) -> Tensor:
    """The words of a tensor, as int64 in [0, 2³²)."""
    flat = value.detach().contiguous().reshape(-1)
    flat = flat.as_strided(flat.shape, (1,))  # a single number may have any stride
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    size = width(flat)
    return flat.view(_SIGNED[size]).long() & _MASKS[size]


def plain(keys: Keys, group: Sequence[Tensor]) -> Tensor:
    """D of one group by torch alone: the twin of the kernel, and its stand-in without Triton."""
    total = torch.zeros(LANES, dtype=torch.int64, device=keys.device)
    block = 0
    for value in group:
        row = words(value)
        for part in torch.split(row, _CHUNK * BLOCK) if len(row) else ():
            count = -(-len(part) // BLOCK)
            padded = torch.nn.functional.pad(part, (0, count * BLOCK - len(part)))
            sums = (padded.view(count, 1, BLOCK) * keys.first).sum(2)
            upper = (sums >> 32) & _MASKS[4]
            own = keys.second(block + count)[block : block + count]
            total += (upper[:, :, None] * own).sum((0, 1))
            block += count
    return total


class Region(NamedTuple):
    """A tensor as the kernel sees it: where its words lie, how many there are, bytes of each."""

    address: int
    words: int
    width: int


def _region(value: Tensor) -> Region:
    size = value.element_size()
    narrow = min(size, 4)
    return Region(value.data_ptr(), value.numel() * size // narrow, narrow)


class _Launches:
    """The launches of the kernel for groups of regions: one for each width of words.

    Which program works on which region, and the table of regions, lie on the device.
    """

    def __init__(self, keys: Keys, groups: Sequence[Sequence[Region]]) -> None:
        self._keys, self._launches = keys, list[tuple[int, Tensor, Tensor]]()
        tables: dict[int, list[list[int]]] = {1: [], 2: [], 4: []}
        most = 1
        for number, group in enumerate(groups):
            block = 0
            for address, count, size in group:
                blocks = -(-count // BLOCK)
                rows = tables[size]
                begin = rows[-1][2] + -(-rows[-1][1] // BLOCK) if rows else 0
                if blocks:
                    rows.append([address, count, begin, block, number])
                block += blocks
            most = max(most, block)
        self._second = keys.second(most)
        for size, rows in tables.items():
            if not rows:
                continue
            table = np.array(rows, dtype=np.int64)
            owners = np.repeat(np.arange(len(table)), -(-table[:, 1] // BLOCK)).astype(np.int32)
            # One copy for both, the owners where 16 bytes begin, which the kernel was compiled for;
            # from pinned memory, or it would wait for all that the device has to do.
            first = table.size + table.size % 2
            both = np.zeros(first + -(-len(owners) // 2), dtype=np.int64)
            both[: table.size] = table.ravel()
            both[first:].view(np.int32)[: len(owners)] = owners
            there = torch.from_numpy(both).pin_memory().to(keys.device, non_blocking=True)
            whose = there[first:].view(torch.int32)[: len(owners)]
            self._launches.append((size, whose, there[: table.size]))

    def add_(self, out: Tensor) -> None:
        """Add the digests of what lies there now to `out`, [groups, 4]."""
        for size, owners, table in self._launches:
            launch: Any = kernel.digest
            with torch.cuda.device(self._keys.device):
                launch[(owners.shape[0],)](
                    owners,
                    table,
                    self._keys.first,
                    self._second,
                    out,
                    WORD=getattr(tl, f"uint{8 * size}"),
                    BLOCK=BLOCK,
                    num_warps=4,
                )


class Printer:
    """Digests of groups of tensors that stay at their addresses.

    Guarantees: `run_` is a function of the secret and the bytes in each group alone, bit for bit
    the same by the kernel and by `plain`; it launches without reading anything from the host, and
    can be captured. The result is a tensor of the printer's own, overwritten by the next run.
    """

    def __init__(self, keys: Keys, groups: Sequence[Sequence[Tensor]]) -> None:
        _check(keys, groups)
        self._keys, self._groups = keys, [list(group) for group in groups]
        self.out = _zeros(keys, len(groups))
        self._launches: _Launches | None = None
        if _has_kernel(keys):
            self._launches = _Launches(keys, [[_region(v) for v in group] for group in groups])

    def run_(self, *, onto: bool = False) -> Tensor:
        """[groups, 4] int64: the digests of what the tensors hold now.

        `onto` adds to what is there, which must be zero.
        """
        if self._launches is None:
            for row, group in zip(self.out, self._groups):
                row.copy_(plain(self._keys, group))
            return self.out
        if not onto:
            self.out.zero_()
        self._launches.add_(self.out)
        return self.out


def _has_kernel(keys: Keys) -> bool:
    return keys.device.type == "cuda" and kernel.HAS_TRITON


def _zeros(keys: Keys, groups: int) -> Tensor:
    return torch.zeros((groups, LANES), dtype=torch.int64, device=keys.device)


def _check(keys: Keys, groups: Sequence[Sequence[Tensor]]) -> None:
    for value in (value for group in groups for value in group):
        if not value.is_contiguous() or value.device.type != keys.device.type:
            raise InvalidInput(
                f"a printer needs contiguous tensors on {keys.device}, got one on "
                f"{value.device} with strides {value.stride()}"
            )


class DigestRing:
    """Digests on their way from a device: published inside a graph, read some steps later.

    The host need not wait for one before it starts the next. State: the digest in the making, its
    number, and the last `SLOTS` of them in memory that both can reach.
    """

    SLOTS = 8

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tick = torch.zeros(1, dtype=torch.int64, device=device)
        # A sector of 32 bytes for each, on a border of 32.
        spare = torch.zeros(self.SLOTS * 4 + 4, dtype=torch.int64, pin_memory=True, device="cpu")
        first = -spare.data_ptr() // 8 % 4
        self._ring = spare[first : first + self.SLOTS * 4].view(self.SLOTS, 4)
        self._seen = self._ring.numpy()
        self.expected = 0

    def publish_(self, printer: Printer) -> None:
        """Digest what the printer holds and hand it over; this is what a graph holds."""
        total = printer.run_(onto=True)
        launch: Any = kernel.publish
        with torch.cuda.device(self._device):
            launch[(1,)](total, self._tick, self._ring.data_ptr(), SLOTS=self.SLOTS, num_warps=1)

    def expect(self) -> int:
        """The host starts a graph that publishes; the number of its digest."""
        self.expected += 1
        return self.expected

    def read(self, number: int) -> bytes:
        """Wait for a digest by its number, at most `SLOTS` after it was started."""
        row, looks = self._seen[number % self.SLOTS], 0
        while row[3] != number:
            looks += 1
            if looks == _PATIENCE:
                torch.cuda.synchronize(self._device)
                if row[3] != number:
                    raise NoshuffleError("the device lost a step; go on from the last checkpoint")
        return bytes(row[:3].tobytes())

    def reset(self) -> None:
        """Start anew; whatever was on its way is lost."""
        self._tick.zero_()
        torch.cuda.synchronize(self._device)
        self._ring.fill_(-1)
        self.expected = 0


@lru_cache(maxsize=8)
def _keys(secret: bytes, device: torch.device) -> Keys:
    return Keys(secret, device=device)


def of_tensors(values: Sequence[Tensor], secret: bytes) -> list[bytes]:
    """The 32 bytes of D of each of several tensors on one device, which is waited for once."""
    return begin(values, secret)()


def begin(values: Sequence[Tensor], secret: bytes) -> Callable[[], list[bytes]]:
    """Start the digests of several tensors on one device; to call the result is to wait for them.

    They are of what the tensors hold now: the device takes its work in order.
    """
    if not values:
        return list
    found = _started([[value] for value in values], secret)
    return lambda: [row.tobytes() for row in found.read().numpy()]


def begin_group(values: Sequence[Tensor], secret: bytes) -> Callable[[], bytes]:
    """Start the digest of several tensors as one row of words; to call the result is to wait.

    Three words of D, as a `DigestRing` hands them over: two sums share them with a probability
    below 2⁻⁹⁰.
    """
    found = _started([values], secret)
    return lambda: bytes(found.read().numpy()[0, :3].tobytes())


@lru_cache(maxsize=16)
def _launches(keys: Keys, stream: Any, groups: tuple[tuple[Region, ...], ...]) -> _Launches:
    """Launches are used again where tensors lie as in an earlier step, on the stream on which
    their tables were copied: there they are whole, and not given away before they are read."""
    return _Launches(keys, groups)


def _started(groups: Sequence[Sequence[Tensor]], secret: bytes) -> DeviceCopy:
    held = [[_as_it_lies(value) for value in group] for group in groups]
    keys = _keys(secret, held[0][0].device)
    if not _has_kernel(keys):
        return DeviceCopy(Printer(keys, held).run_())
    _check(keys, held)
    out, stream = _zeros(keys, len(held)), torch.cuda.current_stream(keys.device)
    _launches(keys, stream, tuple(tuple(map(_region, group)) for group in held)).add_(out)
    return DeviceCopy(out)


def _as_it_lies(value: Tensor) -> Tensor:
    return value if value.is_contiguous() else value.detach().contiguous()

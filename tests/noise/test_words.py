"""Random words: known answers, and that no two streams can meet."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noshuffle.errors import InvalidInput
from noshuffle.noise import philox, test_source
from noshuffle.noise import words as aes
from noshuffle.noise.layout import Layout
from noshuffle.noise.words import PhiloxWords

U32 = st.integers(0, 2**32 - 1)


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """The paper's round, one counter at a time in unbounded integers: the slow twin."""
    x, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [
            (p1 >> 32) ^ x[1] ^ k[0],
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ x[3] ^ k[1],
            p0 & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


def run_philox(counter: list[int], key: list[int]) -> list[int]:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    words = philox.philox((c0, c1, c2, c3), key=(torch.tensor([key[0]]), torch.tensor([key[1]])))
    return [int(word) for word in words]


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], answer: list[int]) -> None:
    assert run_philox(counter, key) == answer
    assert scalar_philox(counter, key) == answer


@settings(max_examples=50, deadline=None)
@given(st.lists(U32, min_size=4, max_size=4), st.lists(U32, min_size=2, max_size=2))
def test_philox_equals_its_scalar_twin(counter: list[int], key: list[int]) -> None:
    assert run_philox(counter, key) == scalar_philox(counter, key)


def test_philox_words_of_a_tile_follow_the_documented_layout() -> None:
    source = test_source(seed="layout", kind="philox")
    layout = Layout.of({"a": (3000,), "b": (5,)}, starts={"a": 2000}, chunk_tiles=8)
    seeds = {name: source.seed(name) for name in ("a", "b")}
    filler = PhiloxWords(layout.chunks, seeds=seeds, device=torch.device("cpu"))
    words = torch.empty(layout.tiles, 1024, dtype=torch.int32)
    filler.fill_(words, chunk=0, row=77)
    for flat_tile, lane, place, name, tile in (
        (0, 0, 0, "a", 1),
        (2, 3, 255, "a", 3),
        (4, 1, 9, "b", 0),
    ):
        k0, k1, t0, t1 = philox.split_seed(seeds[name])
        expected = scalar_philox([tile * 256 + place, 77, t0, t1], [k0, k1])[lane]
        assert int(words[flat_tile, lane * 256 + place]) % 2**32 == expected


def test_aes_known_answer() -> None:
    """NIST SP 800-38A F.5.5, CTR-AES256: keystream = plaintext xor ciphertext of block one."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    plain = bytes.fromhex("6bc1bee22e409f96e93d7e117393172a")
    cipher = bytes.fromhex("601ec313775789a5b7a7f504bbf3d228")
    context = aes.aes_encryptor(key)
    context.reset_nonce(bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"))
    assert context.update(bytes(16)) == bytes(a ^ b for a, b in zip(plain, cipher))


def test_aes_tiles_are_the_blocks_of_the_documented_counter() -> None:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    source = test_source(seed="layout", kind="aes")
    layout = Layout.of({"a": (3000,)}, starts={"a": 2000}, chunk_tiles=8)
    words = torch.empty(layout.tiles, 1024, dtype=torch.int32)
    aes.AesWords(layout.chunks, seeds={"a": source.seed("a")}).fill_(words, chunk=0, row=9)
    # One block at a time, without counter mode: tile 1 is the first of this shard.
    single = Cipher(algorithms.AES256(source.seed("a")), modes.ECB()).encryptor()
    for block in (0, 1, 255, 256, 1023):
        counter = (9 << 64) | (256 + block)
        expected = np.frombuffer(single.update(counter.to_bytes(16, "big")), dtype="<i4")
        np.testing.assert_array_equal(words.view(-1)[4 * block : 4 * block + 4], expected)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**24 - 1))
def test_counters_can_be_read_back(row: int, tile: int) -> None:
    """Row and tile are read back from every counter, so no two (row, tile) share one."""
    block = aes.counter_block(row=row, tile=tile)
    assert len(block) == 16
    assert int.from_bytes(block[:8], "big") == row
    assert int.from_bytes(block[8:], "big") == tile * aes.AES_BLOCKS
    assert philox.address(row=row, tile=tile) == (tile * philox.BLOCKS, row)


def test_the_blocks_of_neighbouring_tiles_do_not_overlap() -> None:
    """A tile uses exactly BLOCKS counters, the distance between the first ones of two tiles."""
    assert aes.AES_BLOCKS * 16 == 1024 * 4
    assert philox.BLOCKS * 16 == 1024 * 4


@pytest.mark.parametrize("kind", ["aes", "philox"])
def test_ten_million_streams_are_distinct_by_construction(kind: str) -> None:
    """1,000 names × 10,000 rows: generator inputs (derived key, counter) all differ, undrawn.

    The trap: a 32-bit digest of (step, name) repeats itself within 10^7 streams for certain.
    """
    source = test_source(seed="streams", kind=kind)
    names = [f"layers.{i}.weight" for i in range(1000)]
    seeds = [source.seed(name) for name in names]
    used = {seed[:16] if kind == "philox" else seed for seed in seeds}
    assert len(used) == len(names)
    rows = np.arange(10_000)
    if kind == "philox":
        counters = {philox.address(row=int(row), tile=0) for row in rows}
    else:
        counters = {aes.counter_block(row=int(row), tile=0) for row in rows}
    assert len(counters) == len(rows)
    # The pair (key, counter) is a product of two injective maps, hence injective on all pairs.
    assert len(used) * len(counters) == 10_000_000


def test_steps_that_collide_elsewhere_differ_here() -> None:
    """Steps equal modulo 2^31 or 2^32, and the pair that opake repeats, are different streams."""
    for kind, rows in (("aes", (0, 2**31, 2**32, 2**33)), ("philox", (5, 2**31 + 5))):
        source = test_source(seed=0, kind=kind)
        drawn = []
        for row in (*rows, 96_840, 183_011):
            out = torch.empty(64)
            source.normal_(out, row=row, name="w")
            drawn.append(out)
        for i, a in enumerate(drawn):
            assert all(not torch.equal(a, b) for b in drawn[:i])


def test_what_does_not_fit_its_field_is_refused() -> None:
    source = test_source(seed=0, kind="philox")
    out = torch.empty(4)
    with pytest.raises(InvalidInput, match="row must be below"):
        source.normal_(out, row=2**32, name="w")
    with pytest.raises(InvalidInput, match="2\\^34 elements"):
        source.normal_(out, row=0, name="w", start=2**34)
    with pytest.raises(InvalidInput, match="64-bit fields"):
        test_source(seed=0, kind="aes").normal_(out, row=-1, name="w")
    source.normal_(out, row=2**32 - 1, name="w", start=2**34 - 4)

"""Digests where tensors lie: against whole numbers of Python, padding, order, and fingerprints."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noshuffle.errors import InvalidInput
from noshuffle.release import fingerprint
from noshuffle.release.digest import BLOCK, LANES, Keys, Printer, of_tensors, plain, words

KEYS = Keys(b"a secret", device="cpu")
MODULUS = 2**64


def slow(group):
    """The definition, in whole numbers of any size."""
    first = KEYS.first.tolist()
    total, block = [0] * LANES, 0
    for value in group:
        row = words(value).tolist()
        for begin in range(0, len(row), BLOCK):
            part = row[begin : begin + BLOCK]
            upper = [
                (sum(k * m for k, m in zip(first[lane], part)) % MODULUS) >> 32
                for lane in range(LANES)
            ]
            second = KEYS.second(block + 1)[block].tolist()
            for o in range(LANES):
                total[o] += sum(second[lane][o] * upper[lane] for lane in range(LANES))
            block += 1
    return [(t % MODULUS) - (MODULUS if t % MODULUS >= MODULUS // 2 else 0) for t in total]


TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(TYPES), st.integers(0, 5000), st.integers(0, 2**31)), max_size=3
    )
)
def test_equals_the_definition(shapes):
    group = []
    for dtype, count, seed in shapes:
        g = torch.Generator().manual_seed(seed)
        group.append((100 * torch.randn(count, generator=g)).to(dtype))
    assert plain(KEYS, group).tolist() == slow(group)
    assert Printer(KEYS, [group, []]).run_().tolist() == [slow(group), [0] * LANES]


def test_words_are_the_bytes():
    value = torch.tensor([[1.5, -2.0], [float("nan"), 0.0]])
    assert words(value).tolist() == np.frombuffer(value.numpy().tobytes(), "<u4").tolist()
    wide = torch.tensor([2**40 + 3, -1])
    assert words(wide).tolist() == [3, 2**8, 2**32 - 1, 2**32 - 1]
    assert words(torch.tensor([1 + 2j])).tolist() == words(torch.tensor([1.0, 2.0])).tolist()


def test_order_and_place_count_and_trailing_zeros_do_not():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5000, generator=g)
    digest = plain(KEYS, [x])
    for other in (x.flip(0), x.roll(BLOCK), x[1:], x.clone().index_fill_(0, torch.tensor(7), 0.0)):
        assert not torch.equal(digest, plain(KEYS, [other]))
    padded = torch.zeros(20_000)
    padded[:5000] = x
    assert torch.equal(digest, plain(KEYS, [padded]))
    assert not torch.equal(digest, plain(Keys(b"another", device="cpu"), [x]))
    assert not torch.equal(plain(KEYS, [x[:2500], x[2500:]]), plain(KEYS, [x[2500:], x[:2500]]))


def test_single_bits_are_seen_in_all_lanes():
    x = torch.zeros(3 * BLOCK, dtype=torch.int32)
    seen = {tuple(plain(KEYS, [x]).tolist())}
    for bit in range(31):
        for place in (0, 1, BLOCK - 1, BLOCK, 3 * BLOCK - 1):
            y = x.clone()
            y[place] = 1 << bit
            seen.add(tuple(plain(KEYS, [y]).tolist()))
    assert len(seen) == 1 + 31 * 5
    assert all(len({row[lane] for row in seen}) == len(seen) for lane in range(LANES))


def test_more_keys_do_not_change_earlier_ones():
    keys = Keys(b"k", device="cpu")
    before = keys.second(3)[:3].clone()
    assert torch.equal(keys.second(1000)[:3], before)


def test_a_batch_padded_or_not_has_one_fingerprint():
    x, y = torch.randn(5, 3), torch.arange(5)
    padded = torch.zeros(9, 3)
    padded[:5] = x
    longer = torch.zeros(9, dtype=torch.int64)
    longer[:5] = y
    rows = Printer(Keys(b"s", device="cpu"), [[padded], [longer]]).run_()
    digests = [row.numpy().tobytes() for row in rows]
    own = of_tensors([x, y], b"s")
    assert digests == own
    ids = np.arange(5)
    found = fingerprint.of_batch((x, y), ids, secret=b"s", digests=digests)
    assert found == fingerprint.of_batch((x, y), ids, secret=b"s", digests=own)
    assert found != fingerprint.of_batch((x, y), None, secret=b"s", digests=digests)
    fewer = (x[:4], y[:4])  # the same digest if the last row is zero: the shape tells them apart
    assert found != fingerprint.of_batch(fewer, ids, secret=b"s", digests=digests)


def test_tensors_that_may_move_are_refused():
    with pytest.raises(InvalidInput, match="contiguous"):
        Printer(KEYS, [[torch.zeros(3, 4).T]])

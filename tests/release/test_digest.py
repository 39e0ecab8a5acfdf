"""Digests where tensors lie: against whole numbers of Python, padding, order, and fingerprints."""

from __future__ import annotations

import ctypes
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noshuffle.errors import InvalidInput
from noshuffle.release import digest, fingerprint
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


def test_a_single_number_may_have_any_stride():
    """That of `torch.tensor(3).expand(1)`, the label of a batch of one, is zero."""
    wide = torch.tensor(3).expand(1)
    assert wide.stride() == (0,)
    assert words(wide).tolist() == [3, 0]
    assert of_tensors([wide], b"s") == of_tensors([torch.tensor([3])], b"s")


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


class Kernel:
    """The kernel in NumPy: it reads the tables of a launch, and memory where they point."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def run(owners, table, first, second, out, *, WORD, BLOCK, num_warps):
            assert owners.data_ptr() % 16 == table.data_ptr() % 16 == 0
            assert len(owners) == grid[0]
            self.launches.append(table)
            for program, owner in enumerate(owners.tolist()):
                address, count, begin, block, group = table.view(-1, 5)[owner].tolist()
                place = (program - begin) * BLOCK
                size = min(BLOCK, count - place) * WORD // 8
                raw = ctypes.string_at(address + place * WORD // 8, size)
                part = np.frombuffer(raw, f"<u{WORD // 8}").astype(np.int64)
                sums = (first.numpy()[:, : len(part)] * part).sum(1)
                upper = (sums >> 32) & 0xFFFFFFFF
                out[group] += torch.from_numpy(upper @ second[block + program - begin].numpy())

        return run


@pytest.fixture
def launched(monkeypatch):
    """Digests by launches of the kernel, whatever the device is."""
    own = Kernel()
    monkeypatch.setattr(digest.kernel, "digest", own)
    monkeypatch.setattr(digest, "_has_kernel", lambda keys: True)
    monkeypatch.setattr(digest, "tl", SimpleNamespace(uint8=8, uint16=16, uint32=32))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: t)
    digest._launches.cache_clear()
    yield own
    digest._launches.cache_clear()


GROUP = [torch.randn(5000), torch.randn(3, 70).bfloat16(), torch.arange(9).to(torch.uint8)]


def test_tables_say_where_every_block_lies(launched):
    groups = [GROUP, [], [torch.zeros(0), GROUP[1], GROUP[1].double()]]
    found = Printer(KEYS, groups).run_()
    assert found.tolist() == [plain(KEYS, group).tolist() for group in groups]
    assert len(launched.launches) == 3  # one for each width of words


def test_tables_are_used_again_where_tensors_lie_as_before(launched):
    values = [GROUP[0].clone(), GROUP[1].clone()]
    for number in range(3):
        values[0][7] = number
        found = digest.begin_group(values, b"a secret")()
        assert found == plain(KEYS, values).numpy()[:3].tobytes()
    assert len({table.data_ptr() for table in launched.launches}) == 2


def test_tables_are_others_for_another_size_type_place_order_stream_or_secret(
    launched, monkeypatch
):
    """A table that is wrong for a sum would give it the digest of something else."""
    both = torch.randn(2, 6000)
    lists = (
        [both[0]],
        [both[0, :5000]],  # the same address
        [both[0].view(torch.int16)],
        [both[1]],
        [both[0], both[1]],
        [both[1], both[0]],
        [both.T],  # a copy
    )
    for values in (*lists, *lists):
        found = digest.begin_group(values, b"a secret")()
        assert found == plain(KEYS, [v.contiguous() for v in values]).numpy()[:3].tobytes()
    other = plain(Keys(b"another", device="cpu"), lists[0]).numpy()[:3].tobytes()
    assert digest.begin_group(lists[0], b"another")() == other
    made = digest._launches.cache_info().misses
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "another")
    digest.begin_group(lists[0], b"a secret")
    assert digest._launches.cache_info().misses == made + 1


def test_tables_keep_no_tensor(launched):
    value = torch.randn(100)
    digest.begin_group([value], b"a secret")()
    gone = weakref.ref(value)
    del value
    assert gone() is None

"""Blocks of a batch: every row once, the same for every rank, with prints and luck of their own."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from noshuffle.release import fingerprint
from noshuffle.training.group.batch_blocks import block_prints, block_rng, blocks_of, rows_of
from noshuffle.training.group.private import share


def test_blocks_and_shares_cover_everything_once() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        size, block = int(rng.integers(0, 40)), int(rng.integers(1, 9))
        users = rng.integers(0, 12, size) if rng.random() < 0.5 else None
        blocks = blocks_of(size, users, block=block)
        assert sorted(np.concatenate([*blocks, []]).tolist()) == list(range(size))
        for rows in blocks[:-1]:
            assert len(np.unique(rows if users is None else users[rows])) == block
        for ranks in (1, 2, 3, 5):
            cuts = [share(len(blocks), rank=r, ranks=ranks) for r in range(ranks)]
            assert cuts[0][0] == 0
            assert cuts[-1][1] == len(blocks)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
            for begin, end in cuts:  # a rank cuts its own rows into the same blocks
                mine = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *blocks[begin:end]]))
                own = blocks_of(len(mine), None if users is None else users[mine], block=block)
                assert [mine[rows].tolist() for rows in own] == [
                    rows.tolist() for rows in blocks[begin:end]
                ]


def test_rows_of_a_batch() -> None:
    x = torch.arange(20.0).reshape(10, 2)
    for rows in ([], [3], [2, 3, 4], [0, 2, 5], list(range(10))):
        index = np.array(rows, dtype=np.int64)
        assert torch.equal(rows_of((x, 7), index)[0], x[rows])
    assert rows_of((x,), np.arange(2, 5))[0].data_ptr() == x[2:].data_ptr()


def test_a_print_is_that_of_the_rows_and_their_ids() -> None:
    x, ids = torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), np.arange(7) + 40
    blocks = blocks_of(7, None, block=3)
    for given in (None, ids):
        expected = [
            fingerprint.of_batch(
                (x[rows], "kind"), None if given is None else given[rows], secret=b"secret"
            )
            for rows in blocks
        ]
        found = block_prints((x, "kind"), blocks, given, secret=b"secret")
        assert found == expected
        assert len(set(found)) == 3
    assert block_prints((x,), blocks, None, secret=b"other") != found
    assert block_prints((x[:0],), [], None, secret=b"secret") == []


def test_masks_are_a_function_of_the_place_and_leaves_no_trace() -> None:
    cpu, before = torch.device("cpu"), torch.get_rng_state()

    def drawn(place: str, key: bytes = b"key") -> list[float]:
        with block_rng(place, key=key, device=cpu):
            return torch.rand(4).tolist()

    first = drawn("3/0/1")
    torch.rand(1)
    assert drawn("3/0/1") == first
    assert drawn("3/1/0") != first
    assert drawn("3/0/1", b"other") != first
    torch.set_rng_state(before)
    drawn("0/0/0")
    assert torch.equal(torch.get_rng_state(), before)

"""Digests of tensors in ordinary memory: every bit counts, and nothing else does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noshuffle.release import fingerprint

TYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8, torch.bool]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.sampled_from(TYPES), st.integers(0, 2**31))
def test_one_flipped_bit_anywhere_changes_it(size: int, dtype: torch.dtype, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    value = (torch.randn(size, generator=draw) * 100).to(dtype)
    before = fingerprint.of_group([value], b"secret")
    assert fingerprint.of_group([value.clone()], b"secret") == before
    data = value.view(torch.uint8)
    place = int(torch.randint(len(data), (1,), generator=draw))
    data[place] ^= 1 << int(torch.randint(8, (1,), generator=draw))
    assert fingerprint.of_group([value], b"secret") != before


def test_strides_do_not_matter_and_the_secret_does() -> None:
    value = torch.randn(30, 50)
    turned = value.t().contiguous().t()
    found = fingerprint.of_group([value], b"s")
    assert fingerprint.of_group([turned], b"s") == found
    assert fingerprint.of_group([value], b"t") != found


def test_bytes_cannot_move_between_tensors() -> None:
    row = torch.arange(6.0)
    cuts = [[row], [row[:2], row[2:]], [row[:4], row[4:]], [row, row[:0]], [row[:0], row]]
    assert len({fingerprint.of_group(cut, b"s") for cut in cuts}) == len(cuts)


@pytest.mark.parametrize("value", [torch.tensor(2.0), torch.empty(0), torch.empty(3, 0)])
def test_numbers_and_empty_tensors(value: torch.Tensor) -> None:
    assert len(fingerprint.of_group([value], b"s")) == 16

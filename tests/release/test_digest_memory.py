"""Digests of tensors in ordinary memory: every bit counts, and nothing else does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noshuffle.c_library import build, text_of
from noshuffle.release import tags

TYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8, torch.bool]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.sampled_from(TYPES), st.integers(0, 2**31))
def test_one_flipped_bit_anywhere_changes_it(size: int, dtype: torch.dtype, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    value = (torch.randn(size, generator=draw) * 100).to(dtype)
    before = tags.of_group([value], b"secret")
    assert tags.of_group([value.clone()], b"secret") == before
    data = value.view(torch.uint8)
    place = int(torch.randint(len(data), (1,), generator=draw))
    data[place] ^= 1 << int(torch.randint(8, (1,), generator=draw))
    assert tags.of_group([value], b"secret") != before


def test_strides_do_not_matter_and_the_secret_does() -> None:
    value = torch.randn(30, 50)
    turned = value.t().contiguous().t()
    found = tags.of_group([value], b"s")
    assert tags.of_group([turned], b"s") == found
    assert tags.of_group([value], b"t") != found


def test_bytes_cannot_move_between_tensors() -> None:
    row = torch.arange(6.0)
    cuts = [[row], [row[:2], row[2:]], [row[:4], row[4:]], [row, row[:0]], [row[:0], row]]
    assert len({tags.of_group(cut, b"s") for cut in cuts}) == len(cuts)


@pytest.mark.parametrize("value", [torch.tensor(2.0), torch.empty(0), torch.empty(3, 0)])
def test_numbers_and_empty_tensors(value: torch.Tensor) -> None:
    assert len(tags.of_group([value], b"s")) == 16


def test_the_loop_gives_the_tags_of_the_library_and_a_wrong_one_is_not_used() -> None:
    built = tags.library()
    if built is None:
        pytest.skip("no compiler, or no carry-less multiplication")
    key, value = bytes(range(1, 33)), torch.randn(16 * tags.PIECE + 3).view(torch.uint8)
    place, size = value.data_ptr(), len(value)
    for cut in (0, 3, 16, 4 * tags.PIECE, size):
        wanted = tags.tag_by_library([value[:cut].numpy().data, value[cut:].numpy().data], key)
        for threads in (1, 2, 3):
            parts = [(place, cut), (place + cut, size - cut)]
            assert tags.tag_in_c(built, parts, key, threads) == wanted
    text = text_of("ghash.c")
    wrong_ones = {
        "0x87, 0x87": "0x87, 0x86",
        "sum ^ turned(data), turned(data + 16)": "turned(data), turned(data + 16)",
    }
    for right, wrong in wrong_ones.items():
        assert right in text
        bad = build(text.replace(right, wrong))
        assert bad is not None
        assert not tags.agrees(bad)


def test_lazy_views_are_what_they_mean() -> None:
    value = torch.randn(40, dtype=torch.complex64)
    assert tags.of_group([value.conj()], b"secret") != tags.of_group([value], b"secret")
    whole = value.conj().resolve_conj()
    assert tags.of_group([value.conj()], b"secret") == tags.of_group([whole], b"secret")

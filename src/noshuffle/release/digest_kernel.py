# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""The digest of `digest` as one pass over memory on a GPU.

One program digests one block: its words times the first keys in four lanes, the upper halves of the
four sums times the second keys of the block, added to the group's four numbers. Addition modulo
2⁶⁴ is exact in any order, so the atomic additions give the same bits every time. A launch reads
nothing from the host and can be captured in a CUDA graph. State: none.
"""

from __future__ import annotations

from noshuffle.triton_shim import HAS_TRITON as HAS_TRITON
from noshuffle.triton_shim import jit, tl


@jit
def digest(
    owners,  # int32, per program: the region that it works on
    regions,  # int64 × 5, per region: address, words, first program, first block, group
    first,  # int64, 4 × BLOCK: keys of the words
    second,  # int64, blocks × 4 × 4: keys of the blocks
    out,  # int64, groups × 4
    WORD: tl.constexpr,  # unsigned type of a word
    BLOCK: tl.constexpr,
):
    """Add one block of one region to the digest of its group."""
    region = regions + tl.load(owners + tl.program_id(0)) * 5
    pointer = tl.load(region).to(tl.pointer_type(WORD))
    index = tl.program_id(0) - tl.load(region + 2)
    place = index * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(pointer + place, mask=place < tl.load(region + 1), other=0).to(tl.int64)
    keys = second + (tl.load(region + 3) + index) * 16 + tl.arange(0, 4)
    total = tl.zeros([4], tl.int64)
    for lane in tl.static_range(4):
        part = tl.sum(words * tl.load(first + lane * BLOCK + tl.arange(0, BLOCK)), axis=0)
        upper = (part >> 32) & 0xFFFFFFFF
        total += upper * tl.load(keys + lane * 4)
    tl.atomic_add(out + tl.load(region + 4) * 4 + tl.arange(0, 4), total, sem="relaxed")


@jit
def publish(
    total,  # int64 × 4: a digest, made zero for the next one
    tick,  # int64: how many were published
    ring,  # address of int64, SLOTS × 4, in memory that the host reads
    SLOTS: tl.constexpr,
):
    """Hand three words of a digest and its number to the host.

    They are one sector of 32 bytes, which a device writes as a whole: where the host finds the
    number, it finds the words that belong to it.
    """
    count = tl.load(tick) + 1
    lane = tl.arange(0, 4)
    words = tl.load(total + lane)
    place = (ring + (count % SLOTS) * 32).to(tl.pointer_type(tl.int64))
    tl.store(place + lane, tl.where(lane == 3, count, words))
    tl.store(total + lane, words * 0)
    tl.store(tick, count)

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
"""Norms of a convolution with few positions and many channels, by inner products of its windows.

    ‖G_b‖² = Σ_{k,l} ⟨w_k, w_l⟩·⟨g_k, g_l⟩        w_k: the window of x at position k

takes K²·(C·taps + O) products an example instead of the K·C·taps·O of G_b itself (`conv_kernels`):
a fifteenth of them for 512 channels at 4 × 4 positions. A program takes one example, and leaves the
five numbers of `gpu_kernels.tiles`, of which `join_tiles` makes a norm that is never too small.
State: none. The module can be imported without Triton, but its kernel not be launched.

>>> pays(16, 4608, 512), pays(64, 2304, 256), pays(1024, 576, 64)
(True, True, False)
"""

from __future__ import annotations

import torch
from torch import Tensor

from noshuffle.clipping.conv_tolerance import tolerance
from noshuffle.clipping.gpu_kernels import _long, join_tiles
from noshuffle.clipping.gram import TENSOR_CORE
from noshuffle.triton_shim import jit, tl

#: Positions of which a program holds all inner products.
MOST_POSITIONS = 64
#: Channels that are multiplied at once, and in pairs: 64 KiB of shared memory for either.
DEEP, DEEP_IN_PAIRS = 128, 64


def pays(positions: int, inputs: int, outputs: int) -> bool:
    """Whether inner products are the cheaper way, with room for their smaller tiles."""
    is_less = 2 * positions * (inputs + outputs) <= inputs * outputs
    return positions <= MOST_POSITIONS and is_less


@jit
def _pair_product(high, low):
    """⟨v_k, v_l⟩ of v = high + low but for ⟨low_k, low_l⟩, the small terms first.

    Tensor cores round towards zero; of one block of channels they do it only a few times.
    """
    table = tl.dot(low, tl.trans(high))
    table = tl.dot(high, tl.trans(low), table)
    return tl.dot(high, tl.trans(high), table)


@jit
def inner(
    x, g, out, starts, inside, outputs, positions, x_example, x_channel, x_high, x_wide, g_example,
    g_row, g_place, pad_high, pad_wide, step_high, step_wide, tiny,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, TAPS_WIDE: tl.constexpr, ALIGN: tl.constexpr,
    PAIR: tl.constexpr, SIDE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Σ ⟨w_k, w_l⟩⟨g_k, g_l⟩ of one example, and what its rounding is measured by."""
    example = tl.program_id(0).to(tl.int64)
    k, lane = tl.arange(0, SIDE), tl.arange(0, BK)
    here = k < positions
    own_x, own_g = x + example * x_example, g + example * g_example
    start = tl.load(starts + k, mask=here, other=0) * ALIGN
    bits = tl.load(inside + k, mask=here, other=0)
    of_w = tl.zeros((SIDE, SIDE), tl.float32)
    PARTS: tl.constexpr = (CHANNELS + BK - 1) // BK
    for i in range(0, TAPS * PARTS):
        tap, channel = i // PARTS, i % PARTS * BK + lane
        place = (tap // TAPS_WIDE * step_high - pad_high) * x_high
        place += (tap % TAPS_WIDE * step_wide - pad_wide) * x_wide
        is_in = (((bits >> tap) & 1) != 0)[:, None] & (channel < CHANNELS)[None, :]
        where = (start + place)[:, None] + channel[None, :] * x_channel
        w = tl.load(own_x + where, mask=is_in, other=0.0)
        if PAIR:
            low = tl.load(own_x + where + CHANNELS * x_channel, mask=is_in, other=0.0)
            of_w += _pair_product(w, low)
        else:
            of_w = tl.dot(w, tl.trans(w), of_w)
    of_g = tl.zeros((SIDE, SIDE), tl.float32)
    for at in range(0, outputs, BK):
        row = at + lane
        is_in = here[:, None] & (row < outputs)[None, :]
        where = k[:, None] * g_place + row[None, :] * g_row
        v = tl.load(own_g + where, mask=is_in, other=0.0)
        if PAIR:
            low = tl.load(own_g + where + outputs * g_row, mask=is_in, other=0.0)
            of_g += _pair_product(v, low)
        else:
            of_g = tl.dot(v, tl.trans(v), of_g)
    is_own = (k[:, None] == k[None, :]) & here[:, None]
    long_w = _long(of_w, is_own, CHANNELS * TAPS, tiny)
    long_g = _long(of_g, is_own, outputs, tiny)
    size = long_w * long_g
    to = out + example * 5
    tl.store(to, tl.sum(of_w * of_g).to(tl.float64))
    tl.store(to + 1, tl.sum(size * size))
    tl.store(to + 2, tl.sum(size))
    tl.store(to + 3, tl.sum(long_w))
    tl.store(to + 4, tl.sum(long_g))


def squares(
    x: Tensor,
    g: Tensor,
    tables: tuple[Tensor, Tensor, int],
    *,
    kernel: tuple[int, int],
    how: tuple[tuple[int, int], ...],
    pictures: int,
    is_pair: bool = False,
) -> Tensor:
    """‖G_b‖² of every example, [B] in float64; x and g in half precision, or pairs, channels last.

    Guarantees: never below what `conv_kernels.total` adds at factor one. Of pairs that is
    G' = Σ_k (g_k w_k − g_lo,k w_lo,k), while the inner products give

        T = ‖G‖² − ‖Σ g_k w_lo,k‖² − ‖Σ g_lo,k w_k‖² + ‖Σ g_lo,k w_lo,k‖²        G = Σ_k g_k w_k

    as ⟨w_lo,k, w_lo,l⟩ lacks in one of their factors, ⟨g_lo,k, g_lo,l⟩ in the other. From
    |lo| ≤ 2⁻¹¹·|hi| and, with that, ‖v_lo‖ ≤ q·‖v‖ with q = 2⁻¹¹/(1 − 2⁻¹¹), R = Σ_k ‖g_k‖‖w_k‖:

        ‖G'‖ ≤ ‖G‖ + q²R,    ‖G‖² ≤ T + 2q²R²
        ‖G'‖² ≤ T + 2q²R² + 2q²R·√(T + 2q²R²) + q⁴R² ≤ (√T + q²R)² + (2 + 2√2·q)·q²R²

    the last from √(T + 2q²R²) ≤ √T + √2·qR. `join_tiles` has √T + moved·√spread, R² ≤ K·spread of
    K positions, so moved = 2⁻²¹·√K is twice what is needed, and so is 2⁻²⁰ in its `share`; lengths
    it knows come from the inner products, and are too small by a part of 2⁻²¹ at most. Norms that
    are found in other ways have that share, too (`conv_tolerance`), pairs or not.
    """
    starts, inside, unit = tables
    many = 2 if is_pair else 1
    examples, channels, outputs = len(x) // pictures, x.shape[1] // many, g.shape[1] // many
    positions, taps = pictures * g.shape[2] * g.shape[3], kernel[0] * kernel[1]
    inputs = channels * taps
    common = tolerance(g, inputs, outputs)
    needed = common._replace(
        growth=TENSOR_CORE * (2 * 3 * DEEP_IN_PAIRS if is_pair else inputs + outputs),
        moved=max(common.moved, 2.0**-21 * positions**0.5 if is_pair else 0.0),
    )
    parts = torch.empty(examples, 1, 5, dtype=torch.float64, device=x.device)
    inner[(examples,)](
        x, g, parts, starts, inside, outputs, positions, pictures * x.stride(0), x.stride(1),
        x.stride(2), x.stride(3), pictures * g.stride(0), g.stride(1), g.stride(3), *how[1],
        *how[2], needed.tiny, CHANNELS=channels, TAPS=taps, TAPS_WIDE=kernel[1], ALIGN=unit,
        PAIR=is_pair, SIDE=max(16, 1 << (positions - 1).bit_length()),
        BK=DEEP_IN_PAIRS if is_pair else DEEP, num_warps=4 if positions > 16 else 2, num_stages=4,
    )  # fmt: skip
    found = torch.empty(examples, dtype=torch.float64, device=x.device)
    join_tiles[(examples,)](parts, found, 1, positions, inputs, outputs, *needed, MANY=1)
    return found

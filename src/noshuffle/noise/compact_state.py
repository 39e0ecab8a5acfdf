"""Buffers of 16 bits as float32 and back: what a stream saves, and goes on from.

    Ŝ = q·(k − D)        k = round(Ŝ/q + D)        D of the step that wrote them last (`compact`)

k − D in float32 is less than ½ off for every k, so that k is found again and a resumed run has the
same bits, also under a longer plan: D and q are the same there. A saved stream thus has one form
for both kinds of buffers, and may go on with either: buffers that were float32 are rounded here, by
dithers that nothing was rounded with but the same buffers in another life, which differ by earlier
errors only (docs/proofs.md, "Buffers of 16 bits"). No state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from noshuffle.noise.compact import Dithering, pack_, unpacked
from noshuffle.noise.gaussian import TILE
from noshuffle.noise.layout import Layout
from noshuffle.noise.source import AnySource


def read_buffers(state: Tensor, *, layout: Layout, source: AnySource, last: Dithering) -> Tensor:
    """The buffers as float32 in ordinary memory; `last`: of the step that wrote them."""
    found = torch.empty(state.shape, dtype=torch.float32, device="cpu")
    for k, place, words, b in _each(state, layout=layout, source=source, last=last):
        found[b, place] = unpacked(k, words=words, buffer=b, spacing=last.spacing[b]).cpu()
    return found


def write_buffers_(
    state: Tensor, values: Tensor, *, layout: Layout, source: AnySource, last: Dithering
) -> None:
    """The reverse of `read_buffers`, and the first rounding of buffers that were float32."""
    for k, place, words, b in _each(state, layout=layout, source=source, last=last):
        s = values[b, place].to(state.device, copy=True)
        pack_(k, s, words=words, buffer=b, spacing=last.spacing[b])


def _each(
    state: Tensor, *, layout: Layout, source: AnySource, last: Dithering
) -> Iterator[tuple[Tensor, slice, Tensor, int]]:
    """Per buffer of every chunk: its numbers, their place, the words of its dithers, which one."""
    drawer = source.drawer(layout.chunks, device=state.device, workers=1)
    for index, chunk in enumerate(layout.chunks):
        place = slice(chunk.first, chunk.first + chunk.tiles)
        words = torch.empty((chunk.tiles, TILE), dtype=torch.int32, device=state.device)
        for b in range(len(last.spacing)):
            if not b % 2:
                row = last.row(last.after) + b // 2
                drawer.words_(words, chunk=index, row=row, draw=last.after)
            yield state[b, place], place, words, b

"""Named tensors as one row of tiles, cut into chunks that fit a cache.

Each name owns whole tiles of its own stream: elements [start, start + numel) of the tensor lie in
the tiles floor(start / 1024) … of that stream, so that a shard draws exactly what the whole tensor
would. The regions follow one another in the order of the sorted names; that order is bookkeeping
only, since what is drawn depends on name, row and index and nothing else.

>>> layout = Layout.of({"w": (3, 500), "b": (3,)}, chunk_tiles=2)
>>> [(piece.name, piece.tile, piece.tiles) for chunk in layout.chunks for piece in chunk.pieces]
[('b', 0, 1), ('w', 0, 1), ('w', 1, 1)]
>>> layout.chunks[1].pieces[0].place, layout.chunks[1].pieces[0].begin
(slice(0, 476, None), 1024)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from noshuffle.errors import InvalidInput
from noshuffle.noise.gaussian import TILE


@dataclass(frozen=True)
class Piece:
    """`tiles` tiles of the stream of `name` from `tile` on, at tile `at` of their chunk.

    They hold elements [begin, end) of the (flattened) tensor, behind `lead` that are not of it.
    """

    name: str
    tile: int
    tiles: int
    at: int
    begin: int
    end: int
    lead: int

    @property
    def place(self) -> slice:
        """Where those elements lie in the chunk."""
        first = self.at * TILE + self.lead
        return slice(first, first + self.end - self.begin)


@dataclass(frozen=True)
class Chunk:
    """Consecutive tiles of the flat row, from `first` on, that are worked on together."""

    first: int
    tiles: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Layout:
    """Where every element of every named tensor lies."""

    shapes: dict[str, tuple[int, ...]]
    starts: dict[str, int]
    tiles: int
    chunks: tuple[Chunk, ...]

    @staticmethod
    def of(
        shapes: Mapping[str, Sequence[int]],
        *,
        starts: Mapping[str, int] | None = None,
        chunk_tiles: int,
    ) -> Layout:
        """Lay out tensors; `starts` says where a shard begins in its whole tensor."""
        sizes = {name: _shape(name, shapes[name]) for name in sorted(shapes)}
        begins = {name: int((starts or {}).get(name, 0)) for name in sizes}
        for name in starts or {}:
            if name not in sizes:
                raise InvalidInput(f"starts names {name!r}, which is not among the shapes")
            if begins[name] < 0:
                raise InvalidInput(f"the start of {name!r} must be >= 0, got {begins[name]}")
        regions = []
        flat = 0
        for name, shape in sizes.items():
            numel = math.prod(shape)
            if numel:
                first, skip = divmod(begins[name], TILE)
                count = -(-(skip + numel) // TILE)
                regions.append((name, flat, first, count, skip, numel))
                flat += count
        return Layout(sizes, begins, flat, tuple(_cut(regions, flat, chunk_tiles)))

    def views(self, state: Tensor) -> dict[str, list[Tensor]]:
        """What each name owns of buffers (count, tiles, 1024), without the padding of its tiles.

        Views of shape (count, some elements), which follow one another in the tensor.
        """
        flat = state.flatten(1)
        found = {name: [flat[:, :0]] for name, shape in self.shapes.items() if not math.prod(shape)}
        for chunk in self.chunks:
            own = flat[:, chunk.first * TILE :]
            for piece in chunk.pieces:
                found.setdefault(piece.name, []).append(own[:, piece.place])
        return found


def _shape(name: object, shape: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(name, str):
        raise InvalidInput(f"tensors are matched by name; expected a string, got {name!r}")
    sizes = tuple(int(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise InvalidInput(f"the shape of {name!r} must have no negative size, got {sizes}")
    return sizes


Region = tuple[str, int, int, int, int, int]


def _cut(regions: Sequence[Region], total: int, chunk_tiles: int) -> list[Chunk]:
    """Chunks of at most `chunk_tiles` tiles; one walk over regions and chunks together."""
    pieces: list[list[Piece]] = [[] for _ in range(-(-total // chunk_tiles))]
    for name, flat, first, count, skip, numel in regions:
        done = 0
        while done < count:
            index, at = divmod(flat + done, chunk_tiles)
            take = min(count - done, chunk_tiles - at)
            # Element e of the tensor is element skip + e of its region.
            begin, end = max(done * TILE, skip), min((done + take) * TILE, skip + numel)
            elements = (begin - skip, end - skip, begin - done * TILE)
            pieces[index].append(Piece(name, first + done, take, at, *elements))
            done += take
    return [
        Chunk(i * chunk_tiles, min(chunk_tiles, total - i * chunk_tiles), tuple(own))
        for i, own in enumerate(pieces)
    ]

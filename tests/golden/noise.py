"""Golden noise: the streams of every recipe under test seeds, to the bit.

Noise is the same on every processor, whichever loop makes it. Recipes are given by their numbers,
since fitted or computed ones may differ in their last bits. Of every stream: the first and last
values of some steps in hexadecimal, and SHA-256 of all bytes of all steps.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import numpy as np
import torch
from tests.golden.arithmetic import bits
from tests.golden.entries import Entry

from noshuffle.noise import NoiseStream, Source, test_source
from noshuffle.strategies.recipe import Buffered, FeedForward, Forest, Recipe, Recursive, Rows

STEPS = 21
GAINS = tuple(1.0 / (1.0 + 0.125 * t) for t in range(STEPS))
TAPS = ((0, 1.0), (4, 0.3), (8, -0.2))
_DENSE = np.array(
    [[((7 * i + 3 * j) % 11 - 5) / 8 if j < i else 1.0 * (i == j) for j in range(STEPS)]
     for i in range(STEPS)]
)  # fmt: skip
RECIPES: dict[str, Recipe] = {
    "identity": FeedForward((1.0,)),
    "identity with gains": FeedForward((1.0,), scale=GAINS),
    "sums": FeedForward((1.0, -1.0)),
    "banded inverse": FeedForward((1.0, -0.5, 0.0, -0.1, 0.05), scale=GAINS),
    "banded": Recursive((0.8, -0.4, 0.2, 0.1)),
    "banded with gains": Recursive((-1.0, 0.5), scale=GAINS),
    "blt": Buffered((0.95, 0.6), (-0.1, -0.3)),
    "blt of four": Buffered((0.99, 0.9, 0.5, 0.1), (-0.05, -0.1, -0.2, -0.1)),
    "blt with taps": Buffered((0.95, 0.6), (-0.1, -0.3), TAPS),
    "blt with taps and gains": Buffered((0.95, 0.6, 0.2), (-0.1, -0.3, 0.1), TAPS, GAINS),
    "blt two-sided": Buffered((0.95, 0.6), (-0.1, -0.3), TAPS, GAINS, GAINS[::-1]),
    "dense": Rows(_DENSE),
} | {
    f"{variant} tree, blocks of {block}{', completed' * completion}": Forest(
        variant, STEPS, block, completion
    )
    for variant in ("plain", "honaker")
    for block, completion in ((0, False), (5, False), (7, True), (8, False))
}
SHAPES: dict[str, tuple[int, ...]] = {"w": (7, 300), "b": (3,), "scalar": ()}
SCALE = 0.37


def stream(recipe: str, kind: str, source: Source | None = None) -> dict[str, Any]:
    """All steps of a stream onto zeros, but for the last one, which is onto other values."""
    noise = NoiseStream(
        RECIPES[recipe],
        source or test_source(seed=f"golden {recipe}", kind=kind),
        SHAPES,
        scale=SCALE,
        steps=STEPS,
    )
    found: dict[str, Any] = {}
    whole = hashlib.sha256()
    for step in range(STEPS):
        values = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        if step == STEPS - 1:
            values["w"] += torch.arange(2100.0).reshape(7, 300) / 64 - 10
        noise.add_(values)
        for name in SHAPES:
            whole.update(values[name].numpy().astype("<f4").tobytes())
        if step in (0, 1, 12, STEPS - 1):
            found[str(step)] = bits(values["w"])["ends"]
    return found | {"all": whole.hexdigest()}


def rekeyed(recipe: str) -> dict[str, Any]:
    """A source with another key from a later row on."""
    source = Source(bytes(32), kind="aes").rekeyed(9, bytes(range(32)))
    return stream(recipe, "aes", source)


def normals(kind: str) -> dict[str, Any]:
    """Rows of Z themselves, and a part of one."""
    source = test_source(seed="normals", kind=kind)
    found: dict[str, Any] = {}
    for row, size, start in ((0, 5000, 0), (1, 1024, 0), (2**31, 77, 0), (3, 10, 1020)):
        out = torch.empty(size)
        source.normal_(out, row=row, name="weight", start=start)
        found[f"row {row} from {start}"] = bits(out)
    return found


SECTION = {
    f"{recipe}, {kind}": Entry(partial(stream, recipe, kind))
    for recipe in RECIPES
    for kind in ("aes", "philox")
}
SECTION |= {
    f"{recipe}, rekeyed": Entry(partial(rekeyed, recipe))
    for recipe in ("identity", "banded", "blt", "dense", "honaker tree, blocks of 0")
}
SECTION |= {f"normals, {kind}": Entry(partial(normals, kind)) for kind in ("aes", "philox")}

"""The compiled step of AES noise: the bits of the chunk by chunk form, whatever is asked."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noshuffle.c_library import text_of
from noshuffle.noise import NoiseStream, native, test_source, whole_step
from noshuffle.noise.gaussian import TILE
from noshuffle.noise.layout import Layout
from noshuffle.noise.whole_step import WholeStep
from noshuffle.noise.words import AesWords
from noshuffle.strategies.recipe import Buffered, FeedForward, Forest, Recipe, Recursive, Rows

needs_loop = pytest.mark.skipif(
    not whole_step.is_ready(),
    reason="no C compiler or no AES instructions: there is one form only",
)
LOWER = np.tril(np.random.default_rng(0).normal(size=(8, 8)))
RECIPES: dict[str, Recipe] = {
    "identity": FeedForward((1.0,), scale=tuple(1.0 + 0.1 * t for t in range(8))),
    "banded inverse": FeedForward((1.0, -0.5, 0.0, -0.1)),
    "bands": Recursive((1.0, -0.5, -0.25)),
    "blt": Buffered((0.9, 0.5), (-0.2, -0.1), scale=tuple(1.0 + 0.1 * t for t in range(8))),
    "taps": Buffered((0.9,), (-0.2,), ((0, 1.0), (2, 0.3)), draw_scale=(1.5,) * 8),
    "tree": Forest("plain", 8, block=3),
    "honaker": Forest("honaker", 8, block=5, completion=True),
    "rows": Rows(LOWER),
}


def steps(
    recipe: Recipe,
    *,
    in_chunks: bool,
    times: float,
    kind: torch.dtype = torch.float32,
    **options: Any,
) -> list[Any]:
    """What eight steps leave: values that are not zero to begin with, and the saved state."""
    shapes = options["shapes"]
    stream = NoiseStream(recipe, test_source(seed=5), scale=0.3, steps=8, **options)
    assert stream._whole is not None
    if in_chunks:
        stream._whole = None
    out: list[Any] = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        values = {
            name: torch.randn(shape, generator=generator, dtype=kind)
            for name, shape in shapes.items()
        }
        assert in_chunks or stream._whole.fits(values)
        stream.add_(values, times=times)
        out += list(values.values())
    return out + list(stream.state_dict()["buffers"].values())


@needs_loop
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_it_has_the_bits_of_the_chunks(name: str, threads: int, kind: torch.dtype) -> None:
    before = torch.get_num_threads()
    shapes = {"w": (130, 1000), "b": (3,), "none": (0, 4), "one": (1024,), "scalar": ()}
    try:
        torch.set_num_threads(threads)
        times = 1.0 if threads == 1 else 1 / 250
        options = {"shapes": shapes, "times": times, "kind": kind}
        fast, slow = (steps(RECIPES[name], in_chunks=c, **options) for c in (False, True))
        assert len(fast) == len(slow) >= 8 * len(shapes)
        assert all(torch.equal(a, b) for a, b in zip(fast, slow))
    finally:
        torch.set_num_threads(before)


@needs_loop
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5000),
    st.sampled_from(sorted(RECIPES)),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_any_size(size: int, name: str, kind: torch.dtype) -> None:
    options = {"shapes": {"w": (size,)}, "times": 1 / 3, "kind": kind}
    fast, slow = (steps(RECIPES[name], in_chunks=c, **options) for c in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(fast, slow))


@needs_loop
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_nothing_beside_the_values_is_touched(kind: torch.dtype) -> None:
    room = torch.zeros(3 * 1500, dtype=kind)
    stream = NoiseStream(FeedForward((1.0,)), test_source(seed=5), {"w": (1500,)}, scale=1, steps=1)
    stream.add_({"w": room[1500:3000]})
    assert int((room[1500:3000] != 0).sum()) > 1480
    assert not room[:1500].any()
    assert not room[3000:].any()


@needs_loop
@settings(max_examples=30, deadline=None)
@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**64 - 1), st.integers(0, 2**54))
def test_its_words_are_those_of_the_cryptography_package(key: bytes, row: int, tile: int) -> None:
    library = native.library()
    assert library is not None
    layout = Layout.of({"w": (TILE,)}, starts={"w": tile * TILE}, chunk_tiles=1)
    expected = torch.empty(1, TILE, dtype=torch.int32)
    AesWords(layout.chunks, seeds={"w": key}).fill_(expected, chunk=0, row=row)
    schedule, words = (ctypes.c_uint8 * 240)(), torch.empty(1, TILE, dtype=torch.int32)
    library.aes_schedule(ctypes.create_string_buffer(key, 32), schedule)
    library.aes_tile(words.data_ptr(), schedule, row, tile * TILE // 4)
    assert torch.equal(words, expected)


#: Slips in the key schedule, the last key and the rounds, in the text that this compiler reads.
SLIPS = {
    "x86_64": [("BOTH(6, 4)", "BOTH(6, 5)"), ("key[14]", "key[13]"), ("r < 14", "r < 13")],
    "aarch64": [("i % 8 == 4", "i % 8 == 3"), ("key[14]", "key[13]"), ("r < 13", "r < 12")],
}
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


@needs_loop
@pytest.mark.parametrize(("right", "wrong"), SLIPS.get(MACHINE, []))
def test_a_wrong_cipher_is_not_used(right: str, wrong: str) -> None:
    text = text_of("noise.c")
    assert text.count(right) >= 1
    built = native.build_loops(text.replace(right, wrong))
    assert built is not None
    assert not native.knows_aes(built)


@needs_loop
@pytest.mark.parametrize("without", ["", "__AVX512BW__", "__VAES__"])
def test_blocks_of_every_processor_are_those_of_the_standard(without: str) -> None:
    """Four, two and one at a time; a processor lacks what the text is not told of."""
    built = native.build_loops((f"#undef {without}\n" if without else "") + text_of("noise.c"))
    assert built is not None
    assert native.knows_aes(built)


@needs_loop
def test_mixed_types_take_the_chunks() -> None:
    shapes = {"a": (1500,), "b": (700,)}
    kinds = {"a": torch.float32, "b": torch.float64}
    found = []
    for is_mixed in (True, False):
        values = {
            name: torch.zeros(shape, dtype=kinds[name] if is_mixed else torch.float32)
            for name, shape in shapes.items()
        }
        stream = NoiseStream(FeedForward((1.0,)), test_source(seed=5), shapes, scale=1, steps=1)
        assert stream._whole is not None
        assert stream._whole.fits(values) is not is_mixed
        stream.add_(values)
        found.append(values)
    assert all(torch.equal(found[0][name].float(), found[1][name]) for name in shapes)


@needs_loop
@pytest.mark.parametrize("kind", ["bfloat16", "strides"])
def test_other_values_take_the_chunks_and_are_multiplied_too(kind: str) -> None:
    def run(times: float) -> torch.Tensor:
        source = test_source(seed=5)
        stream = NoiseStream(FeedForward((1.0,)), source, {"w": (30, 70)}, scale=1, steps=1)
        w = torch.ones(70, 30).t() if kind == "strides" else torch.ones(30, 70).bfloat16()
        stream.add_({"w": w}, times=times)
        return w

    assert torch.equal(run(0.25), run(1.0) * 0.25)


@needs_loop
@pytest.mark.parametrize("wrong", ["a value", "a buffer"])
def test_a_loop_that_steps_wrongly_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison that is made before the first use; one unit of the last place is enough."""
    real = WholeStep.add_

    def altered(self: WholeStep, values: Any, **step: Any) -> None:
        real(self, values, **step)
        place = values["b"] if wrong == "a value" else self._state.view(-1)
        if len(place):
            place[:1] = torch.nextafter(place[:1], torch.tensor(9.0))

    assert whole_step._does_steps.__wrapped__()
    monkeypatch.setattr(WholeStep, "add_", altered)
    assert not whole_step._does_steps.__wrapped__()

"""The compiled step of AES noise: the bits of torch, whatever is asked."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.noise.texts import built, needs_compiler, text

from noshuffle.noise import NoiseStream, Source, c_step, test_source
from noshuffle.noise.c_step import CStep
from noshuffle.noise.gaussian import TILE, normals_
from noshuffle.noise.layout import Layout
from noshuffle.noise.step_plan import StepPlan
from noshuffle.noise.torch_step import TorchStep
from noshuffle.strategies.recipe import Buffered, FeedForward, Forest, Recipe, Recursive, Rows

needs_loop = pytest.mark.skipif(
    c_step.library() is None,
    reason="no library or no AES instructions: there is one form only",
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
    by_torch: bool,
    times: float,
    kind: torch.dtype = torch.float32,
    **options: Any,
) -> list[Any]:
    """What eight steps leave: values that are not zero to begin with, and the saved state."""
    shapes = options["shapes"]
    stream = NoiseStream(recipe, test_source(seed=5), scale=0.3, steps=8, **options)
    assert stream._c_step is not None
    if by_torch:
        stream._c_step = None
    out: list[Any] = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        values = {
            name: torch.randn(shape, generator=generator, dtype=kind)
            for name, shape in shapes.items()
        }
        assert by_torch or stream._c_step.fits(values)
        stream.add_(values, times=times)
        out += list(values.values())
    return out + list(stream.state_dict()["buffers"].values())


@needs_loop
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_it_has_the_bits_of_torch(name: str, threads: int, kind: torch.dtype) -> None:
    before = torch.get_num_threads()
    shapes = {"w": (130, 1000), "b": (3,), "none": (0, 4), "one": (1024,), "scalar": ()}
    try:
        torch.set_num_threads(threads)
        times = 1.0 if threads == 1 else 1 / 250
        options = {"shapes": shapes, "times": times, "kind": kind}
        fast, slow = (steps(RECIPES[name], by_torch=c, **options) for c in (False, True))
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
    fast, slow = (steps(RECIPES[name], by_torch=c, **options) for c in (False, True))
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
@given(
    st.binary(min_size=32, max_size=32),
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=3, unique=True),
    st.integers(0, 2**54),
)
def test_its_words_are_those_of_the_cryptography_package(
    key: bytes, rows: list[int], tile: int
) -> None:
    """Any key, row and place of a stream."""
    loaded = c_step.library()
    assert loaded is not None
    source, plan = Source(key, kind="aes"), StepPlan(tuple((row, 0.5) for row in sorted(rows)))
    layout = Layout.of({"w": (TILE,)}, starts={"w": tile * TILE}, chunk_tiles=1)
    state, fast, slow = torch.zeros(0, 1, TILE), torch.zeros(TILE), torch.zeros(TILE)
    own = CStep(layout, source=source, state=state, loaded=loaded)
    own.add_({"w": fast}, plan=plan, scale=1.0, times=1.0)
    TorchStep(layout, source=source, state=state).add_({"w": slow}, plan=plan, scale=1.0)
    assert torch.equal(fast, slow)


@needs_compiler
@pytest.mark.parametrize("weight", [1.0, -0.37, 1e-30, 0.0, 3e8])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("has_fma", [False, True])
def test_its_normals_are_those_of_torch_at_the_ends_too(
    weight: float, accumulate: bool, has_fma: bool, tmp_path: Path
) -> None:
    """By a function that is added to the text, since AES gives no words of one's choice."""
    c_text = text() + "void probe(int32_t *w, float *z, float c, int a) { normals(w, z, c, a); }"
    if not has_fma:
        c_text, count = re.subn(r"#if .*__FP_FAST_FMAF.*", "#if 0", c_text)
        assert count == 1
    rng = np.random.default_rng(1)
    words = torch.tensor(rng.integers(-(2**31), 2**31, size=(40, TILE)), dtype=torch.int32)
    ends = torch.tensor([0, -1, 1, -2, 2**31 - 1, -(2**31), 2**30, 3])
    words[0, :8], words[1, 512:520] = ends, ends
    fast, slow = torch.ones(40, TILE), torch.ones(40, TILE)
    normals_(slow, words=words, weight=weight, accumulate=accumulate)
    probe = built(tmp_path, c_text).probe
    probe.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float, ctypes.c_int]
    for word, z in zip(words, fast):
        probe(word.data_ptr(), z.data_ptr(), weight, accumulate)
    assert torch.equal(fast, slow)
    assert bool(torch.isfinite(fast).all())


#: Slips in the key schedule, the last key and the rounds, in the text that this compiler reads.
SLIPS = {
    "x86_64": [("BOTH(6, 4)", "BOTH(6, 5)"), ("key[14]", "key[13]"), ("r < 14", "r < 13")],
    "aarch64": [("i % 8 == 4", "i % 8 == 3"), ("key[14]", "key[13]"), ("r < 13", "r < 12")],
}
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


#: Slips in the arithmetic.
WRONG = [
    ("return fused(p, f, rest);", "return 1.0000001f * fused(p, f, rest);"),
    ("y[j] *= gain;", "(void)gain;"),
    ("((a + middle) - middle) * times", "a * times"),
]


@needs_loop
@needs_compiler
@pytest.mark.parametrize(("right", "wrong"), SLIPS.get(MACHINE, []) + WRONG)
def test_a_wrong_build_is_not_used(right: str, wrong: str, tmp_path: Path) -> None:
    assert text().count(right) >= 1
    assert not c_step.agrees(built(tmp_path, text().replace(right, wrong)))


@needs_loop
@needs_compiler
@pytest.mark.parametrize("without", ["__AVX512BW__", "__VAES__", "__AES__"])
def test_blocks_of_every_processor_are_those_of_the_standard(without: str, tmp_path: Path) -> None:
    """Four, two and one at a time; a processor lacks what the text is not told of."""
    library = built(tmp_path, f"#undef {without}\n" + text())
    assert c_step.agrees(library) is (without != "__AES__" or MACHINE != "x86_64")


@needs_loop
def test_mixed_types_go_by_torch() -> None:
    shapes = {"a": (1500,), "b": (700,)}
    kinds = {"a": torch.float32, "b": torch.float64}
    found = []
    for is_mixed in (True, False):
        values = {
            name: torch.zeros(shape, dtype=kinds[name] if is_mixed else torch.float32)
            for name, shape in shapes.items()
        }
        stream = NoiseStream(FeedForward((1.0,)), test_source(seed=5), shapes, scale=1, steps=1)
        assert stream._c_step is not None
        assert stream._c_step.fits(values) is not is_mixed
        stream.add_(values)
        found.append(values)
    assert all(torch.equal(found[0][name].float(), found[1][name]) for name in shapes)


@needs_loop
@pytest.mark.parametrize("kind", ["bfloat16", "strides"])
def test_other_values_are_copied_and_multiplied_too(kind: str) -> None:
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
    real, loaded = CStep.add_, c_step.library()
    assert loaded is not None

    def altered(self: CStep, values: Any, **step: Any) -> None:
        real(self, values, **step)
        place = values["b"] if wrong == "a value" else self._state.view(-1)
        if len(place):
            place[:1] = torch.nextafter(place[:1], torch.tensor(9.0))

    assert c_step.agrees(loaded)
    monkeypatch.setattr(CStep, "add_", altered)
    assert not c_step.agrees(loaded)

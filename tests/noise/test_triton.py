"""The fused kernel adds the numbers of the torch path.

On a GPU where there is one, else in Triton's interpreter, and without Triton on NumPy (`conftest`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from noshuffle.errors import InvalidInput
from noshuffle.noise import NoiseStream, Source, test_source
from noshuffle.noise.fused import Fused
from noshuffle.noise.gaussian import CPU_CHUNK, TILE
from noshuffle.noise.layout import Layout
from noshuffle.noise.step_plan import StepPlans
from noshuffle.noise.tape import HEAD, STEPS, WORDS, record, record_tape
from noshuffle.strategies.recipe import Buffered, FeedForward, Forest, Recipe, Recursive, Rows

HAS_GPU = torch.cuda.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def why_not() -> str:
    """Why the kernel cannot be run here, or nothing."""
    if HAS_GPU or not HAS_TRITON:
        return ""
    fused = fused_of(FeedForward((1.0,)))
    try:
        fused.add_({name: value.view(-1) for name, value in values_of(0, {}).items()}, step=0)
    except Exception as error:
        # Older interpreters turn arrays of one element into integers, which NumPy 2.4 refuses.
        if "0-dimensional" in str(error):
            return "this Triton's interpreter does not work with this NumPy; take a newer one"
        if "active drivers" in str(error):
            return "Triton was imported before its interpreter was chosen; set TRITON_INTERPRET=1"
        raise
    return ""


@pytest.fixture(scope="module")
def kernel(without_triton: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    if reason := why_not():
        pytest.skip(reason)
    with nullcontext() if HAS_TRITON else without_triton():
        yield


needs_triton = pytest.mark.usefixtures("kernel")
needs_gpu = pytest.mark.skipif(not (HAS_TRITON and HAS_GPU), reason="needs a GPU and triton")

N = 7
GAINS = tuple(1.0 / (1 + 0.1 * t) for t in range(N))
DENSE = np.tril(np.random.default_rng(0).standard_normal((N, N)))
TAPS = ((0, 1.0), (2, 0.3), (5, -0.2))
RECIPES: dict[str, Recipe] = {
    "identity": FeedForward((1.0,)),
    "banded inverse": FeedForward((1.0, -0.5, 0.0, -0.1), scale=GAINS),
    "banded": Recursive((0.8, -0.4, 0.2, 0.1)),
    "one band": Recursive((0.7,), scale=GAINS),
    "blt": Buffered((0.95, 0.6), (-0.1, -0.3)),
    "blt with taps and gains": Buffered((0.95, 0.6, 0.2), (-0.1, -0.3, 0.1), TAPS, GAINS),
    "dense": Rows(DENSE),
    "plain tree": Forest("plain", N),
    "honaker": Forest("honaker", N),
    "honaker completed": Forest("honaker", N, 3, True),
}
SHAPES: dict[str, tuple[int, ...]] = {"w": (7, 100), "b": (3,), "none": (0, 4)}
SCALE = 0.37


def values_of(seed: int, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtypes.get(name, torch.float32))
        for name, shape in SHAPES.items()
    }


def source_of(ring: Sequence[int]) -> Source:
    """A test source, or one that takes fresh keys at the rows of a ring."""
    if not ring:
        return test_source(seed="fused", kind="philox")
    source = Source(bytes(32), kind="philox")
    for row in ring:
        source = source.rekeyed(row, bytes([row + 1] * 32))
    return source


def twin_of(recipe: Recipe, ring: Sequence[int] = ()) -> NoiseStream:
    source = source_of(ring)
    return NoiseStream(recipe, source, SHAPES, scale=SCALE, steps=N)


def fused_of(recipe: Recipe, ring: Sequence[int] = (), **settings: object) -> Fused:
    plans, source = StepPlans.of(recipe), source_of(ring)
    layout = Layout.of(SHAPES, chunk_tiles=CPU_CHUNK)
    state = torch.zeros((plans.buffers, layout.tiles, TILE), device=DEVICE)
    settings = {"scale": SCALE, "steps": N} | settings
    return Fused(plans, layout=layout, source=source, state=state, **settings)  # type: ignore[arg-type]


def both(
    recipe: Recipe,
    *,
    steps: Sequence[int] = range(N),
    ring: Sequence[int] = (),
    **settings: object,
) -> list[tuple[Tensor, Tensor]]:
    dtypes = settings.pop("dtypes", {})
    assert isinstance(dtypes, dict)
    twin = twin_of(recipe, ring)
    fused = fused_of(recipe, ring, **settings)
    pairs = []
    for step in steps:
        expected = values_of(step, dtypes)
        got = {name: value.to(DEVICE) for name, value in values_of(step, dtypes).items()}
        twin.add_(expected)
        fused.add_({name: value.view(-1) for name, value in got.items()}, step=step)
        pairs += [(expected[name], got[name].cpu()) for name in SHAPES]
    return pairs


@needs_triton
@pytest.mark.parametrize("name", RECIPES)
def test_bits_of_the_torch_path(name: str) -> None:
    """On the grid: `both` adds to values that are not zero."""
    for expected, got in both(RECIPES[name]):
        assert torch.equal(expected, got)


@needs_triton
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("ring", [(0,), (3,), (1, 2, 5)])
def test_bits_of_the_torch_path_under_a_ring_of_keys(name: str, ring: tuple[int, ...]) -> None:
    plain = twin_of(RECIPES[name])
    for step in range(N):
        plain.add_(values := values_of(step, {}))
    renewed = both(RECIPES[name], ring=ring)
    for expected, got in renewed:
        assert torch.equal(expected, got)
    assert not torch.equal(values["b"], renewed[-2][1])


@needs_triton
@pytest.mark.parametrize("tiles", [1, 2, 4])
def test_tiles_of_a_program_do_not_matter(tiles: int) -> None:
    for expected, got in both(RECIPES["blt"], steps=range(3), tiles=tiles):
        assert torch.equal(expected, got)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_beside_float32(dtype: torch.dtype) -> None:
    if not HAS_TRITON and dtype != torch.float64:
        pytest.skip("half precision needs triton: NumPy rounds it otherwise")
    dtypes = {"w": dtype}
    # Triton's interpreter cuts bfloat16 off instead of rounding it: one unit of its last place.
    close = 2**-7 if dtype == torch.bfloat16 and not HAS_GPU else 0.0
    for expected, got in both(RECIPES["blt"], steps=range(2), dtypes=dtypes):
        assert expected.dtype == got.dtype
        torch.testing.assert_close(got, expected, rtol=close, atol=0.0)


@needs_triton
def test_steps_can_be_left_and_taken_up_again() -> None:
    """The counter follows the step that is asked for, as after a checkpoint was loaded."""
    expected, got = (dict[int, Tensor]() for _ in range(2))
    twin, fused = twin_of(RECIPES["banded inverse"]), fused_of(RECIPES["banded inverse"])
    for step in range(4):
        values = values_of(0, {})
        twin.add_(values)
        expected[step] = values["w"]
    for step in (0, 2, 3, 1):
        values = {name: value.to(DEVICE) for name, value in values_of(0, {}).items()}
        fused.add_({name: value.view(-1) for name, value in values.items()}, step=step)
        got[step] = values["w"].cpu()
        assert torch.equal(got[step], expected[step])


@needs_triton
@pytest.mark.parametrize("name", ["identity", "blt", "honaker"])
@pytest.mark.parametrize("ring", [(), (2, 4)])
def test_a_step_that_was_not_announced_gives_nan(name: str, ring: tuple[int, ...]) -> None:
    fused = fused_of(RECIPES[name], ring)
    values = {n: v.to(DEVICE).view(-1) for n, v in values_of(0, {}).items()}
    fused.add_(values, step=0)
    assert all(bool(torch.isfinite(value).all()) for value in values.values())
    fused._clock[0].add_(1)  # what one replay too many does
    fused.add_(values, step=1)
    assert all(bool(torch.isnan(value).all()) for value in values.values())


@needs_triton
def test_more_steps_than_there_are_cannot_be_announced() -> None:
    fused = fused_of(RECIPES["identity"])
    fused.announce(step=2, count=N - 2)
    with pytest.raises(InvalidInput, match="at most 5 steps"):
        fused.announce(step=2, count=N - 1)


@needs_gpu
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("ring", [(), (1, 2, 5)])
def test_replays_of_a_graph_are_the_steps(name: str, ring: tuple[int, ...]) -> None:
    twin = twin_of(RECIPES[name], ring)
    fused = fused_of(RECIPES[name], ring)
    values = {n: v.to(DEVICE) for n, v in values_of(0, {}).items()}
    flat = {n: v.view(-1) for n, v in values.items()}
    fused.prepare(flat)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused.add_(flat, step=0)
    expected = values_of(0, {})
    for step in range(N):
        if step % 3 == 0:
            fused.announce(step=step, count=min(3, N - step))
        graph.replay()
        twin.add_(expected)
        assert all(torch.equal(values[n].cpu(), expected[n]) for n in SHAPES)
    graph.replay()
    assert all(bool(torch.isnan(value).all()) for value in values.values())


def test_a_tape_holds_the_moves_in_order() -> None:
    plans = StepPlans.of(RECIPES["blt with taps and gains"])
    tape = record_tape(plans, scale=SCALE, first=2, steps=N)
    assert (tape.first, tape.count) == (2, N - 2)
    for i in range(tape.count):
        expected = record(plans.at(2 + i), buffers=plans.buffers, scale=SCALE)
        begin = tape.offsets[i]
        np.testing.assert_array_equal(tape.words[begin : begin + len(expected)], expected)
    for begin in tape.offsets[tape.count :]:
        assert tape.words[begin] == 1
        assert np.isnan(tape.words[begin:].view(np.float32)[HEAD + 1])


def test_a_tape_names_the_key_of_every_draw() -> None:
    """Only under a ring; without one the words are those of before."""
    plans, source = StepPlans.of(RECIPES["blt with taps and gains"]), source_of((2, 5))
    settings = {"buffers": plans.buffers, "scale": SCALE}
    for t in range(N):
        plain = record(plans.at(t), **settings)  # type: ignore[arg-type]
        long = record(plans.at(t), segment_fn=source.segment, **settings)  # type: ignore[arg-type]
        draws = plain[0]
        named = long[HEAD : HEAD + 3 * draws].reshape(-1, 3)
        np.testing.assert_array_equal(named[:, :2].ravel(), plain[HEAD : HEAD + 2 * draws])
        assert named[:, 2].tolist() == [source.segment(row) for row, _ in plans.at(t).draws]
        np.testing.assert_array_equal(long[:HEAD], plain[:HEAD])
        np.testing.assert_array_equal(long[HEAD + 3 * draws :], plain[HEAD + 2 * draws :])


def test_a_tape_is_bounded_but_holds_at_least_one_record() -> None:
    long = FeedForward(tuple(1.0 for _ in range(WORDS)))
    assert record_tape(StepPlans.of(long), scale=1.0, first=WORDS, steps=2 * WORDS).count == 1
    short = record_tape(StepPlans.of(RECIPES["identity"]), scale=1.0, first=5, steps=10**8)
    assert short.count == STEPS
    assert len(short.words) <= WORDS


def fused_multiply(a: object, b: object, c: object) -> NDArray[np.float32]:
    """a·b + c rounded once: the sum has 64 bits, of which float32 keeps 24."""
    a, b, c = (np.asarray(x, dtype=np.float32).astype(np.longdouble) for x in (a, b, c))
    return (a * b + c).astype(np.float32)


has_long_double = pytest.mark.skipif(
    np.finfo(np.longdouble).nmant < 63, reason="needs a long double of 64 bits"
)
every = pytest.mark.parametrize("stride", [97, pytest.param(1, marks=pytest.mark.slow)])


@has_long_double
@every
@pytest.mark.parametrize("error", [-2, -1, 0, 1, 2])
def test_the_root_of_the_kernel_is_exact_for_every_x(stride: int, error: int) -> None:
    """The steps of `triton_kernels.root`; two binades stand for all, by powers of four."""
    fma = fused_multiply
    one = int(np.float32(1).view(np.int32))
    for begin in range(one, one + 2**24, 2**20):
        x = np.arange(begin, begin + 2**20, stride, dtype=np.int32).view(np.float32)
        true = np.sqrt(x.astype(np.float64))
        y = ((1 / true).astype(np.float32).view(np.int32) + error).astype(np.int32)
        y = y.view(np.float32)
        g, h = x * y, np.float32(0.5) * y
        miss = fma(-g, h, 0.5)
        g, h = fma(g, miss, g), fma(h, miss, h)
        g = fma(fma(-g, g, x), h, g)
        np.testing.assert_array_equal(g, true.astype(np.float32))

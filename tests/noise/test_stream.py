"""The streamed noise: equal to the explicit matrix, resumable, and strict about what it is fed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.noise.laws import check_default_type
from tests.strategies.slow_recipes import materialize
from torch import Tensor

from noshuffle.errors import HorizonExceeded, InvalidInput, NoshuffleError
from noshuffle.noise import NoiseStream, Source, c_step, grid, test_source
from noshuffle.noise.c_step import CStep
from noshuffle.noise.fused import Fused
from noshuffle.noise.step_plan import StepPlans, fingerprint, grid_of
from noshuffle.noise.words import AesWords
from noshuffle.strategies.recipe import (
    Buffered,
    FeedForward,
    Forest,
    Recipe,
    Recursive,
    Rows,
    rows,
)

N = 21
GAINS = tuple(1.0 / (1 + 0.1 * t) for t in range(N))
DENSE = np.tril(np.random.default_rng(0).standard_normal((N, N)))
DENSE[5, 2] = 0.0
TAPS = ((0, 1.0), (4, 0.3), (8, -0.2))

RECIPES: dict[str, Recipe] = {
    "identity": FeedForward((1.0,)),
    "identity with gains": FeedForward((1.0,), scale=GAINS),
    "sums": FeedForward((1.0, -1.0)),
    "banded inverse": FeedForward((1.0, -0.5, 0.0, -0.1, 0.05), scale=GAINS),
    "banded": Recursive((0.8, -0.4, 0.2, 0.1)),
    "banded with gains": Recursive((-1.0, 0.5), scale=GAINS),
    "one band": Recursive((0.7,)),
    "blt": Buffered((0.95, 0.6), (-0.1, -0.3)),
    "blt with taps and gains": Buffered((0.95, 0.6, 0.2), (-0.1, -0.3, 0.1), TAPS, GAINS),
    "blt without buffers": Buffered((), (), TAPS),
    "blt two-sided": Buffered((0.95, 0.6), (-0.1, -0.3), TAPS, GAINS, GAINS[::-1]),
    "dense": Rows(DENSE),
} | {
    f"{variant} block {block}{' completed' * completion}": Forest(variant, N, block, completion)
    for variant in ("plain", "honaker")
    for block, completion in (
        (0, False), (0, True), (1, True), (5, False), (5, True), (7, True), (8, True), (8, False),
        (21, True), (40, True),
    )
}  # fmt: skip

SHAPES: dict[str, tuple[int, ...]] = {"w": (7, 300), "b": (3,), "scalar": (), "none": (0, 4)}

every_recipe = pytest.mark.parametrize("name", RECIPES)


def zeros(shapes: Mapping[str, Sequence[int]] = SHAPES) -> dict[str, Tensor]:
    return {name: torch.zeros(tuple(shape)) for name, shape in shapes.items()}


def stream_of(name: str, *, scale: float = 1.0, **changes: object) -> NoiseStream:
    settings: dict[str, object] = {"source": test_source(seed="stream"), "shapes": SHAPES}
    settings |= {"steps": N, "scale": scale} | changes
    source, shapes = settings.pop("source"), settings.pop("shapes")
    return NoiseStream(RECIPES[name], source, shapes, **settings)  # type: ignore[arg-type]


def run(
    stream: NoiseStream, steps: int, shapes: Mapping[str, Sequence[int]] = SHAPES
) -> list[dict[str, Tensor]]:
    released = []
    for _ in range(steps):
        values = zeros(shapes)
        stream.add_(values)
        released.append(values)
    return released


def same(a: Sequence[Mapping[str, Tensor]], b: Sequence[Mapping[str, Tensor]]) -> bool:
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)
        for x, y in zip(a, b)
    )


@cache
def drawn_alone(kind: str, row: int, tensor: str) -> np.ndarray:
    """One row of Z for one tensor, drawn by itself."""
    out = torch.empty(SHAPES[tensor])
    test_source(seed="twin", kind=kind).normal_(out, row=row, name=tensor)
    return out.double().numpy().reshape(-1)


@every_recipe
@pytest.mark.parametrize("kind", ["aes", "philox"])
@pytest.mark.parametrize("has_grid", [True, False])
def test_stream_equals_the_matrix_times_the_draws(name: str, kind: str, has_grid: bool) -> None:
    """The main twin: materialize(recipe) applied in float64 to rows drawn one by one."""
    source = test_source(seed="twin", kind=kind)
    recipe, scale = RECIPES[name], 0.37
    with pytest.MonkeyPatch.context() as patch:
        if not has_grid:
            patch.setattr(grid, "grid_step", lambda _: 0.0)
        released = run(stream_of(name, source=source, scale=scale), N)
    plans = StepPlans.of(recipe)
    steps = np.array([[grid_of(plans.at(t), scale=scale)] for t in range(N)]) * has_grid
    matrix = materialize(recipe, N)
    for tensor in SHAPES:
        draws = [drawn_alone(kind, row, tensor) for row in range(rows(recipe, N))]
        expected = scale * matrix @ np.array(draws)
        got = np.array([values[tensor].double().numpy().reshape(-1) for values in released])
        room = steps + 2e-5 * scale * np.abs(matrix).max() + 1e-6
        assert (np.abs(got - expected) <= room).all()


@every_recipe
def test_resume_at_every_step_is_bit_identical(name: str) -> None:
    straight = stream_of(name)
    released, states = [], [straight.state_dict()]
    for _ in range(N):
        released += run(straight, 1)
        states.append(straight.state_dict())
    for t, state in enumerate(states):
        resumed = stream_of(name)
        resumed.load_state_dict(state)
        assert resumed.step == t
        assert same(run(resumed, N - t), released[t:])


def test_state_survives_a_file_and_is_a_copy(tmp_path: object) -> None:
    stream = stream_of("blt")
    run(stream, 3)
    state = stream.state_dict()
    path = f"{tmp_path}/noise.pt"
    torch.save(state, path)
    expected = run(stream, 2)
    resumed = stream_of("blt")
    resumed.load_state_dict(torch.load(path, weights_only=True))
    assert same(run(resumed, 2), expected)
    assert not any("key" in str(value) for value in state.values() if isinstance(value, bytes))


@every_recipe
def test_threads_order_and_the_length_do_not_change_a_bit(name: str) -> None:
    whole = run(stream_of(name), 6)
    before = torch.get_num_threads()
    shapes = {"w": (90, 1000), "v": (40_000,)}
    try:
        torch.set_num_threads(1)
        alone = run(stream_of(name, shapes=shapes), 4, shapes)
        torch.set_num_threads(3)
        reverse = dict(reversed(shapes.items()))
        together = run(stream_of(name, shapes=reverse), 4, reverse)
    finally:
        torch.set_num_threads(before)
    assert same(alone, together)
    part = run(stream_of(name, shapes={"w": (700,)}), 6, {"w": (700,)})
    for values, full in zip(part, whole):
        assert torch.equal(values["w"], full["w"].view(-1)[:700])


def test_the_torch_form_is_bit_identical_to_the_c_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    if c_step.library() is None:
        pytest.skip("no C library here, so there is one form only")
    for name in RECIPES:
        source = test_source(seed="forms", kind="aes")
        fast = run(stream_of(name, source=source, scale=0.3), 9)
        with monkeypatch.context() as patch:
            patch.setattr(c_step, "library", lambda: None)
            slow = run(stream_of(name, source=source, scale=0.3), 9)
        assert same(fast, slow), name


@pytest.mark.parametrize("kind", ["aes", "philox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["identity", "blt"])
def test_the_default_type_of_torch_does_not_matter(
    name: str, dtype: torch.dtype, kind: str
) -> None:
    """The loops write float32; in rooms of another type half of the values would stay bare."""

    def drawn() -> list[Tensor]:
        source = test_source(seed="default", kind=kind)
        stream = stream_of(name, source=source)
        values = {key: torch.zeros(shape, dtype=dtype) for key, shape in SHAPES.items()}
        stream.add_(values)
        stream.add_(values)
        alone = torch.tensor(source.noisy(0.0, row=1, name="alone", scale=1.0), dtype=dtype)
        table = torch.empty(3000, dtype=torch.float32)
        source.normal_(table, row=2, name="w")
        return [*values.values(), *stream.state_dict()["buffers"].values(), alone, table]

    check_default_type(drawn)


def test_low_precision_values_are_noised_in_float32_and_rounded_once() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        stream, wide = stream_of("banded inverse"), stream_of("banded inverse")
        for _ in range(2):
            values = {name: torch.full(shape, 3.3, dtype=dtype) for name, shape in SHAPES.items()}
            exact = {name: value.float() for name, value in values.items()}
            stream.add_(values)
            wide.add_(exact)
            assert all(torch.equal(values[name], exact[name].to(dtype)) for name in SHAPES)


def test_strides_do_not_matter() -> None:
    plain, odd = stream_of("blt"), stream_of("blt")
    for _ in range(3):
        a, b = zeros(), zeros()
        b["w"] = torch.randn(300, 7).t()
        a["w"] = b["w"].contiguous()
        plain.add_(a)
        odd.add_(b)
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_noise_is_added_to_what_is_there_even_if_it_is_not_finite() -> None:
    noise = run(stream_of("identity"), 1)[0]["b"]
    # One is a multiple of the grid, so that the coins round the same fraction.
    values = zeros() | {"b": torch.tensor([1.0, float("inf"), float("nan")])}
    stream = stream_of("identity")
    stream.add_(values)
    assert values["b"][0] == 1.0 + noise[0]
    assert torch.isinf(values["b"][1])
    assert torch.isnan(values["b"][2])
    assert stream.step == 1


def test_a_parameter_that_requires_grad_is_noised_without_a_graph() -> None:
    value = torch.zeros(3, requires_grad=True)
    NoiseStream(FeedForward((1.0,)), test_source(seed=0), {"w": (3,)}, scale=1.0, steps=1).add_(
        {"w": value}
    )
    assert value.grad_fn is None
    assert bool((value != 0).all())


@every_recipe
def test_past_the_horizon_nothing_is_drawn(name: str) -> None:
    stream = stream_of(name, steps=3)
    run(stream, 3)
    values = zeros()
    with pytest.raises(HorizonExceeded, match="planned for 3 steps"):
        stream.add_(values)
    assert all(not value.any() for value in values.values())
    assert stream.step == stream.horizon == 3


def test_a_recipe_shorter_than_the_run_is_refused() -> None:
    for name in ("identity with gains", "dense", "honaker block 5"):
        with pytest.raises(InvalidInput, match="covers 21 steps"):
            stream_of(name, steps=N + 1)


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(InvalidInput, match="variant must be one of"):
        StepPlans.of(Forest("full", 8))
    with pytest.raises(InvalidInput, match="as many scales as decays"):
        StepPlans.of(Buffered((0.5,), ()))
    with pytest.raises(InvalidInput, match="expected a recipe"):
        StepPlans.of("blt")  # type: ignore[arg-type]


def test_tensors_are_matched_by_name_shape_and_type() -> None:
    stream = stream_of("blt")
    bad: list[tuple[dict[str, Tensor], str]] = [
        ({k: v for k, v in zeros().items() if k != "b"}, "missing \\['b'\\]"),
        (zeros() | {"c": torch.zeros(1)}, "not expected \\['c'\\]"),
        (zeros() | {"b": torch.zeros(4)}, "must have shape \\(3,\\)"),
        (zeros() | {"b": torch.zeros(3, dtype=torch.int64)}, "floating point"),
        (zeros() | {"b": torch.zeros(3, device="meta")}, "floating point on cpu"),
    ]
    for values, message in bad:
        with pytest.raises(InvalidInput, match=message):
            stream.add_(values)
    assert stream.step == 0


def test_the_state_of_another_stream_is_refused() -> None:
    state = stream_of("blt").state_dict()
    others = {
        "recipe": stream_of("blt with taps and gains"),
        "key": stream_of("blt", source=test_source(seed="other")),
        "source": stream_of("blt", source=test_source(seed="stream", kind="philox")),
        "scale": stream_of("blt", scale=2.0),
        "horizon": stream_of("blt", steps=N - 1),
        "shapes": stream_of("blt", shapes={"w": (7, 300)}),
    }
    for what, stream in others.items():
        with pytest.raises(InvalidInput, match=what):
            stream.load_state_dict(state)
    with pytest.raises(InvalidInput, match="version"):
        stream_of("blt").load_state_dict(state | {"version": 0})
    with pytest.raises(InvalidInput, match="step must be"):
        stream_of("blt").load_state_dict(state | {"step": N + 1})
    with pytest.raises(InvalidInput, match="saved buffers"):
        stream_of("blt").load_state_dict(state | {"buffers": {}})
    half = {name: value.bfloat16() for name, value in state["buffers"].items()}
    with pytest.raises(InvalidInput, match="must be float32"):
        stream_of("blt").load_state_dict(state | {"buffers": half})


def test_a_step_that_fails_half_way_stops_the_stream() -> None:
    stream = stream_of("blt")
    with pytest.MonkeyPatch.context() as patch:
        for part, method in ((AesWords, "fill_"), (CStep, "add_")):
            patch.setattr(part, method, lambda *_, **__: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            stream.add_(zeros())
    with pytest.raises(NoshuffleError, match="failed half-way"):
        stream.add_(zeros())
    with pytest.raises(NoshuffleError, match="failed half-way"):
        stream.state_dict()


def test_no_state_where_draws_can_be_made_again() -> None:
    expected = {"identity": 0, "banded inverse": 0, "dense": 0, "banded": 3, "blt": 2}
    expected |= {"honaker block 0": 5, "honaker block 8 completed": 3, "plain block 1 completed": 0}
    for name, buffers in expected.items():
        assert stream_of(name).buffers == buffers


def test_fingerprints_tell_recipes_apart() -> None:
    prints = {name: fingerprint(recipe) for name, recipe in RECIPES.items()}
    assert len(set(prints.values())) == len(prints)
    assert fingerprint(Rows(DENSE)) != fingerprint(Rows(DENSE + 1e-12))
    assert fingerprint(Forest("plain", 5)) == fingerprint(Forest("plain", 5))


def test_a_test_source_is_named_as_one() -> None:
    assert stream_of("blt").is_test
    assert not stream_of("blt", source=Source(key=bytes(32))).is_test


def test_counters_on_the_device_are_set_anew_after_loading() -> None:
    """A replay that was announced and never run must not shift the noise of a loaded state."""
    source = test_source(seed=1, kind="philox")
    stream = NoiseStream(RECIPES["sums"], source, {"w": (5,)}, scale=1.0, steps=N)
    stream.add_({"w": torch.zeros(5)})
    later = stream.state_dict()  # one step is released: what a twin of this run may have saved
    fresh = NoiseStream(RECIPES["sums"], source, {"w": (5,)}, scale=1.0, steps=N)
    parts: dict[str, Any] = {
        "layout": fresh._layout,
        "source": fresh._source,
        "state": fresh._state,
    }
    fresh._fused = Fused(fresh._plans, **parts, scale=1.0, steps=N)
    fresh.announce(counts_itself=True)  # the graph would have moved both counters to 1, and did not
    assert fresh._fused._clock.tolist() == [0, 0]
    fresh.load_state_dict(later)
    fresh.announce(counts_itself=True)
    assert fresh._fused._clock.tolist() == [1, 1]


def test_of_two_threads_in_one_step_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = NoiseStream(FeedForward((1.0,)), test_source(seed=3), {"w": (8,)}, scale=1.0, steps=9)
    both = threading.Barrier(2)

    def slow(*_: object, **__: object) -> None:
        both.wait(900)  # until the other one was refused

    monkeypatch.setattr(stream, "_c_step", None)
    monkeypatch.setattr(stream, "_add_noise", slow)

    def go() -> str:
        try:
            stream.add_({"w": torch.zeros(8)})
        except NoshuffleError as error:
            both.wait(900)
            return str(error)
        return "added"

    with ThreadPoolExecutor(2) as pool:
        said = sorted(f.result() for f in [pool.submit(go) for _ in range(2)])
    assert said[0] == "added"
    assert "failed half-way" in said[1]
    assert stream.step == 1
    monkeypatch.undo()
    stream.add_({"w": torch.zeros(8)})
    assert stream.step == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_factor_of_a_step_is_not_rounded_to_the_type_of_its_tensors(dtype: torch.dtype) -> None:
    def run(times: float) -> Tensor:
        shapes = {"w": (300,), "none": (0,)}
        stream = NoiseStream(FeedForward((1.0,)), test_source(seed=3), shapes, scale=1.0, steps=9)
        value = torch.linspace(-1.0, 1.0, 300).to(dtype)
        stream.add_({"w": value, "none": torch.zeros(0, dtype=dtype)}, times=times)
        return value

    assert torch.equal(run(1 / 3), run(1.0).mul_(1 / 3))

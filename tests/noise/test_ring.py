"""A ring of keys: used rows keep their numbers, all others are fresh, and the law stays.

Statistical bounds are seven standard errors (2.6e-12 a comparison, below 1e-8 for the file), and
the keys are fixed, so that a test that passes once passes always.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.noise.laws import agrees
from tests.strategies.slow_recipes import materialize
from torch import Tensor

import noshuffle.strategies as st
from noshuffle.errors import InvalidInput
from noshuffle.noise import NoiseStream, Source, c_step, test_source
from noshuffle.noise.grid import grid_step
from noshuffle.noise.step_plan import StepPlans, rows_used
from noshuffle.strategies.blt import blt
from noshuffle.strategies.recipe import (
    Buffered,
    FeedForward,
    Forest,
    Recipe,
    Recursive,
    Rows,
)

N, SCALE, SIZE = 12, 1.7, 20_000
SHAPES: dict[str, tuple[int, ...]] = {"w": (7, 300), "b": (3,), "none": (0, 4)}
RISING = tuple(np.linspace(0.6, 1.7, N).tolist())
LOWER = np.tril(np.random.default_rng(7).normal(size=(N, N)), -1) * 0.3 + np.eye(N)

STRATEGIES = {
    "identity": st.identity(),
    "identity-gains": st.column_normalized(st.identity(), N),
    "release-sums": st.release_sums(),
    "tree-plain": st.tree("plain"),
    "tree-honaker": st.tree("honaker"),
    "tree-full": st.tree("full"),
    "tree-plain-restart": st.tree("plain", restart_every=5),
    "tree-honaker-completion": st.tree("honaker", restart_every=5, completion=True),
    "sqrt-bands": st.sqrt_toeplitz(3),
    "bisr": st.banded_inverse(4),
    "bisr-gains": st.banded_inverse(4, gains=RISING[::-1]),
    "banded": st.banded([1.0, 0.6, 0.3]),
    "blt": st.blt((0.95, 0.5), (0.2, 0.3)),
    "blt-taps-gains": st.blt((0.9,), (0.4,), taps=(0.3,), lag=4, gains=RISING),
    "blt-two-sided": blt((0.95, 0.5), (0.2, 0.3), gains=RISING, draw_gains=RISING[::-1]),
    "dense": st.dense(LOWER),
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)

#: Recipes with holes: steps whose newest row has weight zero, or that draw nothing at all.
HOLES = LOWER.copy()
HOLES[4, 2:] = HOLES[7, :] = HOLES[8, 8] = HOLES[11, 9:] = 0.0
ODD: dict[str, Recipe] = {
    "late": FeedForward((0.0, 0.0, 1.0, -0.5)),
    "nothing": FeedForward((0.0,)),
    "zero band": Recursive((0.0, 1.0)),
    "silent draws": Buffered(
        (0.5,), (0.1,), ((0, 1.0), (3, 0.3)), draw_scale=(1.0, 1.0, *[0.0] * (N - 2))
    ),
    "holes": Rows(HOLES),
    "one step": Forest("honaker", 1),
} | {
    f"{variant} {block} {completion}": Forest(variant, N, block, completion)
    for variant in ("plain", "honaker")
    for block in (0, 1, 3, 5, 8, 40)
    for completion in (False, True)
}


def key(name: object) -> bytes:
    return hashlib.blake2b(repr(name).encode(), digest_size=32).digest()


def stream_of(recipe: Recipe, source: Source, **settings: Any) -> NoiseStream:
    settings = {"shapes": SHAPES, "scale": SCALE, "steps": N} | settings
    return NoiseStream(recipe, source, settings.pop("shapes"), **settings)


def run(stream: NoiseStream, steps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    released = []
    for _ in range(steps):
        values = {name: torch.zeros(s, dtype=dtype) for name, s in stream._layout.shapes.items()}
        stream.add_(values)
        released.append(torch.cat([value.flatten() for value in values.values()]))
    return released


def brute_force_rows_used(recipe: Recipe, steps: int) -> int:
    plans = StepPlans.of(recipe)
    drawn = [row for t in range(steps) for row, weight in plans.at(t).draws if weight]
    return max(drawn, default=-1) + 1


@pytest.mark.parametrize("name", [*STRATEGIES, *ODD])
def test_rows_used_is_one_more_than_the_largest_row_drawn(name: str) -> None:
    recipe = STRATEGIES[name].recipe(N) if name in STRATEGIES else ODD[name]
    plans = StepPlans.of(recipe)
    for steps in range(min(N, plans.horizon or N) + 1):
        assert rows_used(plans, steps) == brute_force_rows_used(recipe, steps)


def test_rows_used_looks_at_few_steps() -> None:
    looked: list[int] = []
    plans = StepPlans.of(FeedForward((1.0, -0.5)))

    def at(step: int) -> Any:
        looked.append(step)
        return plans.at(step)

    assert rows_used(StepPlans(None, 0, at), 10**9) == 10**9
    assert looked == [10**9 - 1]


@every_strategy
@pytest.mark.parametrize(("kind", "stop"), [("aes", 0), ("philox", 1), ("philox", 5), ("aes", 8)])
def test_two_continuations_share_the_past_and_nothing_else(name: str, kind: str, stop: int) -> None:
    """State and replays are the old ones to the bit; the fresh parts are uncorrelated.

    On a single lifelong key the two continuations would be equal.
    """
    recipe, shapes = STRATEGIES[name].recipe(N), {"w": (SIZE,)}
    first = Source(key("first"), kind)
    before = stream_of(recipe, first, shapes=shapes)
    start = before.state_dict()
    released = run(before, stop)
    state, used = before.state_dict(), before.rows_used(stop)
    matrix, fresh = materialize(recipe, N), []
    for life in ("one", "other"):
        source = first.rekeyed(used, key(life))
        again = stream_of(recipe, source, shapes=shapes)
        again.load_state_dict(start)
        assert all(torch.equal(a, b) for a, b in zip(run(again, stop), released, strict=True))
        went_on = stream_of(recipe, source, shapes=shapes)
        went_on.load_state_dict(state)
        assert went_on.step == again.step == stop
        for saved, made in zip(*(s.state_dict()["buffers"].values() for s in (went_on, again))):
            assert torch.equal(saved, made)
        went = torch.stack(run(went_on, N - stop)).double().numpy()
        assert np.array_equal(went, torch.stack(run(again, N - stop)).double().numpy())
        old = np.zeros((used, SIZE))
        for row in range(used):
            z = torch.empty(SIZE)
            first.normal_(z, row=row, name="w")
            old[row] = z
        fresh.append(went - SCALE * matrix[stop:, :used] @ old)
    innovation = matrix[stop:, used:]
    covariance = SCALE**2 * innovation @ innovation.T
    variance = np.diag(covariance)
    assert (variance > 0).all()
    for part in fresh:
        assert has_covariance(part, covariance)
        assert not has_covariance(part * 3 / 2, covariance)
    cross = fresh[0] @ fresh[1].T / SIZE / np.sqrt(np.outer(variance, variance))
    assert np.abs(cross).max() * math.sqrt(SIZE) < 7


def has_covariance(sample: np.ndarray, covariance: np.ndarray) -> bool:
    """Within seven standard errors, and the grid's variance."""
    slack = 1e-5 * float(np.diag(covariance).max())
    return agrees(sample, covariance, errors=7.0, slack=slack)


@every_strategy
@pytest.mark.parametrize("kind", ["aes", "philox"])
def test_a_run_of_many_lives_has_the_law_of_an_unbroken_one(name: str, kind: str) -> None:
    """Covariance over time of a run that took a fresh key after 1, 2, 5, 5 and 9 steps."""
    strategy = STRATEGIES[name]
    source, state, released = Source(key("law"), kind), None, []
    for life, (start, stop) in enumerate([(0, 1), (1, 2), (2, 5), (5, 5), (5, 9), (9, N)]):
        stream = stream_of(strategy.recipe(N), source, shapes={"w": (SIZE,)})
        source = source.rekeyed(stream.rows_used(start), key(life))
        stream = stream_of(strategy.recipe(N), source, shapes={"w": (SIZE,)})
        if state is not None:
            stream.load_state_dict(state)
        released += run(stream, stop - start)
        state = stream.state_dict()
    assert source.segments == 6  # the life without a step left no key behind
    sample = torch.stack(released).double().numpy()
    matrix = strategy.noising(N)
    covariance = SCALE**2 * matrix @ matrix.T
    assert has_covariance(sample, covariance)
    assert not has_covariance(sample * 2 / 3, covariance)
    assert not has_covariance(sample * 3 / 2, covariance)


def test_the_law_test_sees_a_key_that_changes_too_early() -> None:
    """Rows that a released step has used must keep their key, or the noise no longer cancels."""
    recipe = st.release_sums().recipe(N)
    source = Source(key("law"))
    stream = stream_of(recipe, source, shapes={"w": (SIZE,)})
    released = run(stream, 5)
    early = stream_of(recipe, source.rekeyed(4, key("early")), shapes={"w": (SIZE,)})
    state = stream.state_dict()
    with pytest.raises(InvalidInput, match="other later keys"):
        early.load_state_dict(state)
    early._step = 5
    released += run(early, N - 5)
    matrix = materialize(recipe, N)
    sample = torch.stack(released).double().numpy()
    assert not has_covariance(sample, SCALE**2 * matrix @ matrix.T)


def ringed(kind: str, *firsts: int) -> Source:
    source = Source(key("ring"), kind)
    for first in firsts:
        source = source.rekeyed(first, key(first))
    return source


@every_strategy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_forms_of_a_step_agree_under_a_ring(name: str, dtype: torch.dtype) -> None:
    """Chunks in torch, chunks in C, and the compiled AES step; the kernel is in test_triton."""
    recipe = STRATEGIES[name].recipe(N)
    for kind in ("aes", "philox"):
        source = ringed(kind, 1, 4, 5, 11)
        straight = run(stream_of(recipe, source), N, dtype)
        in_chunks = stream_of(recipe, source)
        in_chunks._whole = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(c_step, "library", lambda: None)
            slow = run(stream_of(recipe, source), N, dtype)
        for a, b, c in zip(straight, run(in_chunks, N, dtype), slow, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)


@pytest.mark.parametrize("kind", ["aes", "philox"])
def test_a_row_is_drawn_under_the_last_key_that_began(kind: str) -> None:
    source = ringed(kind, 3, 7)
    for row, name in ((0, "ring"), (2, "ring"), (3, 3), (6, 3), (7, 7), (100, 7)):
        found, expected = torch.empty(2, 3000)
        source.normal_(found, row=row, name="w")
        Source(key(name), kind).normal_(expected, row=row, name="w")
        assert torch.equal(found, expected)
        alone = Source(key(name), kind)
        asked = {"row": row, "name": "w", "scale": 2.0}
        assert source.noisy(0.3, **asked) == alone.noisy(0.3, **asked)  # type: ignore[arg-type]


def test_noise_drawn_before_its_number_is_that_of_the_grid() -> None:
    source, step = Source(key("ring"), "aes"), grid_step(2.0)
    noisy = source.adders(name="w", scale=2.0)(4)
    found = torch.tensor([noisy(value) for value in (0.3, -7.0, 1e5)], dtype=torch.float64)
    assert torch.equal(found % step, torch.zeros(3, dtype=torch.float64))
    drawn = torch.empty(1)
    source.normal_(drawn, row=4, name="w")
    assert abs(noisy(0.3) - 0.3 - 2.0 * float(drawn)) <= step
    assert noisy(0.3) != source.adders(name="w", scale=2.0)(5)(0.3)
    assert source.adders(name="w", scale=0.0)(4)(0.3) == 0.3


def test_the_ring_of_a_source() -> None:
    source = ringed("aes", 3, 7)
    assert [source.segment(row) for row in (0, 2, 3, 6, 7, 10**9)] == [0, 0, 1, 1, 2, 2]
    names = tuple(name for _, name in source.ring)
    assert source.segments == len(names) == 3
    assert source.fingerprint == names[0] == Source(key("ring")).fingerprint
    assert names[1:] == tuple(Source(key(row)).fingerprint for row in (3, 7))
    assert [row for row, _ in source.ring] == [0, 3, 7]
    replaced = source.rekeyed(7, key("new"))
    assert replaced.later == ((3, key(3)), (7, key("new")))
    assert source.rekeyed(2, key("new")).later == ((2, key("new")),)
    from_the_start = source.rekeyed(0, key("new"))
    assert from_the_start.later == ((0, key("new")),)
    assert from_the_start.segment(0) == 1
    assert from_the_start.fingerprint == source.fingerprint
    shown = repr(source)
    for secret in (key("ring"), key(3), key(7)):
        assert secret.hex() not in shown
        assert repr(secret) not in shown


def test_rings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidInput, match="test source"):
        test_source(seed=1).rekeyed(3, key(3))
    with pytest.raises(InvalidInput, match="test source"):
        Source(key(1), is_test=True, later=((3, key(3)),))
    with pytest.raises(InvalidInput, match="increasing first rows"):
        Source(key(1), later=((3, key(3)), (3, key(4))))
    with pytest.raises(InvalidInput, match="increasing first rows"):
        Source(key(1)).rekeyed(-1, key(3))
    with pytest.raises(InvalidInput, match="32 bytes"):
        Source(key(1)).rekeyed(3, b"short")


@pytest.mark.parametrize("name", ["identity", "bisr", "tree-honaker", "blt"])
def test_states_load_where_the_used_rows_have_their_keys(name: str) -> None:
    recipe = STRATEGIES[name].recipe(N)
    source = Source(key("ring"))
    stream = stream_of(recipe, source)
    run(stream, 5)
    used = stream.rows_used(5)
    grown = source.rekeyed(used, key("second"))
    second = stream_of(recipe, grown)
    second.load_state_dict(stream.state_dict())
    untouched = second.state_dict()  # nothing of the second key was used: another may replace it
    stream_of(recipe, grown.rekeyed(used, key("third"))).load_state_dict(untouched)
    run(second, 2)
    state, later = second.state_dict(), second.rows_used(7)
    stream_of(recipe, grown).load_state_dict(state)
    stream_of(recipe, grown.rekeyed(later, key("third"))).load_state_dict(state)
    refused = {
        "without the second key": source,
        "another second key": source.rekeyed(used, key("third")),
        "another first row": source.rekeyed(used - 1, key("second")),
        "a key in its midst": grown.rekeyed(later - 1, key("third")),
    }
    for what, other in refused.items():
        with pytest.raises(InvalidInput, match="other later keys"):
            stream_of(recipe, other).load_state_dict(state)
        assert what
    with pytest.raises(InvalidInput, match="key"):
        stream_of(recipe, Source(key("else"))).load_state_dict(state)

"""Lazy noise: the law of eager noise at every touch and at release, whatever the touches are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tests.noise.laws import agrees, check_covariance, check_default_type
from tests.strategies.slow_recipes import materialize
from torch import Tensor

from noshuffle.errors import HorizonExceeded, InvalidInput, NoshuffleError, Unsupported
from noshuffle.noise import test_source as seeded
from noshuffle.noise.gaussian import normals_in_torch_
from noshuffle.noise.grid import grid_step
from noshuffle.noise.layout import Layout
from noshuffle.noise.lazy import LazyNoise
from noshuffle.noise.row_draws import RowDraws
from noshuffle.noise.skip import Skips
from noshuffle.noise.sparse_sgd import SparseSGD
from noshuffle.noise.words import AesWords, PhiloxWords
from noshuffle.strategies.recipe import Buffered, FeedForward

N, SCALE = 37, 1.7
GAINS = tuple(1.0 / (1 + 0.05 * t) for t in range(N))
RATES = tuple(1.0 - t / (N + 3) for t in range(N))
# The optimum for the largest error at 4096 steps, 4 buffers: prefix standard deviation 1.929169.
BLT4 = Buffered(
    decays=(0.99885911, 0.98734501, 0.88051219, 0.26915574),
    scales=(-3.27832e-5, -1.048014e-3, -0.030251166, -0.457538471),
)
PLAIN = Buffered((0.95, 0.6), (-0.1, -0.3))
#: Recipe and rates of the consumer.
CASES: dict[str, tuple[Buffered, tuple[float, ...]]] = {
    "blt": (PLAIN, ()),
    "blt with four buffers": (BLT4, ()),
    "blt with negative and zero decays": (Buffered((0.9, 0.0, -0.4), (-0.2, -0.1, 0.3)), ()),
    "blt with gains": (Buffered((0.9, 0.5), (-0.1, -0.3), scale=GAINS), ()),
    "gains on both sides": (Buffered((0.9,), (-0.3,), scale=GAINS, draw_scale=GAINS[::-1]), ()),
    "blt with rates": (PLAIN, RATES),
    "no buffers": (Buffered((), ()), ()),
}
every_case = pytest.mark.parametrize("name", CASES)


def normals(draws: RowDraws, rows: torch.Tensor, **how: int) -> torch.Tensor:
    return draws.normals_and_coins(rows, **how)[0]


def lazy(case: str = "blt", shape: tuple[int, ...] = (12, 5), **changes: Any) -> LazyNoise:
    recipe, rates = CASES[case]
    settings = {"scale": SCALE, "steps": N, "name": "table", "rates": rates} | changes
    source = settings.pop("source", seeded(seed="lazy"))
    return LazyNoise(recipe, source, shape, **settings)


def prefix(name: str, steps: int = N) -> np.ndarray:
    """Row t: the weights of the draws in the (rate-weighted) sum of the noise up to step t."""
    recipe, rates = CASES[name]
    weights = np.asarray(rates or (1.0,) * steps)[:steps]
    return SCALE * np.cumsum(weights[:, None] * materialize(recipe, steps), axis=0)


def random_touches(rows: int, *, seed: int) -> dict[int, list[int]]:
    """Steps at which each row is touched; some often, some once, one in every step."""
    rng = np.random.default_rng(seed)
    chances = rng.choice([0.04, 0.1, 0.3], size=rows)
    found = {r: np.flatnonzero(rng.random(N) < chances[r])[-7:].tolist() for r in range(rows)}
    return found | {0: list(range(9)), 1: [N - 1]}


def at_step(touches: Mapping[int, list[int]], step: int) -> Tensor:
    return torch.tensor([row for row, steps in touches.items() if step in steps], dtype=torch.int64)


# --- the law -------------------------------------------------------------------------------------


@every_case
def test_skips_against_products_of_single_steps(name: str) -> None:
    recipe, rates = CASES[name]
    skips = Skips.of(recipe, steps=N, rates=rates)
    d = len(recipe.decays)
    for stop in (1, 2, 7, 8, 20, N):
        starts = np.arange(stop)
        for start, found in zip(starts, skips.between(starts, stop=stop), strict=True):
            f, q = np.eye(d + 1), np.zeros((d + 1, d + 1))
            for t in range(start, stop):
                gain = (rates or (1.0,) * N)[t] * (recipe.scale or (1.0,) * N)[t]
                step = np.diag((*recipe.decays, 1.0))
                step[d, :d] = gain * np.asarray(recipe.scales)
                g = np.array([1.0] * d + [gain]) * (recipe.draw_scale or (1.0,) * N)[t]
                f, q = step @ f, step @ q @ step.T + np.outer(g, g)
            factor = found[:, d:]
            np.testing.assert_allclose(found[:, :d], f[:, :d], rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(factor @ factor.T, q, rtol=1e-11, atol=1e-13)
            assert (np.triu(factor, 1) == 0).all()
            assert (factor[:, stop - start :] == 0).all()  # no more normals than steps


def test_the_whole_run_in_one_skip_has_the_known_prefix_deviation() -> None:
    def deviation(steps: int) -> float:
        skips = Skips.of(BLT4, steps=steps)
        return float(np.linalg.norm(skips.between(np.array([0]), stop=steps)[0, 4, 4:]))

    assert deviation(4096) == pytest.approx(1.929169, abs=2e-6)
    explicit = np.linalg.norm(materialize(BLT4, 512).sum(axis=0))
    assert deviation(512) == pytest.approx(explicit, rel=1e-12)


def test_lengths_beyond_the_kept_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = np.array([0, 90, 17, 3])
    kept = Skips.of(BLT4, steps=100).between(starts, stop=100)
    monkeypatch.setattr("noshuffle.noise.skip.KEPT_LENGTHS", 20)
    np.testing.assert_array_equal(Skips.of(BLT4, steps=100).between(starts, stop=100), kept)


@every_case
@pytest.mark.parametrize("kind", ["aes", "philox"])
def test_covariance_of_touches_is_that_of_the_explicit_matrix(name: str, kind: str) -> None:
    rows, size = 7, 12_000
    touches = random_touches(rows, seed=len(name))
    noise = lazy(name, (rows, size), source=seeded(seed="law", kind=kind))
    values: dict[tuple[int, int], np.ndarray] = {}
    for step in range(N):
        touched = at_step(touches, step)
        for row, value in zip(touched.tolist(), noise.touch_(touched, step)):
            values[row, step] = value.double().numpy()
    for row, value in enumerate(noise.flush_(N - 1)):
        if touches[row][-1:] == [N - 1]:
            assert not value.any()
        else:
            values[row, N - 1] = value.double().numpy()
    sums = prefix(name)
    weights = np.zeros((len(values), rows, N))  # rows of a table have independent draws
    last: dict[int, np.ndarray] = {}
    for i, (row, step) in enumerate(values):
        weights[i, row] = sums[step] - last.get(row, 0.0)
        last[row] = sums[step]
    weights = weights.reshape(len(values), -1)
    covariance, sample = weights @ weights.T, np.array(list(values.values()))
    check_covariance(sample, covariance)
    assert np.abs(sample.mean(axis=1) / np.sqrt(np.diag(covariance) / size)).max() < 5


def test_every_row_has_the_eager_variance_after_a_flush() -> None:
    rows, size = 60, 2_000
    touches = random_touches(rows, seed=5)
    noise, table = lazy("blt", (rows, size)), torch.zeros(rows, size)
    for step in range(N):
        touched = at_step(touches, step)
        table[touched] += noise.touch_(touched, step)
    assert noise.flush_(N - 1, out=table) is table
    ratio = table.double().pow(2).mean(dim=1).numpy() / np.sum(prefix("blt")[-1] ** 2)
    assert np.abs(ratio - 1).max() < 5 * np.sqrt(2 / size)
    assert np.abs(ratio * 4 / 9 - 1).min() > 5 * np.sqrt(2 / size)
    assert not noise.flush_(N - 1).any()


def sgd_weights(touched: list[int], *, lr: float, is_stale: bool) -> np.ndarray:
    """Values read and the final one under the gradient g = w, as weights of the draws."""
    matrix = SCALE * materialize(PLAIN, N)
    w, skipped, seen = np.zeros(N), np.zeros(N), []
    for step in range(N):
        y = matrix[step]
        if step in touched:
            read = w if is_stale else w + skipped
            seen.append(read)
            w, skipped = w + skipped - lr * (read + y), np.zeros(N)
        else:
            skipped = skipped - lr * y
    return np.array([*seen[1:], w + skipped])


@pytest.mark.parametrize("is_stale", [False, True])
def test_sparse_sgd_reads_and_releases_the_law_it_says(is_stale: bool) -> None:
    """The gradient is the value read, so noise that is missing at a read shows in the law."""
    touched, size, lr = [2, 9, 10, 24, 33], 40_000, 0.4
    rows, table, seen = torch.tensor([1]), torch.zeros(3, size), []
    divisor = 10.0
    noise = lazy("blt", (3, size))
    sgd = SparseSGD(noise=noise, lr=lr * divisor, divisor=divisor, is_stale=is_stale)
    for step in touched:
        if not is_stale:
            sgd.read_(table, rows, step)
        seen.append(table[1].clone())
        sgd.apply_(table, rows, table[rows], step)
    sgd.release_(table, N - 1)
    sample = torch.stack([*seen[1:], table[1]]).double().numpy()
    for other in (False, True):
        weights = sgd_weights(touched, lr=lr, is_stale=other)
        assert agrees(sample, weights @ weights.T) == (other == is_stale)
    untouched = prefix("blt")[-1] * lr
    assert agrees(table[[0, 2]].double().numpy(), np.eye(2) * (untouched @ untouched))


def test_a_row_touched_every_step_follows_the_recursion_of_eager_noise() -> None:
    noise = lazy("blt", (4, 6))
    draws = RowDraws(seeded(seed="lazy"), name="table", count=18, rows=4, device="cpu")
    rows, state = torch.arange(4), torch.zeros(2, 4, 6, dtype=torch.float64)
    for step in range(N):
        z = normals(draws, rows, step=step).view(4, 3, 6)[:, 0].double()
        y = z - 0.1 * state[0] - 0.3 * state[1]
        state = torch.tensor([0.95, 0.6]).double().view(2, 1, 1) * state + z
        got, near = noise.touch_(rows, step).double(), grid_step(SCALE)
        torch.testing.assert_close(got, SCALE * y, rtol=0, atol=near)
        assert not (got % near).any()


def test_rates_weigh_the_gradient_too() -> None:
    noise = lazy("blt with rates", (3, 4), scale=0.0)
    sgd, table = SparseSGD(noise=noise, lr=0.5, divisor=4.0, is_stale=True), torch.zeros(3, 4)
    sgd.apply_(table, torch.tensor([2]), torch.ones(1, 4), 7)
    torch.testing.assert_close(table[2], torch.full((4,), -0.125 * RATES[7]))
    assert not table[:2].any()


# --- the draws -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["aes", "philox"])
def test_draws_come_from_the_words_of_the_eager_generator(kind: str) -> None:
    """With 1024 numbers a row, row r has the words of tile r of its own name, four by four."""
    source = seeded(seed="draws", kind=kind)
    draws = RowDraws(source, name="w", count=1024, rows=50, device="cpu")
    layout = Layout.of({"w\0lazy": (50 * 1024,)}, chunk_tiles=50)
    words = torch.empty(50, 1024, dtype=torch.int32)
    seeds = {"w\0lazy": source.seed("w\0lazy")}
    if kind == "aes":
        AesWords(layout.chunks, seeds=seeds).fill_(words, chunk=0, row=3)
        blocks = words.view(50, 256, 4)
    else:
        device = torch.device("cpu")
        PhiloxWords(layout.chunks, seeds=seeds, device=device).fill_(words, chunk=0, row=3)
        blocks = words.view(50, 4, 256).transpose(1, 2)
    tiles, out = torch.cat([blocks[..., :2], blocks[..., 2:]], dim=1), torch.empty(50, 1024)
    normals_in_torch_(out, words=tiles.reshape(50, 1024))
    expected = torch.cat(out.view(50, 2, 256, 2).unbind(1), dim=2).view(50, 1024)
    assert torch.equal(normals(draws, torch.tensor([11, 4]), step=3), expected[[11, 4]])


@pytest.mark.parametrize("kind", ["aes", "philox"])
@pytest.mark.parametrize("count", [4, 80])
def test_no_number_is_drawn_twice(kind: str, count: int) -> None:
    """A pair of normals comes from 64 random bits of its own, so no pair may come again."""
    rows = torch.arange(200)
    draws = RowDraws(seeded(seed="x", kind=kind), name="w", count=count, rows=200, device="cpu")
    found = torch.stack([normals(draws, rows, step=t) for t in range(10)])
    pairs = found.view(-1, 2, 2).transpose(1, 2).reshape(-1, 2)
    assert len(pairs.unique(dim=0)) == 1000 * count
    assert abs(float(found.mean())) < 5 / found.numel() ** 0.5
    assert abs(float(found.var()) - 1) < 5 * (2 / found.numel()) ** 0.5
    other = RowDraws(seeded(seed="x", kind=kind), name="v", count=count, rows=200, device="cpu")
    assert not torch.isin(normals(other, rows, step=0)[:50], found[0]).all(dim=1).any()
    fewer = RowDraws(seeded(seed="x", kind=kind), name="w", count=count - 3, rows=9, device="cpu")
    assert torch.equal(normals(fewer, rows[:9], step=3), found[3, :9, : count - 3])
    assert torch.equal(normals(draws, rows[50:], step=3, first=1), found[3, 50:, :1])
    assert normals(draws, rows[:0], step=3).shape == (0, count)
    assert normals(draws, rows, step=3, first=0).shape == (200, 0)


@pytest.mark.parametrize("kind", ["aes", "philox"])
def test_the_default_type_of_torch_does_not_matter(kind: str) -> None:
    def drawn() -> list[Tensor]:
        noise = lazy(source=seeded(seed="default", kind=kind))
        first = noise.touch_(torch.tensor([3, 7]), 2)
        again = noise.touch_(torch.tensor([7]), 5, onto=torch.ones(1, 5, dtype=torch.float32))
        return [first, again, noise.flush_(6), noise.state_dict()["buffers"]]

    check_default_type(drawn)


def test_draws_beyond_their_field_are_refused() -> None:
    with pytest.raises(InvalidInput, match="use aes"):
        RowDraws(seeded(seed=1, kind="philox"), name="w", count=80, rows=2**28, device="cpu")
    for name in ("", "a\0b"):
        with pytest.raises(InvalidInput, match="NUL"):
            lazy(name=name)


# --- values: order, shards, restarts -------------------------------------------------------------


@every_case
def test_order_company_and_sharding_of_rows_change_no_bit(name: str) -> None:
    touches = random_touches(12, seed=3)
    whole, shuffled = lazy(name), lazy(name)
    shards = [lazy(name, (5, 5)), lazy(name, (7, 5), start=5)]
    for step in range(N):
        rows = at_step(touches, step)
        value = whole.touch_(rows, step)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(step))
        assert torch.equal(shuffled.touch_(rows[order], step), value[order])
        for shard, first, last in zip(shards, (0, 5), (5, 12)):
            mine = (rows >= first) & (rows < last)
            for row, expected in zip(rows[mine], value[mine]):  # one by one: no company at all
                assert torch.equal(shard.touch_(row.view(1) - first, step)[0], expected)
    end = whole.flush_(N - 1)
    assert torch.equal(end, shuffled.flush_(N - 1))
    assert torch.equal(end, torch.cat([shard.flush_(N - 1) for shard in shards]))


def test_a_flush_in_chunks_is_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = lazy().flush_(8)
    monkeypatch.setattr("noshuffle.noise.lazy._CHUNK", 60)
    assert torch.equal(lazy().flush_(8), expected)


@every_case
def test_resuming_is_bit_identical(name: str) -> None:
    touches = random_touches(12, seed=8)
    first = lazy(name)
    for step in range(15):
        first.touch_(at_step(touches, step), step)
    saved = first.state_dict()
    second = lazy(name)
    second.touch_(torch.arange(12), 0)  # whatever it held is replaced
    second.load_state_dict(saved)
    for step in range(15, N):
        rows = at_step(touches, step)
        assert torch.equal(first.touch_(rows, step), second.touch_(rows, step))
    assert torch.equal(first.flush_(N - 1), second.flush_(N - 1))
    assert int(saved["done"].max()) <= 15  # a copy, not a view
    assert not any(isinstance(value, bytes) for value in saved.values())


@pytest.mark.parametrize(
    "changes",
    [
        {"scale": 1.0}, {"steps": 30}, {"name": "other"}, {"start": 3}, {"rates": RATES},
        {"shape": (12, 6)}, {"source": seeded(seed="other")},
        {"source": seeded(seed="lazy", kind="philox")},
    ],
)  # fmt: skip
def test_another_noise_is_not_loaded(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="resume with"):
        lazy(**changes).load_state_dict(lazy().state_dict())


def test_a_damaged_state_is_not_loaded() -> None:
    good = lazy().state_dict()
    bad = [
        {"done": good["done"] + N + 1},
        {"done": good["done"] - 1},
        {"done": good["done"].long()},
        {"buffers": good["buffers"].half()},
        {"buffers": good["buffers"][:3]},
        {"buffers": None},
    ]
    for change in bad:
        with pytest.raises(InvalidInput, match="saved"):
            lazy().load_state_dict(good | change)


# --- refusals ------------------------------------------------------------------------------------


def test_rows_that_cannot_be_touched() -> None:
    noise = lazy()
    for rows, words in (
        (torch.tensor([1, 4, 1]), "named once"),
        (torch.tensor([12]), "from 0 to 11"),
        (torch.tensor([-1]), "from 0 to 11"),
        (torch.tensor([1], dtype=torch.int32), "int64"),
        (torch.tensor([[1]]), "one-dimensional"),
        (torch.tensor([True]), "int64"),
    ):
        with pytest.raises(InvalidInput, match=words):
            noise.touch_(rows, 3)
    assert noise.touch_(torch.tensor([], dtype=torch.int64), 3).shape == (0, 5)
    assert not noise.done(torch.arange(12)).any()


def test_a_step_is_touched_once_and_within_the_horizon() -> None:
    noise, rows = lazy(), torch.tensor([2, 7])
    noise.touch_(rows, 4)
    for step in (4, 3):
        with pytest.raises(InvalidInput, match="already has the noise"):
            noise.touch_(torch.tensor([5, 7]), step)
    with pytest.raises(InvalidInput, match="past step 2"):
        noise.flush_(2)
    for act in (lambda: noise.touch_(rows, N), lambda: noise.flush_(N)):
        with pytest.raises(HorizonExceeded, match="the last is step 36"):
            act()
    for step in (-1, 2.0, True):
        with pytest.raises(InvalidInput, match="step"):
            noise.touch_(rows, step)  # type: ignore[arg-type]
    assert noise.done(torch.tensor([2, 5, 7])).tolist() == [5, 0, 5]


def test_catching_up_touches_the_rows_that_are_behind() -> None:
    noise, twin = lazy(), lazy()
    for each in (noise, twin):
        each.touch_(torch.tensor([2, 7]), 4)
    behind, caught = noise.catch_up_(torch.tensor([7, 5, 2, 9]), 4)
    assert behind.tolist() == [5, 9]
    assert torch.equal(caught, twin.touch_(behind, 4))
    assert not len(noise.catch_up_(torch.tensor([5, 2]), 4)[0])
    assert not len(lazy().catch_up_(torch.tensor([5, 2]), -1)[0])
    with pytest.raises(InvalidInput, match="call read_"):
        noise.touch_(torch.tensor([2, 5]), 6, is_read=True)
    assert torch.equal(noise._done, twin._done)


def test_a_touch_that_failed_half_way_stops_the_noise() -> None:
    noise = lazy()
    with torch.inference_mode():
        noise._done = torch.zeros(12, dtype=torch.int32)  # cannot be written outside this mode
    with pytest.raises(RuntimeError, match="inference"):
        noise.touch_(torch.tensor([1]), 3)
    for act in (
        lambda: noise.touch_(torch.tensor([1]), 4), lambda: noise.flush_(5), noise.state_dict
    ):  # fmt: skip
        with pytest.raises(NoshuffleError, match="half-way"):
            act()


def test_a_touch_that_failed_in_its_rounding_has_taken_no_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise, rows = lazy(), torch.tensor([1, 4])

    def fails(*args: Any, **options: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("noshuffle.noise.lazy.add_on_grid_", fails)
        for act in (noise.touch_, noise.catch_up_):
            with pytest.raises(MemoryError):
                act(rows, 3)
    assert torch.equal(noise.flush_(5), lazy().flush_(5))


@pytest.mark.parametrize("act", ["read_", "apply_", "release_"])
def test_noise_that_did_not_reach_the_table_stops_the_noise(act: str) -> None:
    sgd, rows = SparseSGD(noise=lazy(), lr=0.1, divisor=8.0, is_stale=True), torch.tensor([1])
    with torch.inference_mode():
        table = torch.zeros(12, 5)  # cannot be written outside this mode
    inputs = {"read_": (rows, 3), "apply_": (rows, torch.ones(1, 5), 3), "release_": (3,)}
    with pytest.raises(RuntimeError, match="inference"):
        getattr(sgd, act)(table, *inputs[act])
    with pytest.raises(NoshuffleError, match="half-way"):
        sgd.noise.flush_(5)


def test_recipes_without_an_exact_skip_are_refused() -> None:
    source, settings = seeded(seed=1), {"scale": 1.0, "steps": N, "name": "w"}
    with pytest.raises(Unsupported, match="FeedForward"):
        LazyNoise(FeedForward((1.0, -0.5)), source, (3, 2), **settings)  # type: ignore[arg-type]
    tapped = Buffered((0.5,), (-0.1,), ((0, 1.0), (4, 0.3)))
    with pytest.raises(Unsupported, match="taps"):
        LazyNoise(tapped, source, (3, 2), **settings)  # type: ignore[arg-type]
    beyond = Buffered((0.5,), (-0.1,), ((0, 1.0), (N, 0.3)))  # which no step reaches
    LazyNoise(beyond, source, (3, 2), **settings)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="each of 38 steps"):
        lazy("blt with gains", steps=N + 1)
    with pytest.raises(InvalidInput, match="rates"):
        lazy(rates=(float("nan"),) * N)
    with pytest.raises(Unsupported, match="drop the gains"):
        lazy(rates=(1.0,) * 200_000, steps=200_000)
    for shape in ((), (0, 3), (3, 0)):
        with pytest.raises(InvalidInput, match="shape"):
            lazy(shape=shape)
    with pytest.raises(InvalidInput, match="scale"):
        lazy(scale=float("nan"))


def test_sparse_sgd_refusals() -> None:
    noise, table, rows = lazy(), torch.zeros(12, 5), torch.tensor([3])
    sgd = SparseSGD(noise=noise, lr=0.1, divisor=8.0)
    with pytest.raises(InvalidInput, match="call read_"):
        sgd.apply_(table, rows, torch.zeros(1, 5), 2)
    with pytest.raises(InvalidInput, match=r"shape \(1, 5\)"):
        sgd.apply_(table, rows, torch.zeros(2, 5), 2)
    with pytest.raises(InvalidInput, match="the table must be"):
        sgd.apply_(torch.zeros(12, 4), rows, torch.zeros(1, 4), 2)
    with pytest.raises(InvalidInput, match="divisor"):
        SparseSGD(noise=noise, lr=0.1, divisor=0.0)
    assert not table.any()
    assert not noise.done(rows).any()
    sgd.read_(table, rows, 0)
    sgd.apply_(table, rows, torch.zeros(1, 5), 0)
    sgd.read_(table, rows, 1)  # nothing is missing
    assert noise.done(rows).item() == 1


def test_low_precision_and_parameters() -> None:
    parameter = torch.nn.Parameter(torch.zeros(12, 5, dtype=torch.bfloat16))
    sgd = SparseSGD(noise=lazy(), lr=0.5, divisor=1.0)
    sgd.apply_(parameter, torch.tensor([3]), torch.ones(1, 5, dtype=torch.bfloat16), 0)
    expected = -0.5 * (1.0 + lazy().touch_(torch.tensor([3]), 0)[0])
    assert torch.equal(parameter[3], expected.bfloat16())
    higher = lazy(shape=(4, 2, 3)).touch_(torch.tensor([1, 2]), 5)
    assert higher.shape == (2, 2, 3)
    assert lazy(shape=(4,)).touch_(torch.tensor([1, 2]), 5).shape == (2,)
    assert lazy().is_test


@every_case
def test_low_bits_do_not_tell_which_rows_were_touched(name: str) -> None:
    """Touches and flushes give multiples of one grid, gradient or not; it never coarsens."""
    noise, touches = lazy(name), random_touches(12, seed=3)
    grids = [noise._grid_at(step) for step in range(N)]
    assert grids == sorted(grids, reverse=True)
    assert grids[0] > 0
    generator = torch.Generator().manual_seed(0)
    for step in range(N):
        rows = at_step(touches, step)
        onto = torch.randn(len(rows), 5, generator=generator) if step % 2 else None
        assert not (noise.touch_(rows, step, onto=onto) % grids[step]).any()
    assert not (noise.flush_(N - 1) % grids[-1]).any()


def test_gradients_are_rounded_with_their_noise() -> None:
    """Noise by itself and noise on a gradient differ by the gradient, up to a step of the grid."""
    rows, generator = torch.tensor([1, 5]), torch.Generator().manual_seed(0)
    gradient = torch.randn(2, 5, generator=generator)
    noise, noisy = lazy().touch_(rows, 3), lazy().touch_(rows, 3, onto=gradient)
    near = lazy()._grid_at(3)
    assert float((noisy - noise - gradient).abs().max()) < 2 * near
    assert float((noisy - noise - gradient).abs().max()) > near / 20
    with pytest.raises(InvalidInput, match=r"shape \(2, 5\)"):
        lazy().touch_(rows, 3, onto=gradient[:1])


def test_of_two_threads_that_touch_a_row_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = lazy()
    begun, advance = threading.Barrier(2), noise._advance_

    def slow(*arguments: Any, **settings: Any) -> Tensor:
        with contextlib.suppress(threading.BrokenBarrierError):
            begun.wait(0.2)  # without a lock both would get here with the same steps behind them
        return advance(*arguments, **settings)

    monkeypatch.setattr(noise, "_advance_", slow)

    def go(rows: list[int]) -> Tensor | str:
        try:
            return noise.touch_(torch.tensor(rows), 4)
        except InvalidInput as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        got = [f.result() for f in [pool.submit(go, [3, i]) for i in (5, 7)]]
        other = pool.submit(go, [9]).result()
    assert sum(isinstance(g, Tensor) for g in got) == 1
    assert any(isinstance(g, str) and "row 3 already has the noise" in g for g in got)
    assert isinstance(other, Tensor)
    assert torch.equal(other, lazy().touch_(torch.tensor([9]), 4))

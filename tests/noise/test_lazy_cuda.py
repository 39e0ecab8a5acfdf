"""Lazy noise on an accelerator: the numbers of ordinary memory, and the law of eager noise."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from tests.strategies.slow_recipes import materialize
from torch import Tensor

from noshuffle.errors import InvalidInput
from noshuffle.noise import NoiseStream, Source, lazy_fused
from noshuffle.noise import test_source as seeded
from noshuffle.noise.lazy import LazyNoise
from noshuffle.noise.lazy_fused import FusedLazyNoise, lazy_noise
from noshuffle.noise.sparse_sgd import SparseSGD
from noshuffle.noise.triton_kernels import HAS_TRITON
from noshuffle.strategies.recipe import Buffered

HAS_GPU = torch.cuda.is_available()
#: Without a GPU the same walks run once more on the CPU, so that they cannot rot unseen.
DEVICE = "cuda" if HAS_GPU else "cpu"
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no CUDA device here")

N, SCALE = 23, 1.3
RATES = tuple(1.0 - t / (N + 3) for t in range(N))
GAINS = tuple(1.0 / (1 + 0.05 * t) for t in range(N))
CASES: dict[str, tuple[Buffered, tuple[float, ...]]] = {
    "blt": (Buffered((0.95, 0.6), (-0.1, -0.3)), ()),
    "rates": (Buffered((0.95, 0.6), (-0.1, -0.3)), RATES),
    "gains": (Buffered((0.9, 0.5), (-0.1, -0.3), scale=GAINS), ()),
    "no buffers": (Buffered((), ()), ()),
}
RINGED = Source(bytes(32), "philox", later=((4, bytes(range(32))), (9, bytes([7] * 32))))
every_case = pytest.mark.parametrize("case", CASES)
#: The torch form, and the kernels where they can run.
every_form = pytest.mark.parametrize("form", [LazyNoise, lazy_noise], ids=["torch", "kernels"])


def lazy(
    case: str,
    shape: tuple[int, ...],
    device: str,
    form: Callable[..., LazyNoise] = lazy_noise,
    **changed: Any,
) -> LazyNoise:
    recipe, rates = CASES[case]
    source = changed.pop("source", seeded(seed="lazy cuda", kind="philox"))
    settings = {"scale": SCALE, "steps": N, "name": "table", "rates": rates, **changed}
    return form(recipe, source, shape, device=device, **settings)


def pattern(rows: int, seed: int) -> list[tuple[int, Tensor]]:
    """Steps with the rows that they touch, in no order, some steps left out."""
    rng = np.random.default_rng(seed)
    steps = [t for t in range(N - 1) if rng.random() < 0.7]
    return [(t, torch.from_numpy(rng.permutation(rows)[: rng.integers(1, rows)])) for t in steps]


@needs_gpu
@every_case
@every_form
@pytest.mark.parametrize("shape", [(40, 9), (40, 16), (40,)], ids=["9", "16", "1"])
def test_touches_have_the_bits_of_the_cpu(
    case: str, form: Callable[..., LazyNoise], shape: tuple[int, ...]
) -> None:
    source = {"source": RINGED} if shape == (40, 9) else {}
    here = lazy(case, shape, "cpu", LazyNoise, start=3, **source)
    there = lazy(case, shape, "cuda", form, start=3, **source)
    for step, rows in pattern(40, seed=1):
        expected, got = here.touch_(rows, step), there.touch_(rows.cuda(), step)
        assert got.device.type == "cuda"
        assert torch.equal(expected, got.cpu())
        assert torch.equal(here.done(rows), there.done(rows.cuda()).cpu())
    assert torch.equal(here.flush_(N - 1), there.flush_(N - 1).cpu())


@pytest.mark.skipif(HAS_TRITON, reason="with Triton its interpreter, or a GPU, runs the kernels")
@every_case
@pytest.mark.parametrize("source", [seeded(seed=1, kind="philox"), RINGED], ids=["key", "ring"])
def test_kernels_on_numpy(
    case: str, source: Source, without_triton: Callable[[], AbstractContextManager[None]]
) -> None:
    here = lazy(case, (12, 9), "cpu", LazyNoise, start=5, source=source)
    there = lazy(case, (12, 9), "cpu", FusedLazyNoise, start=5, source=source)
    with without_triton():
        for step, rows in pattern(12, seed=1):
            assert torch.equal(here.touch_(rows, step), there.touch_(rows, step))
        assert torch.equal(here.flush_(N - 1), there.flush_(N - 1))


@pytest.mark.skipif(
    HAS_GPU or not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs TRITON_INTERPRET=1 in the environment, Triton, and no GPU",
)
@every_case
@pytest.mark.parametrize("shape", [(12, 8), (12, 9), (12,)], ids=["8", "9", "1"])
def test_kernels_in_the_interpreter(case: str, shape: tuple[int, ...]) -> None:
    here = lazy(case, shape, "cpu", LazyNoise, start=5)
    there = lazy(case, shape, "cpu", FusedLazyNoise, start=5)
    for step, rows in pattern(12, seed=1):
        expected = here.touch_(rows, step)
        try:
            got = there.touch_(rows, step)
        except TypeError as error:  # older interpreters use what NumPy 2.4 refuses
            pytest.skip(f"this Triton's interpreter does not work with this NumPy: {error}")
        assert torch.equal(expected, got)
    assert torch.equal(here.flush_(N - 1), there.flush_(N - 1))


@needs_gpu
def test_long_sleeps_and_empty_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps beyond the table on the device are sent for each touch; the bits stay."""
    monkeypatch.setattr(lazy_fused, "MOST_LENGTHS", 4)
    monkeypatch.setattr(lazy_fused, "CHUNK", 64)
    here, there = lazy("blt", (30, 6), "cpu", LazyNoise), lazy("blt", (30, 6), "cuda")
    if not isinstance(there, FusedLazyNoise):
        pytest.skip("the kernels cannot run here")
    for step, rows in [(2, torch.arange(9)), (9, torch.arange(5, 20)), (9, torch.arange(0))]:
        assert torch.equal(here.touch_(rows, step), there.touch_(rows.cuda(), step).cpu())
    assert torch.equal(here.flush_(N - 1), there.flush_(N - 1).cpu())
    for wrong in ([1, 1], [-1], [30]):
        with pytest.raises(InvalidInput, match="rows must be"):
            there.done(torch.tensor(wrong).cuda())


@needs_gpu
def test_a_run_goes_on_on_the_other_device() -> None:
    noises = {"cpu": lazy("rates", (30, 4), "cpu"), "cuda": lazy("rates", (30, 4), "cuda")}
    for step, rows in pattern(30, seed=2):
        first, second = ("cpu", "cuda") if step % 2 else ("cuda", "cpu")
        got = noises[first].touch_(rows, step)
        noises[second].load_state_dict(noises[first].state_dict())
        assert got.device.type == first
    whole = lazy("rates", (30, 4), "cpu")
    for step, rows in pattern(30, seed=2):
        whole.touch_(rows, step)
    assert torch.equal(whole.flush_(N - 1), noises["cuda"].flush_(N - 1).cpu())


@needs_gpu
def test_sparse_sgd_reads_and_writes_like_the_cpu() -> None:
    """Gradients depend on what was read, so a difference anywhere would spread."""
    tables = {}
    for device in ("cpu", "cuda"):
        table = torch.linspace(-1, 1, 200, device="cpu").view(50, 4).clone().to(device)
        sgd = SparseSGD(noise=lazy("blt", (50, 4), device), lr=0.5, divisor=4.0)
        for step, rows in pattern(50, seed=3):
            mine = rows.to(device)
            sgd.read_(table, mine, step)
            sgd.apply_(table, mine, 0.5 * table[mine], step)
        sgd.release_(table, N - 1)
        tables[device] = table.cpu()
    torch.testing.assert_close(tables["cuda"], tables["cpu"], rtol=1e-6, atol=1e-6)


@every_case
@every_form
def test_the_law_is_that_of_eager_noise(case: str, form: Callable[..., LazyNoise]) -> None:
    """Sums at two touches and at the end, over 60,000 columns, beside the explicit matrix."""
    columns, stops = 60_000, (4, 11, N - 1)
    recipe, rates = CASES[case]
    noise = lazy(case, (3, columns), DEVICE, form)
    parts = [
        noise.touch_(torch.tensor([1], device=DEVICE), stop)[0].double().cpu() for stop in stops
    ]
    sums = torch.stack(parts).cumsum(0).numpy()
    weights = np.asarray(rates or (1.0,) * N)
    rows = SCALE * np.cumsum(weights[:, None] * materialize(recipe, N), axis=0)[list(stops)]
    expected = rows @ rows.T
    found = sums @ sums.T / columns
    # The standard error of an entry of a sample covariance.
    spread = np.sqrt((np.outer(expected.diagonal(), expected.diagonal()) + expected**2) / columns)
    assert (np.abs(found - expected) < 5 * spread).all()
    assert (np.abs(found - 1.5 * expected) > 5 * spread).diagonal().all()


def test_eager_noise_on_the_same_device_has_that_law() -> None:
    """The twin: the stream that adds noise to every row at every step."""
    columns, recipe = 60_000, CASES["blt"][0]
    source = seeded(seed="eager cuda", kind="philox")
    stream = NoiseStream(recipe, source, {"w": (columns,)}, scale=SCALE, steps=N, device=DEVICE)
    total, sums = torch.zeros(columns, device=DEVICE), []
    for _ in range(N):
        stream.add_({"w": total})
        sums.append(total.double().cpu().numpy().copy())
    found = np.var(np.stack(sums), axis=1)
    expected = (SCALE**2) * (np.cumsum(materialize(recipe, N), axis=0) ** 2).sum(1)
    assert (np.abs(found / expected - 1) < 5 * np.sqrt(2 / columns)).all()


def test_a_large_table_is_touched_only_where_it_is_touched() -> None:
    rows = 1_000_000 if HAS_GPU else 20_000
    table = torch.zeros(rows, 16, device=DEVICE)
    sgd = SparseSGD(noise=lazy("blt", (rows, 16), DEVICE), lr=0.1, divisor=8.0)
    chosen = torch.randperm(rows, device=DEVICE)[:1000]
    sgd.read_(table, chosen, 7)
    sgd.apply_(table, chosen, torch.zeros(1000, 16, device=DEVICE), 7)
    moved = table.abs().sum(1) > 0
    assert int(moved.sum()) == 1000
    assert bool(moved[chosen].all())
    sgd.release_(table, N - 1)
    assert bool((table.abs().sum(1) > 0).all())
    assert int((sgd.noise.done(torch.arange(rows, device=DEVICE)) != N).sum()) == 0


@needs_gpu
def test_tables_elsewhere_are_refused() -> None:
    sgd = SparseSGD(noise=lazy("blt", (5, 2), "cuda"), lr=0.1, divisor=8.0)
    with pytest.raises(InvalidInput, match="must be on cuda"):
        sgd.read_(torch.zeros(5, 2), torch.tensor([1]), 3)

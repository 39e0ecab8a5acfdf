"""The one clip factor: its table of edge cases, its twins, its callers; models that change."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import noshuffle
from noshuffle.clipping import Flat, Ghost, PerExample, PerLayer
from noshuffle.clipping import factor as module
from noshuffle.clipping.factor import LEAST_FACTOR, SLACK, Clip, clip_factor, clip_factors
from noshuffle.clipping.forms import DenseGradient
from noshuffle.federated.clients import clip_flat
from noshuffle.training.compiled import kernels
from noshuffle.training.compiled.flat import Flattened
from noshuffle.training.compiled.sum import short

CLIPS = [Flat(0.7), PerLayer(0.7), PerLayer({"a": 0.3, "b": 2.0})]


def squares_of(size: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(size)
    names = {"a.weight": torch.float64, "a.bias": torch.float32, "b.weight": torch.float32}
    found = {n: 3 * torch.rand(size, generator=draw).to(d) for n, d in names.items()}
    for name in found:
        found[name][0] = 0.0
    if size > 3:
        found["a.weight"][1], found["b.weight"][2], found["a.bias"][3] = math.nan, math.inf, 1e38
    return found


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("size", [1, 9, 250])
def test_factors_equal_their_twin(clip: Clip, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    squares, draw = squares_of(size), torch.Generator().manual_seed(1)
    ok, present = (torch.rand(size, generator=draw) < 0.8 for _ in range(2))
    own = clip_factors(squares, ok, present, clip=clip)
    monkeypatch.setattr(module, "are_plain", lambda t: False)
    twin = clip_factors(squares, ok, present, clip=clip)
    assert [names for names, _ in own[0]] == [names for names, _ in twin[0]]
    for (_, mine), (_, other) in zip(own[0], twin[0]):
        assert mine.dtype == other.dtype == torch.float64
        torch.testing.assert_close(mine, other, rtol=1e-14, atol=0)
    torch.testing.assert_close(own[1], twin[1], rtol=1e-14, atol=0, equal_nan=True)
    assert torch.equal(own[2], twin[2])


@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("clip", CLIPS)
def test_no_mark_of_who_is_present_says_that_all_are(
    clip: Clip, is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    squares = squares_of(250)
    ok = torch.rand(250, generator=torch.Generator().manual_seed(1)) < 0.8
    monkeypatch.setattr(module, "are_plain", lambda t: is_plain)
    told = clip_factors(squares, ok, torch.ones_like(ok), clip=clip)
    own = clip_factors(squares, ok, None, clip=clip)
    for (_, mine), (_, other) in zip(own[0], told[0]):
        assert torch.equal(mine, other)
    assert own[1].numpy().tobytes() == told[1].numpy().tobytes()
    assert torch.equal(own[2], told[2])
    assert bool(own[2][1])
    assert bool(own[2][2])


def test_half_precision_and_no_unit_at_all() -> None:
    ok = torch.ones(2, dtype=torch.bool)
    half = {"a.bias": torch.tensor([4.0, 0.25], dtype=torch.bfloat16)}
    ((_, factors),), norms, bad = clip_factors(half, ok, ok, clip=Flat(1.0))
    torch.testing.assert_close(factors, torch.tensor([0.5, 1.0]).double(), rtol=1e-5, atol=0)
    assert norms.tolist() == [2.0, 0.5]
    assert not bad.any()
    none = {"a.bias": torch.zeros(0)}
    ((_, factors),), norms, bad = clip_factors(none, ok[:0], ok[:0], clip=Flat(1.0))
    assert factors.shape == norms.shape == bad.shape == (0,)


def replaced(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.randn(6, 4))


def frozen(model: nn.Sequential) -> None:
    model[0].bias.requires_grad_(False)


def grown(model: nn.Sequential) -> None:
    model.append(nn.Linear(3, 3))


def switched(model: nn.Sequential) -> None:
    model.eval()


@pytest.mark.parametrize("change", [replaced, frozen, grown, switched])
def test_a_model_that_changes_between_two_steps(change) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    batch = (torch.randn(8, 4), torch.randint(3, (8,)))
    engine, loss_fn = Ghost(), nn.CrossEntropyLoss()
    for _ in range(2):
        engine.clipped_sum(model, loss_fn, batch, clip=Flat(0.5))
    change(model)
    own = engine.clipped_sum(model, loss_fn, batch, clip=Flat(0.5))
    twin = PerExample().clipped_sum(model, loss_fn, batch, clip=Flat(0.5))
    assert list(own.values) == list(twin.values)
    for name, value in own.values.items():
        torch.testing.assert_close(value, twin.values[name], rtol=1e-4, atol=1e-5)
    if change is frozen:
        model[0].bias.requires_grad_(True)
        assert "0.bias" in engine.clipped_sum(model, loss_fn, batch, clip=Flat(0.5)).values


EDGES = [0.0, 5e-324, 1e-310, 1e-45, 1e-30, 0.5, 1.0, 1.0 + 2**-52, 3.0, 1e30, 3.4e38, 1e200, 1e308]
WRONG = [math.inf, math.nan]


def obvious(norm: float, clip_norm: float, slack: float) -> Fraction:
    """The clip factor in exact arithmetic."""
    if not math.isfinite(norm):
        return Fraction(0)
    if norm == 0:
        return Fraction(1)
    factor = min(Fraction(1), Fraction(clip_norm) * Fraction(1.0 - slack) / Fraction(norm))
    return factor if factor >= Fraction(LEAST_FACTOR) else Fraction(0)


def norms_of(seed: int) -> list[float]:
    draw = np.random.default_rng(seed)
    return [*EDGES, *WRONG, *np.exp(draw.uniform(-80, 80, size=200)).tolist()]


@pytest.mark.parametrize("clip_norm", [1e-12, 0.7, 1.0, 1e6])
@pytest.mark.parametrize("slack", [0.0, SLACK, 2.0**-9])
def test_the_factor_is_what_exact_arithmetic_says(clip_norm: float, slack: float) -> None:
    norms = norms_of(3)
    on_host = clip_factor(np.array(norms), clip_norm, slack=slack)
    in_torch = clip_factor(torch.tensor(norms, dtype=torch.float64), clip_norm, slack=slack)
    for norm, host, twin in zip(norms, on_host.tolist(), in_torch.tolist()):
        exact = obvious(norm, clip_norm, slack)
        for found in (host, twin, float(clip_factor(norm, clip_norm, slack=slack))):
            if abs(float(exact) / LEAST_FACTOR - 1.0) > 1e-12:  # not on the edge itself
                assert abs(Fraction(found) - exact) <= exact * Fraction(2.0**-51)
            assert found == 0.0 or LEAST_FACTOR <= found <= 1.0
            assert not norm < clip_norm * (1.0 - slack) * (1 - 2**-51) or found == 1.0
            assert float(torch.tensor(found)) == 0.0 or math.isfinite(norm)


def test_rows_that_are_left_out_have_factor_zero() -> None:
    norms, keep = torch.tensor([0.0, 2.0, math.nan, 9.0]), torch.tensor([True, False, True, True])
    assert clip_factor(norms, 3.0, slack=0.0, keep=keep).tolist() == [1.0, 0.0, 0.0, 3.0 / 9.0]
    found = clip_factor(norms.double().numpy(), 3.0, slack=0.0, keep=keep.numpy())
    assert found.tolist() == [1.0, 0.0, 0.0, 3.0 / 9.0]


def test_one_bound_a_run() -> None:
    norms, bounds = torch.rand(5, 3, dtype=torch.float64) * 9, torch.tensor([0.1, 1.0, 5.0])
    found = clip_factor(norms, bounds, slack=SLACK)
    for k, bound in enumerate(bounds.tolist()):
        alone = clip_factor(norms[:, k], bound, slack=SLACK)
        torch.testing.assert_close(found[:, k], alone, rtol=1e-6, atol=0)


def rows_of(norms: list[float]) -> Tensor:
    """Gradients of two parts whose norms are these, as far as float32 holds them."""
    rows = torch.tensor(norms).float()[:, None] * torch.tensor([0.6, 0.8])
    return rows


def held(norms: list[float]) -> list[float]:
    """Those that float32 holds."""
    return [n for n in norms if not 3e38 < n < math.inf]


def by_engine(rows: Tensor, keep: Tensor) -> Tensor:
    """Factor by factor, through `clip_factors`: what `units.finish` multiplies by."""
    squares = {"w": rows.double().square().sum(1)}
    return clip_factors(squares, torch.ones_like(keep), keep, clip=Flat(1.0))[0][0][1]


def one_by_one(clip: Any, rows: Tensor, keep: Tensor) -> Tensor:
    """The factors that a sum of single rows shows: the sum of a row divided by that row."""
    found = []
    for row, is_kept in zip(rows, keep):
        total = clip(row[None], is_kept[None])
        top = int(row.abs().argmax())
        is_plain = bool(torch.isfinite(row[top])) and float(row[top]) != 0.0
        found.append(float(total[top]) / float(row[top]) if is_plain else float(total.abs().max()))
    return torch.tensor(found, dtype=torch.float64)


def by_short(row: Tensor, keep: Tensor) -> Tensor:
    like = {"w": torch.zeros(2)}
    return short({"w": [DenseGradient(row)]}, like, torch.ones(1), keep, clip=Flat(1.0)).values["w"]


def by_matrix(row: Tensor, keep: Tensor) -> Tensor:
    like = {"w": torch.zeros(2)}
    flattened = Flattened({"w": [DenseGradient(row)]}, like, aim=1.0 - SLACK)
    return flattened({"w": [DenseGradient(row)]}, torch.ones(1), keep).values["w"]


def by_client(row: Tensor, keep: Tensor) -> Tensor:
    return clip_flat(row[0], clip_norm=1.0)[0] if bool(keep) else torch.zeros(2)


@pytest.mark.parametrize("clip", [by_short, by_matrix, by_client])
def test_every_caller_has_the_same_factor(clip: Any) -> None:
    rows = rows_of(held(norms_of(5)))
    # Squares that float32 cannot hold are the caller's; the factor is not asked about them.
    size = rows.double().norm(dim=1)
    rows = rows[~((size > 1e18) & torch.isfinite(size)) & ~((size < 1e-18) & (size > 0))]
    keep = torch.arange(len(rows)) % 5 != 0
    found, truth = one_by_one(clip, rows, keep), by_engine(rows, keep)
    is_plain = torch.isfinite(rows).all(1) & (rows != 0).any(1)
    torch.testing.assert_close(found[is_plain], truth[is_plain], rtol=2e-6, atol=0)
    assert not found[~is_plain].any()  # zeros stay zeros, and NaN and infinity become zeros


@pytest.mark.skipif(
    not torch.cuda.is_available() or not kernels.HAS_TRITON,
    reason="the kernel needs a GPU and Triton; its twin on a CPU is tested above",
)
def test_the_kernel_has_the_same_factor() -> None:
    rows = rows_of(held(norms_of(7))).cuda()
    size = rows.double().norm(dim=1)
    rows = rows[~((size > 1e18) & torch.isfinite(size)) & ~((size < 1e-18) & (size > 0))]
    keep = torch.arange(len(rows), device="cuda") % 5 != 0
    like = {"w": torch.zeros(2, device="cuda")}
    losses, extra = torch.ones(len(rows), device="cuda"), torch.zeros(len(rows), device="cuda")
    extra = extra.double()
    extra[1], extra[2], extra[3] = 1e301, 1e77, math.nan  # bad, below 2⁻¹²⁶, bad
    flattened: Any = Flattened({"w": [DenseGradient(rows)]}, like, aim=1.0 - SLACK, rows=len(rows))
    kernel = flattened._by_kernels(rows, losses, keep, extra)
    twin = flattened._plain(rows, losses, keep, extra)
    torch.testing.assert_close(kernel[0], twin[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(kernel[1], twin[1], rtol=1e-6, atol=0, equal_nan=True)
    norms = (rows.double().square().sum(1) + extra).sqrt()
    truth = clip_factor(norms, 1.0, slack=SLACK, keep=keep & (norms <= 1e150))
    torch.testing.assert_close(kernel[0].double(), truth, rtol=2e-6, atol=0)


def test_nobody_else_writes_the_clip_factor() -> None:
    """A factor written out once more would not follow a mend of this one."""
    root = Path(noshuffle.__file__).parent
    words = ("LEAST_FACTOR", "clamp_max(1.0)", "1.1754943508222875e-38")
    allowed = {"clipping/factor.py", "training/compiled/kernels.py"}
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if any(word in path.read_text(encoding="utf8") for word in words)
    }
    assert found == allowed


def test_factors_of_a_traced_sum_are_not_those_of_its_first_batch() -> None:
    def clipped(rows: Tensor) -> Tensor:
        ok = torch.ones(len(rows), dtype=torch.bool)
        found = clip_factors({"w": rows.square().sum(1)}, ok, ok, clip=Flat(1.0), slack=0.0)
        return found[0][0][1]

    traced = make_fx(clipped)(torch.full((3, 2), 0.1))
    other = torch.full((3, 2), 100.0)
    torch.testing.assert_close(traced(other), clipped(other))
    assert float(clipped(other).max()) < 0.1

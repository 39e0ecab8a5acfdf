"""A kernel reads inner products of steps as the plain form does, on a GPU or in the interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

from noshuffle.clipping import gpu_kernels, gram
from noshuffle.clipping.tolerance import RoundingTolerance

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCES = [
    RoundingTolerance(gram.smallest(torch.float32), growth=0.0, moved=0.0, allowance=1e-6),
    RoundingTolerance(gram.smallest(torch.float32), growth=3e-7, moved=2.0**-9, allowance=1e-6),
]


def drawn(steps: int, sizes: tuple[float, float], *, seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed + steps)
    made = (torch.randn(5, steps, w, generator=draw) * s for w, s in zip((9, 70), sizes))
    return [t.to(DEVICE) for t in made]


@pytest.mark.parametrize("how", TOLERANCES, ids=["exact", "rounded"])
@pytest.mark.parametrize("sizes", [(1.0, 1.0), (1e-21, 1e15), (1e15, 1e-21), (1e-30, 1e17)])
@pytest.mark.parametrize("steps", [1, 2, 4, 33, 91, 130])
def test_the_kernel_is_the_plain_form(
    steps: int, sizes: tuple[float, float], how: RoundingTolerance
) -> None:
    a, g = drawn(steps, sizes)
    a[1, :, 0], g[2, 0, 3], a[3], g[4] = torch.inf, torch.nan, 0.0, g[4, :1].clone()
    given = gram.inner(a), gram.inner(g)
    found = gpu_kernels.of_tables(*given, (9, 70), how)
    wanted = gram.bounded(a, g, how)
    assert found.dtype == wanted.dtype == torch.float64
    assert torch.isfinite(found).tolist() == torch.isfinite(wanted).tolist()
    assert torch.isfinite(found).tolist() == [True, False, False, True, True]
    fine = [0, 3, 4]
    torch.testing.assert_close(found[fine], wanted[fine], rtol=1e-6, atol=0.0)
    exact = torch.bmm(g.double().mT, a.double()).square().sum((1, 2))
    assert bool((found >= exact)[fine].all())


def test_tables_may_be_cut_from_larger_ones() -> None:
    a, g = drawn(6, (1.0, 1.0))
    given = [gram.inner(t).repeat(1, 2, 2)[:, 3:9, 3:9] for t in (a, g)]
    found = gpu_kernels.of_tables(given[0], given[1], (9, 70), TOLERANCES[0])
    whole = gpu_kernels.of_tables(
        given[0].contiguous(), given[1].contiguous(), (9, 70), TOLERANCES[0]
    )
    assert torch.equal(found, whole)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_norms_on_a_gpu_are_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    run = gpu_kernels.of_tables
    monkeypatch.setattr(
        gpu_kernels, "of_tables", lambda *a, **k: (calls.append(True), run(*a, **k))[1]
    )
    a, g = drawn(4, (1.0, 1.0))
    assert gram.raised(a, g, TOLERANCES[0]).shape == (5,)
    assert calls
    calls.clear()
    assert gram.raised(a.double(), g.double(), TOLERANCES[0]).shape == (5,)
    assert not calls

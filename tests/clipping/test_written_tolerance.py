"""The rounding tolerance of gradients that are written out: the kernel against torch's form.

On a GPU where there is one, else in Triton's interpreter.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from noshuffle.clipping import gpu_kernels, gram
from noshuffle.clipping.tolerance import RoundingTolerance

HAS_GPU = torch.cuda.is_available()
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
#: Of half precision, and of plain single precision.
TOLERANCES = [
    RoundingTolerance(tiny=1.2e-38, growth=3e-7, moved=2.0**-9, allowance=1e-6),
    RoundingTolerance(tiny=1.2e-38, growth=0.0, moved=0.0, allowance=1e-6),
]


@pytest.mark.parametrize("tolerance", TOLERANCES, ids=["half", "single"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (1e-30, 1e17), (1e15, 1e-21)])
@pytest.mark.parametrize("steps", [2, 255, 256, 700])
def test_the_kernel_is_the_plain_form(
    steps: int, scales: tuple[float, float], dtype: torch.dtype, tolerance: RoundingTolerance
) -> None:
    draw = torch.Generator().manual_seed(steps)
    long_a, long_g = ((torch.rand(5, steps, generator=draw) * scale).to(DEVICE) for scale in scales)
    squared = ((long_a.double() * long_g.double()).sum(1) ** 2 * 0.3).to(dtype)
    long_a[1, 1], squared[2], squared[3] = torch.inf, torch.nan, 0.0
    given = squared, (long_a, long_g), (72, 200), tolerance
    found, wanted = gpu_kernels.of_written(*given), gram._of_written(*given)
    assert found.dtype == wanted.dtype == torch.float64
    assert torch.isfinite(found).tolist() == [True, False, False, True, True]
    # the four numbers of the tolerance reach a kernel in single precision
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0.0, equal_nan=True)
    assert bool((found[[0, 3, 4]] > squared.double()[[0, 3, 4]]).all())

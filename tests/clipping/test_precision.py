"""Settings of torch that round products must not let an example pass the clip norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from noshuffle.clipping import Flat, Ghost, PerExample
from noshuffle.clipping.factor import slack
from noshuffle.clipping.products import exactly, rounds_convolutions, rounds_products

CPU = torch.device("cpu")


@pytest.fixture
def restored():
    before = torch.get_float32_matmul_precision()
    mkldnn = torch.backends.mkldnn.matmul.fp32_precision
    cuda = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.mkldnn.matmul.fp32_precision = mkldnn
    torch.backends.cuda.matmul.fp32_precision = cuda
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("engine", [Ghost, PerExample])
@pytest.mark.parametrize("setting", ["highest", "high", "medium"])
def test_no_example_passes_the_clip_norm(engine, setting, restored):
    """At "medium", processors with matrix units round to bfloat16: 1.002 times the clip norm."""
    torch.set_float32_matmul_precision(setting)
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(300, 256), nn.Tanh(), nn.Linear(256, 10))
        x, y, keep = 10 * torch.randn(64, 300), torch.randint(10, (64,)), torch.zeros(64)
        keep[3] = 1.0
        got = engine().clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(0.01), weights=keep)
        norm = torch.cat([v.double().flatten() for v in got.values.values()]).norm()
        assert 0.0099 <= float(norm) <= 0.01


def test_products_keep_their_bits_inside_and_the_setting_comes_back(restored):
    torch.set_float32_matmul_precision("medium")
    a, b = torch.randn(256, 512), torch.randn(512, 256)
    truth = a.double() @ b.double()
    with exactly(CPU):
        assert float((a @ b - truth).norm() / truth.norm()) < 1e-5
    assert torch.get_float32_matmul_precision() == "medium"
    with pytest.raises(ZeroDivisionError), exactly(CPU):
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == "medium"


def test_newer_names_of_the_settings_are_read(restored):
    """After them torch's older names raise; a step must not."""
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert rounds_products()
    assert rounds_convolutions() in (True, False)
    assert 0.0 < slack(torch.zeros(2)) < 1e-5
    model, batch = nn.Linear(3, 2), (torch.randn(4, 3), torch.randint(2, (4,)))
    Ghost().clipped_sum(model, F.cross_entropy, batch, clip=Flat(1.0))
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"

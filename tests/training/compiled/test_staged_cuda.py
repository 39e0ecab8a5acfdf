"""Users as CUDA graphs: the eager steps' results, and really captured."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from noshuffle.clipping import rules_conv
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.noise import test_source
from noshuffle.participation import MinSeparation
from noshuffle.plan import Plan
from noshuffle.strategies import identity
from noshuffle.training import privatize
from noshuffle.training.compiled import staged
from noshuffle.training.compiled.staged import StagedUsers
from noshuffle.training.models import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
LOSS = nn.CrossEntropyLoss()
SIZE, STEPS = 24, 5
IDS = np.random.default_rng(0).integers(0, 9, SIZE)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("kernels", ["", "halves", "pairs"])
def test_a_graph_gives_what_the_eager_step_gives(reduce, kernels, monkeypatch):
    """Also where convolutions are for kernels, whose sums are by row and not by user."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", kernels != "pairs")
    if kernels:
        monkeypatch.setattr(rules_conv, "FEWEST_WINDOWS", 1)
        monkeypatch.setattr(rules_conv, "FEWEST_BY_WEIGHT", 1)
    found = []
    for compile in (False, "auto"):
        torch.manual_seed(0)
        model = build("tanh_cnn", (1, 28, 28), 10).cuda()
        plan = Plan(
            participation=MinSeparation(STEPS, 1, STEPS),
            strategy=identity(),
            noise_multiplier=0.5,
            unit="user",
        )
        private = privatize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.2),
            plan,
            clip_norm=0.3,
            batch_size=SIZE,
            compile=compile,
            source=test_source(seed=1),
            reduce=reduce,
        )
        g = torch.Generator().manual_seed(1)
        outcomes = []
        for size in (SIZE, 11, SIZE, 1, SIZE):
            x = torch.randn(size, 1, 28, 28, generator=g).cuda()
            y = torch.randint(10, (size,), generator=g).cuda()
            if size == 11:
                x[3] = torch.nan
            private.step(LOSS, x, y, ids=IDS[:size])
            outcomes.append(private.outcome)
        assert compile is False or "compiled for up to" in private.why, private.fallbacks
        found.append((outcomes, [p.detach().cpu() for p in model.parameters()]))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(one.bad.cpu(), other.bad.cpu())
        norms = one.norms.cpu().float(), other.norms.cpu().float()
        torch.testing.assert_close(*norms, rtol=1e-3, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-2, atol=1e-3)


def test_a_clip_norm_that_follows_a_quantile_is_moved_by_the_host():
    model = nn.Linear(4, 2).cuda()
    plan = Plan(
        participation=MinSeparation(STEPS, 1, STEPS), strategy=identity(), noise_multiplier=0.5
    )
    clip = QuantileClip(initial=0.5, units=SIZE, bit_noise=8.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    private = privatize(model, optimizer, plan, clip=clip, batch_size=SIZE)
    assert "the clip norm follows a quantile" in private.why


@pytest.mark.parametrize("is_mean", [False, True])
def test_the_kernel_is_its_twin(is_mean, monkeypatch):
    whose = StagedUsers(capacity=SIZE, device=torch.device("cuda"), is_mean=is_mean)
    whose.stage(IDS[:20], np.arange(20) % 7 != 3)
    matrix, losses = torch.randn(SIZE, 2500).cuda(), torch.zeros(SIZE).cuda()
    matrix[20:], losses[4] = torch.nan, torch.inf
    found = whose.sums(matrix, losses)
    there = StagedUsers(capacity=SIZE, device=torch.device("cpu"), is_mean=is_mean)
    there.stage(IDS[:20], np.arange(20) % 7 != 3)
    monkeypatch.setattr(staged.kernels, "HAS_TRITON", False)
    for own, twin in zip(found, there.sums(matrix.cpu(), losses.cpu()), strict=True):
        torch.testing.assert_close(own.cpu(), twin, equal_nan=True)

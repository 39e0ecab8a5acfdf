"""The same walk on a GPU: step, loop with a criterion, adaptive clipping, checkpoint and resume."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.noise import test_source
from noshuffle.optim import FTRL, l2_ball
from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import tree
from noshuffle.training import fit_model, in_order, privatize, verify
from noshuffle.training.batches import TensorBatches

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def make(run=None, device="cuda", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    optimizer = FTRL(model.parameters(), 0.1, momentum=0.9, constraint=l2_ball(5.0))
    rule = Epochs(epochs=4, steps_per_epoch=4)
    plan = Plan(participation=rule, strategy=tree(restart_every=4), noise_multiplier=0.5)
    settings = {"clip_norm": 1.0, "batch_size": 8, "source": test_source(seed=1, kind="philox")}
    return privatize(model, optimizer, plan, run=run, **{**settings, **options})


def batches(device="cuda"):
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 6, generator=g), torch.randint(3, (32,), generator=g)
    return TensorBatches((x.to(device), y.to(device)), in_order(32, 8))


def weights(private):
    return torch.cat([p.detach().reshape(-1).cpu() for p in private.model.parameters()])


def test_gpu_run_agrees_with_the_cpu_run_and_resumes(tmp_path, monkeypatch):
    # Sums that differ in their last bits would meet neighbouring points of the noise's grid.
    monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)
    loss_fn = nn.CrossEntropyLoss()
    slow, fast = make(device="cpu"), make(tmp_path / "whole")
    fit_model(slow, batches("cpu"), loss_fn)
    fit_model(fast, batches(), loss_fn)
    torch.testing.assert_close(weights(fast), weights(slow), rtol=1e-3, atol=1e-4)
    first = make(tmp_path / "parts")
    fit_model(first, batches(), loss_fn, epochs=2)
    second = make(tmp_path / "parts")
    fit_model(second, batches(), loss_fn)
    torch.testing.assert_close(weights(second), weights(fast), rtol=1e-5, atol=1e-6)
    second.close()
    assert not verify(tmp_path / "parts").refuted


def test_loop_with_a_criterion_and_adaptive_clipping_on_the_gpu():
    private = make(clip_norm=None, clip=QuantileClip(initial=0.1, units=8))
    criterion = private.criterion(nn.CrossEntropyLoss())
    for batch in batches():
        x, y = batch.data
        criterion(private.model(x), y, ids=batch.ids).backward()
        private.optimizer.step()
    assert private.steps_released == 4
    assert private._parts.threshold.clip.norm != 0.1


@pytest.mark.parametrize("compile", ["auto", False])
def test_a_user_captures_a_graph_beside_a_private_run(compile):
    """A run that is alive does not touch the passes of other models."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 6, generator=g).cuda(), torch.randint(3, (8,), generator=g).cuda()
    private, loss_fn = make(compile=compile), nn.CrossEntropyLoss()
    for step in range(2):
        private.step(loss_fn, x, y, ids=list(range(8 * step, 8 * step + 8)))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def once():
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = once()
    losses = []
    for _ in range(3):
        graph.replay()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    private.step(loss_fn, x, y, ids=list(range(16, 24)))
    assert private.steps_released == 3

"""Convolutions whose backward pass takes some examples at a time, against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.clipping.test_conv_input import KINDS
from torch import nn

from noshuffle.clipping import Flat, Ghost, batch_check, conv_input, conv_parts
from noshuffle.clipping.conv_input import by_hand, is_fit
from noshuffle.clipping.conv_parts import backward_in_parts, convolved
from noshuffle.clipping.forwards import forward_by


@given(
    axes=st.sampled_from([1, 2, 3]),
    groups=st.sampled_from([1, 2, 3]),
    taps=st.integers(1, 3),
    border=st.integers(0, 2),
    step=st.integers(1, 3),
    bias=st.booleans(),
    is_first=st.booleans(),
    most=st.sampled_from([1, 500, 2**23]),
)
def test_gradients_are_those_of_autograd(
    axes: int,
    groups: int,
    taps: int,
    border: int,
    step: int,
    bias: bool,
    is_first: bool,
    most: int,
) -> None:
    make: Any = KINDS[axes]
    shape = {"stride": step, "padding": border, "groups": groups, "bias": bias}
    layer = make(2 * groups, 4 * groups, taps, **shape).double()
    x = torch.randn(5, 2 * groups, *[7, 5, 4][:axes], dtype=torch.float64)
    x.requires_grad_(not is_first)
    out, wanted = convolved(layer, x), layer(x)
    g, asked = torch.randn_like(out), [*layer.parameters(), *([] if is_first else [x])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_input, "MOST_AT_ONCE", most)  # one by one, in several, in one part
        found = torch.autograd.grad(out, asked, g)
    assert torch.equal(out, wanted)
    for one, other in zip(found, torch.autograd.grad(wanted, asked, g), strict=True):
        torch.testing.assert_close(one, other)


def net() -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, groups=2)
    return nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(8 * 16, 5))


def test_a_model_on_a_cpu_runs_as_it_is() -> None:
    model = net()
    with backward_in_parts(model):
        assert not any("forward" in layer.__dict__ for layer in model.modules())


@pytest.mark.parametrize("mixes", [False, True])
def test_a_look_asks_the_same(monkeypatch: pytest.MonkeyPatch, mixes: bool) -> None:
    """As a GPU has it: gradients of a look come from here, and examples that mix are found."""
    calls = []

    def as_if(own: Any, x: torch.Tensor) -> bool:
        calls.append(own)
        return True

    def in_parts(model: nn.Module) -> Any:
        chosen = ((own, by_hand(convolved, as_if)) for own in model.modules() if is_fit(own))
        return forward_by(chosen)

    class Centred(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0) if mixes and len(x) > 16 else x

    monkeypatch.setattr(batch_check, "backward_in_parts", in_parts)
    monkeypatch.setattr(conv_input, "MOST_AT_ONCE", 2000)
    model, engine = nn.Sequential(Centred(), net()), Ghost()
    batch = torch.randn(20, 3, 9, 9), torch.randint(5, (20,))
    engine.clipped_sum(model, nn.CrossEntropyLoss(), batch, clip=Flat(0.5))
    assert calls
    assert bool(engine.fallbacks) is mixes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_look_on_a_gpu_needs_less_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(conv_parts, "rounds_convolutions", lambda: False)
    layer, held = nn.Conv2d(64, 64, 3, padding=1).cuda(), []
    x = torch.randn(500, 64, 32, 32, device="cuda", requires_grad=True)
    found = []
    for run in (layer, lambda x: convolved(layer, x)):
        out = run(x)
        torch.cuda.reset_peak_memory_stats()
        began = torch.cuda.memory_allocated()
        found.append(torch.autograd.grad(out.square().sum(), [x, layer.weight]))
        held.append(torch.cuda.max_memory_allocated() - began)
        del out
    for one, other in zip(*found, strict=True):
        assert float((one - other).norm()) <= 1e-5 * float(other.norm())
    assert held[1] <= held[0]

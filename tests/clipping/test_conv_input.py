"""Input gradients as convolutions, against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from noshuffle.clipping import Flat, Ghost, conv_input
from noshuffle.clipping.conv_input import convolved, inputs_by_convolution, is_fit
from noshuffle.clipping.forwards import forward_by

KINDS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@given(
    axes=st.sampled_from([1, 2, 3]),
    groups=st.sampled_from([1, 2, 3]),
    taps=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    far=st.lists(st.integers(1, 2), min_size=3, max_size=3),
    border=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    step=st.lists(st.integers(1, 4), min_size=3, max_size=3),
    sizes=st.lists(st.integers(7, 10), min_size=3, max_size=3),
    bias=st.booleans(),
    most=st.sampled_from([1, 2000, 2**23]),
)
def test_input_gradients_are_those_of_autograd(
    axes: int,
    groups: int,
    taps: list[int],
    far: list[int],
    border: list[int],
    step: list[int],
    sizes: list[int],
    bias: bool,
    most: int,
) -> None:
    own: Any = KINDS[axes](
        2 * groups,
        4 * groups,
        tuple(taps[:axes]),
        stride=tuple(step[:axes]),
        padding=tuple(border[:axes]),
        dilation=tuple(far[:axes]),
        groups=groups,
        bias=bias,
    )
    layer = own.double()
    assert is_fit(layer) == all(1 in (f, s) for f, s in zip(far[:axes], step))
    if not is_fit(layer):
        return
    x = torch.randn(3, 2 * groups, *sizes[:axes], dtype=torch.float64, requires_grad=True)
    out, wanted = convolved(layer, x), layer(x)
    g = torch.randn_like(out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_input, "MOST_AT_ONCE", most)  # in one part, in several, one by one
        (found,) = torch.autograd.grad(out, x, g)
    (truth,) = torch.autograd.grad(wanted, x, g)
    assert torch.equal(out, wanted)
    torch.testing.assert_close(found, truth)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 2, 3, stride=2, dilation=2),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(2, 2, 3),
        nn.Linear(2, 2),
    ],
)
def test_other_layers_stay_as_they_are(layer: nn.Module) -> None:
    assert not is_fit(layer)


def test_a_layer_with_a_forward_of_its_own_stays_as_it_is() -> None:
    class Twice(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().forward(x)

    assert not is_fit(Twice(2, 2, 3))
    assert is_fit(nn.Conv2d(2, 2, 3))


def test_it_is_used_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Conv2d(2, 2, 3)
    for rounds in (True, False):
        monkeypatch.setattr(conv_input, "rounds_convolutions", lambda rounds=rounds: rounds)
        with inputs_by_convolution([layer]):
            assert ("forward" in layer.__dict__) == (not rounds)
        assert "forward" not in layer.__dict__


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_clipped_sums_are_the_same(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.Tanh(),
        nn.Conv2d(8, 4, 3, stride=2),
        nn.Flatten(),
        nn.LazyLinear(5),
    )
    x, y = torch.randn(6, 3, 9, 9), torch.randint(5, (6,))
    model(x)
    model, x, y = model.to(device), x.to(device), y.to(device)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    calls = []

    def as_if(own: Any, x: torch.Tensor) -> bool:
        calls.append(own)
        return x.requires_grad

    if device == "cpu":  # the same way, as if it were worth it there
        monkeypatch.setattr(conv_input, "_is_slow", as_if)

    sums = []
    for repeats in (False, True):
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", repeats)
        engine, loss = Ghost(), nn.CrossEntropyLoss()
        engine.clipped_sum(model, loss, (x, y), clip=Flat(0.5))
        calls.clear()  # those of the look at the first batch, whose convolutions repeat
        found = engine.clipped_sum(model, loss, (x, y), clip=Flat(0.5))
        sums.append((found.values, found.norms))
        assert device == "cuda" or bool(calls) == repeats
    (one, norms), (other, own) = sums
    torch.testing.assert_close(own, norms, rtol=1e-4, atol=1e-6)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)


def test_a_forward_that_was_replaced_first_stays() -> None:
    layer = nn.ReLU()
    with forward_by([(layer, lambda own, x: x + 1)]), forward_by([(layer, lambda own, x: x + 2)]):
        assert float(layer(torch.tensor(1.0))) == 2.0
    assert "forward" not in layer.__dict__


def test_a_convolution_is_called_with_its_input_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = nn.Conv2d(2, 2, 3), torch.randn(1, 2, 5, 5, requires_grad=True)
    wanted = layer(x)
    monkeypatch.setattr(conv_input, "rounds_convolutions", lambda: False)
    for is_slow in (False, True):
        monkeypatch.setattr(conv_input, "_is_slow", lambda *_, is_slow=is_slow: is_slow)
        with inputs_by_convolution([layer]):
            assert torch.equal(layer(x), wanted)
            assert torch.equal(layer(input=x), wanted)
            with pytest.raises(TypeError):
                layer(x, x)
            with pytest.raises(TypeError):
                layer()

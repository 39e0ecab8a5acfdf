"""The LSTM arithmetic, forward and backward, against nn.LSTM on random inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from noshuffle.clipping import lstm


def truth(w: Tensor, u: Tensor, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States of nn.LSTM on x (time, rows, in), and gradients of ⟨states, out⟩ in x Wᵀ and U."""
    layer = nn.LSTM(x.shape[2], u.shape[1], bias=False).double()
    with torch.no_grad():
        layer.weight_ih_l0.copy_(w)
        layer.weight_hh_l0.copy_(u)
    states, _ = layer(x)
    (states * out).sum().backward()
    assert layer.weight_ih_l0.grad is not None
    assert layer.weight_hh_l0.grad is not None
    return states.detach(), layer.weight_ih_l0.grad, layer.weight_hh_l0.grad


@pytest.mark.parametrize("seed", range(12))
def test_forward_and_backward_are_those_of_torch(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (5,), generator=rng).tolist()
    groups, steps, rows, inputs, hidden = sizes

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64) * 2

    w, u = draw(groups, 4 * hidden, inputs), draw(groups, 4 * hidden, hidden)
    x, out = draw(groups, steps, rows, inputs), draw(groups, steps, rows, hidden)
    projected = (x @ w.transpose(1, 2)[:, None]).unbind(1)
    states, cells, gates = lstm.forward(projected, u)
    back = lstm.back_of(torch.stack(cells), torch.stack(gates), time=0)
    raw = torch.stack(lstm.backward(out.unbind(1), u, back), 1)
    h = torch.stack(states, 1)
    before = lstm.earlier(h, 1)
    for k in range(groups):  # a group has weights of its own
        own, dw, du = truth(w[k], u[k], x[k], out[k])
        torch.testing.assert_close(h[k], own, rtol=1e-12, atol=1e-12)
        flat = raw[k].flatten(0, 1).T
        torch.testing.assert_close(flat @ x[k].flatten(0, 1), dw, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(flat @ before[k].flatten(0, 1), du, rtol=1e-10, atol=1e-10)


def test_one_step_is_lstm_cell_and_gates_are_in_its_order() -> None:
    torch.manual_seed(1)
    layer = nn.LSTMCell(3, 4).double()
    x, h, c = (torch.randn(5, n, dtype=torch.float64) for n in (3, 4, 4))
    raw = x @ layer.weight_ih.T + layer.bias_ih + h @ layer.weight_hh.T + layer.bias_hh
    found = lstm.cell(raw, c)
    for got, want in zip(found[:2], layer(x, (h, c))):
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    i, f, g, o = found[2]
    torch.testing.assert_close(i, raw[:, :4].sigmoid())
    torch.testing.assert_close(f, raw[:, 4:8].sigmoid())
    torch.testing.assert_close(g, raw[:, 8:12].tanh())
    torch.testing.assert_close(o, raw[:, 12:].sigmoid())


def test_what_stood_before_the_first_step_is_zero() -> None:
    values = torch.arange(1.0, 7.0).reshape(2, 3)
    assert lstm.earlier(values, 1).tolist() == [[0, 1, 2], [0, 4, 5]]
    assert lstm.earlier(values, 0).tolist() == [[0, 0, 0], [1, 2, 3]]

"""LSTM, GRU and plain recurrent layers, and their single-step cells, seen from inside.

One layer in one direction is, with gates u_t = W_ih x_t + b_ih + W_hh h_{t−1} + b_hh,

    ∂ℓ/∂W_ih = Σ_t ∂u_t x_tᵀ,     ∂ℓ/∂W_hh = Σ_t ∂u_t h_{t−1}ᵀ,     ∂ℓ/∂b = Σ_t ∂u_t,

so the gradient at the input projection, which is computed for all steps at once, says everything
about both weights. A GRU multiplies the hidden part of its candidate by the reset gate r, so that
part's gradient is r·∂u. The rewrites also make recurrent layers work under vmap. State: none;
packed sequences are refused (pad instead).

>>> import torch
>>> from noshuffle.clipping.tape import GradientTape
>>> layer, x = torch.nn.GRU(2, 3, batch_first=True), torch.randn(4, 5, 2)
>>> torch.allclose(recurrent(layer, GradientTape(4, is_on=False), x)[0], layer(x)[0], atol=1e-6)
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.clipping import lstm
from noshuffle.clipping.forms import GradientForm, OuterGradient
from noshuffle.clipping.products import wide
from noshuffle.clipping.rules import bias_of, rewrite, weight_of
from noshuffle.errors import Unsupported

if TYPE_CHECKING:
    from noshuffle.clipping.tape import GradientTape


def _gru_step(u: Tensor, h: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> tuple[Tensor, Tensor]:
    ur, uz, un = u.chunk(3, -1)
    hr, hz, hn = F.linear(h, w_hh, b_hh).chunk(3, -1)
    r, z = torch.sigmoid(ur + hr), torch.sigmoid(uz + hz)
    n = torch.tanh(un + r * hn)
    return n + z * (h - n), r


def _time_second(steps: Tensor) -> Tensor:
    return wide(steps.detach()).transpose(0, 1)


def _one_way(
    mode: str, weights: Any, tape: GradientTape, x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer in one direction over x [T, B, i]; returns outputs and the last states."""
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    is_gru = mode == "GRU"
    bias = b_ih if is_gru or b_ih is None else b_ih + b_hh
    projected = F.linear(x, w_ih, bias)
    outs, before, resets = [], [], []
    for u in projected.unbind(0):
        before.append(h)
        if mode == "LSTM":
            h, c, _ = lstm.cell(u + F.linear(h, w_hh), c)
            if w_hr is not None:
                h = _projected(tape, w_hr, h)
        elif is_gru:
            h, r = _gru_step(u, h, w_hh, b_hh)
            resets.append(r)
        else:
            act = torch.tanh if mode == "RNN_TANH" else torch.relu
            h = act(u + F.linear(h, w_hh))
        outs.append(h)
    if tape.is_on:
        previous = _time_second(torch.stack([t.expand_as(outs[0]).detach() for t in before]))
        reset = _time_second(torch.stack(resets)) if is_gru else None
        inputs = _time_second(x)

        def build(g: Tensor) -> list[tuple[Tensor, GradientForm]]:
            g = wide(g).transpose(0, 1)
            hidden = g
            if reset is not None:
                gates, candidate = torch.split(g, [2 * reset.shape[-1], reset.shape[-1]], -1)
                hidden = torch.cat([gates, candidate * reset], -1)
            found: list[tuple[Tensor, GradientForm]] = [
                (w_ih, OuterGradient(inputs, g, tuple(w_ih.shape))),
                (w_hh, OuterGradient(previous, hidden, tuple(w_hh.shape))),
            ]
            if b_ih is not None:
                one = bias_of(g, size=len(g))
                found += [(b_ih, one), (b_hh, one if hidden is g else bias_of(hidden, size=len(g)))]
            return found

        tape.record(build, projected)
    return torch.stack(outs), h, c


def _projected(tape: GradientTape, weight: Tensor, h: Tensor) -> Tensor:
    out, a = F.linear(h, weight), h.detach()
    size, shape = a.shape[0], tuple(weight.shape)
    tape.record(lambda g: [(weight, weight_of(a, g, shape, size=size))], out)
    return out


@rewrite(nn.LSTM, nn.GRU, nn.RNN)
def recurrent(layer: Any, tape: GradientTape, x: Any, hx: Any = None) -> tuple[Tensor, Any]:
    """What `layer(x, hx)` computes, one step after the other."""
    if not isinstance(x, Tensor) or x.dim() != 3:
        raise Unsupported(
            f"{type(layer).__name__} takes a padded [batch, time, feature] tensor here, got "
            f"{type(x).__name__}; pad instead of packing, and mask the loss"
        )
    x = x.transpose(0, 1) if layer.batch_first else x
    is_lstm = layer.mode == "LSTM"
    ways = ("", "_reverse") if layer.bidirectional else ("",)
    h0, c0 = (hx if is_lstm else (hx, None)) if hx is not None else (None, None)
    last_h: list[Tensor] = []
    last_c: list[Tensor] = []
    width = getattr(layer, "proj_size", 0) or layer.hidden_size
    names = ("weight_ih_l", "weight_hh_l", "bias_ih_l", "bias_hh_l", "weight_hr_l")
    for depth in range(layer.num_layers):
        sides = []
        for way in ways:
            k = len(last_h)
            h = x.new_zeros(x.shape[1], width) if h0 is None else h0[k]
            c = x.new_zeros(x.shape[1], layer.hidden_size) if c0 is None else c0[k]
            weights = [getattr(layer, f"{name}{depth}{way}", None) for name in names]
            out, h, c = _one_way(layer.mode, weights, tape, x.flip(0) if way else x, h, c)
            sides.append(out.flip(0) if way else out)
            last_h.append(h)
            last_c.append(c)
        x = torch.cat(sides, -1) if len(sides) > 1 else sides[0]
        if layer.dropout and layer.training and depth + 1 < layer.num_layers:
            x = F.dropout(x, layer.dropout)
    x = x.transpose(0, 1) if layer.batch_first else x
    h_n = torch.stack(last_h)
    return x, ((h_n, torch.stack(last_c)) if is_lstm else h_n)


@rewrite(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
def cell(layer: Any, tape: GradientTape, x: Tensor, hx: Any = None) -> Any:
    """What a single-step cell computes; x is [B, i]."""
    if x.dim() != 2:
        raise Unsupported(f"{type(layer).__name__} takes [batch, feature], got {tuple(x.shape)}")
    is_lstm = isinstance(layer, nn.LSTMCell)
    mode = "LSTM" if is_lstm else "GRU"
    if isinstance(layer, nn.RNNCell):
        mode = f"RNN_{layer.nonlinearity.upper()}"
    zeros = x.new_zeros(x.shape[0], layer.hidden_size)
    h, c = (hx if is_lstm else (hx, zeros)) if hx is not None else (zeros, zeros)
    weights = (layer.weight_ih, layer.weight_hh, layer.bias_ih, layer.bias_hh, None)
    _, h, c = _one_way(mode, weights, tape, x.unsqueeze(0), h, c)
    return (h, c) if is_lstm else h

"""LSTM, GRU and plain recurrent layers, and their single-step cells, seen from inside.

One layer in one direction is, with gates u_t = W_ih x_t + b_ih + W_hh h_{t−1} + b_hh,

    ∂ℓ/∂W_ih = Σ_t ∂u_t x_tᵀ,     ∂ℓ/∂W_hh = Σ_t ∂u_t h_{t−1}ᵀ,     ∂ℓ/∂b = Σ_t ∂u_t,

so the gradient at the input projection, which is computed for all steps at once, says everything
about both weights. A GRU multiplies the hidden part of its candidate by the reset gate r, so that
part's gradient is r·∂u. An LSTM projection W_hr is one more linear map. The rewrites also are what
makes recurrent layers work under vmap. State: none; packed sequences are refused (pad instead).

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
from noshuffle.clipping.forms import DenseGradient, GradientForm, OuterGradient
from noshuffle.clipping.products import wide
from noshuffle.clipping.rules import affine, rewrite
from noshuffle.errors import Unsupported

if TYPE_CHECKING:
    from noshuffle.clipping.tape import GradientTape


def _gru_step(u: Tensor, h: Tensor, weights: Any) -> tuple[Tensor, Tensor]:
    ur, uz, un = u.chunk(3, -1)
    hr, hz, hn = F.linear(h, weights[0], weights[1]).chunk(3, -1)
    r, z = torch.sigmoid(ur + hr), torch.sigmoid(uz + hz)
    n = torch.tanh(un + r * hn)
    return n + z * (h - n), r


def _time_first(t: Tensor) -> Tensor:
    return wide(t.detach()).transpose(0, 1)


def _one_way(
    layer: Any, tape: GradientTape, x: Tensor, h: Tensor, c: Tensor | None, suffix: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One layer in one direction over x [T, B, i]; returns outputs and the last states."""

    def get(name: str) -> Any:
        return getattr(layer, name + suffix, None)

    w_ih, w_hh, b_ih, b_hh, w_hr = map(
        get, ("weight_ih_l", "weight_hh_l", "bias_ih_l", "bias_hh_l", "weight_hr_l")
    )
    is_gru = layer.mode == "GRU"
    bias = b_ih if is_gru or b_ih is None else b_ih + b_hh
    projected = F.linear(x, w_ih, bias)
    outs, before, resets, raw = [], [], [], []
    for u in projected.unbind(0):
        before.append(h)
        if layer.mode == "LSTM":
            assert c is not None
            h, c, _ = lstm.cell(u + F.linear(h, w_hh), c)
            if w_hr is not None:
                raw.append(h)
                h = F.linear(h, w_hr)
                _record_linear(tape, w_hr, raw[-1], h)
        elif is_gru:
            h, r = _gru_step(u, h, (w_hh, b_hh))
            resets.append(r)
        else:
            u = u + F.linear(h, w_hh)
            h = torch.tanh(u) if layer.mode == "RNN_TANH" else torch.relu(u)
        outs.append(h)
    if tape.is_on:
        previous = _time_first(torch.stack([t.expand_as(outs[0]).detach() for t in before]))
        reset = _time_first(torch.stack(resets)) if is_gru else None
        inputs = _time_first(x)

        def build(g: Tensor) -> list[tuple[Tensor, GradientForm]]:
            g = wide(g).transpose(0, 1)
            hidden = g
            if reset is not None:
                hidden = torch.cat(
                    [g[..., : -reset.shape[-1]], g[..., -reset.shape[-1] :] * reset], -1
                )
            found: list[tuple[Tensor, GradientForm]] = [
                (w_ih, OuterGradient(inputs, g, tuple(w_ih.shape))),
                (w_hh, OuterGradient(previous, hidden, tuple(w_hh.shape))),
            ]
            if b_ih is not None:
                found += [(b_ih, DenseGradient(g.sum(1))), (b_hh, DenseGradient(hidden.sum(1)))]
            return found

        tape.record(projected, build)
    return torch.stack(outs), h, c


def _record_linear(tape: GradientTape, weight: Tensor, a: Tensor, out: Tensor) -> None:
    a = a.detach()
    size, shape = a.shape[0], tuple(weight.shape)
    tape.record(out, lambda g: [(weight, affine(a, g, shape, size=size)[0])])


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
    ways = 2 if layer.bidirectional else 1
    h0, c0 = (hx if is_lstm else (hx, None)) if hx is not None else (None, None)
    last_h, last_c = [], []
    width = getattr(layer, "proj_size", 0) or layer.hidden_size
    for depth in range(layer.num_layers):
        sides = []
        for way in range(ways):
            k = depth * ways + way
            h = x.new_zeros(x.shape[1], width) if h0 is None else h0[k]
            c = x.new_zeros(x.shape[1], layer.hidden_size) if c0 is None else c0[k]
            run = x.flip(0) if way else x
            suffix = f"{depth}_reverse" if way else str(depth)
            out, h, c_last = _one_way(layer, tape, run, h, c if is_lstm else None, suffix)
            sides.append(out.flip(0) if way else out)
            last_h.append(h)
            last_c.append(c_last)
        x = torch.cat(sides, -1) if ways > 1 else sides[0]
        if layer.dropout and layer.training and depth + 1 < layer.num_layers:
            x = F.dropout(x, layer.dropout)
    x = x.transpose(0, 1) if layer.batch_first else x
    h_n = torch.stack(last_h)
    return x, ((h_n, torch.stack([c for c in last_c if c is not None])) if is_lstm else h_n)


@rewrite(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
def cell(layer: Any, tape: GradientTape, x: Tensor, hx: Any = None) -> Any:
    """What a single-step cell computes; x is [B, i]."""
    if x.dim() != 2:
        raise Unsupported(f"{type(layer).__name__} takes [batch, feature], got {tuple(x.shape)}")
    is_lstm, is_gru = isinstance(layer, nn.LSTMCell), isinstance(layer, nn.GRUCell)
    zeros = x.new_zeros(x.shape[0], layer.hidden_size)
    h, c = (hx if is_lstm else (hx, zeros)) if hx is not None else (zeros, zeros)
    b_ih, b_hh = layer.bias_ih, layer.bias_hh
    bias = b_ih if is_gru or b_ih is None else b_ih + b_hh
    u = F.linear(x, layer.weight_ih, bias)
    reset = None
    out: Any
    if is_lstm:
        out = lstm.cell(u + F.linear(h, layer.weight_hh), c)[:2]
    elif is_gru:
        out, reset = _gru_step(u, h, (layer.weight_hh, b_hh))
    else:
        act = torch.tanh if layer.nonlinearity == "tanh" else torch.relu
        out = act(u + F.linear(h, layer.weight_hh))
    a, before = x.detach(), h.detach()
    r = None if reset is None else wide(reset.detach())

    def build(g: Tensor) -> list[tuple[Tensor, GradientForm]]:
        g = wide(g)
        hidden = g if r is None else torch.cat([g[:, : -r.shape[1]], g[:, -r.shape[1] :] * r], 1)
        w_ih, b1 = affine(a, g, tuple(layer.weight_ih.shape), size=len(g))
        w_hh, b2 = affine(before, hidden, tuple(layer.weight_hh.shape), size=len(g))
        found = [(layer.weight_ih, w_ih), (layer.weight_hh, w_hh)]
        return found if b_ih is None else [*found, (b_ih, b1), (b_hh, b2)]

    tape.record(u, build)
    return out

"""LSTM layers that can be stacked over clients: the same numbers as torch's, written out in time.

    (i, f, g, o)_t = (σ, σ, tanh, σ)(W x_t + U h_{t−1} + b)
    c_t = f_t c_{t−1} + i_t g_t,      h_t = o_t tanh c_t

torch's LSTM is one fused call per model, with no batched form under vmap. Here a step in time is a
handful of operations for all clients together, and the way back is written by hand, so that the
gradient of U is one product over all times instead of a sum of one product per time. Worth it on
accelerators, where many small calls wait for each other; on a CPU the fused call is quicker.

State: none; `unrolled` copies a model and keeps its parameter names.

>>> one = nn.LSTM(3, 4, batch_first=True)
>>> x = torch.randn(2, 5, 3)
>>> bool(torch.allclose(unrolled(one)(x)[0], one(x)[0], atol=1e-6))
True
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class _Recurrence(torch.autograd.Function):
    """h from the projected inputs (batch, time, 4·hidden) and U (4·hidden, hidden)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(projected: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        steps, hidden = projected.shape[1], u.shape[1]
        h = projected.new_zeros(projected.shape[0], hidden)
        c = torch.zeros_like(h)
        across = u.t()
        states, cells, gates = [], [], []
        for t in range(steps):
            raw = projected[:, t] + h @ across
            i, f, o = (
                raw[:, :hidden].sigmoid(),
                raw[:, hidden : 2 * hidden].sigmoid(),
                raw[:, 3 * hidden :].sigmoid(),
            )
            g = raw[:, 2 * hidden : 3 * hidden].tanh()
            c = f * c + i * g
            h = o * c.tanh()
            states.append(h)
            cells.append(c)
            gates.append(torch.cat([i, f, g, o], dim=1))
        return torch.stack(states, 1), torch.stack(cells, 1), torch.stack(gates, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], *output)
        ctx.mark_non_differentiable(output[1], output[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        u, h, c, gates = ctx.saved_tensors
        i, f, g, o = gates.chunk(4, dim=2)
        before = torch.cat([torch.zeros_like(c[:, :1]), c[:, :-1]], dim=1)
        bent = c.tanh()
        # What one unit of dc (first three) or dh (last) does to the raw gates, at every time.
        slopes = torch.cat(
            [g * i * (1 - i), before * f * (1 - f), i * (1 - g * g), bent * o * (1 - o)], dim=2
        )
        through = o * (1 - bent * bent)
        dh_next = torch.zeros_like(h[:, 0])
        dc_next = torch.zeros_like(dh_next)
        found = []
        for t in range(h.shape[1] - 1, -1, -1):
            dh = grads[0][:, t] + dh_next
            dc = dc_next + dh * through[:, t]
            raw = slopes[:, t] * torch.cat([dc, dc, dc, dh], dim=1)
            dh_next = raw @ u
            dc_next = dc * f[:, t]
            found.append(raw)
        draw = torch.stack(found[::-1], 1)
        earlier = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], dim=1)
        return draw, draw.flatten(0, 1).t() @ earlier.flatten(0, 1)


class UnrolledLSTM(nn.Module):
    """The forward pass of a one-directional `nn.LSTM` with `batch_first`, from a zero state."""

    def __init__(self, like: nn.LSTM) -> None:
        super().__init__()
        self.layers = like.num_layers
        self.bias = like.bias
        for name, value in like.named_parameters():
            self.register_parameter(name, nn.Parameter(value.detach().clone()))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """All states of the last layer; the final state is not handed out."""
        for layer in range(self.layers):
            w, u = getattr(self, f"weight_ih_l{layer}"), getattr(self, f"weight_hh_l{layer}")
            projected = x @ w.t()
            if self.bias:
                projected = projected + (
                    getattr(self, f"bias_ih_l{layer}") + getattr(self, f"bias_hh_l{layer}")
                )
            x = _Recurrence.apply(projected, u)[0]  # type: ignore[no-untyped-call]
        return x, None


def is_plain(module: nn.Module) -> bool:
    """Whether `UnrolledLSTM` stands for this layer."""
    return (
        isinstance(module, nn.LSTM)
        and module.batch_first
        and not module.bidirectional
        and not module.proj_size
        and (module.dropout == 0 or module.num_layers == 1)
    )


def unrolled(model: nn.Module) -> nn.Module:
    """A copy of the model with its plain LSTM layers written out; parameter names stay."""
    if is_plain(model):
        assert isinstance(model, nn.LSTM)
        return UnrolledLSTM(model)
    twin = copy.deepcopy(model)
    for name, child in list(twin.named_modules()):
        if name and is_plain(child):
            assert isinstance(child, nn.LSTM)
            parent, _, last = name.rpartition(".")
            setattr(twin.get_submodule(parent), last, UnrolledLSTM(child))
    return twin

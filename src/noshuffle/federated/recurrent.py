"""LSTM layers that can be stacked over clients: the same numbers as torch's, written out in time.

torch's LSTM is one fused call per model, with no batched form under vmap. Here a step in time is a
handful of operations for all clients, and the way back is written by hand (`clipping.lstm`), so
that the gradient of U is one product over all times. On a CPU the fused call is quicker.

>>> one = nn.LSTM(3, 4, batch_first=True)
>>> x = torch.randn(2, 5, 3)
>>> bool(torch.allclose(unrolled(one)(x)[0], one(x)[0], atol=1e-6))
True
"""

from __future__ import annotations

import copy
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from noshuffle.clipping import lstm


class _Recurrence(torch.autograd.Function):
    """h from the projected inputs (batch, time, 4·hidden) and U (4·hidden, hidden)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(projected: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        states, cells, gates = lstm.forward(projected.unbind(1), u)
        return torch.stack(states, 1), torch.stack(cells, 1), torch.stack(gates, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1], *output)
        ctx.mark_non_differentiable(output[1], output[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        u, h, c, gates = ctx.saved_tensors
        found = lstm.backward(grads[0].unbind(1), u, lstm.back_of(c, gates, time=1))
        draw = torch.stack(found, 1)
        return draw, draw.flatten(0, 1).t() @ lstm.earlier(h, 1).flatten(0, 1)


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


def is_plain(module: nn.Module) -> TypeGuard[nn.LSTM]:
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
        return UnrolledLSTM(model)
    twin = copy.deepcopy(model)
    for name, child in list(twin.named_modules()):
        if is_plain(child):
            parent, _, last = name.rpartition(".")
            setattr(twin.get_submodule(parent), last, UnrolledLSTM(child))
    return twin

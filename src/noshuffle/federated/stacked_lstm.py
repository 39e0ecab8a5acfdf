"""Gradients of many `CharLSTM` models at once, each with weights and text of its own, by hand.

    projected symbol  P = E Wᵀ + b            once per symbol of the alphabet, then looked up
    cell              as in `clipping.lstm`   one batched product and one fused cell a character
    loss of client u  Σ_i w_i mean_t CE_it / Σ_i w_i,      zero where Σ_i w_i = 0

Clients stand in the first axis; time is walked twice with two or three calls a character, whatever
their number: fit for a CUDA graph. With G sets of parameters for N clients, set j belongs to
clients jN/G … (j+1)N/G − 1. Equal to `vmap(grad(loss))` over the model up to rounding.

>>> from noshuffle.training.models import CharLSTM
>>> model = CharLSTM(5, embedding=3, hidden=4)
>>> params = {n: p.detach()[None].repeat(2, *[1] * p.dim()) for n, p in model.named_parameters()}
>>> x = torch.zeros(2, 3, 6, dtype=torch.int64)
>>> grads = gradients(params, x, x, torch.ones(2, 3))
>>> grads["lstm.weight_hh_l0"].shape, set(grads) == set(params)
(torch.Size([2, 16, 4]), True)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from noshuffle.clipping import lstm
from noshuffle.federated.clients import NO_TARGET
from noshuffle.training.models import CharLSTM

NAMES = (
    "embedding.weight",
    "lstm.weight_ih_l0",
    "lstm.weight_hh_l0",
    "lstm.bias_ih_l0",
    "lstm.bias_hh_l0",
    "output.weight",
    "output.bias",
)


def fits(model: nn.Module) -> bool:
    return type(model) is CharLSTM and tuple(n for n, _ in model.named_parameters()) == NAMES


def scores(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Scores (clients, time, rows, classes) for symbols (clients, rows, time)."""
    clients, rows, steps = x.shape
    states = _by_client(_forward(params, x)[0], clients=clients)
    return _output(params, states).view(clients, steps, rows, -1)


def gradients(
    params: Mapping[str, Tensor], x: Tensor, y: Tensor, weights: Tensor
) -> dict[str, Tensor]:
    """Gradient of each client's own loss. x, y: (clients, rows, time); weights: (clients, rows)."""
    clients, rows, steps = x.shape
    groups, classes = params["output.bias"].shape
    hidden = params["lstm.weight_hh_l0"].shape[2]
    states, cells, gates = _forward(params, x)
    flat = _by_client(states, clients=clients)  # (clients, time·rows, hidden)
    targets = y.transpose(1, 2).reshape(clients, -1)
    slope = torch.softmax(_output(params, flat), dim=2)
    is_target = targets != NO_TARGET
    where = targets.clamp_min(0).unsqueeze(2)
    slope.scatter_add_(2, where, slope.new_full((1, 1, 1), -1.0).expand(where.shape))
    slope.mul_((_shares(y, weights) * is_target).unsqueeze(2))
    back = torch.bmm(slope.view(groups, -1, classes), params["output.weight"])
    back = back.view(clients, steps, rows, hidden)
    raw = _backward(params["lstm.weight_hh_l0"], back, cells, gates)
    draw = _by_client(raw, clients=clients)  # (clients, time·rows, 4·hidden)
    before = torch.cat([flat.new_zeros(clients, rows, hidden), flat[:, :-rows]], dim=1)
    table = _per_symbol(draw, x, classes=classes)
    bias = table.sum(1)
    embedding = params["embedding.weight"]
    every = embedding.repeat_interleave(clients // groups, dim=0, output_size=clients)
    down = torch.bmm(table.view(groups, -1, 4 * hidden), params["lstm.weight_ih_l0"])
    return {
        "embedding.weight": down.view(clients, classes, -1),
        "lstm.weight_ih_l0": torch.bmm(table.transpose(1, 2), every),
        "lstm.weight_hh_l0": torch.bmm(draw.transpose(1, 2), before),
        "lstm.bias_ih_l0": bias,
        "lstm.bias_hh_l0": bias,
        "output.weight": torch.bmm(slope.transpose(1, 2), flat),
        "output.bias": slope.sum(1),
    }


def _shares(y: Tensor, weights: Tensor) -> Tensor:
    """Weight of every target in its client's loss: (clients, time·rows)."""
    counted = (y != NO_TARGET).sum(2).clamp_min(1)
    share = weights / weights.sum(1, keepdim=True).clamp_min(1) / counted
    return share.unsqueeze(1).expand(-1, y.shape[2], -1).reshape(len(y), -1)


def _output(params: Mapping[str, Tensor], states: Tensor) -> Tensor:
    bias, weight = params["output.bias"], params["output.weight"]
    grouped = states.view(len(bias), -1, states.shape[2])
    found = torch.baddbmm(bias.unsqueeze(1), grouped, weight.transpose(1, 2))
    return found.view(*states.shape[:2], -1)


def _by_client(values: Sequence[Tensor], *, clients: int) -> Tensor:
    """(groups, clients of the group · rows, size) at every time → (clients, time·rows, size)."""
    size = values[0].shape[2]
    return torch.stack([value.view(clients, -1, size) for value in values], dim=1).flatten(1, 2)


def _per_symbol(values: Tensor, x: Tensor, *, classes: int) -> Tensor:
    """Sums of values (clients, time·rows, size) by the symbol they belong to."""
    symbols = x.transpose(1, 2).reshape(len(x), 1, -1)
    every = torch.arange(classes, device=x.device).view(1, -1, 1)
    return torch.bmm((symbols == every).to(values.dtype), values)


def _forward(
    params: Mapping[str, Tensor], x: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """States, cells and gates (i, f, g, o): (groups, clients of the group · rows, …), by time."""
    embedding, u = params["embedding.weight"], params["lstm.weight_hh_l0"]
    groups, classes = embedding.shape[:2]
    x = x.reshape(groups, -1, x.shape[2])
    bias = (params["lstm.bias_ih_l0"] + params["lstm.bias_hh_l0"]).unsqueeze(1)
    table = torch.baddbmm(bias, embedding, params["lstm.weight_ih_l0"].transpose(1, 2))
    first = classes * torch.arange(groups, device=x.device).view(1, -1, 1)
    projected = nn.functional.embedding(x.permute(2, 0, 1) + first, table.flatten(0, 1))
    return lstm.forward(projected.unbind(0), u, step_fn=_fused_step if u.is_cuda else lstm.step)


def _backward(u: Tensor, dh: Tensor, cells: list[Tensor], gates: list[Tensor]) -> list[Tensor]:
    """Gradient of the raw gates at every time from that of the states (clients, time, …)."""
    by_time = [value.reshape(cells[0].shape) for value in dh.unbind(1)]
    if u.is_cuda:
        return lstm.backward(by_time, u, _fused_back(cells, gates))
    return lstm.backward(by_time, u, lstm.back_of(torch.stack(cells), torch.stack(gates), time=0))


def _fused_step(projected: Tensor, recurrent: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`lstm.step` as one kernel of torch."""
    flat = (value.flatten(0, 1) for value in (projected, recurrent, c))
    h, c_new, gates = (
        value.view(*c.shape[:2], -1) for value in torch.ops.aten._thnn_fused_lstm_cell(*flat)
    )
    return h, c_new, gates


def _fused_back(cells: Sequence[Tensor], gates: Sequence[Tensor]) -> lstm.BackFn:
    """The way back through `_fused_step`, as one kernel of torch."""
    zero = torch.zeros_like(cells[0])

    def back(t: int, dh: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
        before = cells[t - 1] if t else zero
        flat = [value.flatten(0, 1) for value in (dh, dc, before, cells[t], gates[t])]
        raw, past, _ = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(*flat, False)
        return raw.view(*zero.shape[:2], -1), past.view(zero.shape)

    return back

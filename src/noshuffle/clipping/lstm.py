"""The arithmetic of an LSTM cell, forward and backward, over any leading axes.

    (i, f, g, o)_t = (σ, σ, tanh, σ)(x_t Wᵀ + b + h_{t−1} Uᵀ)
    c_t = f_t c_{t−1} + i_t g_t,      h_t = o_t tanh c_t

and with dh_t, dc_t the gradients that arrive at a step (Hochreiter and Schmidhuber 1997),

    dc_t ← dc_t + dh_t o_t (1 − tanh² c_t),      dc_{t−1} = dc_t f_t
    draw_t = (dc_t g i(1 − i), dc_t c_{t−1} f(1 − f), dc_t i(1 − g²), dh_t tanh(c_t) o(1 − o))

The gates come in torch's order, i f g o. The twin in the tests is `nn.LSTM`. State: none.

>>> layer, x = torch.nn.LSTM(3, 4, bias=False), torch.randn(5, 2, 3)
>>> states, _, _ = forward((x @ layer.weight_ih_l0.T).unbind(0), layer.weight_hh_l0)
>>> bool(torch.allclose(torch.stack(states), layer(x)[0], atol=1e-6))
True
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Gates = tuple[Tensor, Tensor, Tensor, Tensor]
#: (t, dh, dc) → (gradient of the raw gates, dc of the step before)
BackFn = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def cell(raw: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Gates]:
    """One step from the raw gates (…, 4·hidden): the new h and c, and the gates."""
    i, f, g, o = raw.chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + i * g
    return o * c.tanh(), c, (i, f, g, o)


def step(projected: Tensor, recurrent: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`cell`, with its gates in one tensor for the way back."""
    h, c, gates = cell(projected + recurrent, c)
    return h, c, torch.cat(gates, -1)


def forward(
    projected: Sequence[Tensor], u: Tensor
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """States, cells and gates at every time, from zero.

    projected: by time, (…, rows, 4·hidden); u: (…, 4·hidden, hidden).
    """
    h = c = projected[0].new_zeros(*projected[0].shape[:-1], u.shape[-1])
    across = u.transpose(-1, -2)
    states, cells, gates = [], [], []
    for at in projected:
        h, c, gate = step(at, h @ across, c)
        states.append(h)
        cells.append(c)
        gates.append(gate)
    return states, cells, gates


def backward(dh: Sequence[Tensor], u: Tensor, back_fn: BackFn) -> list[Tensor]:
    """Gradients of the raw gates at every time from those of the states."""
    dh_next = dc = torch.zeros_like(dh[0])
    found = []
    for t in range(len(dh) - 1, -1, -1):
        raw, dc = back_fn(t, dh[t] + dh_next, dc)
        found.append(raw)
        dh_next = raw @ u
    return found[::-1]


def back_of(cells: Tensor, gates: Tensor, *, time: int) -> BackFn:
    """The way back through `step`; what does not depend on it is computed for all times at once.

    cells (…, hidden) and gates (…, 4·hidden) have time in the axis of that number.
    """
    i, f, g, o = gates.chunk(4, -1)
    bent = cells.tanh()
    # What one unit of dc (first three) or dh (last) does to the raw gates.
    slopes = torch.cat(
        [g * i * (1 - i), earlier(cells, time) * f * (1 - f), i * (1 - g * g), bent * o * (1 - o)],
        -1,
    ).unbind(time)
    through, kept = (o * (1 - bent * bent)).unbind(time), f.unbind(time)

    def back(t: int, dh: Tensor, dc: Tensor) -> tuple[Tensor, Tensor]:
        dc = dc + dh * through[t]
        return slopes[t] * torch.cat([dc, dc, dc, dh], -1), dc * kept[t]

    return back


def earlier(values: Tensor, time: int) -> Tensor:
    """What stood one step before, zero before the first."""
    first = torch.zeros_like(values.narrow(time, 0, 1))
    return torch.cat([first, values.narrow(time, 0, values.shape[time] - 1)], time)

"""Multi-head attention seen from inside: four linear maps around a product of the batch.

    out = W_o · softmax(QKᵀ/√d + mask) V,    Q = W_q·query, K = W_k·key, V = W_v·value

Each projection is a linear rule of its own; where query, key and value are the same tensor (self
attention) the three are one. Masks have torch's meaning: True or −∞ keeps a position out. State:
none. Layers with bias_k, bias_v or add_zero_attn are left to the fallback.

>>> import torch
>>> from noshuffle.clipping.tape import GradientTape
>>> layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(3, 5, 8)
>>> ours, theirs = attention(layer, GradientTape(3, is_on=False), x, x, x)[0], layer(x, x, x)[0]
>>> torch.allclose(ours, theirs, atol=1e-6)
True
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.clipping.forms import GradientForm
from noshuffle.clipping.rules import bias_of, rewrite, weight_of
from noshuffle.errors import Unsupported

if TYPE_CHECKING:
    from noshuffle.clipping.tape import GradientTape


def _linear(
    tape: GradientTape,
    x: Tensor,
    weight: Tensor,
    bias: Any,
    *,
    rows: Any = None,
    shift: Any = None,
    steps_first: bool = False,
) -> Tensor:
    """x ↦ W x + b, recorded. `rows`, `shift`: only these rows of a stacked weight and bias.

    `steps_first`: the result lies in memory as torch's own does, [T, B, E], which decides about the
    masks of a dropout behind it (torch draws them in the order of memory).
    """
    rows = rows or slice(0, len(weight))
    shift = shift or rows
    own = weight[rows], None if bias is None else bias[shift]
    out = F.linear(x.transpose(0, 1), *own).transpose(0, 1) if steps_first else F.linear(x, *own)
    a, shape = x.detach(), tuple(weight.shape)

    def full(g: Tensor, of: Tensor, own: slice) -> Tensor:
        pad = (own.start, len(of) - own.stop)
        return F.pad(g, pad) if any(pad) else g

    def build(g: Tensor) -> list[tuple[Tensor, GradientForm]]:
        one = weight_of(a, full(g, weight, rows), shape, size=len(a))
        if bias is None:
            return [(weight, one)]
        return [(weight, one), (bias, bias_of(full(g, bias, shift), size=len(a)))]

    tape.record(build, out)
    return out


def _project(layer: Any, tape: GradientTape, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    bias, e = layer.in_proj_bias, layer.embed_dim
    if q is k and k is v and layer.in_proj_weight is not None:
        return list(_linear(tape, q, layer.in_proj_weight, bias).chunk(3, -1))
    thirds = [slice(i * e, (i + 1) * e) for i in range(3)]
    if layer.in_proj_weight is None:  # key and value have widths of their own
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        return [_linear(tape, x, w, bias, shift=s) for x, w, s in zip((q, k, v), weights, thirds)]
    return [_linear(tape, x, layer.in_proj_weight, bias, rows=s) for x, s in zip((q, k, v), thirds)]


def _additive(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(
        mask, -math.inf
    )


@rewrite(nn.MultiheadAttention)
def attention(
    layer: Any,
    tape: GradientTape,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What `layer(query, key, value, …)` computes."""
    if query.dim() != 3:
        raise Unsupported(f"MultiheadAttention takes batched input here, got {tuple(query.shape)}")
    same = query is key and key is value
    if not layer.batch_first:
        query = query.transpose(0, 1)
        key, value = (query, query) if same else (key.transpose(0, 1), value.transpose(0, 1))
    size, steps, _ = query.shape
    heads = layer.num_heads
    q, k, v = (
        t.reshape(*t.shape[:2], heads, -1).transpose(1, 2)
        for t in _project(layer, tape, query, key, value)
    )
    mask = _additive(attn_mask, q)
    if mask is not None and mask.dim() == 3:
        mask = mask.reshape(size, heads, steps, -1)
    if key_padding_mask is not None:
        away = _additive(key_padding_mask, q)
        assert away is not None
        away = away.reshape(size, 1, 1, -1)
        mask = away if mask is None else mask + away
    drop = layer.dropout if layer.training else 0.0
    weights = None
    if need_weights:
        scores = (q / math.sqrt(q.shape[-1])) @ k.mT
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        weights = F.dropout(weights, drop) if drop else weights
        mixed = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop)
    last = layer.out_proj
    mixed = mixed.permute(2, 0, 1, 3).flatten(2).transpose(0, 1)
    out = _linear(tape, mixed, last.weight, last.bias, steps_first=True)
    return (out if layer.batch_first else out.transpose(0, 1)), weights

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
from noshuffle.clipping.rules import affine, rewrite
from noshuffle.errors import Unsupported

if TYPE_CHECKING:
    from noshuffle.clipping.tape import GradientTape


def _linear(tape: GradientTape, x: Tensor, weight: Tensor, bias: Any, *, block: int = -1) -> Tensor:
    """x ↦ W x + b, recorded. `block` k: only rows [k·e, (k+1)·e) of a stacked weight."""
    if block < 0:
        w, b, pad = weight, bias, (0, 0)
    else:
        e = weight.shape[0] // 3
        rows = slice(block * e, (block + 1) * e)
        w, b, pad = weight[rows], None if bias is None else bias[rows], (block * e, (2 - block) * e)
    out = F.linear(x, w, b)
    a = x.detach()

    def build(g: Tensor) -> list[tuple[Tensor, GradientForm]]:
        g = F.pad(g, pad) if any(pad) else g
        one, two = affine(a, g, tuple(weight.shape), size=a.shape[0])
        return [(weight, one)] if bias is None else [(weight, one), (bias, two)]

    tape.record(out, build)
    return out


def _project(layer: Any, tape: GradientTape, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    bias = layer.in_proj_bias
    if layer.in_proj_weight is None:  # key and value have widths of their own
        e = layer.embed_dim
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        outs = [_linear(tape, x, w, None) for x, w in zip((q, k, v), weights)]
        if bias is None:
            return outs
        shifted = [out + bias[i * e : (i + 1) * e] for i, out in enumerate(outs)]
        for i, out in enumerate(shifted):
            _record_bias(tape, out, bias, (i * e, (2 - i) * e))
        return shifted
    if q is k and k is v:
        return list(_linear(tape, q, layer.in_proj_weight, bias).chunk(3, -1))
    return [_linear(tape, x, layer.in_proj_weight, bias, block=i) for i, x in enumerate((q, k, v))]


def _record_bias(tape: GradientTape, out: Tensor, bias: Tensor, pad: tuple[int, int]) -> None:
    def build(g: Tensor) -> list[tuple[Tensor, GradientForm]]:
        return [(bias, affine(g[..., :1], F.pad(g, pad), (1,), size=g.shape[0])[1])]

    tape.record(out, build)


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
    out = _linear(
        tape, mixed.transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias
    )
    return (out if layer.batch_first else out.transpose(0, 1)), weights

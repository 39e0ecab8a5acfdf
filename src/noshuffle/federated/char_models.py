"""Next-character models for federated text: an LSTM and a small causal transformer.

    char_lstm          embedding 32 → LSTM 128 → scores              (`training.models.CharLSTM`)
    char_transformer   embedding 64 + position → 2 blocks → norm → scores;  a block is
                       x + Attention(norm(x)),  x + MLP(norm(x)),  pre-norm (arXiv 2002.04745)

Both take symbols (rows, time) and give scores (rows, classes, time), as cross-entropy wants them,
and have layers that can be stacked over clients (no dropout, no batch statistics).

>>> model = build("char_transformer", classes=11, length=6)
>>> symbols = torch.arange(12).view(2, 6) % 11
>>> changed = symbols.clone()
>>> changed[:, 4:] = 0
>>> a, b = model(symbols), model(changed)
>>> a.shape, bool(torch.allclose(a[..., :4], b[..., :4]))  # it never looks ahead
(torch.Size([2, 11, 6]), True)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from noshuffle.errors import InvalidInput, one_of, whole
from noshuffle.training.models import CharLSTM

NAMES = ("char_lstm", "char_transformer")


def build(name: str, *, classes: int, length: int) -> nn.Module:
    """The model of that name for windows of `length` characters."""
    one_of(NAMES, model=name)
    if name == "char_lstm":
        return CharLSTM(classes)
    return CharTransformer(classes, length=length)


class CharTransformer(nn.Module):
    """A decoder over at most `length` characters."""

    def __init__(
        self, classes: int, *, length: int, width: int = 64, layers: int = 2, heads: int = 4
    ) -> None:
        super().__init__()
        whole(classes=classes, length=length, width=width, layers=layers, heads=heads)
        if width % heads:
            raise InvalidInput(f"width must be a multiple of heads, got {width} and {heads}")
        self.embedding = nn.Embedding(classes, width)
        self.position = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.ModuleList(Block(width, heads=heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, classes)
        nn.init.normal_(self.position, std=0.1)

    def forward(self, symbols: Tensor) -> Tensor:
        if symbols.shape[-1] > len(self.position):
            raise InvalidInput(
                f"the model takes {len(self.position)} characters at most, got {symbols.shape[-1]}"
            )
        x = self.embedding(symbols) + self.position[: symbols.shape[-1]]
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.output(self.norm(x))
        return scores.transpose(-1, -2)


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each added to what came in."""

    def __init__(self, width: int, *, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self._attended(self.qkv(self.norm1(x))))
        done: Tensor = x + self.back(torch.relu(self.wide(self.norm2(x))))
        return done

    def _attended(self, qkv: Tensor) -> Tensor:
        *rows, time, _ = qkv.shape
        q, k, v = (
            part.reshape(*rows, time, self.heads, -1).transpose(-2, -3)
            for part in qkv.chunk(3, dim=-1)
        )
        is_past = torch.ones(time, time, dtype=torch.bool, device=qkv.device).tril()
        closeness = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        share: Tensor = closeness.masked_fill(~is_past, float("-inf")).softmax(-1)
        return (share @ v).transpose(-2, -3).flatten(-2)

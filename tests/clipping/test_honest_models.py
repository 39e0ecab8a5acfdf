"""Ordinary models are not suspected of mixing examples, whatever their seed and precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.clipping import Flat, Ghost


class Bert(nn.Module):
    """An encoder with dropout, positions and a mask of padding."""

    def __init__(self, *, plain: bool) -> None:
        super().__init__()
        self.plain, width = plain, 16
        self.words, self.places = nn.Embedding(30, width, padding_idx=0), nn.Embedding(12, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.back = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        mask = (x != 0)[:, None, None, :]
        for i in range(2):
            q, k, v = (
                t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv[i](h).chunk(3, -1)
            )
            if self.plain:
                mixed = (q @ k.mT / 8**0.5).masked_fill(~mask, -1e4).softmax(-1) @ v
            else:
                mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            mixed = self.out[i](mixed.transpose(1, 2).flatten(2))
            h = self.norms[2 * i](h + self.drop(mixed))
            h = self.norms[2 * i + 1](h + self.drop(self.back[i](F.gelu(self.wide[i](h)))))
        out: Tensor = self.head(h[:, 0])
        return out


class Tagger(nn.Module):
    """A recurrent layer, or torch's own transformer, over embeddings."""

    def __init__(self, core: nn.Module, width: int) -> None:
        super().__init__()
        self.words, self.core, self.head = nn.Embedding(30, 8), core, nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.core(self.words(x))
        out: Tensor = self.head((h[0] if isinstance(h, tuple) else h).mean(1))
        return out


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: Bert(plain=False),
    "bert, plain attention": lambda: Bert(plain=True),
    "lstm": lambda: Tagger(nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True), 12),
    "gru": lambda: Tagger(nn.GRU(8, 6, batch_first=True), 6),
    "transformer": lambda: Tagger(encoder(), 8),
}


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_honest_models_are_not_suspected(name: str, cast: bool, isolate: bool) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        model, engine = MODELS[name](), Ghost(isolate=isolate)
        x, y = torch.randint(1, 30, (9, 12)), torch.randint(3, (9,))
        x[torch.arange(12) >= torch.randint(2, 13, (9, 1))] = 0
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            engine.clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(1.0))
        assert not any("whole model" in note for note in engine.fallbacks), engine.fallbacks

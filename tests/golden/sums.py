"""Golden clipped sums: models × batches × engines × clips, as projections and a norm.

Float32 products of matrices come out otherwise in their last bits on other processors, so sums are
held to 2e-5 of the clip norm, norms and losses to 2e-5 of their size. No model draws at random.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tests.golden.arithmetic import draws, fill, normal, projections, short
from tests.golden.entries import Entry
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.clipping import Flat, Ghost, PerExample, PerLayer

ROWS, CLIP, TOLERANCE = 6, 0.7, 2e-5
TOKENS = 11


class Head(nn.Module):
    """A body, the mean of what it says over everything behind the first two axes, and numbers."""

    def __init__(self, body: nn.Module, width: int, *, is_channels_first: bool = False) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 3)
        self.is_channels_first = is_channels_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        h = h[0] if isinstance(h, tuple) else h
        if self.is_channels_first:
            return self.head(h.flatten(2).mean(2))
        return self.head(h.mean(1) if h.dim() == 3 else h)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Tokens(nn.Module):
    """Embedded tokens with embedded places."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(TOKENS, 8), nn.Embedding(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))


class Tied(nn.Module):
    """One weight as embedding and as the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(TOKENS, 8), nn.Linear(8, 8)
        self.out = nn.Linear(8, TOKENS, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.words(x)))).mean(1)[:, :3]


class Repeated(nn.Module):
    """One layer, called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return self.head(x)


class Lora(nn.Module):
    """A frozen layer with a trained product of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down = nn.Linear(10, 12), nn.Linear(10, 2, bias=False)
        self.up, self.head = nn.Linear(2, 12, bias=False), nn.Linear(12, 3)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + 0.5 * self.up(self.down(x))))


class Patches(nn.Module):
    """Patches of an image, a token in front and places added: parameters beside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(2, 8, 4, 4)
        self.token, self.places = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.cut(x).flatten(2).mT
        return torch.cat([self.token.expand(len(x), 1, 8), h], 1) + self.places


def _cnn() -> nn.Module:
    return Head(
        nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 3, stride=2)
        ),
        5,
        is_channels_first=True,
    )


def _grouped() -> nn.Module:
    body = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=4, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 8, 1, groups=2, bias=False),
        nn.Conv2d(8, 4, 3, dilation=2, padding=2),
    )
    return Head(body, 4, is_channels_first=True)


def _norms() -> nn.Module:
    body = nn.Sequential()
    body.add_module("first", nn.Conv2d(2, 6, 3, padding=1))
    body.add_module("group_norm", nn.GroupNorm(3, 6))
    body.add_module("tanh", nn.Tanh())
    body.add_module("instance_norm", nn.InstanceNorm2d(6, affine=True))
    body.add_module("last", nn.Conv2d(6, 4, 3))
    return Head(body, 4, is_channels_first=True)


def _layer_norms() -> nn.Module:
    body = nn.Sequential()
    body.add_module("first", nn.Linear(10, 8))
    body.add_module("layer_norm", nn.LayerNorm(8))
    body.add_module("gelu", nn.GELU())
    body.add_module("rms_norm", nn.RMSNorm(8))
    return Head(body, 8)


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    return Head(nn.Sequential(Tokens(), layer), 8)


#: Model, and the shape of one row; no shape: five tokens.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)), (12,)),
    "linear over places": (lambda: Head(nn.Linear(6, 9, bias=False), 9), (4, 6)),
    "cnn": (_cnn, (2, 8, 8)),
    "grouped cnn": (_grouped, (4, 7, 7)),
    "conv1d": (lambda: Head(nn.Conv1d(3, 6, 3), 6, is_channels_first=True), (3, 12)),
    "conv3d": (lambda: Head(nn.Conv3d(2, 4, 2), 4, is_channels_first=True), (2, 4, 4, 4)),
    "transposed conv": (
        lambda: Head(nn.ConvTranspose2d(2, 4, 3, stride=2), 4, is_channels_first=True),
        (2, 4, 4),
    ),
    "lstm": (lambda: Head(nn.LSTM(5, 7, batch_first=True), 7), (6, 5)),
    "two lstms": (lambda: Head(nn.LSTM(5, 6, num_layers=2, batch_first=True), 6), (4, 5)),
    "gru": (lambda: Head(nn.GRU(5, 6, batch_first=True, bidirectional=True), 12), (6, 5)),
    "rnn": (lambda: Head(nn.RNN(5, 6, batch_first=True), 6), (6, 5)),
    "embedding": (lambda: Head(Tokens(), 8), ()),
    "attention": (lambda: Head(SelfAttention(), 8), (5, 8)),
    "transformer": (_transformer, ()),
    "norms": (_norms, (2, 6, 6)),
    "layer norms": (_layer_norms, (10,)),
    "lora": (Lora, (10,)),
    "tied": (Tied, ()),
    "repeated": (Repeated, (6,)),
    "patches": (lambda: Head(Patches(), 8), (2, 8, 8)),
}
BATCHES = ("normal", "one row", "huge row", "NaN row", "users")
ENGINES = {"ghost": Ghost, "per example": PerExample}


def model_of(name: str) -> nn.Module:
    """The model with weights that follow from their names."""
    model = MODELS[name][0]()
    fill(model)
    return model


def batch_of(name: str, kind: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets. What is huge or NaN in rows of tokens is the target, and what is huge in
    those of attention: the gradient of huge scores is rounding."""
    shape = MODELS[name][1]
    x: Any = normal(f"x {name}", ROWS, *shape)
    if not shape:
        x = draws(f"x {name}").randint(0, TOKENS, (ROWS, 5))
    y = normal(f"y {name}", ROWS, 3)
    if kind in ("huge row", "NaN row"):
        is_target = not shape or (name == "attention" and kind == "huge row")
        own = y if is_target else x
        own[2] = 1e4 * own[2] if kind == "huge row" else np.nan
    inputs = torch.from_numpy(x.astype(np.float32) if shape else x)
    batch = inputs, torch.from_numpy(y.astype(np.float32))
    return (batch[0][:1], batch[1][:1]) if kind == "one row" else batch


def clipped(name: str, engine: str) -> dict[str, Any]:
    """The clipped sums of a model by one engine, in few numbers each."""
    model, sums = model_of(name), ENGINES[engine]()
    wanted: dict[str, tuple[str, Any, dict[str, Any]]]
    wanted = {kind: (kind, Flat(CLIP), {}) for kind in BATCHES}
    wanted["per layer"] = "normal", PerLayer(CLIP), {}
    if name in ("mlp", "cnn", "lstm"):
        wanted["means of users"] = "users", Flat(CLIP), {"reduce": "mean"}
    if name == "mlp":
        wanted["two bounds"] = "normal", PerLayer({"0": 0.5, "2": 0.3}), {}
    found = {}
    for label, (kind, clip, options) in wanted.items():
        units = torch.tensor([0, 1, 0, 2, 1, 0]) if kind == "users" else None
        got = sums.clipped_sum(
            model, F.mse_loss, batch_of(name, kind), clip=clip, units=units, **options
        )
        found[label] = {
            "sum": projections(got.values.items()),
            "names": sorted(got.values),
            "bound": got.bound,
            "norms": [short(v) for v in got.norms.tolist()],
            "losses": [short(v) for v in got.losses.tolist()],
            "units": got.units,
            "nonfinite": got.nonfinite,
        }
    return found


SECTION = {
    f"{name}, {engine}": Entry(
        partial(clipped, name, engine), rtol=TOLERANCE, atol=TOLERANCE * CLIP
    )
    for name in MODELS
    for engine in ENGINES
}

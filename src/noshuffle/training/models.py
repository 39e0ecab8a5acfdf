"""Models for the shipped data sets: small, per-example friendly (no batch statistics), by name.

    tanh_cnn    16@8×8 and 32@4×4 convolutions, tanh, 26,010 parameters on MNIST
                (Papernot et al. 2021, arXiv 2007.14191; the model of Kairouz et al. 2021)
    vgg         three blocks of two 3×3 convolutions, tanh, 550,570 parameters on CIFAR-10
    small_cnn   two 3×3 convolutions for 8 × 8 digits
    linear, mlp tables
    softmax     linear, from zero: for fixed features (`noshuffle.features`)
    feature_cnn two 3×3 convolutions, tanh, on fixed features of images
    wrn_16_4    a wide residual net with GroupNorm (`residual`), 2,748,890 parameters on CIFAR-10
    char_lstm   embedding, one LSTM, output layer for next-character prediction

Initial weights depend on `torch.manual_seed`: they are public, unlike the noise.

>>> sum(p.numel() for p in build("tanh_cnn", (1, 28, 28), 10).parameters())
26010
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from noshuffle.errors import InvalidInput
from noshuffle.training.residual import wide

Shape = tuple[int, ...]


def build(name: str, shape: Shape, classes: int) -> nn.Module:
    """The model of that name for one example of that shape."""
    if name not in _MODELS:
        raise InvalidInput(f"model must be one of {', '.join(_MODELS)}; got {name!r}")
    if name in _CONVOLUTIONAL and len(shape) != 3:
        raise InvalidInput(
            f"{name} takes images (channels, height, width), got examples of shape {tuple(shape)}; "
            "use mlp or linear"
        )
    model = _initialised(_MODELS[name](shape, classes))
    if name == "softmax":
        nn.init.zeros_(model.get_parameter("1.weight"))
    return model


def default_for(kind: str, shape: Shape) -> str:
    """The model that suits a kind of data."""
    if kind == "text":
        return "char_lstm"
    if kind in ("table", "features"):
        return "linear" if kind == "table" else "softmax"
    if shape[-1] < 16:
        return "small_cnn"
    return "tanh_cnn" if shape[0] == 1 else "vgg"


def _tanh_cnn(shape: Shape, classes: int) -> nn.Module:
    height, width = (((size - 3) // 2 + 1 - 4) // 2 for size in shape[1:])
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(32 * height * width, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


def _convolutions(shape: Shape, widths: tuple[int, ...], *, each: int) -> list[nn.Module]:
    """Blocks of `each` 3 × 3 convolutions with tanh, which halve the sides; then flat."""
    layers: list[nn.Module] = []
    channels = shape[0]
    for width in widths:
        for _ in range(each):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.Tanh()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    return [*layers, nn.Flatten()]


def _vgg(shape: Shape, classes: int) -> nn.Module:
    flat = 128 * (shape[1] // 8) * (shape[2] // 8)
    head = (nn.Linear(flat, 128), nn.Tanh(), nn.Linear(128, classes))
    return nn.Sequential(*_convolutions(shape, (32, 64, 128), each=2), *head)


def _small_cnn(shape: Shape, classes: int) -> nn.Module:
    flat = 32 * (shape[1] // 4) * (shape[2] // 4)
    return nn.Sequential(*_convolutions(shape, (16, 32), each=1), nn.Linear(flat, classes))


def _linear(shape: Shape, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), classes))


def _feature_cnn(shape: Shape, classes: int) -> nn.Module:
    head = nn.Linear(64 * (shape[1] // 4) * (shape[2] // 4), classes)
    return nn.Sequential(*_convolutions(shape, (64, 64), each=1), head)


def _mlp(shape: Shape, classes: int) -> nn.Module:
    first, last = nn.Linear(math.prod(shape), 128), nn.Linear(128, classes)
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), last)


class CharLSTM(nn.Module):
    """Symbols (batch, time) → scores (batch, classes, time), as cross-entropy wants them."""

    def __init__(self, classes: int, *, embedding: int = 32, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.output = nn.Linear(hidden, classes)

    def forward(self, symbols: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(symbols))
        scores: Tensor = self.output(states)
        return scores.transpose(1, 2)


_MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "tanh_cnn": _tanh_cnn,
    "vgg": _vgg,
    "small_cnn": _small_cnn,
    "linear": _linear,
    "softmax": _linear,
    "feature_cnn": _feature_cnn,
    "mlp": _mlp,
    "wrn_16_4": lambda shape, classes: wide(4, channels=shape[0], classes=classes),
    "char_lstm": lambda shape, classes: CharLSTM(classes),
}
NAMES = tuple(_MODELS)
_CONVOLUTIONAL = ("tanh_cnn", "vgg", "small_cnn", "feature_cnn", "wrn_16_4")


def _initialised(model: nn.Module) -> nn.Module:
    """Convolutions N(0, 1/fan-in), linear layers Xavier normal, biases zero."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            nn.init.normal_(module.weight, std=fan_in**-0.5)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            with torch.no_grad():
                module.bias.zero_()
    return model

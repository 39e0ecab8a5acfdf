"""Models as people write them, odd in what one example may do to another; see test_odd_models.

Every entry has a model, its kind of inputs, a loss, and the size of its batches. Inputs are
"vector" (8 numbers), "tokens" (7 whole numbers, zeros at the end), "labels" (tokens with a label
each), "image" (2×6×6) or "series" (5×4).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from noshuffle.clipping import ModelLoss


@dataclass(frozen=True)
class Odd:
    """One model: how to make it, its inputs and its loss."""

    name: str
    make: Callable[[], nn.Module]
    kind: str = "vector"
    loss: Any = F.cross_entropy
    size: int = 6

    def __str__(self) -> str:
        return self.name


def data(odd: Odd, seed: int, size: int | None = None) -> tuple[Tensor, Tensor]:
    """A batch for a model."""
    rng = torch.Generator().manual_seed(seed)
    n = odd.size if size is None else size
    shapes = {"vector": (n, 8), "image": (n, 2, 6, 6), "series": (n, 5, 4)}
    y = torch.randint(3, (n,), generator=rng)
    if odd.kind in shapes:
        return torch.randn(shapes[odd.kind], generator=rng) * 1.5, y
    x = torch.randint(1, 11, (n, 7), generator=rng)
    ends = torch.randint(2, 8, (n,), generator=rng)
    if odd.kind == "labels":  # one a token; some are ignored, from the second batch on
        labels = torch.randint(3, (n, 7), generator=rng)
        if seed:
            labels[torch.arange(7) >= ends[:, None]] = -100
        return x, labels
    x[torch.arange(7) >= ends[:, None]] = 0
    return x, y


class Between(nn.Module):
    """A perceptron with something between its layers."""

    def __init__(self, fn: Callable[..., Tensor], *, has_self: bool = False) -> None:
        super().__init__()
        self.inner, self.head, self.fn = nn.Linear(8, 6), nn.Linear(6, 3), fn
        self.has_self = has_self

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        return self.head(self.fn(self, h) if self.has_self else self.fn(h))


class Before(nn.Module):
    """The same in front of its layers."""

    def __init__(self, fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.fn, self.inner, self.head = fn, nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.fn(x))))


class Tokens(nn.Module):
    """An embedding, something, a mean over tokens, a head."""

    def __init__(self, fn: Callable[..., Tensor], *, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.embed, self.head, self.fn = nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 3), fn
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fn(self, x))


class Backward(torch.autograd.Function):
    """Nothing on the way there; `how` on the way back."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, how: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(h)
        ctx.how = how
        return h.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return ctx.how(g, ctx.saved_tensors[0]), None


def back(how: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    return Between(lambda h: Backward.apply(h, how))


def of(make: Callable[[Any], nn.Module], fns: dict[str, Any], **options: Any) -> list[Odd]:
    """One model for each function that it is made with."""
    return [Odd(name, partial(make, fn), **options) for name, fn in fns.items()]


def norm(h: Tensor) -> Tensor:
    return (h - h.mean(0)) / (h.std(0) + 1e-5)


def ghost_norm(h: Tensor) -> Tensor:
    return torch.cat([norm(part) if len(part) > 1 else part for part in h.split(2)])


class Running(nn.Module):
    """Batch statistics with a momentum buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 6), nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * h.detach().mean(0))
        return self.head(h - self.mean)


class Experts(nn.Module):
    """Each example goes to one expert, which takes `room` of them."""

    def __init__(self, room: int, *, aux: bool = False) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 3) for _ in range(2))
        self.room, self.aux = room, aux

    def forward(self, x: Tensor) -> Tensor:
        choice = self.gate(x).softmax(1)
        which = choice.argmax(1)
        out = x.new_zeros(len(x), 3)
        for i, expert in enumerate(self.experts):
            mine = (which == i).nonzero()[:, 0][: self.room]
            out = out.index_add(0, mine, expert(x[mine]) * choice[mine, i, None])
        if self.aux:
            out = out + (choice.mean(0) * F.one_hot(which, 2).float().mean(0)).sum()
        return out


class Attends(nn.Module):
    """Attention or a recurrent layer, with the batch on the axis that `batch_first` says."""

    def __init__(self, kind: str, *, batch_first: bool) -> None:
        super().__init__()
        self.kind, self.head = kind, nn.Linear(4, 3)
        if kind == "attention":
            self.core: nn.Module = nn.MultiheadAttention(4, 2, batch_first=batch_first)
        else:
            self.core = getattr(nn, kind)(4, 4, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        h = self.core(x, x, x)[0] if self.kind == "attention" else self.core(x)[0]
        return self.head(h.mean(1))


class Conv(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.conv, self.head, self.fn = nn.Conv2d(2, 4, 3), nn.Linear(4 * 16, 3), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.fn(self.conv(x))).flatten(1))


class Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(8, 6), nn.Linear(6, 3)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x).mean(1))[:, :3]


class Checkpointed(Between):
    def forward(self, x: Tensor) -> Tensor:
        def part(t: Tensor) -> Tensor:
            return self.fn(torch.tanh(self.inner(t)))

        return self.head(checkpoint(part, x, use_reentrant=False))


class WeightByBatch(nn.Module):
    """A weight that is normalised by what the batch makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(x, self.inner.weight / (x @ self.inner.weight.T).norm().clamp(min=1e-3))
        return self.head(h * 3.0)


def trimmed(model: Any, x: Tensor) -> Tensor:
    """Padding is cut to the longest of the batch, and the mean is over what is left."""
    return model.embed(x[:, : int((x != 0).sum(1).max())]).mean(1)


def positions_from_the_end(model: Any, x: Tensor) -> Tensor:
    x = x[:, : int((x != 0).sum(1).max())]
    where = torch.arange(x.shape[1], 0, -1, dtype=torch.float32)
    return (model.embed(x) * where[:, None]).sum(1) / 10


def masked_mean(model: Any, x: Tensor) -> Tensor:
    mask = (x != 0)[..., None]
    return (model.embed(x) * mask).sum(1) / mask.sum(1).clamp(min=1)


def packed(model: Any, x: Tensor) -> Tensor:
    """All tokens of a batch in one row through a convolution, then back."""
    flat = model.embed(x).flatten(0, 1).T[None]
    return model.extra(flat)[0].T.unflatten(0, x.shape).mean(1)


def contrastive(model: Any, x: Tensor, y: Tensor) -> Tensor:
    h = F.normalize(model(x), dim=1)
    return F.cross_entropy(h @ h.T / 0.5, torch.arange(len(x)), reduction="none")


def mixed_up(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(0.7 * x + 0.3 * x.roll(1, 0)), y, reduction="none")


def by_kept(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The mean over the labels of the batch that count, times the size: as `.mean()` has it."""
    logits = model.head(model.embed(x))
    each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none", ignore_index=-100)
    return each.sum(1) * len(y) / (y != -100).sum().clamp(min=1)


def by_labelled(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """The mean over the examples of the batch that have a label; all have one at first."""
    each = F.cross_entropy(model(x), y, reduction="none", ignore_index=-1)
    return each * len(y) / (y >= 0).sum().clamp(min=1)


def by_own_kept(model: Any, x: Tensor, y: Tensor) -> Tensor:
    logits = model.head(model.embed(x))
    each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none", ignore_index=-100)
    return each.sum(1) / (y != -100).sum(1).clamp(min=1)


def balanced(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Classes weighed by how rare they are in the batch."""
    weight = len(y) / torch.bincount(y, minlength=3).clamp(min=1)
    return F.cross_entropy(model(x), y, reduction="none") * weight[y]


def hardest(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Only the harder half of the batch counts."""
    each = F.cross_entropy(model(x), y, reduction="none")
    return each * (each >= each.detach().median())


def focal(model: Any, x: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(model(x), y, reduction="none")
    return each * (1 - (-each).exp()) ** 2


def scaled_loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(model(x), y, reduction="none")
    return each / each.detach().max().clamp(min=1e-3)


def row(fn: Callable[..., Tensor]) -> ModelLoss:
    return ModelLoss(fn, by_row=True)


def plain() -> nn.Module:
    return Between(lambda h: h)


def plain_tokens() -> nn.Module:
    return Tokens(masked_mean)


def channels(h: Tensor) -> Tensor:
    return (h - h.mean((0, 2, 3), keepdim=True)) / h.std((0, 2, 3), keepdim=True)


def far_apart(h: Tensor) -> Tensor:
    return h * (len(h) / len(h.round(decimals=1).unique(dim=0)) + h.mean())


def counted(model: Any, x: Tensor) -> Tensor:
    return model.embed(x).sum(1) / (x != 0).sum() * len(x)


drop = nn.Dropout(0.5)

#: Found in the first batch: written out one by one, or refused.
MIXING = [
    *of(
        Between,
        {
            "batch norm by hand": norm,
            "batch mean": lambda h: h - h.mean(0),
            "batch mean, detached": lambda h: h - h.detach().mean(0),
            "ghost batch norm": ghost_norm,
            "softmax over the batch": lambda h: h * h.softmax(0) * len(h),
            "rank in the batch": lambda h: h * h.argsort(0).argsort(0) / len(h),
            "cumulative sum": lambda h: h + 0.3 * h.cumsum(0),
            "neighbour in the batch": lambda h: h + 0.5 * h.roll(1, 0),
            "last of the batch": lambda h: h + 0.5 * h[-1:],
            "order of the batch": lambda h: h[h[:, 0].argsort()],
            "flattened the other way": lambda h: h.T.reshape(h.shape),
            "einsum over the batch": lambda h: h @ torch.einsum("bi,bj->ij", h, h) / 9,
            "swapped einsum": lambda h: torch.einsum("bi,ci->bc", h, h).softmax(1) @ h,
            "whitened": lambda h: h @ torch.linalg.pinv(h.T @ h / len(h) + torch.eye(6)),
            "behind dropout": lambda h: drop(h - h.mean(0)),
            "behind noise": lambda h: h + torch.randn_like(h) - h.mean(0),
            "mixup inside": lambda h: 0.7 * h + 0.3 * h[torch.randperm(len(h))],
            "pooled over the batch": lambda h: F.avg_pool1d(h.T[None], 3, 1, 1)[0].T,
            "early exit": lambda h: h if h.abs().mean() > 0.55 else torch.relu(h),
            "early exit by the last": lambda h: h if float(h[-1, 0]) > 0 else -h,
            "similar rows": lambda h: torch.cdist(h, h).softmax(1) @ h,
            "quantile": lambda h: h.clamp(max=float(h.quantile(0.8))),
            "unlike rows": far_apart,
        },
    ),
    *of(
        Between,
        {
            "odd batches only": lambda h: h - h.mean(0) if len(h) % 2 else h,
            "one size only": lambda h: h - h.mean(0) if len(h) == 15 else h,
            "large, behind dropout": lambda h: drop(h - h.mean(0) if len(h) > 12 else h),
            "large, behind noise": lambda h: (
                h + torch.rand_like(h) - (h.mean(0) if len(h) > 12 else 0)
            ),
        },
        size=15,
    ),
    *of(
        Before,
        {
            "batch norm before": norm,
            "by the largest of the batch": lambda x: x / x.abs().max(),
            "range of the batch": lambda x: (x - x.min()) / (x.max() - x.min() + 1),
        },
    ),
    *of(
        back,
        {
            "backward: centred": lambda g, h: g - g.mean(0),
            "backward: by all norms": lambda g, h: g / g.norm().clamp(min=1e-6),
            "backward: by the largest": lambda g, h: g * h.abs().max(),
            "backward: other rows": lambda g, h: g * (1 + h.mean(0)),
            "backward: rolled": lambda g, h: g.roll(1, 0),
            "backward: clipped together": lambda g, h: g.clamp(max=float(g.abs().mean())),
        },
    ),
    *of(
        back,
        {
            "backward: large only": lambda g, h: g * (1 + h.mean(0)) if len(g) > 12 else g,
            "backward: odd only": lambda g, h: g - g.mean(0) if len(g) % 2 else g,
            "backward: by their number": lambda g, h: g * len(g) / 10 if len(g) > 12 else g,
            "backward: drawn": lambda g, h: g[torch.randperm(len(g))] if len(g) > 12 else g,
        },
        size=15,
    ),
    Odd("running mean", Running),
    Odd("experts, two places", partial(Experts, 2)),
    Odd("experts with a balance term", partial(Experts, 99, aux=True)),
    Odd("attention over the batch", partial(Attends, "attention", batch_first=False), "series"),
    Odd("lstm over the batch", partial(Attends, "LSTM", batch_first=False), "series"),
    *of(Conv, {"channels": channels, "brightest": lambda h: h / h.amax()}, kind="image"),
    Odd("weight by the batch", WeightByBatch),
    Odd("checkpoint with batch mean", lambda: Checkpointed(lambda h: h - h.mean(0))),
    Odd("trimmed padding", partial(Tokens, trimmed), "tokens"),
    Odd("positions from the end", partial(Tokens, positions_from_the_end), "tokens"),
    Odd("one row", lambda: Tokens(packed, extra=nn.Conv1d(6, 6, 3, padding=1)), "tokens"),
    Odd("tokens by their count", partial(Tokens, counted), "tokens"),
    Odd("contrastive", plain, loss=row(contrastive)),
    Odd("mixup in the loss", plain, loss=row(mixed_up)),
    Odd("mean over kept labels", plain_tokens, "labels", row(by_kept)),
    Odd("mean over labelled examples", plain, loss=row(by_labelled)),
    Odd("balanced classes", plain, loss=row(balanced)),
    Odd("hard examples", plain, loss=row(hardest)),
    Odd("loss by the largest loss", plain, loss=row(scaled_loss)),
]

#: Taken at once, by layer rules.
APART = [
    *of(
        Between,
        {
            "plain": lambda h: h,
            "layer norm": lambda h: F.layer_norm(h, (6,)),
            "row softmax": lambda h: h.softmax(1),
            "dropout": drop,
            "noise": lambda h: h + torch.randn_like(h),
        },
        size=15,
    ),
    Odd("gradient reversal", partial(back, lambda g, h: -0.5 * g)),
    Odd("straight through", partial(back, lambda g, h: g * (h.abs() < 0.9))),
    Odd("by the largest of the row", lambda: Before(lambda x: x / x.abs().amax(1, keepdim=True))),
    Odd("lora", Lora),
    Odd("tied", Tied, "tokens"),
    Odd("checkpoint", lambda: Checkpointed(lambda h: h)),
    Odd("attention", partial(Attends, "attention", batch_first=True), "series"),
    Odd("lstm", partial(Attends, "LSTM", batch_first=True), "series"),
    *of(Conv, {"convolution": lambda h: h, "instance norm": F.instance_norm}, kind="image"),
    Odd("masked mean", plain_tokens, "tokens"),
    Odd("mean over own labels", plain_tokens, "labels", row(by_own_kept)),
    Odd("focal", plain, loss=row(focal)),
    Odd("label smoothing", plain, loss=nn.CrossEntropyLoss(label_smoothing=0.1)),
]

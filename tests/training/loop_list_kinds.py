"""Loops of `loops` with other optimizers, models and data, in the style of real projects."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import torch
from tests.training.loops import (
    CE,
    IMAGES,
    PADS,
    TOKENS,
    Forward,
    X,
    Y,
    by_hand,
    each,
    every,
    loop,
    mlp,
    models,
    optimizers,
    plain,
    rows,
    sequence,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from noshuffle.clipping import ModelLoss

# ---- optimizers

for name in ("NAdam", "Adamax", "RAdam", "ASGD", "Rprop", "Adadelta"):
    optimizers(
        name,
        lambda m, name=name: getattr(torch.optim, name)(m.parameters(), lr=0.01),
        tolerance=1e-3,
    )
optimizers("SGD(fused=True)", lambda m: torch.optim.SGD(m.parameters(), lr=0.2, fused=True))
optimizers("maximize=True", lambda m: torch.optim.SGD(m.parameters(), lr=0.02, maximize=True))


@loop(
    "optimizers",
    "a frozen group, lr=0",
    twin=by_hand(),
    optimizer=lambda m: torch.optim.SGD(
        [{"params": m[0].parameters(), "lr": 0.0}, {"params": m[2].parameters(), "lr": 0.3}]
    ),
)
def _(on: Any) -> None:
    plain(on)


@loop(
    "optimizers",
    "parameters of a criterion in the same optimizer",
    expected="refused",
    optimizer=lambda m: torch.optim.SGD([*m.parameters(), nn.Parameter(torch.zeros(1))], lr=0.2),
)
def _(on: Any) -> None:
    plain(on)


@loop(
    "optimizers",
    "SWA with SWALR",
    twin=each(
        lambda on, i, x, y: (
            on.private._parts.optimizer.param_groups[0].update(lr=0.2),
            on.private.step(CE, x, y),
        )
    ),
)
def _(on: Any) -> None:
    average = torch.optim.swa_utils.AveragedModel(on.model)
    schedule = torch.optim.swa_utils.SWALR(on.optimizer, swa_lr=0.2)
    for x, y in rows():
        on.optimizer.zero_grad()
        CE(on.model(x), y).backward()
        on.optimizer.step()
        average.update_parameters(on.model)
        schedule.step()


@loop(
    "optimizers",
    "SparseAdam",
    expected="refused",
    model=sequence(nn.GRU),
    optimizer=lambda m: torch.optim.SparseAdam(m.parameters()),
)
def _(on: Any) -> None:
    for x, y in rows(TOKENS):
        CE(on.model(x), y).backward()
        on.optimizer.step()


# ---- models


@loop(
    "models",
    "GAN: the discriminator, real and fake apart, netD.zero_grad() (DCGAN tutorial)",
    expected="equal, warned",
    twin=each(
        lambda on, i, x, y: on.private.step(
            ModelLoss(lambda m, x, t: F.binary_cross_entropy_with_logits(m(x)[:, 0], t)),
            torch.cat([x, fakes(i)]),
            torch.cat([torch.ones(8), torch.zeros(8)]),
        )
    ),
)
def _(on: Any) -> None:
    bce = nn.BCEWithLogitsLoss()
    for i, (x, _y) in enumerate(rows()):
        on.model.zero_grad()
        bce(on.model(x)[:, 0], torch.ones(8)).backward()
        fake = fakes(i).requires_grad_()
        bce(on.model(fake.detach())[:, 0], torch.zeros(8)).backward()
        on.optimizer.step()
        bce(on.model(fake)[:, 0], torch.ones(8)).backward()  # the generator's own step


def fakes(i: int) -> Any:
    return torch.sin(torch.arange(48.0).reshape(8, 6) + i)


@loop("models", "GAN: real and fake in one loss", expected="more than once")
def _(on: Any) -> None:
    bce = nn.BCEWithLogitsLoss()
    for i, (x, _y) in enumerate(rows()):
        on.optimizer.zero_grad()
        (
            bce(on.model(x)[:, 0], torch.ones(8)) + bce(on.model(fakes(i))[:, 0], torch.zeros(8))
        ).backward()
        on.optimizer.step()


def stateful() -> nn.Module:
    return Forward(
        lambda m, t, h=None: (lambda o: (m.out(o[0][:, -1]), o[1][0]))(
            m.cell(m.embed(t), None if h is None else h[None])
        ),
        embed=nn.Embedding(11, 8),
        cell=nn.GRU(8, 8, batch_first=True),
        out=nn.Linear(8, 4),
    )


@loop(
    "models",
    "truncated BPTT: h = h.detach() carried to the next batch",
    model=stateful,
    expected="earlier",
)
def _(on: Any) -> None:
    h = torch.zeros(8, 8)
    for x, y in rows(TOKENS):
        on.optimizer.zero_grad()
        out, h = on.model(x, h.detach())
        CE(out, y).backward()
        on.optimizer.step()


@loop("models", "truncated BPTT: h.detach().clone()", model=stateful, expected="earlier")
def _(on: Any) -> None:
    h = torch.zeros(8, 8)
    for x, y in rows(TOKENS):
        on.optimizer.zero_grad()
        out, h = on.model(x, h)
        CE(out, y).backward()
        on.optimizer.step()
        h = h.detach().clone()


class Remembering(nn.Module):
    """Keeps its hidden state between batches, as `self.hidden` of many tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.out = (
            nn.Embedding(11, 8),
            nn.GRU(8, 8, batch_first=True),
            nn.Linear(8, 4),
        )
        self.hidden: Any = None

    def forward(self, t: Any) -> Any:
        h = None if self.hidden is None or self.hidden.shape[1] != len(t) else self.hidden.detach()
        out, self.hidden = self.cell(self.embed(t), h)
        return self.out(out[:, -1])


models(
    "a hidden state that the module keeps between batches", Remembering, TOKENS, expected="refused"
)


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mid, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        h = torch.tanh(self.first(x))
        if not self.training or random.random() < 0.8:
            h = h + torch.tanh(self.mid(h))
        return self.out(h)


@loop("models", "stochastic depth by Python's random", model=StochasticDepth, expected="refused")
def _(on: Any) -> None:
    random.seed(4)
    for x, y in zip(X.split(4), Y.split(4)):
        on.optimizer.zero_grad()
        CE(on.model(x), y).backward()
        on.optimizer.step()


@dataclasses.dataclass
class Output:
    logits: Any


every(
    "models",
    "an output that is a dataclass",
    lambda m, x, y: CE(m(x).logits, y),
    model=lambda: Forward(lambda m, x: Output(m.a(x)), a=nn.Linear(6, 4)),
)


every(
    "models",
    "a NamedTuple of outputs",
    lambda m, x, y: CE(m(x).logits, y),
    model=lambda: Forward(
        lambda m, x: collections.namedtuple("Out", "logits hidden")(m.a(x), x), a=nn.Linear(6, 4)
    ),
)


every(
    "models",
    "a batch that is a dataclass",
    lambda m, x, y: CE(m(Output(x)), y),
    expected="refused",
    model=lambda: Forward(lambda m, b: m.a(b.logits), a=nn.Linear(6, 4)),
)


every(
    "models",
    "a list of images as input",
    lambda m, x, y: CE(m(list(x)), y),
    expected="refused",
    model=lambda: Forward(lambda m, xs: m.a(torch.stack(xs)), a=nn.Linear(6, 4)),
)


@loop(
    "models",
    "time first: LSTM without batch_first",
    expected="refused",
    model=lambda: Forward(
        lambda m, t: m.out(m.cell(m.embed(t))[0]),
        embed=nn.Embedding(11, 8),
        cell=nn.LSTM(8, 8),
        out=nn.Linear(8, 11),
    ),
)
def _(on: Any) -> None:
    for x, _y in rows(TOKENS):
        on.optimizer.zero_grad()
        out = on.model(x[:, :-1].T)
        CE(out.reshape(-1, 11), x[:, 1:].T.reshape(-1)).backward()
        on.optimizer.step()


every(
    "models",
    "h_n of an RNN as output, [layers, batch, size]",
    lambda m, x, y: CE(m(x)[0], y),
    TOKENS,
    Y,
    expected="refused",
    model=lambda: Forward(
        lambda m, t: m.cell(m.embed(t))[1],
        embed=nn.Embedding(11, 8),
        cell=nn.GRU(8, 4, batch_first=True),
    ),
)


every(
    "models",
    "EmbeddingBag with offsets (text classification tutorial)",
    lambda m, x, y: CE(m(x.reshape(-1), torch.arange(0, x.numel(), 5)), y),
    TOKENS,
    Y,
    expected="refused",
    model=lambda: Forward(
        lambda m, t, o: m.out(m.bag(t, o)), bag=nn.EmbeddingBag(11, 8), out=nn.Linear(8, 4)
    ),
)


models(
    "EmbeddingBag of rows",
    lambda: Forward(lambda m, t: m.out(m.bag(t)), bag=nn.EmbeddingBag(11, 8), out=nn.Linear(8, 4)),
    TOKENS,
    expected="equal, warned",
)


def masked() -> nn.Module:
    return Forward(
        lambda m, t, mask: m.out(m.mix(m.embed(t), src_mask=mask).mean(1)),
        embed=nn.Embedding(11, 8),
        out=nn.Linear(8, 4),
        mix=nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    )


LONG = torch.cat([TOKENS, TOKENS[:, :3]], 1)


@loop(
    "models",
    "a causal mask [T, T] as input, T = batch size",
    model=masked,
    expected="masks and other constants",
)
def _(on: Any) -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(8)
    for x, y in rows(LONG):
        on.optimizer.zero_grad()
        CE(on.model(x, mask), y).backward()
        on.optimizer.step()


@loop("models", "a causal mask [T, T] as input", model=masked, expected="refused")
def _(on: Any) -> None:
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    for x, y in rows(TOKENS):
        on.optimizer.zero_grad()
        CE(on.model(x, mask), y).backward()
        on.optimizer.step()


@loop(
    "models",
    "padded sequences with lengths as a tensor",
    twin=by_hand(
        lambda m, x, y: CE(m(x[:, :5], x[:, 5]), y), torch.cat([TOKENS, PADS[:, None]], 1), Y
    ),
    model=lambda: Forward(
        lambda m, t, n: m.out(
            (m.embed(t) * (torch.arange(5) < n[:, None])[..., None]).sum(1) / n[:, None]
        ),
        embed=nn.Embedding(11, 8),
        out=nn.Linear(8, 4),
    ),
)
def _(on: Any) -> None:
    for x, n, y in zip(TOKENS.split(8), PADS.split(8), Y.split(8)):
        on.optimizer.zero_grad()
        CE(on.model(x, n), y).backward()
        on.optimizer.step()


@loop(
    "models",
    "pack_padded_sequence with lengths as a list",
    expected="refused",
    model=lambda: Forward(
        lambda m, t, n: m.out(
            m.cell(
                nn.utils.rnn.pack_padded_sequence(
                    m.embed(t), n, batch_first=True, enforce_sorted=False
                )
            )[1][0]
        ),
        embed=nn.Embedding(11, 8),
        cell=nn.GRU(8, 8, batch_first=True),
        out=nn.Linear(8, 4),
    ),
)
def _(on: Any) -> None:
    for x, n, y in zip(TOKENS.split(8), PADS.split(8), Y.split(8)):
        on.optimizer.zero_grad()
        CE(on.model(x, n.tolist()), y).backward()
        on.optimizer.step()


def lm() -> nn.Module:
    return Forward(
        lambda m, t: m.out(torch.tanh(m.embed(t))), embed=nn.Embedding(11, 8), out=nn.Linear(8, 11)
    )


@loop(
    "models",
    "a language model: logits.view(-1, V), labels.view(-1), ignore_index",
    model=lm,
    twin=by_hand(
        lambda m, x: F.cross_entropy(
            m(x)[:, :-1].reshape(-1, 11), x[:, 1:].reshape(-1), ignore_index=3
        ),
        TOKENS,
    ),
)
def _(on: Any) -> None:
    for x, _y in rows(TOKENS):
        on.optimizer.zero_grad()
        out = on.model(x)
        F.cross_entropy(
            out[:, :-1].reshape(-1, 11), x[:, 1:].reshape(-1), ignore_index=3
        ).backward()
        on.optimizer.step()


every(
    "models",
    "segmentation: CE over pixels with ignore_index",
    lambda m, x: F.cross_entropy(m(x), (x[:, 0] > 0).long() + (x[:, 0] > 1), ignore_index=2),
    IMAGES,
    model=lambda: nn.Conv2d(1, 3, 3, padding=1),
)


@loop(
    "models",
    "CTC",
    model=lm,
    twin=by_hand(
        lambda m, x, y: F.ctc_loss(
            m(x).log_softmax(2).transpose(0, 1),
            y[:, None] + 1,
            torch.tensor([5]),
            torch.tensor([1]),
        ),
        TOKENS,
        Y,
    ),
)
def _(on: Any) -> None:
    for x, y in rows(TOKENS):
        on.optimizer.zero_grad()
        own = on.model(x).log_softmax(2).transpose(0, 1)
        F.ctc_loss(
            own, y[:, None] + 1, torch.full((8,), 5), torch.ones(8, dtype=torch.long)
        ).backward()
        on.optimizer.step()


def with_loss(loss: Any) -> Any:
    return lambda: Forward(
        lambda m, x, y: loss(m.b(torch.tanh(m.a(x))), y), a=nn.Linear(6, 8), b=nn.Linear(8, 4)
    )


def own_losses(name: str, loss: Any, **more: Any) -> None:
    @loop("models", name, model=with_loss(loss), **more)
    def run(on: Any) -> None:
        for x, y in rows():
            on.optimizer.zero_grad()
            on.model(x, y).backward()
            on.optimizer.step()


own_losses("a model that returns its loss: CE", CE, twin=by_hand(lambda m, x, y: m(x, y)))
own_losses(
    "a model that returns its loss: ((o - y) ** 2).mean()",
    lambda o, y: ((o - y[:, None]) ** 2).mean(),
    expected="equal, warned",
    twin=by_hand(lambda m, x, y: m(x, y)),
)
own_losses(
    "a model that returns its loss: log_softmax, gather, mean",
    lambda o, y: -o.log_softmax(1).gather(1, y[:, None]).mean(),
    expected="equal, warned",
    twin=by_hand(lambda m, x, y: m(x, y)),
)
own_losses(
    "a model that returns its loss: contrastive",
    lambda o, y: CE(o @ o.T, torch.arange(len(o))),
    expected="equal, warned",
    twin=by_hand(lambda m, x, y: m(x, y)),
)
own_losses(
    "a model that returns its loss: CE of outputs less their mean",
    lambda o, y: CE(o - o.mean(0), y),
    expected="equal, warned",
    twin=by_hand(lambda m, x, y: m(x, y)),
)
own_losses(
    "a model that returns its loss: CE + 0.1 · mean of outputs",
    lambda o, y: CE(o, y) + 0.1 * o.square().mean(),
    expected="equal, warned",
    twin=by_hand(lambda m, x, y: m(x, y)),
)


@loop(
    "models",
    "logits and an auxiliary loss of the model",
    expected="refused",
    model=lambda: Forward(
        lambda m, x: (m.b(h := torch.tanh(m.a(x))), h.square().mean()),
        a=nn.Linear(6, 8),
        b=nn.Linear(8, 4),
    ),
)
def _(on: Any) -> None:
    for x, y in rows():
        on.optimizer.zero_grad()
        out, aux = on.model(x)
        (CE(out, y) + 0.1 * aux).backward()
        on.optimizer.step()


class Lit(nn.Module):
    """Written as for Lightning: `training_step` calls the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.head(torch.tanh(self.encoder(x)))

    def training_step(self, batch: Any, number: int) -> Any:
        x, y = batch
        return CE(self.head(torch.tanh(self.encoder(x))), y)


@loop(
    "models",
    "Lightning's training_step that calls parts",
    model=Lit,
    expected="parts of the model, its forward",
)
def _(on: Any) -> None:
    for i, batch in enumerate(rows()):
        on.optimizer.zero_grad()
        on.model.training_step(batch, i).backward()
        on.optimizer.step()


models("torch.jit.trace", lambda: torch.jit.trace(mlp(), X[:2]), expected="refused")
models("torch.jit.script", lambda: torch.jit.script(mlp()), expected="refused")
models("torch.fx", lambda: torch.fx.symbolic_trace(mlp()))
models(
    "reentrant checkpointing",
    lambda: Forward(
        lambda m, x: m.out(checkpoint(m.first, x.requires_grad_(), use_reentrant=True)),
        first=nn.Linear(6, 8),
        out=nn.Linear(8, 4),
    ),
    expected="refused",
)
models(
    "a bare parameter that scales",
    lambda: (lambda m: (m.register_parameter("scale", nn.Parameter(torch.ones(4))), m)[1])(
        Forward(lambda m, x: m.scale * m.a(x), a=nn.Linear(6, 4))
    ),
    expected="equal, warned",
)
models(
    "Gumbel softmax in forward",
    lambda: Forward(
        lambda m, x: m.b(F.gumbel_softmax(m.a(x))), a=nn.Linear(6, 8), b=nn.Linear(8, 4)
    ),
)
models(
    "InstanceNorm1d, affine",
    lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True), nn.Flatten(), nn.Linear(6, 4)
    ),
)
models(
    "InstanceNorm with running statistics",
    lambda: nn.Sequential(
        nn.Unflatten(1, (2, 3)),
        nn.InstanceNorm1d(2, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(6, 4),
    ),
    expected="refused",
)
models(
    "BatchNorm in eval inside a frozen backbone",
    lambda: Forward(
        lambda m, x: m.b(m.a.eval()(x)),
        a=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).requires_grad_(False),
        b=nn.Linear(8, 4),
    ),
    expected="refused",
)
models(
    "a running mean kept by hand in forward",
    lambda: (lambda m: (m.register_buffer("mean", torch.zeros(6)), m)[1])(
        Forward(
            lambda m, x: (m.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1), m.a(x - m.mean))[1],
            a=nn.Linear(6, 4),
        )
    ),
    expected="refused",
)
models(
    "inputs normalised by the batch in forward, detached",
    lambda: Forward(lambda m, x: m.a(x / x.std(0)), a=nn.Linear(6, 4)),
    expected="refused",
)
models(
    "attention over the batch (no batch_first)",
    lambda: Forward(
        lambda m, x: m.b(m.mix(h := m.a(x)[None], h, h)[0][0]),
        a=nn.Linear(6, 8),
        mix=nn.MultiheadAttention(8, 2, batch_first=True),
        b=nn.Linear(8, 4),
    ),
    expected="refused",
)


@loop("models", "DataParallel around the model after privatize", twin=by_hand())
def _(on: Any) -> None:
    wide = nn.DataParallel(on.model)
    for x, y in rows():
        on.optimizer.zero_grad()
        CE(wide(x), y).backward()
        on.optimizer.step()


@loop("models", "a wrapper module with model and criterion, after privatize", twin=by_hand())
def _(on: Any) -> None:
    whole = Forward(lambda m, x, y: m.criterion(m.inner(x), y), inner=on.model, criterion=CE)
    for x, y in rows():
        on.optimizer.zero_grad()
        whole(x, y).backward()
        on.optimizer.step()


every(
    "models",
    "MC dropout: several passes averaged",
    lambda m, x, y: CE(torch.stack([m(x) for _ in range(3)]).mean(0), y),
    expected="more than once",
    model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 4)),
)


@loop("models", "REINFORCE: a list of log-probabilities, one backward", expected="more than once")
def _(on: Any) -> None:
    for x, y in rows():
        on.optimizer.zero_grad()
        log = [
            torch.distributions.Categorical(logits=on.model(x + t)).log_prob(y) for t in range(3)
        ]
        (-torch.stack(log) * torch.tensor([1.0, 0.5, 0.2])[:, None]).sum().backward()
        on.optimizer.step()


@loop(
    "models",
    "a policy gradient of one step",
    twin=by_hand(
        lambda m, x, y: -(torch.distributions.Categorical(logits=m(x)).log_prob(y) * x[:, 0]).mean()
    ),
)
def _(on: Any) -> None:
    for x, y in rows():
        on.optimizer.zero_grad()
        policy = torch.distributions.Categorical(logits=on.model(x))
        (-(policy.log_prob(y) * x[:, 0]).mean()).backward()
        on.optimizer.step()


@loop("models", "advantages normalised by the batch", expected="refused")
def _(on: Any) -> None:
    for x, y in rows():
        on.optimizer.zero_grad()
        out = on.model(x)
        reward = (x[:, 0] - x[:, 0].mean()) / x[:, 0].std()
        (-(out.log_softmax(1)[torch.arange(8), y] * reward).mean()).backward()
        on.optimizer.step()


every(
    "models",
    "two private models in one loss",
    lambda m, x, y: CE(m[2](m[:2](x)), y),
    expected="refused",
)


# ---- data


@loop("data", "DataLoader with pin_memory, batch_sampler", twin=by_hand())
def _(on: Any) -> None:
    order = BatchSampler(SequentialSampler(range(24)), 8, drop_last=False)
    for x, y in DataLoader(TensorDataset(X, Y), batch_sampler=order):
        on.optimizer.zero_grad()
        CE(on.model(x), y).backward()
        on.optimizer.step()


@loop("data", "DataLoader with two workers", twin=by_hand())
def _(on: Any) -> None:
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=8, num_workers=1):
        on.optimizer.zero_grad()
        CE(on.model(x), y).backward()
        on.optimizer.step()


@loop("data", "targets as a list of tensors of many lengths, padded in the loop", twin=by_hand())
def _(on: Any) -> None:
    for x, y in rows():
        padded = nn.utils.rnn.pad_sequence(list(x), batch_first=True)
        on.optimizer.zero_grad()
        CE(on.model(padded), y).backward()
        on.optimizer.step()


@loop(
    "data",
    "another loader midway, other sizes",
    twin=lambda on: (
        [
            on.private.step(CE, x, y)
            for x, y in [(X[:8], Y[:8]), (X[8:12], Y[8:12]), (X[12:24], Y[12:24])]
        ]
    ),
)
def _(on: Any) -> None:
    for x, y in [(X[:8], Y[:8]), (X[8:12], Y[8:12]), (X[12:24], Y[12:24])]:
        on.optimizer.zero_grad()
        CE(on.model(x), y).backward()
        on.optimizer.step()


every(
    "data",
    "two views of every row in one batch: torch.cat([x, x + noise])",
    lambda m, x, y: CE(m(torch.cat([x, x + 0.01])), torch.cat([y, y])),
    expected="different, warned",
)


@loop("data", "an empty batch", expected="refused")
def _(on: Any) -> None:
    on.optimizer.zero_grad()
    CE(on.model(X[:0]), Y[:0]).backward()
    on.optimizer.step()


@loop(
    "data",
    "a batch of one row, squeezed",
    twin=by_hand(
        lambda m, x, y: F.binary_cross_entropy_with_logits(m(x)[:, 0], (y > 1).float()),
        X[:3],
        Y[:3],
        size=1,
    ),
)
def _(on: Any) -> None:
    for x, y in zip(X[:3].split(1), Y[:3].split(1)):
        on.optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(
            on.model(x)[:, 0].squeeze(), (y > 1).float().squeeze()
        ).backward()
        on.optimizer.step()

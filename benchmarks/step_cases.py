"""Models, batches and losses that steps are timed on, and what is not ours: plain SGD, Opacus.

cnn   26,010 parameters, 250 images        mlp    two wide layers, 256 rows
tlm   a small transformer, 32 × 20 tokens  lstm   the same tokens ("-flat": another loss layout)
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Flattened(nn.CrossEntropyLoss):
    """Cross entropy over tokens: [B, T, V] and [B, T]."""

    def forward(self, out, y):
        return super().forward(out.flatten(0, 1), y.flatten())


def tokens(out, y):
    return F.cross_entropy(out.transpose(1, 2), y)


def flat_tokens(out, y):
    """The same loss on scores in the order of memory, which torch reads much faster."""
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class TransformerLM(nn.Module):
    def __init__(self, vocab=10_000, width=128, heads=4, hidden=512, depth=2, length=20):
        super().__init__()
        self.token, self.place = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, hidden) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape).contiguous()
        return self.head(self.norm(self.blocks(self.token(x) + self.place(places))))


class RecurrentLM(nn.Module):
    def __init__(self, vocab=10_000, width=96, hidden=670, lstm=nn.LSTM):
        super().__init__()
        self.token, self.lstm = nn.Embedding(vocab, width), lstm(width, hidden, batch_first=True)
        self.down, self.head = nn.Linear(hidden, width), nn.Linear(width, vocab)

    def forward(self, x):
        return self.head(self.down(self.lstm(self.token(x))[0]))


def cnn():
    """The tanh network of Papernot et al., 26,010 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


def mlp():
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def text():
    return torch.randint(10_000, (32, 20)), torch.randint(10_000, (32, 20))


CASES = {
    "cnn": (cnn, lambda: (torch.randn(250, 1, 28, 28), torch.randint(10, (250,))), F.cross_entropy),
    "mlp": (mlp, lambda: (torch.randn(256, 784), torch.randint(10, (256,))), F.cross_entropy),
    "tlm": (TransformerLM, text, tokens),
    "lstm": (RecurrentLM, text, tokens),
    "tlm-flat": (TransformerLM, text, flat_tokens),
    "lstm-flat": (RecurrentLM, text, flat_tokens),
}


def plain(model, loss_fn, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        loss_fn(model(batch[0]), *batch[1:]).backward()
        optimizer.step()

    return step


def opacus(make, loss_fn, batch, mode, noise=0.0):
    from opacus import PrivacyEngine
    from opacus.layers import DPLSTM

    model = make(lstm=DPLSTM) if make is RecurrentLM else make()
    data = torch.utils.data.TensorDataset(*batch)
    loader = torch.utils.data.DataLoader(data, batch_size=len(batch[0]))
    ghost = mode == "ghost"
    criterion = Flattened() if make in (RecurrentLM, TransformerLM) else nn.CrossEntropyLoss()
    parts = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode=mode,
        **({"criterion": criterion} if ghost else {}),
    )
    model, optimizer, loss = parts[0], parts[1], parts[2] if ghost else criterion
    is_text = make in (RecurrentLM, TransformerLM)

    def step():
        optimizer.zero_grad()
        out = model(batch[0])
        if ghost and is_text:  # its wrapper wants [B·T, V] and the shape of the batch
            loss(out, batch[1], shape=(len(batch[0]), batch[1].shape[1])).backward()
        else:
            loss(out, batch[1]).backward()
        optimizer.step()

    return step

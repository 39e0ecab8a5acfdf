"""The next-word model of StackOverflow: embedding 96 → LSTM 670 → 96 → scores, 4 M parameters.

As in Reddi et al. 2020 (arXiv 2003.00295) and Kairouz et al. 2021; torch's LSTM has a second bias,
2,680 numbers more than theirs (4,050,748). Symbols (rows, time) → scores (rows, classes, time).

>>> sum(p.numel() for p in WordLSTM(10_004).parameters())
4053428
"""

from __future__ import annotations

from torch import Tensor, nn

from noshuffle.errors import whole


class WordLSTM(nn.Module):
    """One LSTM between two narrow layers."""

    def __init__(self, classes: int, *, embedding: int = 96, hidden: int = 670) -> None:
        super().__init__()
        whole(classes=classes, embedding=embedding, hidden=hidden)
        self.embedding = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.narrow = nn.Linear(hidden, embedding)
        self.output = nn.Linear(embedding, classes)

    def forward(self, symbols: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(symbols))
        scores: Tensor = self.output(self.narrow(states))
        return scores.transpose(-1, -2)

"""The loss of a causal language model, one number per row.

    ℓ_b = mean over t with a label of  −log p(x_{b,t+1} | x_{b,1…t})

`private.step(next_token, batch)` takes token ids, or a dictionary as tokenizers make it:
`input_ids`, perhaps `attention_mask` and `labels` (−100 where there is none). Labels are shifted
here, as for Hugging Face models; without them every token that the mask keeps is predicted. The
mean is over the tokens of a row and never over the batch, which would couple examples. Logits of
half precision are widened before the loss. A row without labels has loss 0. No state.

>>> import torch
>>> model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5))
>>> losses = next_token.fn(model, torch.tensor([[1, 2, 3], [4, 0, 1]]))
>>> losses.shape, next_token.by_row
(torch.Size([2]), True)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from noshuffle.clipping.objective import ModelLoss
from noshuffle.clipping.products import wide
from noshuffle.errors import InvalidInput

IGNORED = -100


def _rows(model: Any, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
    if isinstance(inputs, Tensor):
        labels, out = inputs, model(inputs)
    else:
        given = dict(inputs)
        if "input_ids" not in given:
            raise InvalidInput(f"a batch of text must hold input_ids, got {sorted(given)}")
        labels = given.pop("labels", given["input_ids"])
        mask = given.get("attention_mask")
        if "labels" not in inputs and mask is not None:
            labels = labels.masked_fill(mask == 0, IGNORED)
        out = model(**given)
    logits = getattr(out, "logits", out)
    # The labels move, not the logits: a slice of those would be a copy of the largest tensor.
    target = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    each = F.cross_entropy(
        wide(logits).flatten(0, 1), target.flatten(), reduction="none", ignore_index=IGNORED
    )
    count = (target != IGNORED).sum(1).clamp_min(1)
    return each.view(target.shape).sum(1) / count


#: `private.step(next_token, batch)`: the loss of causal language models.
next_token = ModelLoss(_rows, by_row=True)

"""Padding that changes results: the longest row of a batch decides how far all others are padded.

    loss(row, padded with others) = loss(row, collated alone)

must hold, or one long example moves the gradients of its whole batch (a model without
`attention_mask`, one that reads the last place, positions that count from the left of the padding).
Nothing of that is seen in a batch that is padded already, but here the collator is known, so it is
tried on some rows before the first step. No state.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from noshuffle.clipping import ModelLoss
from noshuffle.clipping.layers import tensors
from noshuffle.clipping.objective import batch_size, take
from noshuffle.errors import InvalidInput
from noshuffle.integrations.huggingface_checks import is_indexable, spread_rows
from noshuffle.training.rng import restore_rng, rng_state

#: Rows that are looked at, beside some further on, and how many of them are asked for their loss.
_FIRST, _TRIED = 32, 3
#: Relative to the larger loss, and below which loss to that: in full precision, and in half. The
#: loss of a row that a model is sure of is a small difference of what was rounded.
_TOLERANCE, _TOLERANCE_HALF = (1e-3, 2e-2), (5e-2, 0.5)


def refuse_padding(
    model: Any,
    loss_fn: ModelLoss,
    loader: Any,
    *,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Raise where the loss of a row depends on how far it is padded.

    Of a collator that draws nothing is said, nor of batches that the model does not take: the
    first step does that.
    """
    data = loader.dataset
    if not is_indexable(data) or len(data) < 2:
        return
    before, is_training = rng_state(), model.training
    device = next(model.parameters()).device

    def collated(places: list[int]) -> dict[str, Any]:
        made: dict[str, Any] = dict(loader.collate_fn([data[i] for i in places]))
        made = tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, made)
        return made

    def loss(batch: dict[str, Any]) -> float:
        with torch.no_grad(), autocast():
            return float(loss_fn.fn(model, batch).sum())

    found = (0.0, 0.0)
    try:
        model.eval()
        is_half = any(p.element_size() < 4 for p in model.parameters()) or _is_cast(autocast)
        share, least = _TOLERANCE_HALF if is_half else _TOLERANCE
        places = sorted({*range(min(_FIRST, len(data))), *spread_rows(data)})
        together = collated(places)
        if batch_size((together,)) != len(places) or not _are_alike(together, collated(places)):
            return
        rows = ((take((together,), torch.tensor([row], device="cpu"))[0], collated([place]))
                for row, place in enumerate(places))  # fmt: skip
        differ = (pair for pair in rows if _shapes(pair[0]) != _shapes(pair[1]))
        for padded, alone in islice(differ, _TRIED):
            long, short = loss(padded), loss(alone)
            if abs(long - short) > share * max(abs(long), abs(short), least):
                found = long, short
    except Exception:  # whatever a model or a collator raises
        return
    finally:
        model.train(is_training)
        restore_rng(before)
    if found != (0.0, 0.0):
        raise InvalidInput(
            f"padding changes results: the loss of a row of train_dataset is {found[1]:.4g} by "
            f"itself and {found[0]:.4g} padded beside others, so that one long example "
            "would move the gradients of all others; give the model attention_mask and pad on the "
            "right, or pad every row to one length (padding='max_length')"
        )


def _shapes(batch: dict[str, Any]) -> list[Any]:
    return [one.shape for one in tensors(batch)]


def _are_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


def _is_cast(autocast: Callable[[], AbstractContextManager[Any]]) -> bool:
    with autocast():
        return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")

"""What a batch may hold: tensors with the example axis first, and settings.

    tensors                       cut by example; dictionaries, tuples and lists of them too
    None, bool, int, float, str   a setting, the same for every example
    other mappings                taken as dictionaries (the BatchEncoding of a tokenizer)

Anything else is refused. A NumPy array, a list of numbers or an object of one's own cannot be cut
by example: the loss of every example would see all of them, and one changed row would move the
whole sum, whatever each gradient is clipped to. No state.

>>> import torch
>>> from collections import UserDict
>>> cuttable((UserDict(ids=torch.ones(2)), 0.5))
({'ids': tensor([1., 1.])}, 0.5)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from noshuffle.errors import InvalidInput

#: Values that are a setting by themselves, and of unknown meaning in a list.
PLAIN = (bool, int, float, complex, str, bytes)


def cuttable(batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """The batch with every mapping as a dictionary; raises if it holds what cannot be cut."""
    for part in batch if type(batch) is tuple else (None,):
        if not isinstance(part, Tensor):
            break
    else:
        return batch
    if not isinstance(batch, tuple | list):
        raise InvalidInput(
            f"a batch must be a tuple of tensors or of dictionaries, lists and tuples of tensors, "
            f"got {type(batch).__name__}; put it into one: (batch,)"
        )
    return tuple(_read(part, where=f"part {i} of the batch") for i, part in enumerate(batch))


def _read(part: Any, *, where: str) -> Any:
    if isinstance(part, Tensor) or part is None or type(part) in PLAIN:
        return part
    if isinstance(part, Mapping):
        return {key: _read(own, where=f"{where}[{key!r}]") for key, own in part.items()}
    if isinstance(part, tuple | list):
        if any(type(own) in PLAIN for own in part):
            raise InvalidInput(
                f"{where} is a {type(part).__name__} of plain values, which cannot be cut by "
                "example: make it a tensor with one row an example (settings go in one by one, or "
                "through the loss function)"
            )
        read = [_read(own, where=f"{where}[{i}]") for i, own in enumerate(part)]
        if hasattr(part, "_fields"):
            return type(part)(*read)
        return read if isinstance(part, list) else tuple(read)
    raise InvalidInput(
        f"{where} must be a tensor, or a dictionary, list or tuple of tensors, got "
        f"{type(part).__module__}.{type(part).__name__}, which cannot be cut by example; make it a "
        "tensor (torch.from_numpy), or give it through the loss function if it is a setting"
    )

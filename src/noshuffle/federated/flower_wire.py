"""What travels between our Flower strategy and our client mod, and how it is read with suspicion.

    to a client      arrays: the parameters        config: step, clip-norm, whatever the app adds
    back             delta: clipped, named         update: step, who it is, and if it was asked for
                                                   (wants-norm) the norm before clipping
    or               declined: why
    handshake        query.noshuffle, empty    →   identity: user

Arrays travel in Flower's own form (numpy, never pickled), so float32 and float64 arrive bit for
bit. What a client sends is data of a stranger: reading it ends in tensors or in one line.

>>> sent = to_arrays({"w": torch.tensor([1.0, 2.0]), "scale": torch.tensor(3.0)})
>>> to_tensors(sent)
{'w': tensor([1., 2.]), 'scale': tensor(3.)}
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from noshuffle.errors import InvalidInput, Unsupported

ARRAYS, CONFIG = "arrays", "config"
DELTA, UPDATE, DECLINED, IDENTITY = "delta", "update", "declined", "identity"
STEP, CLIP_NORM, NORM, USER, WHY = "step", "clip-norm", "norm", "user", "why"
WANTS_NORM = "wants-norm"
#: Message type of the handshake.
ASK_IDENTITY = "query.noshuffle"


def to_arrays(values: Mapping[str, Tensor]) -> ArrayRecord:
    """Named tensors as Flower carries them."""
    for name, value in values.items():
        if value.dtype == torch.bfloat16:
            raise Unsupported(
                f"{name!r} is bfloat16, which Flower cannot carry; train in float32 or float16"
            )
    return ArrayRecord({name: value.detach() for name, value in values.items()})


def to_tensors(record: object) -> dict[str, Tensor]:
    """The other way. Anything that is not a record of plain arrays is refused."""
    if not isinstance(record, ArrayRecord):
        raise InvalidInput(f"named arrays were expected, got {type(record).__name__}")
    try:
        return {name: torch.from_numpy(array.numpy()) for name, array in record.items()}
    except Exception as error:  # bytes of a stranger: whatever goes wrong is their fault
        raise InvalidInput(f"the arrays cannot be read ({type(error).__name__})") from None


def section(message: Message, name: str) -> ConfigRecord:
    """A record of plain values in a message; empty where there is none."""
    content = message.content if message.has_content() else RecordDict()
    found = content.get(name)
    return found if isinstance(found, ConfigRecord) else ConfigRecord()


def is_user_id(user: object, *, kind: type) -> bool:
    """Whether this can name a user: a 64-bit integer, or a string of reasonable length."""
    if kind is int:
        return isinstance(user, int) and not isinstance(user, bool) and -(2**63) <= user < 2**63
    return isinstance(user, str) and 0 < len(user) <= 256


def order_of(message: Message) -> tuple[dict[str, Tensor], int, float]:
    """Client side: parameters, step and clip norm of a message to train."""
    config = section(message, CONFIG)
    step, clip_norm = config.get(STEP), config.get(CLIP_NORM)
    if not isinstance(step, int) or not isinstance(clip_norm, float):
        raise InvalidInput(
            f"a message to train needs {STEP!r} and {CLIP_NORM!r} in its config; send it with "
            "PrivateStrategy"
        )
    return to_tensors(message.content.get(ARRAYS)), step, clip_norm


def short(user: object) -> str:
    """A stranger's words, in at most one line."""
    words = repr(user)
    return words if len(words) <= 80 else words[:77] + "..."

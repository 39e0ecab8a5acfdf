"""What a noise stream saves, and goes on from: its identity, and its buffers by names of tensors.

    {**identity, "later": names of later keys, "step": rows released,
     "buffers": {name: (count, *shape)}}

The identity (recipe, source, key, scale, horizon, shapes) must be that of the stream that
goes on: another one would add the noise of another mechanism. Buffers are saved as float32 without
the padding of tiles, so that neither layout nor device matter to whoever goes on. No state.

>>> layout, state = Layout.of({"w": (2, 3)}, chunk_tiles=1), torch.zeros(1, 1, 1024)
>>> write_buffers_(state, {"w": torch.arange(6.0).view(1, 2, 3)}, layout=layout)
>>> read_buffers(state, layout=layout)["w"].tolist()
[[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from noshuffle.errors import InvalidInput
from noshuffle.noise.layout import Layout


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise where a saved state is that of another stream."""
    for key, expected in identity.items():
        if key not in state or state[key] != expected:
            shown = "another" if key == "shapes" else repr(state.get(key))
            raise InvalidInput(
                f"the saved noise state has {shown} {key}, this stream has "
                f"{'its own' if key == 'shapes' else repr(expected)}; "
                "resume with the plan and key of the run that was saved"
            )


def read_buffers(state: Tensor, *, layout: Layout) -> dict[str, Tensor]:
    """Copies of the buffers in ordinary memory; empty without buffers."""
    if not len(state):
        return {}
    buffers = {}
    for name, pieces in layout.views(state).items():
        shape = (len(state), *layout.shapes[name])
        buffers[name] = torch.cat(pieces, dim=1).view(shape).cpu().clone()
    return buffers


def check_buffers(saved: Mapping[str, Any], *, layout: Layout, count: int) -> None:
    """Raise where saved buffers are not `count` float32 ones of every tensor."""
    names = set(layout.shapes) if count else set()
    if set(saved) != names:
        raise InvalidInput(f"the saved buffers must be those of {sorted(names)}")
    for name, own in saved.items():
        shape = (count, *layout.shapes[name])
        if own.dtype != torch.float32 or tuple(own.shape) != shape:
            raise InvalidInput(
                f"the saved buffer of {name!r} must be float32 of shape {shape}, "
                f"got {own.dtype} of {tuple(own.shape)}"
            )


def write_buffers_(state: Tensor, saved: Mapping[str, Tensor], *, layout: Layout) -> None:
    """Make `state` what `read_buffers` gave; `saved` was checked."""
    # The padding of a tile is never read by anyone, so it need not be restored.
    state.zero_()
    for name, pieces in layout.views(state).items() if len(state) else ():
        flat = saved[name].reshape(len(state), -1)
        for piece, part in zip(pieces, torch.split(flat, [p.shape[1] for p in pieces], dim=1)):
            piece.copy_(part)

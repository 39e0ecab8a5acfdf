"""What a noise stream saves, and goes on from: its identity, and its buffers by names of tensors.

    {**identity, "later": names of later keys, "step": rows released,
     "buffers": {name: (count, *shape)}}

The identity (recipe, source, key, scale, horizon, shapes, starts) must be that of the stream that
goes on: another one would add the noise of another mechanism. Buffers are saved as float32 without
the padding of tiles, so that neither layout nor device matter to whoever goes on; those of 16 bits
are read and written by `compact_state`. No state.

>>> from noshuffle.noise.source import test_source
>>> saved = SavedBuffers(Layout.of({"w": (2, 3)}, chunk_tiles=1), test_source(seed=1))
>>> state = torch.zeros(1, 1, 1024)
>>> saved.write_(state, {"w": torch.arange(6.0).view(1, 2, 3)}, step=1)
>>> saved.read(state, step=1)["w"].tolist()
[[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noshuffle.errors import InvalidInput
from noshuffle.noise.compact import CompactPlans
from noshuffle.noise.compact_state import read_buffers, write_buffers_
from noshuffle.noise.layout import Layout
from noshuffle.noise.source import AnySource


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise where a saved state is that of another stream."""
    for key, expected in identity.items():
        if key not in state or state[key] != expected:
            shown = "another" if key in ("shapes", "starts") else repr(state.get(key))
            raise InvalidInput(
                f"the saved noise state has {shown} {key}, this stream has "
                f"{'its own' if key in ('shapes', 'starts') else repr(expected)}; "
                "resume with the plan and key of the run that was saved"
            )


@dataclass(frozen=True)
class SavedBuffers:
    """How the buffers of one stream are saved, and restored."""

    layout: Layout
    source: AnySource
    #: Of buffers of 16 bits; None: float32.
    compact: CompactPlans | None = None

    def read(self, state: Tensor, *, step: int) -> dict[str, Tensor]:
        """Copies of the buffers after `step` steps, in ordinary memory; empty without buffers."""
        if not len(state):
            return {}
        kept, buffers = state, {}
        if self.compact is not None and step:
            kept = read_buffers(state, **self._last_dithers(step))
        elif self.compact is not None:  # the first dithers are for what the first step writes
            kept = torch.zeros(state.shape, dtype=torch.float32, device="cpu")
        for name, pieces in self.layout.views(kept).items():
            shape = (len(state), *self.layout.shapes[name])
            buffers[name] = torch.cat(pieces, dim=1).view(shape).cpu().clone()
        return buffers

    def check(self, saved: Mapping[str, Any], *, count: int) -> None:
        """Raise where saved buffers are not `count` float32 ones of every tensor."""
        names = set(self.layout.shapes) if count else set()
        if set(saved) != names:
            raise InvalidInput(f"the saved buffers must be those of {sorted(names)}")
        for name, own in saved.items():
            shape = (count, *self.layout.shapes[name])
            if own.dtype != torch.float32 or tuple(own.shape) != shape:
                raise InvalidInput(
                    f"the saved buffer of {name!r} must be float32 of shape {shape}, "
                    f"got {own.dtype} of {tuple(own.shape)}"
                )

    def write_(self, state: Tensor, saved: Mapping[str, Tensor], *, step: int) -> None:
        """Make `state` what `read` gave after `step` steps; `saved` was checked."""
        kept = state
        if self.compact is not None:
            kept = torch.zeros(state.shape, dtype=torch.float32, device="cpu")
        # The padding of a tile is never read by anyone, so it need not be restored.
        kept.zero_()
        for name, pieces in self.layout.views(kept).items() if len(state) else ():
            flat = saved[name].reshape(len(state), -1)
            for piece, part in zip(pieces, torch.split(flat, [p.shape[1] for p in pieces], dim=1)):
                piece.copy_(part)
        if self.compact is not None:
            write_buffers_(state, kept, **self._last_dithers(step))

    def _last_dithers(self, step: int) -> dict[str, Any]:
        """Where the numbers of compact buffers are read from and written to after `step` steps."""
        assert self.compact is not None
        last = self.compact.dithering(max(step - 1, 0))
        return {"layout": self.layout, "source": self.source, "last": last}

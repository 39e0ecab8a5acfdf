"""A prior that was made once stays on this machine: the next run has the same features.

    $XDG_CACHE_HOME/noshuffle/prior-DIGEST.pt        (~/.cache where that is not set)

DIGEST is that of all settings, so that others have another file. Learning takes minutes, and on a
GPU no two encoders come out alike: a study that goes on in another process needs the one it began
with. What is kept is public. A file that cannot be read is made anew.
"""

from __future__ import annotations

import hashlib
import io
import json
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from noshuffle.features.encoder import Encoder, place
from noshuffle.features.patches import Patches
from noshuffle.features.prior import Prior
from noshuffle.features.whitening import Whitening
from noshuffle.release.files import write_bytes
from noshuffle.user_cache import user_cache

#: To be counted up when the same settings make other features.
MADE = 1


def kept(*, device: str = "cpu", folder: Path | None = None, **how: Any) -> Prior:
    """`Prior.of(**how)`, from its file where there is one."""
    every = {name: one.default for name, one in signature(Prior.of).parameters.items()} | how
    named = {name: every[name] for name in every if name not in ("say", "device")} | {"made": MADE}
    digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:16]
    path = (folder or user_cache()) / f"prior-{digest}.pt"
    if path.is_file():
        try:
            found = _prior(torch.load(path, map_location=device, weights_only=True))
            shape = (2, every["channels"], every["side"], every["side"])
            tried = found(torch.zeros(shape, device=device))
            if bool(torch.isfinite(tried).all()):
                return found
            _tell(how, f"{path} does not hold finite numbers; it is made anew")
        except Exception as error:  # torch raises whatever the bytes lead it to
            _tell(how, f"{path} cannot be read ({type(error).__name__}); it is made anew")
    made = Prior.of(device=device, **how)
    out = io.BytesIO()
    torch.save(_state(made), out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, out.getvalue())
    except OSError as error:
        _tell(how, f"{path} cannot be written ({error.strerror}); the next run learns again")
    return made


def _tell(how: dict[str, Any], line: str) -> None:
    if how.get("say"):
        how["say"](line)


def _state(prior: Prior) -> dict[str, Any]:
    net = None if prior.encoder is None else prior.encoder.state_dict()
    return {
        "filters": prior.patches.filters,
        "offset": prior.patches.offset,
        "pool": prior.patches.pool,
        "mirror": prior.mirror,
        "whitenings": [(white.mean, white.matrix) for white in prior.whitenings],
        "encoder": net and {name: value.contiguous() for name, value in net.items()},
    }


def _prior(state: dict[str, Any]) -> Prior:
    patches = Patches(state["filters"], state["offset"], state["pool"])
    whitenings = tuple(Whitening(mean, matrix) for mean, matrix in state["whitenings"])
    net, weights = None, state["encoder"]
    if weights is not None:
        width, channels = weights["stem.0.weight"].shape[:2]
        net = Encoder(width=width, channels=channels)
        place(net, state["filters"].device)
        net.load_state_dict(weights)
        net.eval()
    return Prior(patches, net, whitenings, state["mirror"])

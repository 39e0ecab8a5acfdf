"""The other libraries: where they are found, which version, and why one is missing.

    python benchmarks/peers.py              one row for each peer

A peer is imported from the environment (`pip install -e '.[bench]'` brings most of them), else
from a folder of unpacked wheels: `peers/` in the repository, or the one that `NOSHUFFLE_PEERS`
names. Put into it only what the environment lacks: processes that are started from here look there
first, if it was filled for this Python. Fill it on a machine with a network and carry it to one
without:

    pip download --no-deps --dest wheels opacus==1.6.0 jax_privacy==2.0.0 optax chex dp_accounting …
    for wheel in wheels/*.whl; do python -m zipfile -e $wheel peers; done

fastDP is on no index: put the folder `fastDP` of a checkout of awslabs/fast-differential-privacy
into it. It imports transformers, and its release 2.0.0 deepspeed too.

A benchmark asks `absent(name)` before it measures a peer and prints the reason instead of a row.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(os.environ.get("NOSHUFFLE_PEERS", ROOT / "peers"))


@dataclass(frozen=True)
class Peer:
    """A library, the module that has to import, and what it is measured for."""

    name: str
    module: str
    for_what: str


PEERS = (
    Peer("torch", "torch", "plain training, normal_"),
    Peer("triton", "triton", "the fused kernels"),
    Peer("opacus", "opacus", "private steps: hooks, functorch, ghost"),
    Peer("fastDP", "fastDP", "private steps: book-keeping"),
    Peer("jax", "jax", "what jax-privacy runs on"),
    Peer("jax-privacy", "jax_privacy.noise_addition", "noise: independent, BLT, bands, redrawn"),
    Peer("opake", "opake.dpftrl.noise", "noise (drawn on the CPU)"),
    Peer("dp-accounting", "dp_accounting", "accounting"),
    Peer("transformers", "transformers", "causal language models, ViT"),
    Peer("peft", "peft", "LoRA adapters"),
    Peer("flwr", "flwr", "federated rounds"),
    Peer("river", "river", "streams"),
    Peer("scikit-learn", "sklearn", "convex estimators"),
)


def look_in_folder() -> None:
    """Let the folder of unpacked wheels be searched, after everything else."""
    path = str(FOLDER)
    if FOLDER.is_dir() and path not in sys.path:
        sys.path.append(path)
    # jax would otherwise take most of the GPU's memory away from torch.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def absent(name: str) -> str:
    """Why a peer cannot be measured here, in one line; nothing if it can."""
    look_in_folder()
    peer = next(p for p in PEERS if p.name == name)
    try:
        importlib.import_module(peer.module)
    except Exception as error:  # a peer may fail in any way; its row says how
        text = " ".join(str(error).split())
        return f"{type(error).__name__}: {text[:160]}"
    return ""


def version(name: str) -> str:
    """The installed version, or an empty string."""
    look_in_folder()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        peer = next(p for p in PEERS if p.name == name)
        module = sys.modules.get(peer.module.split(".")[0])
        return str(getattr(module, "__version__", ""))


def fits() -> bool:
    """Whether the folder is there and its compiled modules are none of another Python.

    One that is found and does not load would stop torch, which asks for some of them by itself.
    """
    names = [path.name for path in FOLDER.rglob("*.so")] if FOLDER.is_dir() else []
    tags = {tag for name in names for tag in re.findall(r"cpython-\d+", name)}
    return FOLDER.is_dir() and tags <= {sys.implementation.cache_tag}


def environment() -> dict[str, str]:
    """The environment of a benchmark that is started as a process of its own."""
    look_in_folder()
    kept = dict(os.environ)
    paths = [str(ROOT / "src"), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    if fits():
        paths.append(str(FOLDER))
    kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    kept["PYTHONUNBUFFERED"] = "1"
    return kept


def table() -> str:
    """Every peer with its version, or the reason why it is not measured."""
    lines = ["| library | version | measured for |", "|---|---|---|"]
    for peer in PEERS:
        why = absent(peer.name)
        found = f"not here ({why})" if why else version(peer.name)
        lines.append(f"| {peer.name} | {found} | {peer.for_what} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())

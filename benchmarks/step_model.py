"""A model of the time of a private step on 8 to 1,024 GPUs, from parts measured on one.

    python benchmarks/step_model.py [--parameters 1.3e9] [--plain 170] [--private 207]

Data parallel, the same batch on every GPU (weak scaling), whole parameters on each; milliseconds.

    private(N) = private(1) + reduce(8·P, N) + fixed point + digest + 4 meetings
    plain(N)   = plain(1) + what reduce(2·P, N) takes beyond two thirds of plain(1)
    reduce(V, N) = 2·(7/8)·V/NVLINK + 2·(M − 1)/M·(V/8)/NETWORK + 2·log₂(N)·HOP,   M = N/8 nodes

The clipped sum is known only when the last norm is, so nothing of its reduction is hidden behind
the backward pass; plain bf16 gradients are, as DDP does it. Measured on one H200: plain(1),
private(1) (`transformer_gpu.py`) and the bandwidth of a copy. Assumed, not measured here: NVLINK
and NETWORK in use, HOP, and that no GPU waits for a slower one.
"""

from __future__ import annotations

import argparse
import math

#: Bytes a second: what a copy reads and writes; assumed bandwidths of one GPU; seconds of a hop.
COPY, NVLINK, NETWORK, HOP = 4.2e12, 300e9, 45e9, 10e-6


def reduce(volume: float, gpus: int) -> float:
    """Milliseconds of an all_reduce inside nodes of eight, then between them."""
    inside = min(gpus, 8)
    nodes = max(1, gpus // 8)
    near = 2 * (inside - 1) / inside * volume / NVLINK
    far = 2 * (nodes - 1) / nodes * volume / inside / NETWORK
    return 1e3 * (near + far + 2 * math.log2(max(gpus, 2)) * HOP)


def private(gpus: int, *, parameters: float, alone: float) -> float:
    """To 64-bit integers and back is 24 bytes a parameter, the digest of the sum 8."""
    local = 1e3 * 32 * parameters / COPY
    meetings = 4 * 1e3 * 2 * math.log2(gpus) * HOP
    return alone + reduce(8 * parameters, gpus) + local + meetings


def plain(gpus: int, *, parameters: float, alone: float) -> float:
    return alone + max(0.0, reduce(2 * parameters, gpus) - alone * 2 / 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=1.3e9)
    parser.add_argument("--plain", type=float, default=170.0)
    parser.add_argument("--private", type=float, default=207.0)
    given = parser.parse_args()
    print("| GPUs | plain, ms | private, ms | × plain | four batches a step: × plain |")
    print("|---|---|---|---|---|")
    for gpus in (8, 16, 64, 256, 1024):
        one = plain(gpus, parameters=given.parameters, alone=given.plain)
        own = private(gpus, parameters=given.parameters, alone=given.private)
        many = plain(gpus, parameters=given.parameters, alone=4 * given.plain)
        four = private(gpus, parameters=given.parameters, alone=4 * given.private)
        print(f"| {gpus:,} | {one:.0f} | {own:.0f} | {own / one:.2f} | {four / many:.2f} |")


if __name__ == "__main__":
    main()

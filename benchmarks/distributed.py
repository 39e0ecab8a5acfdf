"""Many ranks: the private step beside plain training and DDP, by torchrun on this machine.

    python benchmarks/distributed.py [--ranks 1 2] [--backend gloo] [--device cpu] [--rounds 12]

Starts itself under torchrun once for each number of ranks. The batch is that of all ranks together
(MLP 784-1024-1024-10, batch 256, tree noise), so more ranks share the same work. Every round runs
each method once; milliseconds a step are medians over the rounds on rank 0.

    plain          one process, SGD, no communication (world of one only)
    DDP            plain SGD in DistributedDataParallel
    private        `privatize`, one process (world of one only)
    one block      `privatize_distributed`, a block for each rank
    eight blocks   `privatize_distributed` by default: the same bits for up to 8 ranks
    FSDP2          eight blocks, parameters, optimizer and noise sharded

NCCL takes one rank for each GPU; with `--backend gloo --device cuda` ranks can share one, which
shows that it works and not how fast it is.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import tree
from noshuffle.training import privatize
from noshuffle.training.distributed import privatize_distributed

BATCH = 256
METHODS = ("plain", "DDP", "private", "one block", "eight blocks", "FSDP2")
ALONE = ("plain", "private")
Step = Callable[[], object]


def mlp(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    ).to(device)


def sharded(model: nn.Sequential, device: str) -> nn.Sequential:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def stepper(method: str, device: str, steps: int) -> Step:
    """One step of a method on this rank's rows of the batch."""
    made = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 784, generator=made).to(device)
    y = torch.randint(10, (BATCH,), generator=made).to(device)
    loss_fn, rank, ranks = nn.CrossEntropyLoss(), dist.get_rank(), dist.get_world_size()
    model = mlp(device)
    if method in ("plain", "DDP"):
        mine = slice(BATCH * rank // ranks, BATCH * (rank + 1) // ranks)
        if method == "DDP":
            model = nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]
        optimizer = sgd(model)

        def plain() -> None:
            optimizer.zero_grad()
            loss_fn(model(x[mine]), y[mine]).backward()
            optimizer.step()

        return plain
    # The same batch at every step: one epoch is one step long.
    plan = Plan(participation=Epochs(steps, 1), strategy=tree(), noise_multiplier=1.0)
    if method == "private":
        private: Any = privatize(model, sgd(model), plan, clip_norm=1.0, batch_size=BATCH)
        return lambda: private.step(loss_fn, x, y)
    if method == "FSDP2":
        model = sharded(model, device)
    block = -(-BATCH // ranks) if method == "one block" else None
    private = privatize_distributed(
        model, sgd(model), plan, clip_norm=1.0, batch_size=BATCH, block=block
    )
    rows = torch.from_numpy(private.rows(BATCH)).to(device)
    own = x[rows], y[rows]
    return lambda: private.step(loss_fn, *own)


def measure(device: str, rounds: int) -> dict[str, float | str]:
    """Milliseconds of every method, or why it does not run; the same calls on every rank."""
    found: dict[str, float | str] = {}
    steps: dict[str, Step] = {}
    for method in METHODS:
        if method in ALONE and dist.get_world_size() > 1:
            continue
        try:
            step = stepper(method, device, rounds + 2)
            step()
            step()
            steps[method] = step
        except Exception as error:
            text = " ".join(str(error).split())
            found[method] = f"{type(error).__name__}: {text[:120]}"
    times: dict[str, list[float]] = {method: [] for method in steps}
    for _ in range(rounds):
        for method, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            times[method].append((time.perf_counter() - begin) * 1e3)
    return found | {method: statistics.median(taken) for method, taken in times.items()}


def worker(out: Path, backend: str, device: str, rounds: int) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    found = measure(device, rounds)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # torch's own teardown now and then aborts a gloo process that is done


def world(ranks: int, backend: str, device: str, rounds: int) -> dict[str, float | str]:
    """Start this file under torchrun and read what rank 0 measured."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks), __file__]
        command += ["--worker", str(out), "--backend", backend, "--device", device]
        done = subprocess.run(
            [*command, "--rounds", str(rounds)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if not out.exists():
            raise RuntimeError(f"{ranks} ranks of {backend} failed: {done.stderr[-600:]}")
        found: dict[str, float | str] = json.loads(out.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.backend, options.device, options.rounds)
        return
    print(f"{options.backend} on {options.device}, MLP of 1.9 M, batch {BATCH}: ms a step\n")
    print("| ranks |" + "".join(f" {method} |" for method in METHODS))
    print("|---|" + "---|" * len(METHODS))
    for ranks in options.ranks:
        try:
            found = world(ranks, options.backend, options.device, options.rounds)
        except Exception as error:
            print(f"| {ranks} | FAILED {' '.join(str(error).split())[:400]} |", flush=True)
            continue
        cells = (found.get(method, "–") for method in METHODS)
        shown = (f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells)
        print(f"| {ranks} |" + "".join(f" {cell} |" for cell in shown), flush=True)


if __name__ == "__main__":
    main()

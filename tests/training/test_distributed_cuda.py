"""Many ranks on GPUs: nccl with one rank, gloo with two ranks on one GPU, equal one process.

NCCL takes one rank for each GPU, so a machine with one GPU can have a world of one. Gloo moves CUDA
tensors through ordinary memory and does not mind sharing, which tests two real ranks there, with
whole models: with torch 2.11 FSDP2 crashes as it gathers CUDA tensors over gloo. With more GPUs the
nccl world is larger by itself.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from noshuffle.noise import test_source as make_source
from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import blt
from noshuffle.training import privatize, verify
from noshuffle.training.distributed import privatize_distributed
from noshuffle.training.group.private import GroupPrivate

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
BATCH, BLOCK, STEPS = 12, 3, 6
LOSS = nn.CrossEntropyLoss()
#: Sums that differ in their last bits meet neighbouring points of the noise's grid now and then.
CELLS = {"rtol": 1e-2, "atol": 3e-3}


def settings(device: str) -> dict[str, Any]:
    plan = Plan(
        participation=Epochs(epochs=2, steps_per_epoch=3),
        strategy=blt((0.9, 0.5), (0.1, 0.3)),
        noise_multiplier=0.5,
    )
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3)).to(device)
    source = make_source(seed=11, kind="philox")
    return {"model": model, "plan": plan, "clip_norm": 1.0, "batch_size": BATCH, "source": source}


def batches(device: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    made = torch.Generator().manual_seed(5)
    x = torch.randn(3 * BATCH, 6, generator=made).to(device)
    y = torch.randint(3, (3 * BATCH,), generator=made).to(device)
    ids = torch.arange(3 * BATCH)
    for _ in range(2):
        yield from zip(x.split(BATCH), y.split(BATCH), ids.split(BATCH))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def final(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu().clone()
        for name, p in model.named_parameters()
    }


def single(device: str) -> dict[str, Tensor]:
    """One process, the ordinary step."""
    chosen = settings(device)
    model = chosen.pop("model")
    private = privatize(model, adam(model), **chosen)
    for x, y, ids in batches(device):
        private.step(LOSS, x, y, ids=ids)
    return final(model)


def group(model: nn.Module, run: Path | None = None) -> GroupPrivate:
    chosen = settings(DEVICE)
    del chosen["model"]
    return privatize_distributed(model, adam(model), block=BLOCK, run=run, **chosen)


def train(private: GroupPrivate, *, start: int = 0, stop: int = STEPS) -> None:
    for step, (x, y, ids) in enumerate(batches(DEVICE)):
        if start <= step < stop:
            mine = torch.from_numpy(private.rows(len(x)))
            private.step(LOSS, x[mine.to(DEVICE)], y[mine.to(DEVICE)], ids=ids[mine])


def sharded() -> nn.Sequential:
    model: nn.Sequential = settings(DEVICE)["model"]
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


# What every rank does.


def replicated(out: Path) -> dict[str, Tensor]:
    private = group(settings(DEVICE)["model"], out / "replicated")
    train(private)
    private.close()
    return final(private.model)


def by_fsdp(out: Path) -> dict[str, Tensor]:
    private = group(sharded(), out / "by_fsdp")
    train(private)
    private.close()
    return final(private.model)


def resumed(out: Path) -> dict[str, Tensor]:
    """Saved whole after three steps, gone on with sharded; the last checkpoint counts."""
    first = group(settings(DEVICE)["model"], out / "resumed")
    train(first, stop=3)
    first.save()
    train(first, start=3, stop=4)
    first.ledger.close()
    second = group(sharded(), out / "resumed")
    train(second, start=second.resume())
    second.save()
    second.close()
    return final(second.model)


def resumed_whole(out: Path) -> dict[str, Tensor]:
    """Saved after three steps, a fourth released, gone on from the checkpoint."""
    first = group(settings(DEVICE)["model"], out / "resumed_whole")
    train(first, stop=3)
    first.save()
    train(first, start=3, stop=4)
    first.ledger.close()
    second = group(settings(DEVICE)["model"], out / "resumed_whole")
    train(second, start=second.resume())
    second.close()
    return final(second.model)


Scenario = Callable[[Path], dict[str, Tensor]]
WHOLE: tuple[Scenario, ...] = (replicated, resumed_whole)
SHARDED: tuple[Scenario, ...] = (by_fsdp, resumed)


def scenarios(backend: str, size: int) -> tuple[Scenario, ...]:
    return WHOLE + SHARDED if backend == "nccl" or size == 1 else WHOLE


def worker(out: Path, backend: str) -> None:
    chosen = scenarios(backend, dist.get_world_size())
    seen = {scenario.__name__: scenario(out) for scenario in chosen}
    torch.save(seen, out / f"rank-{dist.get_rank()}.pt")


def world(out: Path, *, backend: str, size: int) -> list[dict[str, dict[str, Tensor]]]:
    """Run this file under torchrun; what every rank saw."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(size)]
    done = subprocess.run(
        [*command, __file__, str(out), backend],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [torch.load(out / f"rank-{rank}.pt") for rank in range(size)]


WORLDS = [("gloo", 1), ("gloo", 2)]
if HAS_GPU and dist.is_nccl_available():
    counts = sorted({1, torch.cuda.device_count()})
    WORLDS = [*(("nccl", size) for size in counts), *WORLDS]


@pytest.fixture(scope="module")
def truth() -> dict[str, Tensor]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return single(DEVICE)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device here; test_distributed covers CPUs")
@pytest.mark.parametrize(("backend", "size"), WORLDS, ids=[f"{b}{n}" for b, n in WORLDS])
def test_ranks_on_gpus_end_where_one_process_does(
    backend: str, size: int, truth: dict[str, Tensor], tmp_path: Path
) -> None:
    """Whole, sharded and resumed: the same bits among themselves, and the single run's numbers."""
    seen = world(tmp_path, backend=backend, size=size)
    first = seen[0]["replicated"]
    for rank in seen:
        assert set(rank) == {scenario.__name__ for scenario in scenarios(backend, size)}
        for scenario, found in rank.items():
            for name, value in found.items():
                torch.testing.assert_close(value, truth[name], **CELLS)
                assert torch.equal(value, first[name]), (scenario, name)
    for scenario in seen[0]:
        assert verify(tmp_path / scenario).failures == ()


@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device here")
def test_the_gpu_run_is_the_cpu_run_up_to_rounding(truth: dict[str, Tensor]) -> None:
    for name, value in single("cpu").items():
        torch.testing.assert_close(truth[name], value, **CELLS)


def leave(out: Path) -> None:
    """Exit when every rank has written, without the teardown of torch's threads."""
    patience = time.monotonic() + 30
    while time.monotonic() < patience:
        if all((out / f"rank-{rank}.pt").exists() for rank in range(dist.get_world_size())):
            break
        time.sleep(0.05)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    if HAS_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.set_num_threads(1)
    dist.init_process_group(sys.argv[2], timeout=datetime.timedelta(seconds=60))
    worker(Path(sys.argv[1]), sys.argv[2])
    leave(Path(sys.argv[1]))

"""Many ranks: real gloo processes on loopback, 1, 4 (or 2) of them, end with the same bits.

The file is its own worker: it is started with a folder for the results of each world, forks the
ranks, since most of their time would be the import of torch, and every rank runs all scenarios in
order. The tests below compare what the worlds left behind. torchrun starts those of
docs/distributed.md.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import math
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.runs import same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from noshuffle.clipping import PerExample
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, NoshuffleError
from noshuffle.noise import NoiseStream
from noshuffle.noise import test_source as make_source
from noshuffle.participation import Epochs, MinSeparation, Poisson
from noshuffle.plan import Plan
from noshuffle.release.extension import extend
from noshuffle.release.ledger import Ledger
from noshuffle.strategies import identity
from noshuffle.training import privatize, verify
from noshuffle.training.distributed import privatize_distributed
from noshuffle.training.group.fixed_sum import FixedSum
from noshuffle.training.group.private import GroupPrivate
from noshuffle.training.group.team import all_agree

#: Of four ranks one has no row of the last layer; two share everything.
WORLDS = [(1, 4), pytest.param((1, 2), marks=pytest.mark.slow)]
SIZES = (14, 14, 10)  # an epoch of three batches, the last one short
BATCH, BLOCK = 14, 3
LIMIT = 900.0  # seconds for whatever is waited for; an idle machine needs a minute
#: Sums that differ in their last bits may meet neighbouring points of the noise's grid.
CELL = {"rtol": 1e-4, "atol": 3e-4}


def data() -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    made = torch.Generator().manual_seed(5)
    x = torch.randn(sum(SIZES), 6, generator=made)
    y = torch.randint(3, (sum(SIZES),), generator=made)
    return x, y, np.arange(sum(SIZES)) * 7 + 1000


def batches(epochs: int = 2) -> Iterator[tuple[torch.Tensor, torch.Tensor, np.ndarray]]:
    x, y, ids = data()
    for _ in range(epochs):
        at = 0
        for size in SIZES:
            yield x[at : at + size], y[at : at + size], ids[at : at + size]
            at += size


@functools.cache
def plan_of(mechanism: str = "tree", **changed: Any) -> Plan:
    settings: dict[str, Any] = {"mechanism": mechanism, "noise_multiplier": 0.7, **changed}
    return Plan.fit(settings.pop("rule", Epochs(epochs=2, steps_per_epoch=3)), **settings)


def model_of(seed: int = 3, *, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Dropout(dropout), nn.Linear(17, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def final(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters (a collective call for a sharded model)."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p.detach()).clone()
        for name, p in model.named_parameters()
    }


LOSS = nn.CrossEntropyLoss()


def build(model: nn.Module, plan: Plan | None = None, **changed: Any) -> GroupPrivate:
    settings: dict[str, Any] = {
        "clip_norm": 1.0,
        "batch_size": BATCH,
        "block": BLOCK,
        "source": make_source(seed=11),
        **changed,
    }
    if settings.get("clip") is not None:
        settings.pop("clip_norm")
    return privatize_distributed(model, sgd(model), plan or plan_of(), **settings)


def sharded(model: nn.Sequential) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(private: GroupPrivate, *, start: int = 0, stop: int = 6) -> list[float]:
    losses = []
    for step, (x, y, ids) in enumerate(batches()):
        if start <= step < stop:
            mine = private.rows(len(x))
            losses.append(private.step(LOSS, x[mine], y[mine], ids=ids[mine]))
    return losses


def rows_of(ledger: Ledger) -> list[tuple[Any, ...]]:
    return [(r.step, r.batch, r.digest, r.units.tolist()) for r in ledger.rows()]


def refused(work: Callable[[], Any]) -> str:
    try:
        work()
    except NoshuffleError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


# What the ranks do. Every scenario returns what this rank saw.


def replicated(out: Path) -> dict[str, Any]:
    model = model_of()
    private = build(model, run=out / "replicated")
    losses = train(private)
    rows = rows_of(private.ledger) if dist.get_rank() == 0 else None
    nobody = "" if dist.get_rank() == 0 else refused(lambda: private.ledger.units())
    private.close()
    return {
        "parameters": final(model),
        "losses": losses,
        "rows": rows,
        "nobody": nobody,
        "epsilon": private.plan.epsilon_after(6),
    }


def by_fsdp(out: Path) -> dict[str, Any]:
    model = sharded(model_of())
    private = build(model, run=out / "fsdp")
    local = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    train(private, stop=4)
    private.save()
    train(private, start=4)
    rows = rows_of(private.ledger) if dist.get_rank() == 0 else None
    backward = refused(lambda: private.optimizer)
    out_of_model = model(torch.ones(2, 6)).detach()  # FSDP's own hooks are back in place
    private.close()
    return {
        "parameters": final(model),
        "rows": rows,
        "local": local,
        "backward": backward,
        "output": out_of_model,
    }


def resumed(out: Path) -> dict[str, Any]:
    """Saved by replicated ranks after three steps, two more released; gone on with sharded ones."""
    first = build(model_of(), run=out / "resumed")
    train(first, stop=3)
    first.save()
    train(first, start=3, stop=5)
    first.ledger.close()
    model = sharded(model_of(seed=99))
    second = build(model, run=out / "resumed", source=None)
    start = second.resume()
    train(second, start=start)
    second.close(keep_keys=True)
    other = build(model_of(seed=99), run=out / "resumed")
    again = other.resume()  # back to whole parameters, from the same checkpoint
    swapped = refused(lambda: other.step(LOSS, torch.ones(2, 6), torch.zeros(2).long(), ids=[1, 2]))
    train(other, start=again)
    other.close()
    return {
        "parameters": final(model),
        "again": final(other.model),
        "start": (start, again),
        "swapped": swapped,
    }


def extended(out: Path) -> dict[str, Any]:
    """Rank 0 lets a run go on by a phase of its own, under another clip norm; shards go on."""
    first = build(model_of(), run=out / "extended")
    train(first, stop=3)
    first.save()
    first.close()
    plan = plan_of().extended(epochs=1, after=3, mechanism=identity())
    if not dist.get_rank():
        extend(out / "extended", plan, clip_norm=0.5)
    dist.barrier()
    model = sharded(model_of(seed=99))
    second = build(model, plan, run=out / "extended", clip_norm=0.5)
    train(second, start=second.resume())
    second.close()
    return {"parameters": final(model), "steps": second.steps_done}


def violation(out: Path) -> dict[str, Any]:
    """One rank brings a unit that may not come yet; nobody takes the step; all can go on."""
    private = build(model_of())
    train(private, stop=1)
    x, y, ids = list(batches())[1]
    mine = private.rows(len(x))
    wrong = ids[mine].copy()
    if dist.get_rank() == dist.get_world_size() - 1:
        wrong[-1] = 1000  # took part in step 0
    said = refused(lambda: private.step(LOSS, x[mine], y[mine], ids=wrong))
    released = private.steps_released
    train(private, start=1)
    return {"said": said, "released": released, "parameters": final(private.model)}


def dropped(out: Path) -> dict[str, Any]:
    """The same with on_violation='drop': the row is left out, wherever it lies."""
    private = build(model_of(), on_violation="drop")
    for x, y, ids in list(batches())[:2]:
        wrong = ids.copy()
        wrong[4] = 1000
        wrong[13] = 1000
        mine = private.rows(len(x))
        private.step(LOSS, x[mine], y[mine], ids=wrong[mine])
    assert private.outcome is not None
    return {"parameters": final(private.model), "dropped": private.outcome.dropped}


def disagreements(out: Path) -> dict[str, Any]:
    last = dist.get_rank() == dist.get_world_size() - 1
    said = {
        "plan": refused(lambda: build(model_of(), plan_of("identity" if last else "tree"))),
        "key": refused(lambda: build(model_of(), source=make_source(seed=int(last)))),
        "batch_size": refused(lambda: build(model_of(), batch_size=BATCH + last)),
        "values": refused(lambda: build(model_of(seed=int(last)))),
        "bad": refused(lambda: build(model_of(), block=0 if last else 1)),
    }
    for name, change in (
        ("frozen", lambda m: m[0].requires_grad_(False).bias.data.add_(float(last))),
        ("buffer", lambda m: m.register_buffer("scale", torch.ones(1) + last)),
    ):
        change(other := model_of())
        optimizer = torch.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=0.5)
        said[name] = refused(
            lambda: privatize_distributed(other, optimizer, plan_of(), clip_norm=1.0, batch_size=8)  # noqa: B023
        )
    x, y, ids = next(batches())
    private = build(model_of())
    mine = private.rows(len(x))
    if last:
        private.model.add_module("late", nn.Linear(3, 3))
    said["late"] = refused(lambda: private.step(LOSS, x[mine], y[mine], ids=ids[mine]))
    private = build(model_of())
    own = [str(i) for i in ids[:4]] if last else ids[:4]  # the same units on every rank
    said["kinds"] = refused(lambda: private.step(LOSS, x[:4], y[:4], ids=own))
    private = build(model_of())
    private._parts.optimizer.param_groups[0]["lr"] = 0.1 + last
    said["settings"] = refused(lambda: private.step(LOSS, x[mine], y[mine], ids=ids[mine]))
    keyless = build(model_of(), source=None)
    return {"said": said, "key": keyless._parts.release.name}


def failing(out: Path) -> dict[str, Any]:
    """A loss that fails on one rank stops the step everywhere and uses no noise."""
    private = build(model_of())
    last = dist.get_rank() == dist.get_world_size() - 1

    def broken(outputs: Any, target: Any) -> Any:
        if last:
            raise ZeroDivisionError("a fault in the loss")
        return LOSS(outputs, target)

    x, y, ids = next(batches())
    mine = private.rows(len(x))
    try:
        private.step(broken, x[mine], y[mine], ids=ids[mine])
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    released = private.steps_released
    train(private)
    return {"said": said, "released": released, "parameters": final(private.model)}


def in_parts(out: Path) -> dict[str, Any]:
    """Two parts of a batch on every rank; a rank that brings one more is refused by name."""
    private = build(model_of())
    for x, y, ids in batches():
        mine = private.rows(len(x))
        with private.accumulate() as step:
            step.add(LOSS, (x[mine], y[mine]), ids=ids[mine])
            step.add(LOSS, (x[:0], y[:0]), ids=ids[:0])
    other = build(model_of())
    x, y, ids = next(batches())
    last = dist.get_rank() == dist.get_world_size() - 1

    def uneven() -> None:
        mine = other.rows(len(x))
        with other.accumulate() as step:
            step.add(LOSS, (x[mine], y[mine]), ids=ids[mine])
            if last and dist.get_world_size() > 1:
                step.add(LOSS, (x[:0], y[:0]), ids=ids[:0])

    return {"parameters": final(private.model), "said": refused(uneven)}


def users(out: Path) -> dict[str, Any]:
    """The unit is a user; rows of one user are interleaved with others and never torn apart."""
    plan = plan_of(rule=MinSeparation(steps=4, separation=2, max_participations=2), unit="user")
    private = build(model_of(), plan)
    x, y, _ = data()
    whose = np.arange(28) % 9
    counts = []
    for step in range(4):
        at = 14 * (step % 2)
        ids = whose[at : at + 14] + 100 * (step % 2)
        mine = private.rows(ids=ids)
        counts.append(len(mine))
        private.step(LOSS, x[at : at + 14][mine], y[at : at + 14][mine], ids=ids[mine])
    torn = build(model_of(), plan)
    said = refused(lambda: torn.step(LOSS, x[:2], y[:2], ids=[5, 6]))
    return {"parameters": final(private.model), "said": said, "counts": counts}


def by_luck(out: Path) -> dict[str, Any]:
    """Dropout, and a clip norm that follows a quantile."""
    plan = plan_of("identity", noise_multiplier=2.0)
    clip = QuantileClip(initial=0.3, units=BATCH, bit_noise=4.0)
    private = build(model_of(dropout=0.3), plan, clip=clip)
    losses = train(private)
    return {
        "parameters": final(private.model),
        "losses": losses,
        "clip": repr(private._parts.threshold.clip),
    }


def sampled(out: Path) -> dict[str, Any]:
    """Every rank draws the secret sample and takes its rows; the key comes from rank 0."""
    plan = Plan.fit(
        Poisson(steps=4, rate=0.3), mechanism="identity", noise_multiplier=1.0, delta=1e-3
    )
    private = build(model_of(), plan, run=out / "sampled")
    x, y, _ = data()
    mode = None
    if dist.get_rank() == 0:
        mode = stat.S_IMODE((out / "sampled" / "ledger.sqlite").stat().st_mode)
    sampler = private.sampler(len(x))
    drawn = [batch.tolist() for batch in sampler]
    for batch in sampler:
        mine = batch[private.rows(len(batch))]
        private.step(LOSS, x[mine], y[mine], ids=mine)
    return {"drawn": drawn, "steps": private.steps_released, "mode": mode}


def unchanged(out: Path) -> dict[str, Any]:
    """`loss.backward(); optimizer.step()` on whole models; the wrapped model's hooks are quiet."""
    private = build(model_of())
    optimizer = private.optimizer
    for x, y, ids in batches():
        mine = private.rows(len(x))
        optimizer.zero_grad()
        LOSS(private.model(x[mine]), y[mine]).backward()
        optimizer.step(ids=ids[mine])
    return {"parameters": final(private.model)}


def without_ids(out: Path) -> dict[str, Any]:
    """Batches known by their content; with the order of an epoch changed, all refuse."""
    private = build(model_of(), engine=PerExample())
    for step, (x, y, _) in enumerate(batches()):
        mine = private.rows(len(x))
        if step == 3:
            other = private.rows(len(x))[::-1].copy()
            said = refused(lambda: private.step(LOSS, x[other], y[other]))  # noqa: B023
        private.step(LOSS, x[mine], y[mine])
    half = dist.get_rank() == 0 and dist.get_world_size() > 1
    x, y, ids = next(batches())
    new = build(model_of())
    mixed = refused(lambda: new.step(LOSS, x, y, ids=None if half else ids))
    whole = refused(lambda: build(model_of()).step(LOSS, x, y))  # every rank brings all of it
    rank = dist.get_rank()

    def turned() -> None:  # what one rank brought, another brings in the next part
        with build(model_of()).accumulate() as step:
            for part in range(2):
                own = [(rank + part) % 2 + 2 * (rank // 2)]
                step.add(LOSS, (x[own], y[own]))

    again = refused(turned)
    return {
        "parameters": final(private.model),
        "said": said,
        "mixed": mixed,
        "whole": whole,
        "again": again,
        "words": private.statement().assumptions,
    }


def by_adam(out: Path) -> dict[str, Any]:
    """Optimizer state that is partly sharded, through a checkpoint, against whole models."""

    def run(make: Callable[[nn.Sequential], nn.Sequential], name: str) -> dict[str, torch.Tensor]:
        for stop in (3, 6):
            model = make(model_of())
            private = privatize_distributed(
                model,
                torch.optim.AdamW(model.parameters(), lr=0.02),
                plan_of(),
                clip_norm=1.0,
                batch_size=BATCH,
                block=BLOCK,
                source=make_source(seed=11),
                run=out / name,
            )
            train(private, start=private.resume(), stop=stop)
            private.save()
        return final(model)

    return {"parameters": run(lambda m: m, "adam"), "fsdp": run(sharded, "adam fsdp")}


def at_other_places(out: Path) -> dict[str, Any]:
    """A run folder that was copied goes on by itself; one that lost rows of its ledger does not."""
    private = build(model_of(), run=out / "placed", source=None)
    train(private, stop=1)
    private.save()
    private.close()
    copy, early = out / "placed copy", b""

    def on_rank_0(work: Callable[[], Any]) -> None:
        if dist.get_rank() == 0:
            work()
        dist.barrier()

    def again(path: Path, **changed: Any) -> GroupPrivate:
        return build(model_of(), run=path, source=None, **changed)

    on_rank_0(lambda: shutil.copytree(out / "placed", copy))
    if dist.get_rank() == 0:
        early = (copy / "ledger.sqlite").read_bytes()
    said, released, starts = {}, [], []
    for path in (out / "placed", copy, copy):
        one = again(path)
        starts.append(one.resume())
        train(one, start=starts[-1], stop=len(released) + 1 if released[1:] else 2)
        gradient = [p.grad for p in one.model.parameters()]
        released.append(torch.cat([g.reshape(-1) for g in gradient if g is not None]))
        one.save()
        one.close()
    on_rank_0(lambda: (copy / "ledger.sqlite").write_bytes(early))
    said["rolled back"] = refused(lambda: again(copy))
    on_rank_0(lambda: (copy / "ledger.sqlite").unlink())
    said["lost"] = refused(lambda: again(copy))

    def older() -> None:
        with contextlib.closing(sqlite3.connect(out / "placed" / "ledger.sqlite")) as db, db:
            db.execute("DELETE FROM meta WHERE name = 'noise'")

    on_rank_0(older)
    said["older noise"] = refused(lambda: again(out / "placed"))
    return {"said": said, "starts": starts, "released": released}


def unsupported(out: Path) -> dict[str, Any]:
    """Layouts and policies that are refused by name."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    said = {}
    options: dict[str, dict[str, Any]] = {
        "columns": {"shard_placement_fn": lambda p: Shard(p.dim() - 1)},
        "precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    }
    for name, option in options.items():
        model = fully_shard(nn.Sequential(nn.Linear(8, 8, bias=False)), mesh=mesh, **option)
        said[name] = refused(lambda: build(model))  # noqa: B023
    wrapped = nn.parallel.DistributedDataParallel(model_of())
    said["ddp"] = refused(lambda: build(wrapped))
    whole = sharded(model_of())
    said["one process"] = refused(
        lambda: privatize(whole, sgd(whole), plan_of(), clip_norm=1.0, batch_size=4)
    )
    return {"said": said}


SCENARIOS = (
    without_ids,
    by_adam,
    unsupported,
    at_other_places,
    replicated,
    by_fsdp,
    resumed,
    extended,
    violation,
    dropped,
    disagreements,
    failing,
    in_parts,
    users,
    by_luck,
    sampled,
    unchanged,
)


def worker(out: Path) -> None:
    torch.set_num_threads(1)
    seen = {scenario.__name__: scenario(out) for scenario in SCENARIOS}
    torch.save(seen, out / f"rank-{dist.get_rank()}.pt")


def alone(out: Path) -> None:
    """A world of one rank, in this process."""
    threads, luck = torch.get_num_threads(), torch.get_rng_state()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        worker(out)
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)
        torch.set_rng_state(luck)


def launch(folders: dict[int, Path]) -> subprocess.Popen[str]:
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    loopback["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # for `tests.runs`
    worlds = [f"{size}:{out}" for size, out in folders.items()]
    return subprocess.Popen(
        [sys.executable, __file__, *worlds],
        env={**os.environ, **loopback},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


Seen = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=WORLDS, ids=str)
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """world size → rank → scenario → what it saw."""
    folders = {size: tmp_path_factory.mktemp(f"world{size}") for size in request.param}
    process = launch({size: folders[size] for size in request.param[1:]})
    try:
        alone(folders[1])
        _, said = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, said[-4000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the group of its own: it and its ranks
            process.wait(timeout=LIMIT)
    seen: Seen = {}
    for size, out in folders.items():
        files = (out / f"rank-{rank}.pt" for rank in range(size))
        seen[size] = [torch.load(file, weights_only=False) for file in files]
        for name in ("replicated", "fsdp", "resumed"):
            seen[size][0][f"verified {name}"] = verify(out / name)
    return seen


def everywhere(worlds: Seen, scenario: str, key: str = "parameters") -> list[Any]:
    return [seen[scenario][key] for ranks in worlds.values() for seen in ranks]


def truth() -> tuple[dict[str, torch.Tensor], list[float]]:
    """One process, the ordinary step, the whole batch at once."""
    model = model_of()
    private = privatize(
        model, sgd(model), plan_of(), clip_norm=1.0, batch_size=BATCH, source=make_source(seed=11)
    )
    losses = [private.step(LOSS, x, y, ids=ids) for x, y, ids in batches()]
    return final(model), losses


SAME = ("replicated", "by_fsdp", "resumed", "violation", "failing", "in_parts")


@pytest.mark.parametrize("scenario", SAME)
def test_every_way_ends_with_the_same_bits(worlds: Seen, scenario: str) -> None:
    """Any number of ranks; whole, sharded, resumed, after refusals, in parts."""
    first = worlds[1][0]["replicated"]["parameters"]
    assert all(same(first, found) for found in everywhere(worlds, scenario))


@pytest.mark.parametrize(
    "scenario", ["dropped", "extended", "users", "by_luck", "by_adam", "unchanged", "without_ids"]
)
def test_world_sizes_agree(worlds: Seen, scenario: str) -> None:
    first, *others = everywhere(worlds, scenario)
    if scenario == "unchanged":  # the gradient is scaled by each rank's own number of rows
        for found in others:
            for name, value in first.items():
                torch.testing.assert_close(found[name], value, **CELL)
    else:
        assert all(same(first, found) for found in others)


def test_equals_one_process(worlds: Seen) -> None:
    parameters, losses = truth()
    for found in everywhere(worlds, "replicated"):
        for name, value in parameters.items():
            torch.testing.assert_close(found[name], value, **CELL)
    for found in everywhere(worlds, "unchanged"):
        torch.testing.assert_close(found["0.weight"], parameters["0.weight"], **CELL)
    for found in everywhere(worlds, "replicated", "losses"):
        assert found == pytest.approx(losses, rel=1e-3)


def test_ledger_is_the_same_for_any_world(worlds: Seen) -> None:
    """Units, batch and state fingerprints, sharded or not; rank 0 alone holds them."""
    rows = worlds[1][0]["replicated"]["rows"]
    assert [len(row[3]) for row in rows] == [*SIZES, *SIZES]
    for size in worlds:
        assert worlds[size][0]["replicated"]["rows"] == rows
        assert worlds[size][0]["by_fsdp"]["rows"] == rows
        assert all("rank 0" in seen["replicated"]["nobody"] for seen in worlds[size][1:])
        for name in ("replicated", "fsdp", "resumed"):
            assert worlds[size][0][f"verified {name}"].failures == ()


def test_resume_between_layouts(worlds: Seen) -> None:
    first = worlds[1][0]["replicated"]["parameters"]
    assert all(same(first, found) for found in everywhere(worlds, "resumed", "again"))
    assert set(everywhere(worlds, "resumed", "start")) == {(3, 3)}
    assert all("ReplayRefused" in said for said in everywhere(worlds, "resumed", "swapped"))


def test_one_rank_cannot_break_the_rules_alone(worlds: Seen) -> None:
    for size in worlds:
        for rank, seen in enumerate(worlds[size]):
            said = seen["violation"]["said"]
            assert said.startswith("ParticipationViolation: unit 1000 may not take part in step 1")
            assert seen["violation"]["released"] == 1
            assert "a fault in the loss" in seen["failing"]["said"]
            assert ("on rank" in seen["failing"]["said"]) == (rank != size - 1)
            assert seen["failing"]["released"] == 0
            assert seen["dropped"]["dropped"] == 2


def test_ranks_that_bring_the_same_rows_are_refused(worlds: Seen) -> None:
    """Without ids and private.rows each example counted once a rank, under a statement of one."""
    for size, ranks in worlds.items():
        for seen in ranks:
            found = seen["without_ids"]
            wanted = "ParticipationViolation: ranks 0 and 1 bring the same examples to step 0"
            assert found["whole"].startswith(wanted) == (size > 1)
            assert ("same examples" in found["again"]) == (size > 1)
            assert any("what several ranks brought" in w for w in found["words"]) == (size > 1)


def test_disagreements_are_refused_by_name(worlds: Seen) -> None:
    for size in sorted(worlds)[1:]:
        for seen in worlds[size]:
            said = seen["disagreements"]["said"]
            for name in ("plan", "key", "batch_size"):
                assert f"disagree on {name}: rank 0 has" in said[name]
            assert "disagree on the values of parameter '0.bias'" in said["values"]
            assert "disagree on optimizer settings" in said["settings"]
            assert "disagree on the values of parameter '0.bias'" in said["frozen"]
            assert "disagree on the values of buffer 'scale'" in said["buffer"]
            assert "'late.weight' became trainable after privatize" in said["late"]
            assert "'5' would count as two units" in said["kinds"]
            assert "block must be" in said["bad"]
            assert "'the release of step 0'" in seen["in_parts"]["said"]
            assert "user 5 has examples on two ranks" in seen["users"]["said"]
        keys = {seen["disagreements"]["key"] for seen in worlds[size]}
        assert len(keys) == 1
    assert len({ranks[0]["disagreements"]["key"] for ranks in worlds.values()}) == len(worlds)


def test_copies_go_on_under_keys_of_their_own_on_every_rank(worlds: Seen) -> None:
    row_norm = float(np.linalg.norm(plan_of().strategy.noising(6)[1]))
    for size in worlds:
        for seen in worlds[size]:
            said = seen["at_other_places"]["said"]
            assert "missing or older" in said["rolled back"]
            assert "missing or older" in said["lost"]
            assert "begun by another version of noshuffle" in said["older noise"]
            assert seen["at_other_places"]["starts"] == [1, 1, 2]
            here, there, _ = seen["at_other_places"]["released"]
            # The same batch and model: what differs is noise alone, of two independent draws.
            gap = float((here - there).norm()) * BATCH
            expected = math.sqrt(2 * len(here)) * 0.7 * row_norm
            assert 0.6 * expected < gap < 1.6 * expected


def test_adam_is_the_same_sharded(worlds: Seen) -> None:
    first = worlds[1][0]["by_adam"]["parameters"]
    assert all(same(first, found) for found in everywhere(worlds, "by_adam", "fsdp"))


def test_what_is_not_supported_is_refused(worlds: Seen) -> None:
    for said in everywhere(worlds, "unsupported", "said"):
        assert "only fully_shard over one mesh axis" in said["columns"]
        assert "mixed precision and offload policies" in said["precision"]
        assert "privatize the module inside" in said["ddp"]
        assert "use noshuffle.training.privatize_distributed" in said["one process"]
    for said in everywhere(worlds, "without_ids", "said"):
        assert "ParticipationViolation" in said
    for size in sorted(worlds)[1:]:
        assert all("disagree on having ids" in w["without_ids"]["mixed"] for w in worlds[size])


def test_fsdp_holds_shards_only(worlds: Seen) -> None:
    total = sum(p.numel() for p in model_of().parameters())
    for size in worlds:
        parts = [seen["by_fsdp"]["local"] for seen in worlds[size]]
        assert sum(parts) == total
        assert max(parts) <= -(-17 // size) * 7 + -(-3 // size) * 18
        assert all("raw gradients" in seen["by_fsdp"]["backward"] for seen in worlds[size])
    outputs = everywhere(worlds, "by_fsdp", "output")
    assert all(torch.allclose(outputs[0], other) for other in outputs)


def test_sampled_batches_are_split(worlds: Seen) -> None:
    for size in worlds:
        drawn = [seen["sampled"]["drawn"] for seen in worlds[size]]
        assert all(other == drawn[0] for other in drawn)
        assert all(seen["sampled"]["steps"] == 4 for seen in worlds[size])
        assert worlds[size][0]["sampled"]["mode"] == 0o600  # it lists the secret draws


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("mechanism", ["blt", "tree", "identity"])
def test_noise_of_shards_is_that_of_the_whole(ranks: int, mechanism: str) -> None:
    """Rows as fully_shard cuts them, for sizes that do not divide, and empty shards."""
    plan = plan_of(mechanism)
    recipe, source = plan.strategy.recipe(6), make_source(seed=2)
    for shape in ((5, 411), (2,), (1, 3, 700)):
        whole = NoiseStream(recipe, source, {"w": shape}, scale=0.5, steps=6)
        rows = -(-shape[0] // ranks)
        cuts = [(min(r * rows, shape[0]), min((r + 1) * rows, shape[0])) for r in range(ranks)]
        width = int(np.prod(shape[1:]))
        streams = [
            NoiseStream(
                recipe,
                source,
                {"w": (end - begin, *shape[1:])},
                scale=0.5,
                steps=6,
                starts={"w": begin * width},
            )
            for begin, end in cuts
        ]
        for _ in range(6):
            all_of_it = torch.zeros(shape)
            whole.add_({"w": all_of_it})
            parts = [torch.zeros(end - begin, *shape[1:]) for begin, end in cuts]
            for stream, part in zip(streams, parts):
                stream.add_({"w": part})
            assert torch.equal(torch.cat(parts), all_of_it)


def test_fixed_sum_is_exact_in_any_order() -> None:
    rng = torch.Generator().manual_seed(1)
    for bound in (1e-6, 0.3, 1.0, 2.0, 37.5):
        terms = [bound * torch.randn(50, generator=rng) / 8 for _ in range(20)]
        sums = []
        for order in (range(20), reversed(range(20)), torch.randperm(20, generator=rng).tolist()):
            total = FixedSum({"w": (50,)}, bound=bound, device="cpu")
            for i in order:
                total.add({"w": terms[i]}, units=1)
            sums.append(total.to_float(total.values["w"], torch.float64))
        assert torch.equal(sums[0], sums[1])
        assert torch.equal(sums[0], sums[2])
        exact = torch.stack([t.double() for t in terms]).sum(0)
        assert float((sums[0] - exact).abs().max()) <= 20 * bound * 2.0**-40


def test_fixed_sum_never_wraps() -> None:
    total = FixedSum({"w": (4,)}, bound=1.0, device="cpu")
    total.add({"w": torch.tensor([float("inf"), float("nan"), -float("inf"), 1e30])}, units=3)
    got = total.to_float(total.values["w"], torch.float32)
    assert got.tolist() == [3.0, 0.0, -3.0, 3.0]
    with pytest.raises(InvalidInput, match="at most"):
        total.add({}, units=2**22)


def test_no_process_group_is_one_clear_line() -> None:
    model = model_of()
    with pytest.raises(InvalidInput, match="torchrun"):
        build(model)


def test_agreement_names_the_fact() -> None:
    all_agree([{"a": 1}, {"a": 1}])
    with pytest.raises(InvalidInput, match=r"disagree on b: rank 0 has None, rank 1 has 2"):
        all_agree([{"a": 1}, {"a": 1, "b": 2}])


@pytest.mark.slow
def test_the_documented_script_runs(tmp_path: Path) -> None:
    """The script of docs/distributed.md by its own command, whole and sharded."""
    text = (Path(__file__).parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    script, sharding = (part.split("```")[0] for part in text.split("```python\n")[1:3])
    (tmp_path / "whole.py").write_text(script)
    cut = script.index("plan = ")
    (tmp_path / "shards.py").write_text(script[:cut] + sharding + script[cut:])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    loopback["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # for `tests.runs`
    for name in ("whole.py", "shards.py"):
        done = subprocess.run(
            [*torchrun, "--nproc-per-node", "2", str(tmp_path / name)],
            # On CPUs also where there is one GPU, which nccl would not give to two ranks.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **loopback},
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert "delta" in done.stdout.lower() or "δ" in done.stdout


def leave(out: Path) -> None:
    """Exit at once, when every rank has written what it saw.

    Without the teardown of torch's own threads: an exiting gloo process now and then dies of
    "terminate called without an active exception" although all its work is done.
    """
    size, patience = dist.get_world_size(), time.monotonic() + LIMIT
    while time.monotonic() < patience:
        if all((out / f"rank-{rank}.pt").exists() for rank in range(size)):
            break
        time.sleep(0.05)
    sys.stderr.flush()
    os._exit(0)


def rank_of(number: int, size: int, out: Path) -> None:
    """What a forked process does; it never returns."""
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{out}/meeting",
            rank=number,
            world_size=size,
            timeout=datetime.timedelta(seconds=LIMIT),
        )
        worker(out)
        leave(out)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def main(worlds: list[str]) -> None:
    """Start all ranks of all worlds; the first that fails ends the others."""
    # What a first step and the stream of a tree would import in every rank.
    for name in ("torch._dynamo", "scipy.signal", "cryptography.hazmat.primitives.ciphers"):
        importlib.import_module(name)
    ranks: set[int] = set()
    for size, out in (world.split(":", 1) for world in worlds):
        for number in range(int(size)):
            pid = os.fork()
            if not pid:
                rank_of(number, int(size), Path(out))
            ranks.add(pid)
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            raise SystemExit(f"a rank ended with status {status}")


if __name__ == "__main__":
    main(sys.argv[1:])

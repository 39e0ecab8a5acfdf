"""The whole private step of a small CNN on one GPU, beside plain SGD and the peers.

    python benchmarks/step_gpu.py                    interleaved medians, ms a step
    python benchmarks/step_gpu.py --run              4,800 private steps on MNIST, wall time
    python benchmarks/step_gpu.py --fuse             also let torch's compiler fuse (some seconds)
    python benchmarks/step_gpu.py --profile          where the time of a compiled step goes

The model is the 26,010-parameter CNN of `training.models`, batch 250, in single precision with
torch's defaults. A step of ours is everything that `private.step` does: guard, row of the
log (in memory, or in a run folder), clipped sum, noise, division, update. Every round runs
each method for some steps (`step_methods`, `step_peers`), one method after the other; the table
shows medians over the rounds. Peers that do not import are named with the reason. MNIST is looked
up in $NOSHUFFLE_DATA.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import peers
import torch
from step_methods import (
    BATCH,
    DEVICE,
    LOSS,
    STRATEGIES,
    Step,
    adamw,
    cut,
    network,
    ours,
    plain_eager,
    plain_graph,
    random_batches,
    usual_adamw,
)
from step_peers import FASTDP, fastdp, jax_privacy, opacus

from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import from_dict
from noshuffle.training import Batch, fit_model, privatize

PER_EPOCH, EPOCHS = 240, 20
Make = Callable[[list[Batch]], Step]


def methods(fuse: bool) -> dict[str, Make]:
    folder = tempfile.mkdtemp()
    table: dict[str, Make] = {
        "SGD, eager": plain_eager,
        "SGD, CUDA graph": plain_graph,
        "ours, eager": lambda b: ours(b, "Honaker tree", compile=False),
    }
    for name in STRATEGIES:
        table[f"ours, compiled, {name}"] = lambda b, n=name: ours(b, n, compile="auto")
    table |= {
        "ours, compiled, loss not read": lambda b: ours(
            b, "Honaker tree", compile="auto", reads_loss=False
        ),
        "ours, compiled, no ids": lambda b: ours(b, "Honaker tree", compile="auto", has_ids=False),
        "ours, compiled, run folder": lambda b: ours(
            b, "Honaker tree", compile="auto", run=f"{folder}/run"
        ),
    }
    four = "BLT, 4 buffers"
    table |= {
        "AdamW, CUDA graph": lambda b: plain_graph(b, adamw),
        "ours, compiled, BLT, AdamW": lambda b: ours(b, four, compile="auto", optimizes=adamw),
        "… AdamW without capturable=True": lambda b: ours(
            b, four, compile="auto", optimizes=usual_adamw
        ),
    }
    if fuse:
        table["ours, compiled and fused"] = lambda b: ours(b, "Honaker tree", compile=True)
        table["ours, fused, loss not read"] = lambda b: ours(
            b, "Honaker tree", compile=True, reads_loss=False
        )
    for mode in ("hooks", "functorch", "ghost"):
        table[f"Opacus, {mode}"] = lambda b, m=mode: opacus(b, m)
    for name, has_origin in FASTDP.items():
        table[name] = lambda b, o=has_origin: fastdp(b, has_origin=o)
    table["jax-privacy, jit"] = jax_privacy
    return table


def compare(rounds: int, steps: int, fuse: bool, only: str) -> None:
    batches = random_batches()
    running: dict[str, Step] = {}
    for name, make in methods(fuse).items():
        if only and not any(part in name for part in only.split(",")):
            continue
        try:
            began = time.perf_counter()
            step = make(batches)
            for i in range(5):
                step(i)
            finish(step)
            running[name] = step
            private = getattr(step, "private", None)
            if private is not None:
                ready = time.perf_counter() - began
                print(f"{name}: ready after {ready:.1f} s; {private.why[-110:]}", flush=True)
                for note in private.fallbacks:
                    print(f"    {note}", flush=True)
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            print(f"{name}: not measured ({type(error).__name__}: {text})", flush=True)
    times: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, step in running.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for i in range(steps):
                step(i)
            finish(step)
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - began) / steps * 1e3)
    medians = {name: statistics.median(values) for name, values in times.items()}
    sgd_ms, adamw_ms = (medians.get(f"{n}, CUDA graph", float("nan")) for n in ("SGD", "AdamW"))
    print("\n| step | ms (fastest to slowest round) | × SGD graph | × AdamW graph |")
    print("|---|---|---|---|")
    for name, ms in medians.items():
        spread = f"{min(times[name]):.3f} to {max(times[name]):.3f}"
        other = f"{ms / adamw_ms:.2f}" if "AdamW" in name else ""
        print(f"| {name} | {ms:.3f} ({spread}) | {ms / sgd_ms:.2f} | {other} |", flush=True)


def finish(step: Step) -> None:
    getattr(step, "wait", torch.cuda.synchronize)()


def mnist_run(compile: bool | str, mechanism: str, folder: str | None) -> None:
    """20 epochs of MNIST in file order through `fit_model`, timed as a whole."""
    import json

    from noshuffle.datasets import load

    data = load("mnist")
    x, y = data.x_train.to(DEVICE), data.y_train.to(DEVICE)
    batches = cut(x, y)
    rule = Epochs(EPOCHS, PER_EPOCH)
    fitted = Path("data/mnist_strategies.json")
    budget = {"epsilon": 8.0, "delta": 1e-5}
    if mechanism == "tree":
        plan = Plan.fit(rule, mechanism="tree", **budget)
    elif fitted.is_file():  # the one of the accuracy table, fitted to momentum
        strategy = from_dict(json.loads(fitted.read_text())["blt_momentum/60000"])
        plan = Plan.fit(rule, mechanism=strategy, **budget)
    else:
        plan = Plan.fit(rule, mechanism="blt_tapped", buffers=2, **budget)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9)
    torch.cuda.synchronize()
    began = time.perf_counter()
    settings = {"clip_norm": 1.0, "batch_size": BATCH, "compile": compile, "run": folder}
    private = privatize(model, optimizer, plan, **settings)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _cooldown)
    private.advance(LOSS, batches[0].data, ids=batches[0].ids)
    scheduler.step()
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    fit_model(private, batches, LOSS, scheduler=scheduler)
    torch.cuda.synchronize()
    total = time.perf_counter() - began
    with torch.no_grad():
        scores = model(data.x_test.to(DEVICE))
        right = float((scores.argmax(1) == data.y_test.to(DEVICE)).float().mean())
    print(
        f"MNIST, {plan.steps} steps, {plan.strategy.words()}, compile={compile}, "
        f"{'in memory' if folder is None else 'run folder'}: {total:.2f} s "
        f"(privatize, capture and first step {first:.2f} s; then "
        f"{(total - first) / (plan.steps - 1) * 1e3:.3f} ms a step), "
        f"test accuracy {100 * right:.2f} % at ε = {private.epsilon:.2f}"
    )
    print(f"    {private.why} {private.fallbacks}", flush=True)


def _cooldown(step: int) -> float:
    """Constant for three quarters of the run, then down to a twentieth."""
    steps = EPOCHS * PER_EPOCH
    return 1.0 if step < 0.75 * steps else max(0.05, 0.05 + 0.95 * (steps - step) / (0.25 * steps))


def profile(compile: bool | str) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    batches = random_batches()
    step = ours(batches, "Honaker tree", compile=compile)
    for i in range(20):
        step(i)
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA]) as seen:
        step(20)
        torch.cuda.synchronize()
    rows = [(e.device_time_total, e.count, e.key) for e in seen.key_averages()]
    busy, count = sum(r[0] for r in rows), sum(r[1] for r in rows)
    print(f"one compiled step: {count} kernels, {busy:.0f} µs busy; {step.private.why}")
    for total, times, key in sorted(rows, reverse=True)[:30]:
        print(f"  {total:7.1f} µs × {times:2d}  {key[:110]}")
    import cProfile
    import pstats

    watch = cProfile.Profile()
    watch.enable()
    for i in range(200):
        step(i)
    watch.disable()
    stats = pstats.Stats(watch)
    print(f"host, 200 steps: {stats.total_tt * 5:.3f} ms a step under the profiler")
    stats.sort_stats("tottime").print_stats(22)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--only", default="", help="methods whose name contains one of these")
    parser.add_argument("--fuse", action="store_true", help="also compile=True")
    parser.add_argument("--run", action="store_true", help="4,800 steps of MNIST, only that")
    parser.add_argument("--profile", action="store_true", help="kernels and host, only that")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device; there is none")
    warnings.filterwarnings("ignore")
    peers.look_in_folder()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if options.profile:
        profile(True if options.fuse else "auto")
    elif options.run:
        for mechanism in ("tree", "blt"):
            mnist_run("auto", mechanism, None)
        for mechanism in ("tree", "blt"):
            mnist_run("auto", mechanism, tempfile.mkdtemp() + "/run")
        if options.fuse:
            mnist_run(True, "tree", None)
    else:
        compare(options.rounds, options.steps, options.fuse, options.only)


if __name__ == "__main__":
    main()

"""Many runs at once: runs × steps a second of a study, beside the same runs one by one.

    python benchmarks/many_runs.py [cnn mlp] [--runs 1 8 32] [--rounds 5] [--device cuda]
                                   [--threads 2] [--times 20]

Models: the MNIST CNN of 26,010 parameters and an MLP 784-128-10, batch 250, BLT noise, momentum. A
step of a study is clipped sums, noise and update of all its runs (`training.many`), in the form
that it chooses: the same layers in a module of one's own cannot be stacked, and go by vmap (large
convolutions on a CPU: one by one). Beside it: `privatize`, one
run after the other (with its guard, ledger and, on CUDA, graphs); torch's vmap of plain SGD, and
plain SGD one by one, neither private. On CUDA everything but the last is captured as a graph. Every
round runs each method, one after the other; the tables show medians, and the last column those of
processor time (of the host, on CUDA).
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import blt
from noshuffle.training import privatize
from noshuffle.training.many import Setting, Study
from noshuffle.training.many.graph import StudyGraph
from noshuffle.training.models import build

BATCH, MANY_STEPS, RATE, MOMENTUM = 250, 100_000, 0.05, 0.9
STRATEGY = blt((0.99, 0.75), (0.16, 0.32))
LOSS = nn.CrossEntropyLoss()
MODELS = {"cnn": "tanh_cnn", "mlp": "mlp"}
Step = Callable[[], object]


class Wrapped(nn.Module):
    """The same network in a form that cannot be stacked."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def study(name: str, runs: int, batch: tuple, device: torch.device, *, by_vmap: bool) -> Step:
    def make() -> nn.Module:
        model = build(MODELS[name], (1, 28, 28), 10)
        return Wrapped(model) if by_vmap else model

    settings = [Setting(noise_multiplier=1.0, learning_rate=RATE, seed=k) for k in range(runs)]
    made = Study(
        make, settings, strategy=STRATEGY, steps=MANY_STEPS, batch_size=BATCH, device=device
    )

    def step() -> None:
        made.step(*batch)

    step.why = made  # type: ignore[attr-defined]
    return step


def one_by_one(name: str, runs: int, batch: tuple, device: torch.device) -> Step:
    """One run; the others would take as long again."""
    model = build(MODELS[name], (1, 28, 28), 10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    # The same batch at every step: one epoch is one step long.
    plan = Plan(participation=Epochs(MANY_STEPS, 1), strategy=STRATEGY, noise_multiplier=1.0)
    private = privatize(model, optimizer, plan, clip_norm=1.0, batch_size=BATCH)
    return lambda: private.advance(LOSS, batch)


def plain_one(name: str, runs: int, batch: tuple, device: torch.device) -> Step:
    model = build(MODELS[name], (1, 28, 28), 10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    x, y = batch

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        LOSS(model(x), y).backward()
        optimizer.step()

    return step


def plain_vmap(name: str, runs: int, batch: tuple, device: torch.device) -> Step:
    """Ordinary gradients of all runs by vmap, heavy-ball updates; no clipping, no noise."""
    models = [build(MODELS[name], (1, 28, 28), 10).to(device) for _ in range(runs)]
    params = {
        n: torch.stack([m.get_parameter(n).detach() for m in models])
        for n, _ in models[0].named_parameters()
    }
    velocity = {n: torch.zeros_like(p) for n, p in params.items()}

    def loss(theta: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return LOSS(functional_call(models[0], theta, (x,)), y)

    gradients = vmap(grad(loss), in_dims=(0, None, None))

    def work(batch: tuple, keep: torch.Tensor) -> torch.Tensor:
        for n, g in gradients(params, *batch).items():
            velocity[n].mul_(MOMENTUM).add_(g)
            params[n].sub_(velocity[n], alpha=RATE)
        return keep

    graph = StudyGraph(batch, capacity=BATCH, device=device)
    graph.put(batch, None, size=BATCH)
    graph.capture(work, work)

    def step() -> None:
        graph.put(batch, None, size=BATCH)
        graph.replay()

    return step


def timed(step: Step, *, times: int, device: torch.device) -> tuple[float, float]:
    """Seconds a step, by the clock and of processor time."""
    begin = time.perf_counter(), time.process_time()
    for _ in range(times):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin[0]) / times, (time.process_time() - begin[1]) / times


def methods(name: str, runs: list[int], batch: tuple, device: torch.device) -> dict:
    """(title, K) → a step; those of one run are there once."""
    found: dict[tuple[str, int], Callable[[], Step]] = {}
    args = (batch, device)
    found["private, one by one (privatize)", 1] = lambda: one_by_one(name, 1, *args)
    found["plain SGD, one by one", 1] = lambda: plain_one(name, 1, *args)
    for k in runs:
        found["private, at once", k] = lambda k=k: study(name, k, *args, by_vmap=False)
        found["private, at once, own module", k] = lambda k=k: study(name, k, *args, by_vmap=True)
        found["plain SGD by torch's vmap", k] = lambda k=k: plain_vmap(name, k, *args)
    return found


def compare(name: str, runs: list[int], device: torch.device, *, rounds: int, times: int) -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, 1, 28, 28, generator=g).to(device)
    y = torch.randint(10, (BATCH,), generator=g).to(device)
    steps: dict[tuple[str, int], Step] = {}
    forms = []
    for key, build_step in methods(name, runs, (x, y), device).items():
        try:
            step = build_step()
            step(), step()
            steps[key] = step
            if hasattr(step, "why") and key[1] == runs[-1]:
                forms.append(f"{key[0]}: {step.why.why}")
        except Exception as error:
            print(f"{key}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    took: dict[tuple[str, int], list] = {key: [] for key in steps}
    gc.collect()
    for _ in range(rounds):
        for key, step in steps.items():
            took[key].append(timed(step, times=times, device=device))
    medians = {key: [statistics.median(clock) for clock in zip(*own)] for key, own in took.items()}
    base = medians["private, one by one (privatize)", 1][0]
    print(f"\n{name}, batch {BATCH}, {device}")
    heads = ("method", "K", "ms a step of all", "runs × steps / s", "× private one by one")
    print(f"| {' | '.join(heads)} | CPU ms a run and step |\n|{'---|' * 6}")
    for (title, k), (seconds, busy) in medians.items():
        cells = f"{1e3 * seconds:.2f} | {k / seconds:,.0f} | {k * base / seconds:.2f}"
        cells += f" | {1e3 * busy / k:.2f}"
        print(f"| {title} | {k} | {cells} |", flush=True)
    for form in forms:
        print(form)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS), help="cnn, mlp")
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, help="steps a round (1 on a CPU, 20 on a GPU)")
    parser.add_argument("--threads", type=int, help="of torch on a CPU")
    parser.add_argument("--device", help="cuda if there is one")
    options = parser.parse_args()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
    if options.threads:
        torch.set_num_threads(options.threads)
    times = options.times or (20 if device.type == "cuda" else 1)
    for name in options.models:
        if name not in MODELS:
            parser.error(f"no such model: {name}; there are {', '.join(MODELS)}")
        compare(name, options.runs, device, rounds=options.rounds, times=times)


if __name__ == "__main__":
    main()

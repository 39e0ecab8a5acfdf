"""Private training of transformers on one GPU beside plain training and Opacus' ghost mode.

    python benchmarks/transformer_gpu.py --shape gpt2-small --dtype bf16
    python benchmarks/transformer_gpu.py --shape 1.3b --dtype bf16 --optimizer adamw

One process, one model after the other, same shapes and tokens; times are medians of wall time with
the device waited for, memory is torch's peak of allocated bytes during the timed steps.

    plain           forward, backward, optimizer
    clipping        the clipped sum alone, of which `step` is made
    private.step    all of it: fingerprint of the batch, guard, clipped sum, ledger row, BLT noise
                    with four buffers (16 bytes a parameter), division, optimizer
    Opacus          its ghost mode with its own independent noise, no sampling

`bf16` is a model whose parameters are bfloat16, `autocast` one in float32 run under autocast,
`tf32` one in float32 whose products may round to TF32. The 1.3 B shape has tied embeddings.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from clipping_cpu import TransformerLM
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from noshuffle.clipping import Flat, Ghost, ModelLoss
from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import blt
from noshuffle.training import privatize


@dataclass(frozen=True)
class Shape:
    depth: int
    width: int
    heads: int
    batch: int
    length: int
    vocab: int = 50257
    is_tied: bool = False


SHAPES = {
    "tiny": Shape(2, 64, 2, 8, 64, vocab=517),
    "gpt2-small": Shape(12, 768, 12, 32, 512),
    "1.3b": Shape(24, 2048, 16, 8, 1024, is_tied=True),
}
BLT_4 = blt((0.999, 0.98, 0.85, 0.4), (0.01, 0.03, 0.08, 0.12))
Step = Callable[[], object]


class Saved(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Case:
    """A model shape in a precision, on a device."""

    def __init__(
        self, shape: Shape, dtype: str, optimizer: str, device: str, is_saved: bool = False
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.optimizer, self.is_saved = optimizer, is_saved
        size = (shape.batch, shape.length)
        torch.manual_seed(0)
        self.x = torch.randint(shape.vocab, size, device=device)
        self.y = torch.randint(shape.vocab, size, device=device)
        self.loss = ModelLoss(self.rows, by_row=True)

    def model(self) -> nn.Module:
        s = self.shape
        torch.manual_seed(0)
        with self.device:
            model = TransformerLM(s.vocab, s.width, s.heads, 4 * s.width, s.depth, s.length)
        if s.is_tied:
            model.head = nn.Linear(s.width, s.vocab, bias=False, device=self.device)
            model.head.weight = model.token.weight
        if self.is_saved:
            model.blocks = nn.Sequential(*(Saved(block) for block in model.blocks))
        return model.to(torch.bfloat16) if self.dtype == "bf16" else model

    def updates(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=1e-4)
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def rows(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of the tokens of every row."""
        on = self.dtype == "autocast"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=on):
            out = model(x)
            each = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")
        return each.view(len(x), -1).mean(1)

    def plain(self) -> Step:
        model = self.model()
        optimizer = self.updates(model)

        def step() -> None:
            optimizer.zero_grad()
            self.rows(model, self.x, self.y).mean().backward()
            optimizer.step()

        return step

    def clipping(self, engine: Ghost) -> Step:
        model = self.model()
        return lambda: engine.clipped_sum(model, self.loss, (self.x, self.y), clip=Flat(1.0))

    def private(self, engine: Ghost) -> Step:
        model = self.model()
        # The same batch at every step: one epoch is one step long.
        plan = Plan(participation=Epochs(1000, 1), strategy=BLT_4, noise_multiplier=1.0)
        optimizer = self.updates(model)
        private = privatize(
            model, optimizer, plan, clip_norm=1.0, batch_size=self.shape.batch, engine=engine
        )
        return lambda: private.step(self.loss, self.x, self.y)

    def opacus(self) -> Step:
        from opacus import PrivacyEngine

        class Tokens(nn.CrossEntropyLoss):
            def forward(self, out: Tensor, y: Tensor) -> Tensor:
                return super().forward(out.flatten(0, 1), y.flatten())

        model = self.model()
        data = torch.utils.data.TensorDataset(self.x.cpu(), self.y.cpu())
        module, optimizer, loss, _ = PrivacyEngine().make_private(
            module=model,
            optimizer=self.updates(model),
            data_loader=torch.utils.data.DataLoader(data, batch_size=self.shape.batch),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode="ghost",
            criterion=Tokens(),
        )

        def step() -> None:
            optimizer.zero_grad()
            on = self.dtype == "autocast"
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=on):
                out = module(self.x)
                value = loss(out, self.y, shape=tuple(self.x.shape))
            value.backward()
            optimizer.step()

        return step


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def measured(make: Callable[[], Step], case: Case, rounds: int) -> tuple[float, float]:
    """Milliseconds and GiB of a step; the model is gone afterwards."""
    step = make()
    for _ in range(3):
        step()
    wait(case.device)
    if case.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step()
    times = []
    for _ in range(rounds):
        wait(case.device)
        begin = time.perf_counter()
        step()
        wait(case.device)
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times), peak(case.device)


def clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare(name: str, case: Case, rounds: int, peers: bool) -> None:
    engines = {mode: Ghost(mode=mode) for mode in ("fast", "lean", "auto")}
    rows: dict[str, Callable[[], Step]] = {
        f"plain {case.optimizer}": case.plain,
        "clipping alone, fast": lambda: case.clipping(engines["fast"]),
        "clipping alone, lean": lambda: case.clipping(engines["lean"]),
        "private.step, fast": lambda: case.private(engines["fast"]),
        "private.step, lean": lambda: case.private(engines["lean"]),
        "private.step, auto": lambda: case.private(engines["auto"]),
    }
    if peers:
        rows["Opacus, ghost"] = case.opacus
    count = sum(p.numel() for p in case.model().parameters())
    saved = ", checkpointed" if case.is_saved else ""
    size = f"{case.shape.batch} × {case.shape.length}"
    print(f"\n{name}, {count / 1e6:.0f} M parameters, batch {size}, {case.dtype}{saved}")
    print("| step | ms | × plain | GiB | × plain |\n|---|---|---|---|---|", flush=True)
    base: tuple[float, float] | None = None
    for label, make in rows.items():
        clean()
        try:
            ms, gib = measured(make, case, rounds)
        except Exception as error:
            print(f"| {label} | {type(error).__name__}: {str(error).splitlines()[0][:100]} |")
            continue
        base = base or (ms, gib)
        memory = f"{gib:.2f} | {gib / base[1]:.2f}" if gib else "– | –"
        print(f"| {label} | {ms:.1f} | {ms / base[0]:.2f} | {memory} |", flush=True)
    for mode, engine in engines.items():
        print(f"{mode}: {engine.why.rpartition('; ')[2]} {engine.fallbacks or ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="gpt2-small")
    parser.add_argument("--dtype", choices=["tf32", "bf16", "autocast"], default="bf16")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peers", action="store_true", help="also run Opacus, if it is there")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_float32_matmul_precision("high")
    shape = SHAPES[chosen.shape]
    case = Case(shape, chosen.dtype, chosen.optimizer, chosen.device, chosen.checkpoint)
    compare(chosen.shape, case, chosen.rounds, chosen.peers)


if __name__ == "__main__":
    main()

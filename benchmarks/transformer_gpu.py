"""Private training of transformers on one GPU beside plain training, Opacus and fastDP.

    python benchmarks/transformer_gpu.py --shape gpt2-small --dtype bf16 tf32 --peers
    python benchmarks/transformer_gpu.py --shape 1.3b --dtype bf16 --optimizer adamw

One process, same shapes and tokens; wall time with the device waited for, rounds of all rows in
turn (`gpu_rows`; one row after the other for the 1.3 B shape), memory is torch's peak of allocated
bytes in a step.

    plain           forward, backward, optimizer
    clipped sum     of which the private step is made
    private step    all of it: guard, row of the log, clipped sum, BLT noise with four buffers
                    (16 bytes a parameter; `--buffers 2`: what fits default to),
                    division, optimizer
    Opacus          its ghost mode with its own independent noise, no sampling
    fastDP          book-keeping (`step_peers`), the same; tied embeddings are refused

`bf16` is a model whose parameters are bfloat16, `autocast` one in float32 run under autocast,
`tf32` one in float32 whose products may round to TF32. The 1.3 B shape has tied embeddings.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import peers
import torch
from gpu_rows import Step, bandwidth, bytes_of_release, measure, show, tell_release
from step_cases import TransformerLM
from step_peers import FASTDP, fastdp_step
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
    fits_often: bool = True


SHAPES = {
    "tiny": Shape(2, 64, 2, 8, 64, vocab=517),
    "gpt2-small": Shape(12, 768, 12, 32, 512),
    "1.3b": Shape(24, 2048, 16, 8, 1024, is_tied=True, fits_often=False),
}
DECAYS, WEIGHTS = (0.999, 0.98, 0.85, 0.4), (0.01, 0.03, 0.08, 0.12)
NAMES = {"sgd": "SGD", "adamw": "AdamW"}


class Saved(nn.Module):
    """A block whose activations are computed again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Case:
    """A model shape in a precision, on a device."""

    buffers = 4

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

    def model(self, device: torch.device | None = None) -> nn.Module:
        s, device = self.shape, device or self.device
        torch.manual_seed(0)
        with device:
            model = TransformerLM(s.vocab, s.width, s.heads, 4 * s.width, s.depth, s.length)
        if s.is_tied:
            model.head = nn.Linear(s.width, s.vocab, bias=False, device=device)
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
        strategy = blt(DECAYS[: self.buffers], WEIGHTS[: self.buffers])
        plan = Plan(participation=Epochs(1000, 1), strategy=strategy, noise_multiplier=1.0)
        optimizer = self.updates(model)
        private = privatize(
            model,
            optimizer,
            plan,
            clip_norm=1.0,
            batch_size=self.shape.batch,
            engine=engine,
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

    def fastdp(self, has_origin: bool) -> Step:
        model = self.model()
        loss = lambda: self.rows(model, self.x, self.y).mean()  # noqa: E731
        size = self.shape.batch
        return fastdp_step(model, self.updates(model), loss, batch_size=size, has_origin=has_origin)


def compare(name: str, case: Case, *, rounds: int, only: str) -> None:
    engines = {mode: Ghost(mode=mode) for mode in ("fast", "lean", "auto")}
    rows: dict[str, Callable[[], Step]] = {f"plain {NAMES[case.optimizer]}": case.plain}
    for mode in ("fast", "lean"):
        rows[f"clipped sum alone, {mode}"] = lambda m=mode: case.clipping(engines[m])
    for mode in engines:
        rows[f"private step, {mode}"] = lambda m=mode: case.private(engines[m])
    rows["Opacus, ghost mode"] = case.opacus
    rows |= {title: lambda o=has_origin: case.fastdp(o) for title, has_origin in FASTDP.items()}
    wanted = only.split(",")
    rows = {n: make for n, make in rows.items() if any(part in n for part in ("plain", *wanted))}
    count = sum(p.numel() for p in case.model(torch.device("meta")).parameters())
    saved = ", checkpointed" if case.is_saved else ""
    size = f"{case.shape.batch} × {case.shape.length}"
    print(f"\n{name}, {count / 1e6:.0f} M parameters, batch {size}, {case.dtype}{saved}\n")
    together = case.shape.fits_often
    found = measure(rows, device=case.device, rounds=rounds, together=together)
    show(found)
    print()
    kind = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    tell_release(
        found.get("private step, fast"),
        found.get("clipped sum alone, fast"),
        count=count,
        each=bytes_of_release(kind, case.optimizer),
        speed=bandwidth(case.device),
    )
    for mode, engine in engines.items():
        if f"private step, {mode}" in found:
            print(f"{mode} chose: {engine.why.rpartition('; ')[2]} {engine.fallbacks or ''}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="gpt2-small")
    kinds = ["bf16", "tf32", "autocast"]
    parser.add_argument("--dtype", nargs="+", choices=kinds, default=kinds[:1])
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="clipped,private", help="parts of the names of rows")
    parser.add_argument("--peers", action="store_true", help="also run those that are there")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing")
    parser.add_argument("--buffers", type=int, choices=range(1, 5), default=4, help="of the noise")
    chosen = parser.parse_args()
    Case.buffers = chosen.buffers
    warnings.filterwarnings("ignore")
    peers.look_in_folder()
    torch.set_float32_matmul_precision("high")
    shape = SHAPES[chosen.shape]
    only = chosen.only + (",Opacus,fastDP" if chosen.peers else "")
    for dtype in chosen.dtype:
        case = Case(shape, dtype, chosen.optimizer, chosen.device, chosen.checkpoint)
        compare(chosen.shape, case, rounds=chosen.rounds, only=only)


if __name__ == "__main__":
    main()

"""Hugging Face models as they are, private beside plain, on one GPU: GPT-2, ViT, LoRA adapters.

    python benchmarks/huggingface_gpu.py                          all three, bf16 and tf32
    python benchmarks/huggingface_gpu.py --models vit --dtypes bf16 --peers

Models are built from their configurations with random weights (nothing is downloaded), in training
mode with their own dropout, and not edited. AdamW; the private step is all of `private.step` with
BLT noise of four buffers, fast or lean chosen by the engine and printed.

    gpt2    GPT2LMHeadModel, small, tied head            32 × 512 tokens
    vit     ViTForImageClassification, B/16              64 images of 224 × 224
    lora    GPT-2 medium, peft's LoRA of rank 16          16 × 512 tokens

`bf16` casts the model, `tf32` leaves it in float32 and lets products round. Rounds of the rows take
turns (`gpu_rows`). Opacus' ghost mode is tried with `--peers`; where it cannot, its error is shown.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import peers
import torch
from gpu_rows import Step, bandwidth, bytes_of_release, clean, measure, show, tell_release
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.clipping import Flat, Ghost, ModelLoss, next_token
from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.strategies import blt
from noshuffle.training import privatize

BLT_4 = blt((0.999, 0.98, 0.85, 0.4), (0.01, 0.03, 0.08, 0.12))
#: The same for a trial of this file on a CPU.
TINY_LM = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 301}
TINY_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 32,
}


def _labels(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(pixel_values=x).logits.float(), y, reduction="none")


class Case:
    """A model in a precision, with one batch."""

    loss: ModelLoss = next_token

    def __init__(self, dtype: str, device: str, *, is_tiny: bool) -> None:
        self.device, self.is_tiny = torch.device(device), is_tiny
        self.kind = torch.bfloat16 if dtype == "bf16" else torch.float32
        torch.manual_seed(0)
        self.batch = self.data()

    def tokens(self, rows: int, length: int, vocab: int) -> tuple[Tensor, ...]:
        size = (4, 16) if self.is_tiny else (rows, length)
        return (
            torch.randint(TINY_LM["vocab_size"] if self.is_tiny else vocab, size).to(self.device),
        )

    def data(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def bare(self) -> nn.Module:
        raise NotImplementedError

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        with self.device:
            model = self.bare()
        return model.to(self.kind).train()

    def scores(self, module: nn.Module) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Logits and labels side by side for Opacus, and the shape of the labels."""
        (ids,) = self.batch
        out = module(input_ids=ids).logits[:, :-1]
        return out.flatten(0, 1), ids[:, 1:].flatten(), tuple(ids[:, 1:].shape)


class Gpt2(Case):
    words = "GPT2LMHeadModel, small, tied head, 32 × 512"
    shape: ClassVar[dict[str, int]] = {}

    def data(self) -> tuple[Tensor, ...]:
        return self.tokens(32, 512, 50257)

    def bare(self) -> nn.Module:
        import transformers

        own = TINY_LM if self.is_tiny else self.shape
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**own, use_cache=False))


class Lora(Gpt2):
    words = "GPT-2 medium, LoRA of rank 16 on c_attn (peft), 16 × 512"
    shape: ClassVar[dict[str, int]] = {"n_embd": 1024, "n_layer": 24, "n_head": 16}

    def data(self) -> tuple[Tensor, ...]:
        return self.tokens(16, 512, 50257)

    def bare(self) -> nn.Module:
        import peft

        options = {"r": 16, "lora_alpha": 32, "target_modules": ["c_attn"], "fan_in_fan_out": True}
        return peft.get_peft_model(
            super().bare(), peft.LoraConfig(**options, task_type="CAUSAL_LM")
        )


class Vit(Case):
    words = "ViTForImageClassification, B/16, 64 images"
    loss = ModelLoss(_labels, by_row=True)

    def data(self) -> tuple[Tensor, ...]:
        rows, side = (4, 32) if self.is_tiny else (64, 224)
        images = torch.randn(rows, 3, side, side).to(self.device, self.kind)
        return images, torch.randint(1000, (rows,)).to(self.device)

    def bare(self) -> nn.Module:
        import transformers

        own = TINY_VIT if self.is_tiny else {}
        config = transformers.ViTConfig(**own, num_labels=1000)
        return transformers.ViTForImageClassification(config)

    def scores(self, module: nn.Module) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        x, y = self.batch
        return module(pixel_values=x).logits, y, tuple(y.shape)


CASES: dict[str, type[Case]] = {"gpt2": Gpt2, "vit": Vit, "lora": Lora}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def plain(case: Case) -> Step:
    model = case.model()
    optimizer = adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        case.loss.fn(model, *case.batch).mean().backward()
        optimizer.step()

    return step


def clipping(case: Case, engine: Ghost) -> Step:
    model = case.model()
    return lambda: engine.clipped_sum(model, case.loss, case.batch, clip=Flat(1.0))


def private(case: Case, engine: Ghost) -> Step:
    model = case.model()
    # The same batch at every step: one epoch is one step long.
    plan = Plan(participation=Epochs(1000, 1), strategy=BLT_4, noise_multiplier=1.0)
    size = len(case.batch[0])
    made = privatize(model, adamw(model), plan, clip_norm=1.0, batch_size=size, engine=engine)
    return lambda: made.step(case.loss, *case.batch)


def opacus(case: Case) -> Step:
    from opacus import PrivacyEngine

    model = case.model()
    data = torch.utils.data.TensorDataset(case.batch[0].cpu())
    options: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    module, optimizer, loss, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=adamw(model),
        data_loader=torch.utils.data.DataLoader(data, batch_size=len(case.batch[0])),
        poisson_sampling=False,
        grad_sample_mode="ghost",
        criterion=nn.CrossEntropyLoss(),
        **options,
    )

    def step() -> None:
        optimizer.zero_grad()
        out, labels, shape = case.scores(module)
        value = loss(out, labels, shape=shape) if len(shape) > 1 else loss(out, labels)
        value.backward()
        optimizer.step()

    return step


def compare(case: Case, dtype: str, *, rounds: int, with_peers: bool) -> None:
    engines = {mode: Ghost(mode=mode) for mode in ("auto", "lean")}
    rows: dict[str, Callable[[], Step]] = {
        "plain AdamW": lambda: plain(case),
        "clipped sum alone": lambda: clipping(case, engines["auto"]),
        "private step, auto": lambda: private(case, engines["auto"]),
        "private step, lean": lambda: private(case, engines["lean"]),
    }
    if with_peers:
        rows["Opacus, ghost mode"] = lambda: opacus(case)
    model = case.model()
    count = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    del model
    clean(case.device)
    print(f"\n{case.words}, {dtype}: {trained / 1e6:.1f} of {count / 1e6:.0f} M parameters train\n")
    found = measure(rows, device=case.device, rounds=rounds, together=True)
    show(found)
    print()
    tell_release(
        found["private step, auto"],
        found["clipped sum alone"],
        count=trained,
        each=bytes_of_release(case.kind, "adamw"),
        speed=bandwidth(case.device),
    )
    for mode, engine in engines.items():
        print(
            f"{mode} chose: {engine.why.rpartition('; ')[2]} {engine.fallbacks or ''}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "tf32"], default=["bf16", "tf32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try this file out")
    parser.add_argument("--peers", action="store_true", help="also run Opacus, if it is there")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    peers.look_in_folder()
    if why := peers.absent("transformers"):
        raise SystemExit(f"transformers does not import here ({why}); pip install -e '.[bench]'")
    torch.set_float32_matmul_precision("high")
    for name in chosen.models:
        for dtype in chosen.dtypes:
            try:
                case = CASES[name](dtype, chosen.device, is_tiny=chosen.tiny)
                compare(case, dtype, rounds=chosen.rounds, with_peers=chosen.peers)
            except ImportError as error:
                print(f"\n{CASES[name].__name__}, {dtype}: not measured ({error})", flush=True)


if __name__ == "__main__":
    main()

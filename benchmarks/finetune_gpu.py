"""Fine-tuning of language models on a GPU: false alarms, captured steps, slow steps.

    python benchmarks/finetune_gpu.py                             every cell once, 50 steps each
    python benchmarks/finetune_gpu.py --runs 5 --text FOLDER      with real weights and texts

A cell is a model (BERT, GPT-2, Llama), what is trained (all weights, LoRA), a precision (TF32,
bfloat16, autocast) and an attention kernel (sdpa, eager). An alarm is a model that is said to mix
examples, or any other reason to leave the layer rules. `slow` counts the steps after the third that
took over five times the median.

FOLDER holds `model.safetensors` and `config.json` of a BERT and `texts.npz` (`input_ids`,
`attention_mask`, `labels`); without it weights and tokens are random numbers.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.clipping import ModelLoss, next_token
from noshuffle.participation import AnyOrderEpochs
from noshuffle.plan import Plan
from noshuffle.training import Private, privatize

MODELS, TRAINED = ("bert", "gpt2", "llama"), ("full", "lora")
PRECISIONS, KERNELS = ("tf32", "bf16", "autocast"), ("sdpa", "eager")
SMALL = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}


def _class_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    return F.cross_entropy(out.logits.float(), batch["labels"], reduction="none")


class_loss = ModelLoss(_class_losses, by_row=True)


def texts(folder: Path | None, rows: int) -> dict[str, Tensor]:
    """Padded token ids, their mask, and a label each."""
    if folder is not None:
        with np.load(folder / "texts.npz") as data:
            return {name: torch.from_numpy(data[name][:rows].astype(np.int64)) for name in data}
    lengths = torch.randint(6, 65, (rows,))
    mask = (torch.arange(64) < lengths[:, None]).long()
    ids = torch.randint(5, 30000, (rows, 64)) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(2, (rows,))}


def build(name: str, kernel: str, folder: Path | None) -> nn.Module:
    """A model with its head, on the GPU, in training mode."""
    base: dict[str, Any] = {"attn_implementation": kernel, "use_cache": False}
    if name == "bert" and folder is not None:
        config = transformers.AutoConfig.from_pretrained(folder, num_labels=2, **base)
        model = transformers.BertForSequenceClassification.from_pretrained(folder, config=config)
    elif name == "bert":
        config = transformers.BertConfig(**SMALL, intermediate_size=1536, num_labels=2, **base)
        model = transformers.BertForSequenceClassification(config)
    elif name == "gpt2":
        size = {"n_embd": 384, "n_layer": 6, "n_head": 12, "vocab_size": 30522}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **base))
    else:
        size = {**SMALL, "intermediate_size": 1024, "vocab_size": 30522}
        config = transformers.LlamaConfig(**size, num_key_value_heads=4, **base)
        model = transformers.LlamaForCausalLM(config)
    return model.cuda().float().train()


def adapted(name: str, model: nn.Module) -> nn.Module:
    """The same with adapters of rank 8 in its attention."""
    import peft

    targets = {"bert": ["query", "value"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}
    task = "SEQ_CLS" if name == "bert" else "CAUSAL_LM"
    return peft.get_peft_model(
        model, peft.LoraConfig(r=8, target_modules=targets[name], task_type=task)
    )


def run(cell: tuple[str, ...], *, steps: int, folder: Path | None) -> tuple[Private, list[float]]:
    """One run of a cell; milliseconds of every step."""
    name, trained, precision, kernel = cell
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    model = build(name, kernel, folder)
    if trained == "lora":
        model = adapted(name, model)
    if precision == "bf16":
        model = model.to(torch.bfloat16)
    loss_fn = class_loss if name == "bert" else next_token
    data, size = texts(folder, 460), 46
    plan = Plan.fit(AnyOrderEpochs(steps // 10, 10), mechanism="identity", noise_multiplier=1.0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    private = privatize(model, optimizer, plan, clip_norm=1.0, batch_size=size)
    took = []
    for step in range(steps):
        rows = torch.arange(size) + step % 10 * size
        width = int(data["attention_mask"][rows].sum(1).max())
        width += -width % 8
        batch = {k: v[rows, :width] if v.dim() > 1 else v[rows] for k, v in data.items()}
        batch = {k: v.cuda() for k, v in batch.items() if k != "labels" or name == "bert"}
        cast: Any = nullcontext()
        if precision == "autocast":
            cast = torch.autocast("cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        began = time.perf_counter()
        with cast:
            private.advance(loss_fn, (batch,), ids=rows.numpy())
        torch.cuda.synchronize()
        took.append(1e3 * (time.perf_counter() - began))
    return private, took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--within", type=float, default=1e9, help="seconds; later cells are left")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    began, runs, alarms, slow = time.monotonic(), 0, 0, 0
    print(f"{'cell':32} {'first':>8} {'median':>7} {'slowest':>8} {'slow':>4}  alarms, why")
    for cell in product(args.models, TRAINED, PRECISIONS, KERNELS):
        for _ in range(args.runs):
            if time.monotonic() - began > args.within:
                continue
            private, took = run(cell, steps=args.steps, folder=args.text)
            late = took[3:]
            middle = statistics.median(late)
            over = sum(one > 5 * middle for one in late)
            notes = list(private.fallbacks)
            runs, alarms, slow = runs + 1, alarms + bool(notes), slow + over
            print(
                f"{' '.join(cell):32} {took[0]:8.0f} {middle:7.2f} {max(late):8.2f} {over:4d}  "
                f"{'; '.join(notes) or '-'} | {private.why[-60:]}",
                flush=True,
            )
            del private
            torch.cuda.empty_cache()
    print(f"{runs} runs of {args.steps} steps: {alarms} with an alarm, {slow} slow steps")


if __name__ == "__main__":
    main()

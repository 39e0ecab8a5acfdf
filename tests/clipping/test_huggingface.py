"""Hugging Face models, unedited, against the one-example-at-a-time loop; nothing is downloaded."""

import copy
import re
from pathlib import Path

import pytest
import torch
from tests.clipping.twin import flat, loop
from torch.nn import functional as F

from noshuffle.clipping import Flat, Ghost, ModelLoss, auto, next_token
from noshuffle.errors import InvalidInput

tr = pytest.importorskip("transformers", reason="transformers is not installed (extra: bench)")

V, T = 37, 7
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "vocab_size": V,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GPT2 = {
    "vocab_size": V,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def gpt2(drop=0.0, **more):
    config = tr.GPT2Config(**GPT2, resid_pdrop=drop, embd_pdrop=drop, attn_pdrop=drop, **more)
    return tr.GPT2LMHeadModel(config)


def llama(**more):
    return tr.LlamaForCausalLM(tr.LlamaConfig(**SMALL, num_key_value_heads=2, **more))


LMS = {
    "gpt2 (Conv1D, tied)": gpt2,
    "gpt2 eager attention": lambda: gpt2(attn_implementation="eager"),
    "llama (RMSNorm, rotary, GQA)": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "mistral": lambda: tr.MistralForCausalLM(tr.MistralConfig(**SMALL, num_key_value_heads=2)),
    "qwen2": lambda: tr.Qwen2ForCausalLM(tr.Qwen2Config(**SMALL, num_key_value_heads=2)),
    "qwen3": lambda: tr.Qwen3ForCausalLM(
        tr.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=4)
    ),
    "gemma (scaled embedding)": lambda: tr.GemmaForCausalLM(
        tr.GemmaConfig(**SMALL, num_key_value_heads=2, head_dim=4)
    ),
    "gpt-neox": lambda: tr.GPTNeoXForCausalLM(
        tr.GPTNeoXConfig(**SMALL, hidden_dropout=0.0, attention_dropout=0.0)
    ),
}


def gap(got, truth):
    assert list(got.values) == list(truth)
    return float((flat(got.values) - flat(truth)).norm() / flat(truth).norm())


def tokens():
    torch.manual_seed(3)
    return (torch.randint(3, V, (3, T)),)


def assert_like_the_loop(model, loss=next_token, batch=None, tolerance=1e-5, engine=None):
    batch = batch or tokens()
    truth, norms, norm = loop(model, loss, batch, share=0.7)
    engine = engine or Ghost()
    got = engine.clipped_sum(model, loss, batch, clip=Flat(norm))
    assert gap(got, truth) <= tolerance
    torch.testing.assert_close(got.norms, norms, rtol=max(tolerance, 1e-4), atol=0.0)
    assert bool((got.norms >= norms * (1.0 - 1e-6)).all()) or tolerance > 1e-4
    return engine


def trainable_lora(model, **options):
    peft = pytest.importorskip("peft", reason="peft is not installed (extra: bench)")
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, task_type="CAUSAL_LM", **options)
    adapted = peft.get_peft_model(model, config).train()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # zero at the start, which would hide lora_A's gradient
            torch.nn.init.normal_(parameter, std=0.3)
    return adapted


@pytest.mark.parametrize("name", LMS)
def test_causal_language_models(name):
    torch.manual_seed(0)
    model = LMS[name]().train()
    before = copy.deepcopy(model.state_dict())
    engine = assert_like_the_loop(model, engine=auto(model))
    assert isinstance(engine, Ghost)
    assert not engine.fallbacks, engine.fallbacks
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_double_precision_is_kept():
    torch.manual_seed(0)
    model, (ids,) = gpt2().double(), tokens()
    found = next_token.fn(model, ids)
    truth = torch.nn.functional.cross_entropy(model(ids).logits[:1, :-1].mT, ids[:1, 1:])
    assert found.dtype == torch.float64
    torch.testing.assert_close(found[0], truth, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("mode", ["fast", "lean"])
def test_padded_batches_and_labels(mode):
    torch.manual_seed(0)
    (ids,) = tokens()
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    for batch in (
        {"input_ids": ids, "attention_mask": mask},
        {"input_ids": ids, "labels": ids.masked_fill(ids < 9, -100)},
    ):
        model = llama().train()
        engine = assert_like_the_loop(model, batch=(batch,), engine=Ghost(mode=mode))
        assert not engine.fallbacks
    own = model(input_ids=ids[:1], labels=ids[:1].masked_fill(ids[:1] < 9, -100)).loss
    torch.testing.assert_close(next_token.fn(model, batch)[0], own)
    with pytest.raises(InvalidInput, match="input_ids"):
        next_token.fn(model, {"tokens": ids})


@pytest.mark.parametrize("make", [gpt2, llama])
def test_gradient_checkpointing(make):
    torch.manual_seed(0)
    model = make().train()
    want = Ghost().clipped_sum(model, next_token, tokens(), clip=Flat(0.4))
    model.config.use_cache = False
    for kwargs in (None, {"use_reentrant": False}):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
        engine = Ghost()
        got = engine.clipped_sum(model, next_token, tokens(), clip=Flat(0.4))
        torch.testing.assert_close(flat(got.values), flat(want.values), rtol=1e-5, atol=1e-7)
        assert not engine.fallbacks


def test_lora_on_llama_and_gpt2():
    torch.manual_seed(0)
    for model in (
        trainable_lora(llama(), target_modules=["q_proj", "v_proj", "down_proj"]),
        trainable_lora(gpt2(), target_modules=["c_attn"], fan_in_fan_out=True),
    ):
        engine = assert_like_the_loop(model)
        assert not engine.fallbacks, engine.fallbacks
        got = engine.clipped_sum(model, next_token, tokens(), clip=Flat(1.0))
        assert all("lora_" in name for name in got.values)


def test_image_transformer():
    torch.manual_seed(0)
    config = tr.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = tr.ViTForImageClassification(config).train()

    def rows(model, x, y):
        return F.cross_entropy(model(pixel_values=x).logits, y, reduction="none")

    batch = (torch.randn(3, 3, 8, 8), torch.randint(3, (3,)))
    engine = assert_like_the_loop(model, ModelLoss(rows, by_row=True), batch)
    assert all("ViTEmbeddings" in note for note in engine.fallbacks)  # one learned token of its own


def test_an_encoder_and_a_model_that_needs_the_fallback():
    torch.manual_seed(0)
    (ids,) = tokens()
    config = tr.BertConfig(
        vocab_size=V,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )

    def rows(model, x, y):
        return F.cross_entropy(model(input_ids=x).logits, y, reduction="none")

    bert = tr.BertForSequenceClassification(config).train()
    engine = assert_like_the_loop(
        bert, ModelLoss(rows, by_row=True), (ids, torch.tensor([0, 2, 1]))
    )
    assert not engine.fallbacks

    def answers(model, x, y):
        out = model(input_ids=x, labels=y).logits
        each = F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")
        return each.view(len(x), -1).mean(1)

    t5 = tr.T5ForConditionalGeneration(
        tr.T5Config(
            vocab_size=V,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=1,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    ).train()
    loss = ModelLoss(answers, by_row=True)
    engine = assert_like_the_loop(t5, loss, (ids, ids.flip(1)))
    assert "relative_attention_bias" in engine.fallbacks[0]  # one table for all examples
    for name, parameter in t5.named_parameters():
        parameter.requires_grad_("relative_attention_bias" not in name)
    assert not assert_like_the_loop(t5, loss, (ids, ids.flip(1))).fallbacks


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("how", ["parameters", "autocast"])
def test_bfloat16(make, how):
    torch.manual_seed(0)
    model = make().train()

    def cast(model, ids):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return next_token.fn(model, ids)

    model = model.to(torch.bfloat16) if how == "parameters" else model
    loss = next_token if how == "parameters" else ModelLoss(cast, by_row=True)
    engine = assert_like_the_loop(model, loss, tolerance=0.02)
    assert not engine.fallbacks
    got = engine.clipped_sum(model, loss, tokens(), clip=Flat(0.3))
    assert all(v.dtype == torch.float32 for v in got.values.values())


def test_compiled_parts_run_as_written():
    torch.manual_seed(0)
    model = gpt2().train()
    want = Ghost().clipped_sum(model, next_token, tokens(), clip=Flat(0.4))
    inner = copy.deepcopy(model)
    inner.transformer.h[0] = torch.compile(inner.transformer.h[0], backend="eager")
    whole = copy.deepcopy(model)
    whole.compile(backend="eager")
    for other in (inner, whole):
        engine = Ghost()
        got = engine.clipped_sum(other, next_token, tokens(), clip=Flat(0.4))
        torch.testing.assert_close(flat(got.values), flat(want.values), rtol=1e-5, atol=1e-7)
        assert any("as written" in note for note in engine.fallbacks)


def test_a_layer_that_only_has_the_name_is_written_out():
    class OddRMSNorm(torch.nn.Module):
        def __init__(self, width):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(width)), 1e-6

        def forward(self, x):
            return x * self.weight.square()

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(V, 8), OddRMSNorm(8), torch.nn.Linear(8, V)
    ).train()
    engine = assert_like_the_loop(model)
    assert "whole model written out per example: layer '1'" in engine.fallbacks[0]


@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_a_private_run_without_editing_the_model(drop):
    import noshuffle as ns

    torch.manual_seed(0)
    model = gpt2(drop).train()
    plan = ns.Plan.fit(ns.SinglePass(steps=4), mechanism="tree", noise_multiplier=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    private = ns.privatize(model, optimizer, plan, clip_norm=1.0, batch_size=3)
    before = flat(dict(model.named_parameters())).detach().clone()
    (ids,) = tokens()
    private.step(next_token, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    with private.accumulate() as step:
        for part in ids.split(2):
            step.add(next_token, (part,))
    assert float((flat(dict(model.named_parameters())).detach() - before).norm()) > 0.0
    assert private.steps_released == 2


def test_the_page_about_transformers_runs():
    pytest.importorskip("peft", reason="peft is not installed (extra: bench)")
    page = Path(__file__).parents[2] / "docs" / "transformers.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    known = {}
    for block in blocks:
        exec(block, known)
    assert len(blocks) == 4
    assert "fast, in one part" in known["engine"].why

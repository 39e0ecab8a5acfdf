"""PrivateTrainer is `privatize` by hand to the bit, killed and resumed, and refuses what is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache
from itertools import chain
from pathlib import Path

import accelerate
import numpy as np
import peft
import pytest
import torch
import transformers
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

import noshuffle as ns
from noshuffle.clipping import next_token
from noshuffle.errors import (
    InvalidInput,
    ParticipationViolation,
    Unsupported,
)
from noshuffle.integrations.huggingface import PrivateTrainer, participation_of
from noshuffle.noise import test_source
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History
from noshuffle.training import privatize, verify

ROWS = 22  # batches of 4: the last one has 2


class Sentences(Dataset):
    """Token ids with labels of different number."""

    def __init__(self, rows=ROWS):
        g = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, 24, (rows, 6), generator=g)
        self.labels = self.ids.clone()
        self.labels[torch.rand(rows, 6, generator=g) < 0.3] = -100
        self.labels[:, 1] = self.ids[:, 1]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def gpt2(kind="full", seed=0):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=24, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config)
    if kind == "full":
        return model
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.1)
    return peft.get_peft_model(model, lora)


def arguments(out, **options):
    settings = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 2,
        "learning_rate": 0.05,
        "report_to": [],
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
    }
    return transformers.TrainingArguments(str(out), **{**settings, **options})


@cache
def _fitted(rule, mechanism, unit):
    return ns.Plan.fit(rule, mechanism=mechanism, unit=unit, noise_multiplier=0.8, delta=1e-5)


def fitted(args, data=None, *, mechanism="blt", unit="example"):
    rule = participation_of(args, Sentences() if data is None else data)
    return _fitted(rule, mechanism, unit)


def trainer(out, kind="full", *, seed=0, run=None, callbacks=(), data=None, **options):
    given = {
        k: options.pop(k)
        for k in ("units", "compute_loss_func", "data_collator", "eval_dataset")
        if k in options
    }
    plan = options.pop("plan", None)
    args = arguments(out, **options)
    data = data or Sentences()
    return PrivateTrainer(
        gpt2(kind, seed),
        args,
        train_dataset=data,
        callbacks=list(callbacks),
        run=run,
        plan=plan or fitted(args, data),
        clip_norm=0.6,
        privacy={"source": test_source(seed=1)},
        **given,
    )


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def by_hand(out, kind, parts, epochs=2):
    """The same training, written out: natural order, `next_token`, one release a step."""
    settings = {"gradient_accumulation_steps": parts, "num_train_epochs": epochs}
    model, data, args = gpt2(kind), Sentences(), arguments(out, **settings)
    plan = fitted(args)
    optimizer = transformers.Trainer(model, args).create_optimizer()
    schedule = transformers.get_scheduler("linear", optimizer, 0, plan.steps)
    size = {"clip_norm": 0.6, "batch_size": 4 * parts, "source": test_source(seed=1)}
    private = privatize(model, optimizer, plan, **size)
    model.train()
    for t in range(plan.steps):
        start = t % plan.participation.steps_per_epoch * 4 * parts
        with private.accumulate() as step:
            for at in range(start, min(start + 4 * parts, ROWS), 4):
                rows = np.arange(at, min(at + 4, ROWS))
                batch = {"input_ids": data.ids[rows], "labels": data.labels[rows]}
                step.add(next_token, (batch,), ids=rows)
        schedule.step()
    return private


class Stop(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **rest):
        if state.global_step == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("kind", "parts"), [("full", 2), pytest.param("lora", 1, marks=pytest.mark.slow)]
)
def test_the_same_as_by_hand_stopped_and_resumed(tmp_path, kind, parts):
    hand = by_hand(tmp_path / "hand", kind, parts, epochs=parts)
    options = {"run": tmp_path / "run", "gradient_accumulation_steps": parts}
    options |= {"num_train_epochs": parts, "save_only_model": True}
    first = trainer(tmp_path / "out", kind, callbacks=[Stop(3)], **options)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    del first
    again = trainer(tmp_path / "out", kind, seed=9, **options)  # its weights come from the run
    torch.manual_seed(77)
    done = again.train()
    assert again.private.steps_released == hand.steps_released == done.global_step
    assert torch.equal(weights(again.model), weights(hand.model))
    assert again.statement().epsilon == hand.statement().epsilon == hand.plan.epsilon()
    assert again.private.fallbacks == hand.fallbacks == []
    steps = [line["step"] for line in again.state.log_history]
    assert steps == sorted(steps)
    again.private.close()
    assert verify(tmp_path / "run").answer == "NOT PRIVATE"  # a test seed, and nothing else


def test_nothing_raw_is_logged_and_evaluation_works(tmp_path):
    class Look(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **rest):
            seen.append(set(logs))

    seen = []
    args = arguments(tmp_path, num_train_epochs=1)
    made = trainer(
        tmp_path,
        plan=fitted(args, mechanism="tree"),
        num_train_epochs=1,
        eval_dataset=Sentences(4),
        eval_strategy="epoch",
        callbacks=[Look()],
        save_strategy="no",
        logging_steps=3,
    )
    output = made.train()
    assert output.training_loss != output.training_loss
    for names in (*seen, *map(set, made.state.log_history), set(output.metrics)):
        assert not names & {"loss", "train_loss", "grad_norm"}
    assert any("eval_loss" in names for names in seen)
    assert made.state.log_history[-1]["epsilon"] == made.private.epsilon
    assert output.metrics["total_flos"] == 0  # lengths of texts
    with pytest.raises(InvalidInput, match="has trained before"):
        made.train()


def test_users_with_many_sequences(tmp_path):
    data = Sentences(8)
    args = arguments(tmp_path, per_device_train_batch_size=8, num_train_epochs=1)
    plan = fitted(args, data, unit="user", mechanism="tree")
    made = trainer(
        tmp_path,
        "lora",
        data=data,
        plan=plan,
        units=[0, 0, 0, 1, 1, 2, 3, 3],
        save_strategy="no",
        per_device_train_batch_size=8,
        num_train_epochs=1,
    )
    made.train()
    assert len(made.private.outcome.norms) == 4  # one contribution a user, whatever they wrote
    with pytest.raises(InvalidInput, match="the user of every example"):
        trainer(tmp_path, data=data, plan=plan, per_device_train_batch_size=8, num_train_epochs=1)


@pytest.mark.slow
def test_a_loop_of_accelerate_is_the_same_as_by_hand(tmp_path):
    """It divides every loss by the number of parts, by itself."""
    args = arguments(tmp_path, gradient_accumulation_steps=2)
    plan, data, model = fitted(args), Sentences(), gpt2()
    inner = transformers.Trainer(model, args).create_optimizer()
    schedule = transformers.get_scheduler("linear", inner, 0, plan.steps)
    size = {"clip_norm": 0.6, "batch_size": 8, "source": test_source(seed=1)}
    private = privatize(model, inner, plan, **size)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    criterion = private.criterion(
        lambda logits, labels: F.cross_entropy(logits[:, :-1].mT, labels[:, 1:])
    )
    model, optimizer, loader = accelerator.prepare(model, private.optimizer, loader)
    model.train()
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(criterion(model(**batch).logits, batch["labels"]))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                schedule.step()
    assert private.steps_released == 6
    hand = by_hand(tmp_path / "hand", "full", 2)
    torch.testing.assert_close(weights(model), weights(hand.model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "or 'sequential'"),
        ({"train_sampling_strategy": "batch_rebalance"}, "or 'sequential'"),
        ({"torch_compile": True}, "calls of the layers"),
        ({"label_smoothing_factor": 0.1}, "put it into loss_fn"),
        ({"ignore_data_skip": True}, "reads rows again"),
        ({"auto_find_batch_size": True}, "part of the plan"),
        ({"include_num_input_tokens_seen": "non_padding"}, "numbers of tokens are raw"),
        ({"compute_loss_func": lambda out, labels, num_items_in_batch: 0}, "by_row=True"),
    ],
)
def test_what_the_guarantee_does_not_cover_is_refused(tmp_path, options, words):
    with pytest.raises(Unsupported, match=words):
        trainer(tmp_path, **options)


@pytest.mark.parametrize("count", ["world_size", "n_gpu"])
def test_several_processes_or_devices_are_refused(tmp_path, count, monkeypatch):
    monkeypatch.setattr(transformers.TrainingArguments, count, 2)
    with pytest.raises(Unsupported, match="one"):
        trainer(tmp_path)


def test_a_subclass_whose_method_would_not_be_called_is_refused(tmp_path, monkeypatch):
    kind = type("Own", (PrivateTrainer,), {"compute_loss": lambda self, *args, **options: None})
    monkeypatch.setattr(f"{__name__}.PrivateTrainer", kind)
    with pytest.raises(Unsupported, match="a compute_loss of a subclass"):
        trainer(tmp_path)


class OwnOptimizer(PrivateTrainer):
    def create_optimizer(self, model=None):
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        return self.optimizer


class OwnStep(PrivateTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        self.compute_loss(model, inputs).backward()
        return torch.zeros(())


class OwnLoader(PrivateTrainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, shuffle=True)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (OwnOptimizer, "a SGD outside"),
        (OwnStep, "without batches"),
        (OwnLoader, "without the places"),
    ],
)
def test_a_subclass_that_goes_past_the_run_is_refused(tmp_path, kind, words, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PrivateTrainer", kind)
    made = trainer(tmp_path, save_strategy="no")
    before = weights(made.model)
    with pytest.raises(InvalidInput, match=words):
        made.train()
    assert torch.equal(weights(made.model), before)


def test_a_shuffled_trainer_keeps_its_order_and_goes_on_in_it(tmp_path):
    """Its order is drawn once, from a public seed of the run, and it is not that of the data."""
    options = {"train_sampling_strategy": "random", "num_train_epochs": 2}
    whole = trainer(tmp_path / "whole", **options)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "out", run=tmp_path / "run", callbacks=[Stop(8)], **options).train()
    again = trainer(tmp_path / "out", seed=9, run=tmp_path / "run", **options)
    again.train()
    assert torch.equal(weights(again.model), weights(whole.model))
    steps = [None] * 12

    def hear(step, units):
        steps[step] = units.tolist()

    History.read(RunFolder(tmp_path / "run"), on_step=hear)
    assert steps[:6] == steps[6:]
    assert sorted(chain(*steps[:6])) == list(range(ROWS)) != list(chain(*steps[:6]))


class EndEpoch(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **rest):
        control.should_epoch_stop = state.global_step == 3


def test_rows_are_known_by_what_was_read_and_not_by_the_number_of_the_step(tmp_path, monkeypatch):
    """An epoch that a callback ends early begins again at row 0, under whatever number: rows 0 to
    11 took part in steps 0 to 2 and in steps 3 to 5, as rows 12 to 23 of a run that held."""
    made = trainer(tmp_path, data=Sentences(24), callbacks=[EndEpoch()], num_train_epochs=3)
    with pytest.raises(ParticipationViolation, match="unit 0 may not take part in step 3"):
        made.train()
    seen, real = [], PrivateTrainer.training_step

    def every_second(self, model, inputs, items=None):
        seen.append(inputs["input_ids"])
        return real(self, model, inputs, items) if len(seen) % 2 == 0 else torch.zeros(())

    monkeypatch.setattr(PrivateTrainer, "training_step", every_second)
    made = trainer(tmp_path, gradient_accumulation_steps=2, num_train_epochs=1)
    made.train()
    units, _ = made.private._parts.release.guard.table.all()
    assert sorted(units) == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21]


def test_other_data_do_not_go_on(tmp_path):
    """Its list of files is on record, under the secret of the run."""
    same, other = Sentences(), Sentences()
    same.samples, other.samples = ["a.txt"], ["b.txt"]
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, run=tmp_path / "run", data=same, callbacks=[Stop(3)]).train()
    with pytest.raises(InvalidInput, match="was begun with files"):
        trainer(tmp_path, run=tmp_path / "run", data=other).train()
    trainer(tmp_path, run=tmp_path / "run", data=same).train()


class Ragged(Dataset):
    """Rows of 3 tokens, and one of 6."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        ids = torch.arange(6 if i == 5 else 3) * (i + 3) % 22 + 2
        return {"input_ids": ids, "label": i % 2}


def padded(*, has_mask):
    def collate(items):
        rows = [item["input_ids"] for item in items]
        batch = {
            "input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
            "labels": torch.tensor([item["label"] for item in items]),
        }
        mask = torch.nn.utils.rnn.pad_sequence(list(map(torch.ones_like, rows)), batch_first=True)
        return {**batch, "attention_mask": mask} if has_mask else batch

    return collate


def bert():
    torch.manual_seed(0)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=24, intermediate_size=8, initializer_range=0.5, **size
    )
    return transformers.BertForSequenceClassification(config)


def test_padding_that_changes_results_is_refused(tmp_path):
    """One long row moved the sum of 64 by 3.7 clip norms, twice what its own may change."""
    for has_mask in (True, False):
        args = arguments(tmp_path, num_train_epochs=1, save_strategy="no")
        given = {"train_dataset": Ragged(), "data_collator": padded(has_mask=has_mask)}
        plan = fitted(args, Ragged())
        made = PrivateTrainer(bert(), args, plan=plan, clip_norm=0.6, **given)
        if has_mask:
            made.train()
        else:
            with pytest.raises(InvalidInput, match="padded to different widths"):
                made.train()


class Seeds(transformers.TrainerCallback):
    def __init__(self, seen):
        self.seen = seen

    def on_epoch_begin(self, args, state, control, **rest):
        self.seen.append(torch.initial_seed())


def test_what_a_collator_draws_nobody_knows(tmp_path):
    """A longer row moves the draws of all others, as masked tokens, and 42 is known."""
    seen = []
    for source in (None, None, test_source(seed=1), test_source(seed=1)):
        made = trainer(tmp_path, callbacks=[Seeds(seen)], save_strategy="no", num_train_epochs=1)
        made._options["source"] = source
        made.train()
    assert len(set(seen)) == 3
    assert seen[2] == seen[3]
    assert 42 not in seen


def test_plans_and_collators_that_do_not_fit_are_refused(tmp_path):
    whole = fitted(arguments(tmp_path), mechanism="tree")
    assert whole.steps == 12
    dropped = fitted(arguments(tmp_path, dataloader_drop_last=True), mechanism="tree")
    assert dropped.participation.steps_per_epoch == 5
    for plan, options in ((whole, {"dataloader_drop_last": True}), (dropped, {})):
        with pytest.raises(InvalidInput, match="participation_of"):
            trainer(tmp_path, plan=plan, **options)
    with pytest.raises(InvalidInput, match="fit it for"):
        trainer(tmp_path, plan=whole, num_train_epochs=3)

    def packed(items):
        flat = torch.cat([item["input_ids"] for item in items])[None]
        return {"input_ids": flat[:, :8], "labels": flat[:, :8]}

    made = trainer(tmp_path, data_collator=packed, save_strategy="no", plan=whole)
    with pytest.raises(InvalidInput, match="no packing"):
        made.train()
    assert made.private.steps_released == 0
    with pytest.raises(InvalidInput, match="run folder"):
        trainer(tmp_path, plan=whole).train(resume_from_checkpoint="somewhere")


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"max_steps": 4}, ns.SinglePass(4)),
        ({"max_steps": 6}, ns.Epochs(1, 6)),
        ({"max_steps": 8}, ns.MinSeparation(8, 6, 2)),
        ({"max_steps": 12}, ns.Epochs(2, 6)),
        ({"num_train_epochs": 1.5}, ns.MinSeparation(9, 6, 2)),
        ({"num_train_epochs": 0.4}, ns.SinglePass(3)),
    ],
)
def test_the_plan_is_for_the_steps_that_are_taken(tmp_path, options, rule):
    """It was for whole epochs: more noise than the steps needed, or a smaller ε than was asked."""
    args = arguments(tmp_path, **options)
    assert participation_of(args, Sentences()) == rule
    made = trainer(tmp_path, save_strategy="no", **options)
    made.train()
    assert made.private.steps_released == rule.steps == made.state.max_steps
    assert made.statement().epsilon == made.plan.epsilon()
    whole = _fitted(ns.Epochs(2, 6), "blt", "example")  # of before, or for more: as good
    assert trainer(tmp_path, plan=whole, **options).plan is whole


def test_a_plan_for_longer_epochs_is_refused_before_the_second_one(tmp_path):
    plan = _fitted(ns.MinSeparation(9, 7, 2), "tree", "example")
    with pytest.raises(InvalidInput, match="8 steps, 6 an epoch; the plan has 9, 7 an epoch"):
        trainer(tmp_path, plan=plan, max_steps=8)
    trainer(tmp_path, plan=plan, max_steps=6)


@pytest.mark.parametrize("rule", [ns.SinglePass(12), ns.MinSeparation(12, 6, 1)])
def test_a_plan_of_fewer_passes_is_refused_before_the_first_step(tmp_path, rule):
    """The second epoch was refused, when the first was trained and paid for."""
    plan = _fitted(rule, "tree", "example")
    with pytest.raises(InvalidInput, match=r"same rows 2 times.*participation_of"):
        trainer(tmp_path, plan=plan)
    trainer(tmp_path, plan=plan, num_train_epochs=1)


def test_the_best_model_is_that_of_an_unbroken_run(tmp_path):
    """Stopped behind the best checkpoint; what is evaluated last is that one, of either run."""
    options = {"num_train_epochs": 1, "save_total_limit": 1, "eval_strategy": "steps"}
    options |= {"eval_dataset": Sentences(6), "eval_steps": 2, "load_best_model_at_end": True}
    options |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # it is the first
    options |= {"learning_rate": 0.5}
    whole = trainer(tmp_path / "whole", run=tmp_path / "a", **options)
    whole.train()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "out", run=tmp_path / "b", callbacks=[Stop(3)], **options).train()
    again = trainer(tmp_path / "out", seed=9, run=tmp_path / "b", **options)
    again.train(resume_from_checkpoint=True)
    assert again.state.best_model_checkpoint == str(tmp_path / "out" / "checkpoint-2")
    assert again.state.best_metric == whole.state.best_metric
    assert torch.equal(weights(again.model), weights(whole.model))
    assert again.private.steps_released == whole.private.steps_released == 6
    again.private.close()  # the run folder ends with the last model, not the best
    assert verify(tmp_path / "b").answer == "NOT PRIVATE"


@pytest.mark.slow
def test_killed_by_the_system_and_resumed(tmp_path):
    """SIGKILL before a step, twice: what was not saved is passed over."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_huggingface as t\n"
        "import os, signal, transformers\n"
        "class Kill(transformers.TrainerCallback):\n"
        "    def on_pre_optimizer_step(self, args, state, control, **rest):\n"
        "        if state.global_step == int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "made = t.trainer(sys.argv[2] + '/out', 'lora', run=sys.argv[2] + '/run',\n"
        "                 callbacks=[Kill()]); made.train()\n"
        "assert made.private.steps_released == made.state.global_step == 12\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for stop in (3, 7, -1):
        command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path), str(stop)]
        status = subprocess.run(command, env=env, check=False, timeout=600).returncode
        assert status == (-signal.SIGKILL if stop > 0 else 0)
    assert verify(tmp_path / "run").answer == "NOT PRIVATE"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_half_precision_trains(tmp_path, kind):
    made = trainer(tmp_path, kind, bf16=True, save_strategy="no", num_train_epochs=1)
    before = weights(made.model)
    made.train()
    assert made.private.steps_released == 6
    assert bool(torch.isfinite(weights(made.model)).all())
    assert not torch.equal(before, weights(made.model))


class Stream(IterableDataset):
    """A stream that has a length."""

    def __len__(self):
        return ROWS

    def __iter__(self):
        rows = Sentences()
        return (rows[i] for i in range(ROWS))


def test_a_stream_with_a_length_has_no_places(tmp_path):
    """Nobody can say which rows came: by places, a shuffled one would pass unseen."""
    made = trainer(tmp_path / "a", data=Stream())
    made.train()
    rows = trainer(tmp_path / "b")
    rows.train()
    assert torch.equal(weights(made.model), weights(rows.model))
    assert not made.statement().participation_checked
    assert rows.statement().participation_checked
    with pytest.raises(InvalidInput, match="units= needs a data set with a length and rows"):
        trainer(tmp_path / "d", data=Stream(), units=list(range(ROWS))).train()


def test_units_are_one_for_each_row(tmp_path):
    with pytest.raises(InvalidInput, match="the user of each row of train_dataset: 22, got 10"):
        trainer(tmp_path, units=list(range(10)))

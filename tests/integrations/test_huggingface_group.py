"""PrivateTrainer on several processes: one guarantee, and the bits of one process.

The file is its own worker: torchrun starts two of it (accelerate finds them; its own launcher does
the same on GPUs, and wants MPI on CPUs). The twin is written by hand with
`privatize_distributed` in a group of one, whose blocks are the same.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from tests.integrations.test_huggingface import (
    ROWS,
    Sentences,
    arguments,
    fitted,
    gpt2,
    trainer,
    weights,
)

from noshuffle.clipping import next_token
from noshuffle.errors import InvalidInput
from noshuffle.integrations import huggingface_checks as checks
from noshuffle.integrations.huggingface import participation_of
from noshuffle.noise import test_source
from noshuffle.training import verify
from noshuffle.training.distributed import privatize_distributed

#: An epoch of 22 rows in parts of 8: two steps of two parts, or three of one; the last part has 6.
ROOT = Path(__file__).parents[2]
#: By number of parts; the two users of a part are one block, so that one rank has nothing to do.
UNIT = {1: "example", 2: "user"}
USERS = [i // 4 for i in range(ROWS)]
SETTINGS = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "save_steps": 1}


class Noisy(Sentences):
    """Every reading of a row is another."""

    def __getitem__(self, i):
        return {"x": np.random.default_rng().normal(size=2)}


class Kill(transformers.TrainerCallback):
    """SIGKILL for one rank, before it takes a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.at = (rank, step)

    def on_pre_optimizer_step(self, args, state, control, **rest):
        if (args.process_index, state.global_step) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def work(folder: Path, parts: int, kill: str) -> None:
    """A rank: train, from where the folder is, and leave the weights behind."""
    rank, step = map(int, kill.split(":"))
    torch.set_num_threads(1)
    own = arguments(folder / "out", gradient_accumulation_steps=parts, **SETTINGS)
    made = trainer(
        folder / "out",
        plan=fitted(own, unit=UNIT[parts]),
        units=USERS if UNIT[parts] == "user" else None,
        run=folder / "run",
        seed=int(os.environ["RANK"]),  # rank 0 tells the others how to begin
        callbacks=[Kill(rank, step)],
        gradient_accumulation_steps=parts,
        **SETTINGS,
    )
    made.train()
    me = made.args.process_index
    assert (made.args.world_size, type(made.model_wrapped).__name__) == (2, "GPT2LMHeadModel")
    torch.save((weights(made.model), made.statement().epsilon), folder / f"weights{me}.pt")
    made.private.close(keep_keys=True)
    dist.destroy_process_group()


def by_hand(folder: Path, parts: int) -> tuple[torch.Tensor, float]:
    """The same training by one process: parts of 8 rows, `parts` of them a step."""
    settings = {**SETTINGS, "per_device_train_batch_size": 8, "gradient_accumulation_steps": parts}
    model, data, args = gpt2(), Sentences(), arguments(folder, **settings)
    plan = fitted(args, unit=UNIT[parts])
    units = np.array(USERS) if UNIT[parts] == "user" else np.arange(ROWS)
    optimizer = transformers.Trainer(model, args).create_optimizer()
    schedule = transformers.get_scheduler("linear", optimizer, 0, plan.steps)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    try:
        size = {"clip_norm": 0.6, "batch_size": 8 * parts, "source": test_source(seed=1)}
        private = privatize_distributed(model, optimizer, plan, **size)
        model.train()
        for t in range(plan.steps):
            start = t % plan.participation.steps_per_epoch * 8 * parts
            with private.accumulate() as step:
                for at in range(start, min(start + 8 * parts, ROWS), 8):
                    rows = np.arange(at, min(at + 8, ROWS))
                    batch = {"input_ids": data.ids[rows], "labels": data.labels[rows]}
                    step.add(next_token, (batch,), ids=units[rows])
            schedule.step()
        return weights(model), private.statement().epsilon
    finally:
        dist.destroy_process_group()


def launch(folder: Path, *words: str) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2"]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((*sys.path, str(ROOT))),
        "OMP_NUM_THREADS": "1",
    }
    command += [__file__, str(folder), *words]
    with (folder / "log").open("ab") as log:
        done = subprocess.run(command, env=env, timeout=600, check=False, stdout=log, stderr=log)
    return done.returncode


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_two_processes_killed_and_resumed_are_one_process_to_the_bit(tmp_path, parts):
    """Either rank is killed in the middle of a step; the last start goes on to the end."""
    torch.set_num_threads(1)
    for kill in ("0:1", "1:2"):
        assert launch(tmp_path, str(parts), kill) != 0
    assert launch(tmp_path, str(parts), "-1:0") == 0, (tmp_path / "log").read_text()[-3000:]
    want, epsilon = by_hand(tmp_path, parts)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"weights{rank}.pt")
        assert torch.equal(found[0], want)
        assert found[1] == epsilon
    assert not verify(tmp_path / "run").refuted


def test_a_process_with_data_in_another_order_is_refused():
    """Rows are known by their places: an example would take part under two ids."""
    data, other = Sentences(), Sentences()
    other.ids = other.ids[torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))]
    look = checks.looked_at(data, None)
    checks.refuse_other_data([look, checks.looked_at(Sentences(), None)])
    with pytest.raises(InvalidInput, match="other rows on rank 1"):
        checks.refuse_other_data([look, checks.looked_at(other, None)])
    looks = [checks.looked_at(Noisy(), None) for _ in range(2)]  # augmented: nothing to compare
    checks.refuse_other_data(looks)
    for told in (checks.looked_at(Sentences(ROWS - 1), None), checks.looked_at(data, USERS)):
        with pytest.raises(InvalidInput, match="the ranks disagree"):
            checks.refuse_other_data([look, told])


def test_a_plan_is_fitted_for_the_batches_of_all_processes(tmp_path):
    args = arguments(tmp_path)
    two = SimpleNamespace(**{**vars(args), "world_size": 2})
    assert participation_of(args, Sentences()).steps_per_epoch == 6
    assert participation_of(two, Sentences()).steps_per_epoch == 3
    two.dataloader_drop_last = True
    assert participation_of(two, Sentences()).steps_per_epoch == 2


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

"""Kill −9 at random instants, resume: bit-identical parameters, and evidence that verifies.

A driver process imports everything once and forks a child per run. Each child trains in a run
folder and is killed by a real SIGKILL after a random number of calls (of Python and C functions
alike, so also inside a checkpoint or a transaction); the next child resumes, is perhaps killed
again, until one finishes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

DRIVER = r'''
import hashlib, json, os, random, signal, sys
from pathlib import Path
import torch
from torch import nn
from noshuffle import Plan, Epochs
from noshuffle.noise import test_source
from noshuffle.strategies import tree
from noshuffle.training import (fit_model, in_order, privatize)
from noshuffle.training import verify
from noshuffle.training.batches import TensorBatches

torch.set_num_threads(1)
folder, instants, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
g = torch.Generator().manual_seed(5)
x, y = torch.randn(40, 6, generator=g), torch.randint(3, (40,), generator=g)
plan = Plan(participation=Epochs(epochs=3, steps_per_epoch=5), strategy=tree(variant="honaker"),
            noise_multiplier=2.0)

def build(path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    private = privatize(model, optimizer, plan, clip_norm=0.7, batch_size=8, run=path,
                        source=test_source(seed="crash"))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return private, schedule

def train(path, data=x):
    private, schedule = build(path)
    batches = TensorBatches((data, y), in_order(40, 8))
    accuracy = lambda m: {"accuracy": (m(x).argmax(1) == y).double().mean()}
    fit_model(private, batches, nn.CrossEntropyLoss(), scheduler=schedule, evaluate=accuracy,
              evaluate_every=4, checkpoint_every=3)
    hasher = hashlib.sha256()
    for p in private.model.state_dict().values():
        hasher.update(p.numpy().tobytes())
    metrics = list(private.run.metrics())
    private.close(keep_keys=True)
    return {"digest": hasher.hexdigest(), "metrics": metrics, "released": private.plan.steps}

def child(work, kill_after=None):
    """Run `work` in a forked process; (result, number of calls) or None when it was killed."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        calls = 0
        def count(frame, event, arg):
            nonlocal calls
            calls += 1
            if calls == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
        code = 0
        try:
            sys.setprofile(count)
            out = work()
            sys.setprofile(None)
            os.write(write, json.dumps([out, calls]).encode())
        except BaseException as error:
            sys.setprofile(None)
            os.write(write, json.dumps([f"{type(error).__name__}: {error}", calls]).encode())
        os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    return None if os.WIFSIGNALED(status) else json.loads(data)

train(folder / "warm")  # torch imports half of itself at the first step; once is enough
reference, calls = child(lambda: train(folder / "reference"))
# A look at the model, drawn at random, makes a third more calls: take the count without one.
calls = min([calls, *(child(lambda: train(folder / f"count{i}"))[1] for i in range(5))])
rng, results = random.Random(seed), []
for i in range(instants):
    path, kills = folder / f"run{i}", 0
    # Most calls are those of the first look at the model: every third kill falls late.
    late = 4 * calls // 5 if i % 3 == 2 else 1
    out = child(lambda: train(path), kill_after=rng.randrange(late, calls))
    while out is None:
        kills += 1
        again = rng.randrange(1, calls) if kills < 2 and i % 2 else None
        released = 0
        if (path / "ledger.sqlite").exists():
            import sqlite3
            db = sqlite3.connect(path / "ledger.sqlite")
            try:
                released = db.execute("SELECT count(*) FROM steps").fetchone()[0]
            except sqlite3.OperationalError:
                pass
            db.close()
        changed = None
        if released % 3 and kills == 1:  # a step behind the last checkpoint, with other data
            def tamper():
                other = x.clone()
                other[8 * ((released - 1) % 5)] += 1e-3
                train(path, other)
            # on a copy, so that the run itself stays as the crash left it
            import shutil
            copy = folder / f"copy{i}"
            shutil.copytree(path, copy)
            path_before, path = path, copy
            changed = child(tamper)[0]
            path = path_before
        out = child(lambda: train(path), kill_after=again)
    verdict = verify(path)
    results.append({"same": out[0] == reference, "kills": kills, "answer": verdict.answer,
                    "failures": [*verdict.refuted, *verdict.unchecked],
                    "changed": changed if kills else None, "out": str(out[0])[:300],
                    "mode": oct(os.stat(path / "checkpoints/key.json").st_mode & 0o777)})
print(json.dumps(results))
'''


def crash(tmp_path, *, instants, seed):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path), str(instants), str(seed)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == instants
    for result in results:
        assert result["same"], result
        assert result["failures"] == [], result
        assert result["answer"] == "NOT PRIVATE"  # the test seed
        assert result["mode"] == "0o600"
        if result["changed"] is not None:
            assert result["changed"].startswith("ReplayRefused"), result
    return results


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_a_few_instants(tmp_path):
    assert sum(r["kills"] for r in crash(tmp_path, instants=2, seed=1)) >= 2


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_thirty_instants(tmp_path):
    results = crash(tmp_path, instants=30, seed=2)
    assert sum(r["kills"] for r in results) >= 30
    assert any(r["changed"] for r in results)

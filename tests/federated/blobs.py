"""A small task of two blobs, a model for it, what a run folder says of its users, and a kill."""

from __future__ import annotations

import itertools
import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tests.conftest import ENTROPY
from torch import nn

from noshuffle.federated.tasks import FederatedTask
from noshuffle.release.folder import RunFolder
from noshuffle.release.history import History

_KILLED = itertools.count()


def a_task(users: int = 30, *, held_out: int = 200, prefix: str | None = "u") -> FederatedTask:
    """Every user has a few points, some have none; ids are numbers without a prefix."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 9, users)
    y = rng.integers(0, 2, sizes.sum() + held_out)
    x = rng.normal(size=(len(y), 1, 2, 2)) * 20 + 128 + 30 * (2 * y - 1)[:, None, None, None]
    pixels, labels = torch.from_numpy(x.clip(0, 255).astype(np.uint8)), torch.from_numpy(y)
    n, starts = int(sizes.sum()), np.append(0, np.cumsum(sizes))
    names = tuple(i if prefix is None else f"{prefix}{i}" for i in range(users))
    return FederatedTask(
        "blobs", "image", names, starts, pixels[:n], labels[:n], pixels[n:], labels[n:], 2
    )


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def fact(run: Path) -> str | None:
    """How users were told apart, by the log."""
    return History.read(RunFolder(run)).facts().get("user_identity")


def saved(run: Path) -> str:
    """The assumptions of the saved statement."""
    return " ".join(json.loads((run / "statement.json").read_text())["assumptions"])


def killed(job: Callable[[], object]) -> None:
    """Do this in a process of its own, which is then killed: nothing is closed."""
    name = f"killed {next(_KILLED)}"
    child = os.fork()
    if child == 0:
        ENTROPY.go_on(name)
        try:
            job()
            os.kill(os.getpid(), signal.SIGKILL)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # whatever went wrong: the tests are the parent's
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL

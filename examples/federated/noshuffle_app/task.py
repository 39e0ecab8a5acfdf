"""What both halves of the app agree on: data by user, the model, local training."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from flwr.app import Context
from torch import nn

from noshuffle.federated import LocalTraining
from noshuffle.federated.clients import cross_entropy
from noshuffle.federated.flower_client import Parts
from noshuffle.federated.tasks import FederatedTask, load_task
from noshuffle.training.models import build, default_for


def digits(users: int) -> FederatedTask:
    """scikit-learn's 8 × 8 digits, dealt to users; the last 297 images are for testing."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.from_numpy((found.images * 15.9375).astype(np.uint8)).unsqueeze(1)
    y = torch.from_numpy(found.target.astype(np.int64))
    rows = np.concatenate([np.arange(user, 1500, users) for user in range(users)])
    starts = np.cumsum([0, *(len(range(user, 1500, users)) for user in range(users))])
    return FederatedTask(
        "digits", "image", tuple(range(users)), starts, x[rows], y[rows], x[1500:], y[1500:], 10
    )


def toy(users: int) -> FederatedTask:
    """Two clouds of points, dealt to users: nothing to load, for tests and a quick look."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 8 * users + 64)
    x = rng.normal(128 + 25 * (2 * y - 1)[:, None], 30, (len(y), 4)).clip(0, 255)
    pixels, labels = torch.from_numpy(x.astype(np.uint8)).reshape(-1, 1, 2, 2), torch.from_numpy(y)
    n, starts = 8 * users, np.arange(users + 1) * 8
    return FederatedTask(
        "toy",
        "image",
        tuple(range(users)),
        starts,
        pixels[:n],
        labels[:n],
        pixels[n:],
        labels[n:],
        2,
    )


OWN = {"digits": digits, "toy": toy}


def model_name(task: FederatedTask) -> str:
    return "linear" if task.name in OWN else default_for(task.kind, task.shape)


def model_for(task: FederatedTask) -> nn.Module:
    """The architecture. Its first weights are public and the same everywhere."""
    torch.manual_seed(0)
    if task.name in OWN:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(task.shape), task.classes))
    return build(model_name(task), task.shape, task.classes)


@lru_cache(maxsize=2)
def task_of(name: str, users: int) -> FederatedTask:
    return OWN[name](users) if name in OWN else load_task(name)


def parts_of(context: Context) -> Parts:
    """What a client trains with."""
    config = context.run_config
    task = task_of(str(config["task"]), int(config["users"]))
    local = LocalTraining(
        learning_rate=float(config["local-lr"]),
        steps=int(config["local-steps"]),
        batch_size=int(config["local-batch"]),
    )
    return task, model_for(task), local, cross_entropy

"""What draws noise cannot become two: copies, pickles and forks are refused, workers are not."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from noshuffle.convex import PrivateLogisticRegression
from noshuffle.errors import ReuseRefused, Unsupported
from noshuffle.noise import NoiseStream
from noshuffle.noise import test_source as make_source
from noshuffle.participation import MinSeparation, SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import identity
from noshuffle.training import privatize
from noshuffle.training.private import Private

LOSS = nn.CrossEntropyLoss()


def private_of(**options: Any) -> Private:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    plan = Plan(participation=SinglePass(steps=6), strategy=identity(), noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return privatize(model, optimizer, plan, clip_norm=1.0, batch_size=2, **options)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 3, generator=generator), torch.randint(2, (2,), generator=generator)


def server() -> Any:
    from noshuffle.federated import ServerOptimizer

    plan = Plan.fit(MinSeparation(8, 4, 2), mechanism="tree", noise_multiplier=1.0, unit="user")
    return ServerOptimizer(
        {"w": torch.zeros(2)},
        plan,
        clip=1.0,
        cohort_size=2,
        optimizer_fn=lambda p: torch.optim.SGD(p, lr=1.0),
    )


def stream() -> NoiseStream:
    return NoiseStream(identity().recipe(5), make_source(seed=1), {"w": (4,)}, scale=1.0, steps=5)


def learned() -> PrivateLogisticRegression:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (60, 2))
    model = PrivateLogisticRegression(
        epsilon=1.0, horizon=200, bounds=(-1, 1), classes=[0, 1], batch_size=10
    )
    return model.partial_fit(x, (x[:, 0] > 0).astype(int))


BUILDERS: dict[str, Callable[[], Any]] = {
    "Private": private_of,
    "ServerOptimizer": server,
    "NoiseStream": stream,
    "LearningStream": lambda: learned()._stream,
    "Release": lambda: private_of()._parts.release,
}


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps])
def test_nothing_that_draws_noise_is_copied(name: str, way: Callable[[Any], Any]) -> None:
    with pytest.raises(Unsupported, match="neither copied nor pickled") as told:
        way(BUILDERS[name]())
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("name", ["Private", "ServerOptimizer", "NoiseStream"])
def test_not_even_its_outer_shell(name: str) -> None:
    """A shallow copy of a stream has a step counter of its own."""
    with pytest.raises(Unsupported, match=f"a {name} is neither"):
        copy.copy(BUILDERS[name]())


def test_models_and_estimators_are_copied_as_ever() -> None:
    private = private_of()
    private.step(LOSS, *batch(0), ids=[0, 1])
    twin = copy.deepcopy(private.model)
    assert torch.equal(twin.weight, private.model.weight)
    model = learned()
    fresh = clone(model)
    assert fresh.get_params() == model.get_params()
    assert not hasattr(fresh, "privacy_")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(other.coef_, model.coef_)


def in_fork(work: Callable[[], Any]) -> str:
    """What `work` came to in a forked process: "done", or the name and text of its error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
            said = "done"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as file:
        return file.read().decode()


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@needs_fork
@quiet
@pytest.mark.parametrize("kept", ["in memory", "in a folder"])
def test_a_fork_does_not_train(kept: str, tmp_path: Any) -> None:
    options = {} if kept == "in memory" else {"run": tmp_path / "run"}
    private = private_of(**options)
    private.step(LOSS, *batch(0), ids=[0, 1])
    said = in_fork(lambda: private.step(LOSS, *batch(1), ids=[2, 3]))
    assert said.startswith("ReuseRefused: this process is a fork")
    assert in_fork(private.statement) == "done"  # looking does no harm
    private.step(LOSS, *batch(2), ids=[4, 5])  # the owner goes on
    assert private.steps_released == 2


@needs_fork
@quiet
def test_a_fork_uses_no_other_noise_either() -> None:
    server_, stream_ = server(), stream()
    values = {"w": torch.zeros(4)}
    works: list[Callable[[], Any]] = [
        lambda: server_.open(["ada"]),
        lambda: stream_.add_(values),
    ]
    for work in works:
        assert in_fork(work).startswith("ReuseRefused: this process is a fork")
    stream_.add_(values)
    with pytest.raises(ReuseRefused, match="build it in the process that trains"):
        _as_if_forked(stream_).add_(values)


def _as_if_forked(stream: NoiseStream) -> NoiseStream:
    stream._owner = 1
    return stream


@needs_fork
@quiet
def test_workers_of_a_data_loader_may_hold_a_private_model() -> None:
    private = private_of()
    x, y = (torch.cat(parts) for parts in zip(*(batch(step) for step in range(6))))

    class Watched(TensorDataset):
        owner = private  # goes along into every worker

    loader = DataLoader(
        Watched(x, y, torch.arange(12)), batch_size=2, num_workers=1, multiprocessing_context="fork"
    )
    for bx, by, ids in loader:
        private.step(LOSS, bx, by, ids=ids)
    assert private.steps_released == 6

"""Federated messages and checkpoints of strangers: refused in one line, or what they say they are.

No byte of theirs is ever unpickled, and a sum never holds more than a clipped difference of each
user who was asked.
"""

from __future__ import annotations

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.damage import EXAMPLES, ODD, check_one_line, counted, spoiled

from noshuffle import MinSeparation, Plan, PrivateSum, SinglePass
from noshuffle.errors import NoshuffleError
from noshuffle.federated import Rounds, ServerOptimizer
from noshuffle.release.folder import load
from noshuffle.strategies import identity


class Exploit:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_arrays_of_strangers(tmp_path: Path) -> None:
    app = pytest.importorskip("flwr.app", reason="needs the extra 'federated'")
    from flwr.app import Array

    from noshuffle.federated.flower_wire import to_tensors

    chance = random.Random(0)
    buffer = io.BytesIO()
    np.save(buffer, np.arange(6, dtype=np.float32).reshape(2, 3))
    objects = io.BytesIO()
    np.save(objects, np.array([Exploit(tmp_path / "owned")], dtype=object), allow_pickle=True)
    plain = pickle.dumps(Exploit(tmp_path / "owned"))
    for number in range(150 * EXAMPLES):
        data = (
            spoiled(buffer.getvalue(), chance)
            if number > 1
            else (objects.getvalue(), plain)[number]
        )
        sent = app.ArrayRecord()
        sent["w"] = Array("float32", (2, 3), chance.choice(("numpy.ndarray", "x")), data)
        try:
            found = to_tensors(sent)
        except NoshuffleError as error:
            check_one_line(error)
        else:
            assert found["w"].is_floating_point() or found["w"].dtype != torch.float32
    for value in ODD:
        with pytest.raises(NoshuffleError):
            to_tensors(value)
    assert not (tmp_path / "owned").exists()


def rounds() -> Rounds:
    plan = Plan(
        participation=MinSeparation(steps=4, separation=1, max_participations=4),
        strategy=identity(), noise_multiplier=0.0, unit="user",
    )  # fmt: skip
    server = ServerOptimizer(
        {"w": torch.zeros(3), "b": torch.zeros(())}, plan, clip=1.0, cohort_size=2,
        optimizer_fn=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    )  # fmt: skip
    return Rounds(server)


NUMBERS = st.floats(width=32, allow_nan=True, allow_infinity=True)
DELTAS = st.dictionaries(
    st.sampled_from(["w", "b", "c", ""]),
    st.one_of(
        st.lists(NUMBERS, max_size=4).map(lambda v: torch.tensor(v, dtype=torch.float32)),
        NUMBERS.map(torch.tensor),
        st.just(torch.zeros(3, dtype=torch.int64)),
        st.just(torch.zeros(3, dtype=torch.complex64)),
        st.just(torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1e30]), (3,))),
        st.sampled_from([None, 3, "w", [1.0]]),
    ),
    max_size=3,
)
STEPS = st.one_of(st.integers(-2, 3), st.booleans(), st.just(2**70))


@given(st.lists(st.tuples(st.integers(0, 4), DELTAS, STEPS, st.none() | NUMBERS), max_size=6))
@settings(max_examples=25 * EXAMPLES)
def test_replies_of_strangers(replies: list[tuple[int, Any, Any, Any]]) -> None:
    """Whatever comes, the parameters move by at most one clipped difference for each user."""
    counted()
    run = rounds()
    work = run.begin([0, 1])
    assert work is not None
    honest = {"w": torch.tensor([0.6, 0.0, 0.0]), "b": torch.tensor(0.0)}
    for user, delta, step, norm in replies:
        try:
            run.receive(user, delta, norm=norm, step=step)
        except NoshuffleError as error:
            check_one_line(error)
    run.receive(1, honest, step=work.step)
    moved = run.finish().parameters
    length = torch.cat([value.reshape(-1) for value in moved.values()]).norm()
    assert length.isfinite()
    assert length <= 2 / 2 * (1 + 1e-6)


def test_checkpoints_of_strangers(tmp_path: Path) -> None:
    chance = random.Random(4)
    sums = PrivateSum(Plan.fit(SinglePass(4), mechanism="tree", noise_multiplier=1.0), clip=1.0,
                      shape=(3,), run=tmp_path / "run")  # fmt: skip
    sums.add(np.ones((1, 3)), ids=[1])
    path = sums.save()
    names = ("state.pt", "secret.pt", "model.safetensors")
    files = {name: (path / name).read_bytes() for name in names}
    torch.save({"step": Exploit(tmp_path / "owned")}, path / "state.pt")
    with pytest.raises(NoshuffleError):
        load(path, with_secret=True)
    for _ in range(60 * EXAMPLES):
        for name, data in files.items():
            (path / name).write_bytes(data)
        name = chance.choice([*files])
        (path / name).write_bytes(spoiled(files[name], chance))
        try:
            found = load(path, with_secret=True)
        except NoshuffleError as error:
            check_one_line(error)
        else:
            assert isinstance(found, dict)
            assert isinstance(found["model"], dict)
    assert not (tmp_path / "owned").exists()

"""Fingerprints in ordinary memory: the same with and without a compiler, and what they tell."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from noshuffle import Plan, SinglePass
from noshuffle.c_library import text_of
from noshuffle.errors import InvalidInput
from noshuffle.noise import test_source
from noshuffle.release import digest as device_print
from noshuffle.release import digest_host as host_print
from noshuffle.release import fingerprint
from noshuffle.release.fork import fork
from noshuffle.training import privatize

needs_loop = pytest.mark.skipif(
    host_print.library() is None, reason="no C compiler: there is one form only"
)
TYPES = [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8, torch.bool]
SIZES = st.sampled_from([0, 1, 7, 2047, 2048, 2049, 4096, 4097, 6150, 70_001])


@needs_loop
@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from(TYPES), st.binary(max_size=40), st.integers(0, 2**31))
def test_the_loop_gives_the_digest_of_the_torch_form(
    size: int, dtype: torch.dtype, secret: bytes, seed: int
) -> None:
    host_print._seen[0] = host_print._SOON + 1
    draw = torch.Generator().manual_seed(seed)
    value = (torch.randn(size, generator=draw) * 100).to(dtype)
    keys = device_print.Keys(secret, device="cpu")
    expected = device_print.plain(keys, [value]).numpy().tobytes()
    assert host_print.of_tensor(value, secret) == expected
    assert device_print.of_tensor(value, secret) == expected


def test_without_a_compiler_the_fingerprints_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = (torch.randn(30, 200), {"y": torch.arange(30)}, "words", np.arange(3))
    monkeypatch.setattr(host_print, "_seen", [host_print._SOON + 1])
    fast = fingerprint.of_batch(batch, np.arange(30), secret=b"s")
    monkeypatch.setattr(host_print, "library", lambda: None)
    assert fingerprint.of_batch(batch, np.arange(30), secret=b"s") == fast


def test_threads_and_strides_do_not_matter_but_every_element_does() -> None:
    before = torch.get_num_threads()
    value = torch.randn(300, 500)
    try:
        found = set()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.add(host_print.of_tensor(value, b"s"))
            found.add(host_print.of_tensor(value.t().contiguous().t(), b"s"))
        assert len(found) == 1
        for place in (0, 2048, 4095, 77_777, 149_999):
            other = value.clone()
            other.view(-1)[place] += 1
            found.add(host_print.of_tensor(other, b"s"))
        assert len(found) == 6
        assert host_print.of_tensor(value, b"another") not in found
    finally:
        torch.set_num_threads(before)


def test_a_batch_is_told_apart_by_type_shape_order_and_ids() -> None:
    x, y = torch.arange(6.0), torch.arange(6)
    batches = [(x, y), (y, x), (x.view(2, 3), y), (x.double(), y), (x, y, y), ([x], y)]
    prints = [fingerprint.of_batch(batch, None) for batch in batches]
    prints += [fingerprint.of_batch((x, y), np.arange(n)) for n in (2, 3)]
    assert len(set(prints)) == len(prints)
    assert all(len(one) == fingerprint.SIZE for one in prints)


def test_a_state_is_told_apart_by_settings_values_and_shapes() -> None:
    w, b = torch.randn(9000), torch.zeros(3)
    states = [
        ({"lr": 0.1}, [w, b]),
        ({"lr": 0.2}, [w, b]),
        ({"lr": 0.1}, [w + 1e-6, b]),
        ({"lr": 0.1}, [b, w]),
        ({"lr": 0.1}, [w.view(90, 100), b]),
        ({"lr": 0.1}, [w.double(), b]),
        ({"lr": 0.1}, []),
    ]
    prints = [fingerprint.of_state(*state) for state in states]
    assert len(set(prints)) == len(prints)
    assert prints[0] == fingerprint.of_state({"lr": 0.1}, [w.clone(), b.bfloat16().float()])


def test_remembered_places_give_the_same_state() -> None:
    luck, samples = torch.Generator().manual_seed(0), fingerprint.Samples()
    own = [
        nn.Parameter(torch.randn(70, 130, generator=luck)),
        nn.Parameter(torch.randn(5, generator=luck).bfloat16()),
        nn.Parameter(torch.randn(40, 30, generator=luck).mT),  # not one block: read anew every time
        nn.Parameter(torch.randn((), generator=luck)),
        nn.Parameter(torch.empty(0)),
    ]
    seen = set()

    def same() -> None:
        found = fingerprint.of_state({"lr": 0.1}, own, samples=samples)
        assert found == fingerprint.of_state({"lr": 0.1}, own)
        assert found not in seen
        seen.add(found)

    same()
    for p in own[:4]:  # changed where it lies
        with torch.no_grad():
            p.add_(1.0)
        same()
    for p in own[:4]:  # moved elsewhere
        p.data = p.data.clone() + 1.0
        same()
    own[0].data = own[0].data.view(130, 70)  # the same place, another shape
    same()
    own[0].data = own[0].data[:, :35].contiguous()
    same()
    own[0] = nn.Parameter(own[0].detach().double())
    same()


@needs_loop
@pytest.mark.parametrize(
    ("right", "wrong"),
    [("<< 32)) >> 32", "<< 32)) >> 31"), ("(b + j) * LANES + l", "(b + j) * LANES")],
)
def test_a_wrong_build_is_not_used(right: str, wrong: str) -> None:
    text = text_of("digest.c")
    assert text.count(right) == 1
    built = host_print._build(text.replace(right, wrong))
    assert built is not None
    assert not host_print._agrees(built)


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM meta WHERE name = 'prints'",
        "DELETE FROM meta WHERE name = 'noise'",
        "UPDATE meta SET value = '1' WHERE name = 'noise'",
    ],
)
def test_a_run_of_another_version_is_refused(tmp_path: Path, change: str) -> None:
    plan = Plan.fit(SinglePass(steps=3), mechanism="tree", noise_multiplier=2.0)

    def start(run: str = "run") -> object:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        source = test_source(seed=run)
        return privatize(
            model, optimizer, plan, clip_norm=1.0, batch_size=4, source=source, run=tmp_path / run
        )  # fmt: skip

    private = start()
    private.step(nn.MSELoss(), torch.randn(4, 2), torch.randn(4, 1))  # type: ignore[attr-defined]
    start()
    private.ledger._file.db.execute(change)  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match=r"another version.*fork the run") as refused:
        start()
    assert "\n" not in str(refused.value)
    fork(tmp_path / "run", tmp_path / "forked")
    start("forked")


def test_plain_values_are_told_apart() -> None:
    x = torch.ones(2)
    pairs = [((x, 1, 23), (x, 12, 3)), ((x, 1.0), (x, 1)), ((x, None), (x, "None"))]
    for one, other in pairs:
        assert fingerprint.of_batch(one, None) != fingerprint.of_batch(other, None)


def test_an_extra_row_of_zeros_is_another_batch() -> None:
    x, longer = torch.ones(3, 4), torch.zeros(4, 4)
    longer[:3] = x
    assert host_print.of_tensor(x, b"s") == host_print.of_tensor(longer, b"s")  # as padding must
    assert fingerprint.of_batch((x,), None) != fingerprint.of_batch((longer,), None)

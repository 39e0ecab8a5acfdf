"""Blocks as replays, and sums side by side, against their slow twins; one rank, no capture."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from noshuffle.noise import test_source as make_source
from noshuffle.participation import Epochs
from noshuffle.plan import Plan
from noshuffle.release import digest as device_print
from noshuffle.strategies import tree
from noshuffle.training.compiled.blocks import BlockSums, block_sums
from noshuffle.training.distributed import privatize_distributed
from noshuffle.training.group.fixed_sum import FixedSum, _rounded, runs_of

BATCH, BLOCK = 10, 4


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory):
    """A process group of one."""
    file = tmp_path_factory.mktemp("world") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(drop=0.0, clip_norm=0.5):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 5), nn.Tanh(), nn.Dropout(drop), nn.Linear(5, 3)]
    model = nn.Sequential(*layers)
    plan = Plan(participation=Epochs(4, 2), strategy=tree(), noise_multiplier=1.0)
    private = privatize_distributed(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        plan,
        clip_norm=clip_norm,
        batch_size=BATCH,
        block=BLOCK,
        source=make_source(seed=5),
    )
    return private


def walk(private, steps=8, size=BATCH):
    luck = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, size, 6, generator=luck), torch.randint(3, (2, size), generator=luck)
    loss = nn.CrossEntropyLoss()
    for step in range(steps):
        ids = np.arange(size) + size * (step % 2)
        private.step(loss, x[step % 2], y[step % 2], ids=ids)
    return torch.cat([p.detach().flatten() for p in private.model.parameters()])


def test_replayed_blocks_equal_eager_ones():
    """Blocks of 4, 4 and 2 rows, to the last bit."""
    slow, fast = made(), made()
    fast._parts.sums = BlockSums(fast._parts, captures=False)
    assert torch.equal(walk(fast), walk(slow))
    sums = fast._parts.sums
    assert not sums.fallbacks
    assert not fast.fallbacks
    assert "blocks of 2 or 4 rows are replays" in fast.why
    assert "blocks not captured: graphs need a CUDA device" in slow.why
    assert slow._parts.sums == "graphs need a CUDA device, the parameters are on cpu"
    for program in sums._programs.values():  # no raw sum stays behind
        assert all(not bool(v.any()) for v in program.values.values())


def test_replayed_blocks_draw_by_their_place():
    """With dropout a block has its own random numbers, the same in every run of the step."""
    ends = []
    for _ in range(2):
        private = made(drop=0.5)
        private._parts.sums = BlockSums(private._parts, captures=False)
        torch.manual_seed(len(ends))  # the generator outside has nothing to do with it
        ends.append(walk(private))
        assert list(private._parts.sums._draws.values()) == [True, True]
    assert torch.equal(*ends)


def test_a_block_is_clipped_row_by_row():
    private = made(clip_norm=0.01)
    sums = BlockSums(private._parts, captures=False)
    x, y = torch.randn(3, 6), torch.tensor([0, 1, 2])
    loss = nn.CrossEntropyLoss()

    def of(rows):
        got = sums.clipped_sum(loss, (x[rows], y[rows]), rng=contextlib.nullcontext)
        return torch.cat([v.flatten() for v in got.values.values()]).clone(), got

    every, got = of([0, 1, 2])
    assert len(got.norms) == len(got.losses) == 3
    alone = [of([i])[0] for i in range(3)]
    torch.testing.assert_close(sum(alone), every, rtol=1e-5, atol=1e-8)
    assert all(float(v.norm()) <= 0.01 for v in alone)
    x[1, 0] = torch.nan
    spoiled, got = of([0, 1, 2])
    torch.testing.assert_close(spoiled, alone[0] + alone[2], rtol=1e-5, atol=1e-8)
    assert got.bad.tolist() == [False, True, False]
    five = (torch.randn(5, 6), torch.zeros(5).long())
    assert sums.clipped_sum(loss, five, rng=None) is None  # a third size


def test_why_there_are_no_replays():
    parts = made()._parts
    assert block_sums(parts, is_sharded=True)[1].startswith("sharded parameters")
    assert block_sums(parts, is_sharded=False)[0] is None


@pytest.mark.parametrize("seed", range(5))
def test_values_side_by_side_are_the_values(seed):
    luck = torch.Generator().manual_seed(seed)
    shapes = {
        f"p{i}": (int(n), 3) for i, n in enumerate(torch.randint(0, 90, (7,), generator=luck))
    }
    shapes["scalar"], shapes["long"] = (), (2**22 + 5,)
    values = {n: torch.randn(s, generator=luck) for n, s in shapes.items()}
    values["p1"] = values["p1"].double()
    slow, fast = (FixedSum(shapes, bound=0.7, device="cpu") for _ in range(2))
    for _ in range(3):
        slow.add(values, units=2)
        scale, most = 2.0 ** (40 - fast.exponent), 2 * 2.0**40
        for run, total in zip(fast.runs, fast._totals):  # what a GPU does
            total.add_(_rounded(fast._side_by_side(values, run), scale, most))
    assert all(torch.equal(slow.values[n], fast.values[n]) for n in shapes)
    expected = {n: slow.to_float(slow.values[n], torch.float32) for n in shapes}
    kinds = dict.fromkeys(shapes, torch.float32)
    found = fast.reduced(lambda total: None, kinds)
    assert list(found) == list(shapes)
    assert all(torch.equal(found[n], expected[n]) for n in shapes)
    assert len(runs_of(shapes)) == 2


def test_digests_of_many_tensors_are_those_of_each():
    values = [torch.randn(n) for n in (3, 5000, 1)] + [torch.arange(4), torch.zeros(0)]
    every = device_print.of_tensors(values, b"secret")
    assert every == [device_print.of_tensors([v], b"secret")[0] for v in values]
    assert all(a != b for a, b in itertools.combinations(every[:4], 2))
    assert device_print.of_tensors([], b"secret") == []

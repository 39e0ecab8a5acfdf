"""Fast, lean and automatic: the same sum in one part or several, whatever the memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.clipping.twin import flat
from torch import nn
from torch.nn import functional as F

import noshuffle as ns
from noshuffle.clipping import Flat, Ghost, PerLayer, auto
from noshuffle.clipping import microbatches as modes
from noshuffle.clipping.microbatches import Need, decide, microbatches
from noshuffle.errors import InvalidInput

GIB = 2**30


def small():
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(9, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Flatten(), nn.Linear(30, 3)
    )
    return model.double(), (torch.randint(9, (11, 5)), torch.randint(3, (11,)))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.data())
def test_pieces_hold_every_example_and_every_unit_once(size, parts, data):
    assert (
        sum(range(*p.rows.indices(size)) == range(0) for p in microbatches(size, parts, None)) == 0
    )
    rows = torch.cat([torch.arange(size)[p.rows] for p in microbatches(size, parts, None)])
    assert rows.tolist() == list(range(size))
    units = torch.tensor(data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)))
    cut = microbatches(size, parts, units)
    rows = torch.cat([torch.arange(size)[p.rows] for p in cut])
    assert sorted(rows.tolist()) == list(range(size))
    first = 0
    for piece in cut:
        assert torch.equal(piece.units + first, units[piece.rows])
        first += int(piece.units.max()) + 1
    assert first == int(units.max()) + 1
    assert len(cut) <= max(1, parts)
    if len(cut) == 1:  # the batch goes through as it is
        assert cut[0].rows == slice(0, size)
        assert torch.equal(cut[0].units, units)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=8), st.integers(2, 8), st.booleans())
def test_every_example_is_clipped_with_its_own_unit(whose, parts, masked):
    """Also where one unit has most of the batch, so that nothing is left to cut."""
    torch.manual_seed(1)
    model, units = nn.Linear(5, 3).double(), torch.tensor(whose)
    batch = torch.randn(len(whose), 5).double(), torch.randint(3, (len(whose),))
    marks = (torch.arange(len(whose)) % 3 > 0).long() if masked else None
    options = {"clip": Flat(0.5), "units": units, "weights": marks}
    want = Ghost(mode="fast").clipped_sum(model, F.cross_entropy, batch, **options)
    engine = Ghost(mode="lean")
    engine.clipped_sum(model, F.cross_entropy, batch, **options)
    for known in engine._known[model].values():
        for chosen in known.parts.values():
            chosen.parts = parts
    got = engine.clipped_sum(model, F.cross_entropy, batch, **options)
    torch.testing.assert_close(got.norms, want.norms)
    torch.testing.assert_close(got.losses, want.losses)
    torch.testing.assert_close(flat(got.values), flat(want.values))


@pytest.mark.parametrize("units", [None, torch.tensor([4, 0, 4, 1, 1, 0, 4, 6, 6, 2, 0])])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_lean_is_fast_in_parts(units, masked, layerwise, reduce):
    model, batch = small()
    marks = torch.tensor([1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1]) if masked else None
    clip = PerLayer(0.5) if layerwise else Flat(0.5)
    options = {"clip": clip, "units": units, "weights": marks, "reduce": reduce}
    want = Ghost(mode="fast").clipped_sum(model, F.cross_entropy, batch, **options)
    engine = Ghost(mode="lean")
    got = engine.clipped_sum(model, F.cross_entropy, batch, **options)
    torch.testing.assert_close(flat(got.values), flat(want.values))
    for field in ("norms", "losses", "bad", "present"):
        torch.testing.assert_close(getattr(got, field), getattr(want, field))
    assert got.bound == want.bound
    assert "lean, in 2 parts" in engine.why


@pytest.mark.parametrize("where", [0, 10])
def test_a_bad_example_spoils_only_itself_in_every_part(where):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(11, 4).double(), torch.randint(3, (11,))
    good = torch.ones(11)
    good[where] = 0.0
    want = Ghost().clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(0.5), weights=good)
    x = x.clone()
    x[where] = torch.nan
    got = Ghost(mode="lean").clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(0.5))
    torch.testing.assert_close(flat(got.values), flat(want.values))
    assert got.nonfinite == 1
    assert bool(got.bad[where])


def test_decisions():
    need = Need(1 * GIB, 1 * GIB)
    assert decide("fast", 32, need, 0.0)[0] == 1
    assert decide("lean", 32, None, 0.0)[0] == 2
    assert decide("lean", 1, None, 0.0)[0] == 1
    assert decide("auto", 32, None, 0.0)[0] == 1
    assert decide("auto", 32, need, 40 * GIB)[0] == 1
    assert decide("auto", 32, need, 20 * GIB)[0] == 2
    assert decide("auto", 32, need, 0.0)[0] == 32
    parts, words = decide("auto", 32, need, 12 * GIB)
    assert (parts, words) == (4, "lean, in 4 parts: needs about 9.00 GiB of 12.00 GiB free")


def test_auto_follows_the_memory_that_is_left(monkeypatch):
    model, batch = small()
    left = [100.0 * GIB]
    monkeypatch.setattr(modes, "free_bytes", lambda device: left[0])
    monkeypatch.setattr(modes, "measure", lambda run, **known: run(2) or Need(0.0, 1.0 * GIB))
    engine = auto(model)
    assert engine.mode == "auto"
    want = engine.clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.5))
    assert engine.why.endswith("fast, in one part: needs about 11.00 GiB of 100.00 GiB free")
    left[0] = 7.0 * GIB  # the optimizer has taken its share after the first step
    got = engine.clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.5))
    assert "lean, in 2 parts: needs about 6.00 GiB" in engine.why
    torch.testing.assert_close(flat(got.values), flat(want.values))
    assert engine.why.count("parts") == 1


def test_longer_batches_are_measured_again(monkeypatch):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3))
    monkeypatch.setattr(modes, "free_bytes", lambda device: 9.0 * GIB)
    seen = []

    def measure(run, *, size, device):
        seen.append(size)
        return Need(0.0, (1.0 if len(seen) == 1 else 3.0) * GIB)

    monkeypatch.setattr(modes, "measure", measure)
    engine = Ghost()
    for length in (10, 10, 40, 40):
        x, y = torch.randint(9, (6, length)), torch.randint(3, (6, length))
        loss = ns.ModelLoss(
            lambda model, x, y: F.cross_entropy(model(x).mT, y, reduction="none").mean(1),
            by_row=True,
        )
        engine.clipped_sum(model, loss, (x, y), clip=Flat(1.0))
    assert seen == [6, 6]
    assert "lean, in 4 parts" in engine.why


def test_out_of_memory_is_tried_again_in_more_parts(monkeypatch):
    model, batch = small()
    want = Ghost().clipped_sum(model, F.cross_entropy, batch, clip=Flat(0.5))
    monkeypatch.setattr(modes, "free_bytes", lambda device: 100.0 * GIB)
    monkeypatch.setattr(modes, "measure", lambda run, **known: Need(0.0, 1.0 * GIB))
    sizes = []

    class Full(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            sizes.append(len(x))
            if len(x) > 4 and len(sizes) > tried[0]:
                raise torch.OutOfMemoryError("pretended")
            return self.inner(x)

    full, engine, tried = Full(model), Ghost(), [10**9]
    engine.clipped_sum(full, F.cross_entropy, batch, clip=Flat(0.5))
    tried[0] = len(sizes)
    got = engine.clipped_sum(full, F.cross_entropy, batch, clip=Flat(0.5))
    torch.testing.assert_close(flat(got.values), flat(want.values))
    assert sizes[tried[0] :] == [11, 6, 3, 3, 3, 2]
    tried[0] = 0
    with pytest.raises(torch.OutOfMemoryError):  # as asked for, and no other way
        Ghost(mode="fast").clipped_sum(full, F.cross_entropy, batch, clip=Flat(0.5))


def test_a_mode_that_does_not_exist_is_refused():
    with pytest.raises(InvalidInput, match="mode"):
        Ghost(mode="small")


@pytest.mark.parametrize("mode", ["fast", "lean"])
def test_gradient_accumulation_is_one_batch(mode):
    def trained(split):
        torch.manual_seed(0)
        model, (x, y) = small()
        plan = ns.Plan.fit(ns.SinglePass(steps=3), mechanism="tree", noise_multiplier=1.0)
        private = ns.privatize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            plan,
            clip_norm=0.5,
            batch_size=11,
            engine=Ghost(mode=mode),
            source=ns.noise.test_source(seed="modes"),
        )
        for shift in range(2):  # another batch at every step
            rows = ((x + shift) % 9).split(split)
            with private.accumulate() as step:
                for part in zip(rows, y.split(split)):
                    step.add(F.cross_entropy, part)
        return flat(dict(model.named_parameters()))

    torch.testing.assert_close(trained(11), trained(4), rtol=1e-9, atol=1e-10)


def test_a_graph_that_changes_is_walked_again():
    class Switch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.is_chain = nn.Linear(4, 4), nn.Linear(4, 4), True

        def forward(self, x):
            h = self.a(x)
            return self.b(h) if self.is_chain else h + self.b(x)

    torch.manual_seed(0)
    model, engine = Switch().double(), Ghost()
    x, y = torch.randn(5, 4).double(), torch.randint(4, (5,))
    for is_chain in (True, False, False, True):
        model.is_chain = is_chain
        got = engine.clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(1e6))
        loss = F.cross_entropy(model(x), y, reduction="sum")
        want = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(flat(got.values), torch.cat([g.reshape(-1) for g in want]))
    assert not engine.fallbacks

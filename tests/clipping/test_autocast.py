"""Under autocast the model runs in half precision; norms, factors and sums never do."""

import pytest
import torch
from tests.clipping.twin import flat, loop
from torch import nn
from torch.nn import functional as F

from noshuffle.clipping import Flat, Ghost, PerExample


@pytest.mark.parametrize("engine", [PerExample, Ghost])
@pytest.mark.parametrize("grouped", [False, True])
def test_one_unit_moves_the_sum_by_no_more_than_the_bound(engine, grouped):
    """A product that autocast rounds to bfloat16 would be up to half a percent too long."""
    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
        x, y = torch.randn(4, 64), torch.randint(10, (4,))
        options = {"weights": torch.tensor([1, 1, 0, 0] if grouped else [1, 0, 0, 0])}
        if grouped:
            options["units"] = torch.tensor([0, 0, 1, 1])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = engine().clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(0.1), **options)
        assert all(value.dtype == torch.float32 for value in got.values.values())
        norm = float(torch.cat([v.double().flatten() for v in got.values.values()]).norm())
        assert 0.097 < norm <= 0.1


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_convolutions_of_users_are_not_written_out_in_half_precision(reduce):
    """The gradients of a convolution are written out where users are added up."""
    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 9, 4))
        x, y = torch.randn(4, 2, 5, 5), torch.randint(4, (4,))
        options = {"weights": torch.tensor([1, 1, 0, 0]), "units": torch.tensor([0, 0, 1, 1])}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = Ghost().clipped_sum(
                model, F.cross_entropy, (x, y), clip=Flat(0.1), reduce=reduce, **options
            )
        norm = float(torch.cat([v.double().flatten() for v in got.values.values()]).norm())
        assert 0.097 < norm <= 0.1


class Encoder(nn.Module):
    """A transformer whose forward pass has its own autocast, so that the way back has none."""

    def __init__(self):
        super().__init__()
        self.mix = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.last(self.mix(x).mean(1))


@pytest.mark.parametrize("engine", [PerExample, Ghost])
def test_what_vmap_cannot_do_behind_an_autocast_is_done_one_by_one(engine):
    """Layer norm and fused attention, with torch 2.13; a type that is wrong is said as it is."""
    torch.manual_seed(0)
    model, own = Encoder(), engine()
    batch = torch.randn(6, 5, 8), torch.randint(3, (6,))
    truth, norms, clip = loop(model, F.cross_entropy, batch)
    got = own.clipped_sum(model, F.cross_entropy, batch, clip=Flat(clip))
    torch.testing.assert_close(got.norms, norms, rtol=3e-2, atol=0.0)
    torch.testing.assert_close(flat(got.values), flat(truth), rtol=0.0, atol=2e-2 * clip)
    assert not own.fallbacks or "vmap gave up: expected scalar type BFloat16" in own.fallbacks[0]
    assert bool(own.fallbacks) == (engine is PerExample)
    plain, wrong = nn.Sequential(nn.Flatten(), nn.Linear(40, 3)), (batch[0].double(), batch[1])
    with pytest.raises(RuntimeError, match=r"same dtype|scalar type"):
        own.clipped_sum(plain, F.cross_entropy, wrong, clip=Flat(clip))


def test_looks_at_a_batch_run_the_model_under_the_autocast_of_its_steps():
    """In float32 a look would set the most memory of a run, and see another model."""
    seen: list[tuple[int, bool]] = []

    class Noting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(2, 8, 3), nn.Linear(8, 1)

        def forward(self, x):
            out = torch.tanh(self.first(x))
            seen.append((len(x), out.dtype is torch.bfloat16))
            rated = self.last(out.mean((2, 3)))
            return rated[:, 0]

    torch.manual_seed(0)
    engine, model, size = Ghost(), Noting(), 24
    x, y = torch.randn(size, 2, 9, 9), torch.randn(size)
    for _ in range(12):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            engine.clipped_sum(model, nn.MSELoss(), (x, y), clip=Flat(1.0))
    assert not engine.fallbacks
    assert len([rows for rows, _ in seen if rows == size]) > 12
    assert all(is_cast for _, is_cast in seen)


def test_gradients_that_are_written_out_wider_are_compared_as_half_precision():
    """What autograd went through is rounded, whichever type a form has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, bias=False), nn.Tanh(), nn.Flatten())
    x, signs = torch.randn(4, 16, 5, 5), torch.rand(4)
    x[1] *= 0.01  # products of an example that nearly cancel
    engine = Ghost()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        engine.clipped_sum(
            model, lambda out, s: 3e4 * (out.mean(1).float() * s).sum(), (x, signs), clip=Flat(1.0)
        )
    assert not engine.fallbacks

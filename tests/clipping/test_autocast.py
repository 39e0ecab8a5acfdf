"""Under autocast the model runs in half precision; norms, factors and sums never do."""

import pytest
import torch
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

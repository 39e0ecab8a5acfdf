"""A model that keeps examples apart when it is tried, and mixes them later, is found out."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from noshuffle.clipping import Flat, Ghost

LOSS = nn.CrossEntropyLoss()


class Late(nn.Module):
    """Adds the batch's mean once it was told to, which nothing in the module shows."""

    def __init__(self, mixes: list[bool]) -> None:
        super().__init__()
        self.layer, self.said = nn.Linear(4, 3), lambda: mixes[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + x.mean(0) if self.said() else x)


def test_examples_that_begin_to_mix_are_found_at_the_next_power_of_two() -> None:
    torch.manual_seed(0)
    mixes = [False]
    model, engine = Late(mixes), Ghost()
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    for call in range(1, 33):
        mixes[0] = call > 26
        told = pytest.warns(RuntimeWarning, match="since call 8") if call == 32 else nullcontext()
        with told:
            engine.clipped_sum(model, LOSS, (x, y), clip=Flat(1.0))
        assert bool(engine.fallbacks) == (call == 32), call
    assert "from call 32 on: the loss of an example changes" in engine.fallbacks[0]
    # From here on every example is by itself: a changed row moves the sum by its own part only.
    other = x.clone()
    other[0] = 100.0
    sums = [
        engine.clipped_sum(model, LOSS, (rows, y), clip=Flat(1.0)).values for rows in (x, other)
    ]
    gap = torch.cat([(sums[0][name] - sums[1][name]).flatten() for name in sums[0]]).norm()
    assert float(gap) <= 2.0


def test_a_model_that_stays_as_it_is_is_tried_again_and_kept() -> None:
    model, engine = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), Ghost()
    for _ in range(9):
        engine.clipped_sum(model, LOSS, (torch.randn(6, 4), torch.randint(3, (6,))), clip=Flat(1.0))
    assert not engine.fallbacks


@pytest.mark.parametrize(("per_example", "is_found"), [(3e-8, False), (3e-3, True)])
def test_a_loss_that_all_but_cancels_may_move_as_far_as_rounding(
    per_example: float, is_found: bool
) -> None:
    """A sum over more rows is rounded otherwise, by parts in ten million: that is no mixing."""
    torch.manual_seed(0)
    counted, engine = [0.0], Ghost()

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return torch.cat([out * (1.0 + counted[0] * len(x)), out], 1)

    def loss(out: Tensor, size: Tensor) -> Tensor:
        return (size[:, 0] * out[:, 0] - size[:, 1] * out[:, 1]).sum()

    model, x, sizes = nn.Sequential(Counted(4, 1)), torch.randn(6, 4), torch.ones(6, 2)
    sizes[:, 1] = 0.3
    engine.clipped_sum(model, loss, (x, sizes), clip=Flat(1.0))
    sizes[:, 0], sizes[:, 1], counted[0] = 1e3, 1e3 * (1.0 - 1e-5), per_example
    told = pytest.warns(RuntimeWarning, match="apart no longer") if is_found else nullcontext()
    with told:
        for _ in range(8):
            engine.clipped_sum(model, loss, (x, sizes), clip=Flat(1.0))
    assert any("from call 8 on" in line for line in engine.fallbacks) == is_found

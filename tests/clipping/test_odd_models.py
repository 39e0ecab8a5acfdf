"""Odd models: one example moves the clipped sum by its clip norm at most, or the model is refused.

On request (-m slow) by brute force: two runs whose data differ in one example of the last step.
Else the sum of the second batch is compared with that of examples one by one.
"""

from collections.abc import Callable

import pytest
import torch
from tests.clipping.odd_models import APART, MIXING, Odd, data
from tests.clipping.twin import flat
from torch import nn

from noshuffle.clipping import Flat, Ghost, PerExample
from noshuffle.errors import Unsupported


@pytest.mark.parametrize("odd", MIXING, ids=str)
def test_examples_that_mix_are_found_in_the_first_batch(odd: Odd) -> None:
    torch.manual_seed(0)
    model, engine = odd.make(), Ghost()
    try:
        for seed in (0, 1):
            engine.clipped_sum(model, odd.loss, data(odd, seed), clip=Flat(0.2))
    except Unsupported:
        assert odd.name == "running mean"
        return
    assert any("whole model written out" in line for line in engine.fallbacks)


@pytest.mark.parametrize("odd", APART, ids=str)
def test_examples_that_are_apart_are_taken_at_once(odd: Odd) -> None:
    torch.manual_seed(0)
    model, engine = odd.make(), Ghost()
    engine.clipped_sum(model, odd.loss, data(odd, 0), clip=Flat(0.2))
    batch = data(odd, 1)
    got = engine.clipped_sum(model, odd.loss, batch, clip=Flat(0.2))
    assert not any("whole model" in line for line in engine.fallbacks)
    if odd.name not in ("dropout", "noise"):
        want = PerExample().clipped_sum(model, odd.loss, batch, clip=Flat(0.2))
        torch.testing.assert_close(flat(got.values), flat(want.values), rtol=1e-4, atol=1e-6)


def last_sum(
    odd: Odd, steps: int, change: Callable[..., torch.Tensor] | None = None
) -> torch.Tensor:
    """The clipped sum of the last step of a run, where `change` is made to its batch."""
    torch.manual_seed(0)
    model, engine = odd.make(), Ghost()
    for step in range(steps - 1):
        torch.manual_seed(1000 + step)
        got = engine.clipped_sum(model, odd.loss, data(odd, step), clip=Flat(0.2)).values
        rng = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.requires_grad:
                    noise = 0.01 * torch.randn(p.shape, generator=rng)
                    p -= 0.5 * (got[name] / odd.size + noise)
    batch = data(odd, steps - 1)
    torch.manual_seed(1000 + steps)
    batch = batch if change is None else tuple(map(change, batch))
    return flat(engine.clipped_sum(model, odd.loss, batch, clip=Flat(0.2)).values).double()


@pytest.mark.slow
@pytest.mark.parametrize("odd", [*MIXING, *APART], ids=str)
def test_one_example_by_brute_force(odd: Odd) -> None:
    if odd.name == "running mean":
        pytest.skip("refused")
    is_random = any(word in odd.name for word in ("dropout", "noise", "mixup inside"))
    for steps in (1, 5, 30):
        whole = last_sum(odd, steps)
        for i in range(4):

            def without(t: torch.Tensor, i: int = i) -> torch.Tensor:
                return torch.cat([t[:i], t[i + 1 :]])

            def other(t: torch.Tensor, i: int = i) -> torch.Tensor:
                far = t.clone()
                if t.dim() > 1:
                    far[i] = 20 * t[i] if t.is_floating_point() else 1
                return far

            gaps = [(last_sum(odd, steps, other) - whole).norm() / 2]  # two contributions
            if not is_random:  # with a row less, others have other masks
                gaps.append((last_sum(odd, steps, without) - whole).norm())
            assert max(map(float, gaps)) <= 0.2 * 1.0001, (steps, i)


@pytest.mark.parametrize("engine", [Ghost, PerExample])
def test_a_loss_that_keeps_something_of_its_examples_is_refused(
    engine: type[Ghost] | type[PerExample],
) -> None:
    class ByRunningMean(nn.Module):
        """A loss in units of its running mean."""

        mean = 1.0

        def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(out, y)
            self.mean = 0.5 * self.mean + 0.5 * float(loss.detach())
            return loss / self.mean

    plain, loss = APART[0], ByRunningMean()
    with pytest.raises(Unsupported, match="keeps something of one example"):
        engine().clipped_sum(plain.make(), loss, data(plain, 0), clip=Flat(0.2))
    assert loss.mean == 1.0

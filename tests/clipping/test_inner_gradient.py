"""A model that asks autograd in its own forward pass: a force as the gradient of an energy."""

import pytest
import torch
from tests.clipping.twin import flat, loop
from torch import nn

from noshuffle.clipping import Flat, Ghost, PerExample

LOSS = nn.CrossEntropyLoss()


class Force(nn.Module):
    """h − ∂e/∂h, or x − ∂e/∂x, of an energy e; with `keeps` it is trained through, too."""

    def __init__(self, of, *, keeps, layer):
        super().__init__()
        self.of, self.keeps, self.layer = of, keeps, layer
        self.out = nn.Linear(3, 2)
        self.is_asking = True

    def forward(self, x):
        if not self.is_asking:
            return self.out(self.at(x))
        with torch.enable_grad():
            if self.of == "input":
                x = x.clone().requires_grad_()
            h = self.at(x)
            by = x if self.of == "input" else h
            (force,) = torch.autograd.grad(
                h.tanh().square().sum(), by, create_graph=self.keeps, retain_graph=True
            )
        return self.out(h - force)

    def at(self, x):
        found = self.layer(x[:, None] if isinstance(self.layer, nn.LSTM) else x)
        return found[0][:, 0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 3), lambda: nn.LSTM(3, 3, batch_first=True)])
@pytest.mark.parametrize("of", ["input", "layer"])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("engine", [Ghost, PerExample])
def test_a_gradient_in_the_forward_pass_is_not_taken_for_that_of_the_loss(
    engine, keeps, of, make
) -> None:
    torch.manual_seed(0)
    model = Force(of, keeps=keeps, layer=make()).double()
    batch = torch.randn(7, 3, dtype=torch.float64), torch.randint(2, (7,))
    truth, norms, clip = loop(model, LOSS, batch)
    own = engine()
    found = own.clipped_sum(model, LOSS, batch, clip=Flat(clip))
    torch.testing.assert_close(flat(found.values), flat(truth), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.norms.double(), norms, rtol=1e-6, atol=1e-12)
    if engine is Ghost and of == "layer":  # all of it goes by the output of the layer
        assert not own.fallbacks


def test_a_model_that_asks_only_after_its_trial() -> None:
    """Before, the first gradient to arrive stood for the loss's: silently, or as an IndexError."""
    torch.manual_seed(0)
    model, engine = Force("layer", keeps=True, layer=nn.Linear(3, 3)).double(), Ghost()
    batch = torch.randn(7, 3, dtype=torch.float64), torch.randint(2, (7,))
    for asks in (False, True, False):
        model.is_asking = asks
        truth, _, clip = loop(model, LOSS, batch)
        found = engine.clipped_sum(model, LOSS, batch, clip=Flat(clip))
        torch.testing.assert_close(flat(found.values), flat(truth), rtol=1e-9, atol=1e-12)
    assert not engine.fallbacks

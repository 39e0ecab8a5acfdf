"""`loss.backward(); private.optimizer.step()` gives what `private.step` gives."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from tests.runs import agree
from torch import nn

from noshuffle.clipping import Ghost, PerExample
from noshuffle.errors import (
    InvalidInput,
    NoshuffleError,
    ParticipationViolation,
    ProbablyNotMeant,
    Unsupported,
)
from noshuffle.noise import test_source
from noshuffle.participation import Epochs, SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import tree
from noshuffle.training import passes, privatize


@pytest.fixture(autouse=True)
def _off_grid(monkeypatch):
    """Sums that differ in their last bits may be rounded to neighbouring points of the grid."""
    monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(48, 4)
    )


class Words(nn.Module):
    """Keyword inputs, an embedding, and one output per token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 4)
        self.out = nn.Linear(4, 11)

    def forward(self, tokens, *, mask):
        return self.out(torch.tanh(self.embed(tokens)) * mask[..., None]).transpose(1, 2)


def make(model, **options):
    plan = Plan(participation=SinglePass(steps=6), strategy=tree(), noise_multiplier=0.5)
    return privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9),
        plan,
        clip_norm=0.3,
        batch_size=8,
        source=test_source(seed=1),
        **options,
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_same_as_private_step(reduction):
    g = torch.Generator().manual_seed(2)
    x, y = 4 * torch.randn(24, 1, 6, 6, generator=g), torch.randint(4, (24,), generator=g)
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    ours, theirs = convolutional(), convolutional()
    loop, plain = make(ours, loss_reduction=reduction), make(theirs)
    optimizer = loop.optimizer
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    other = torch.optim.lr_scheduler.ExponentialLR(plain._parts.optimizer, 0.8)
    for t in range(3):
        rows = slice(8 * t, 8 * t + 8)
        optimizer.zero_grad()
        loss = loss_fn(ours(x[rows]), y[rows])
        loss.backward()
        optimizer.step(ids=range(8 * t, 8 * t + 8))
        schedule.step()
        plain.step(nn.CrossEntropyLoss(), x[rows], y[rows], ids=range(8 * t, 8 * t + 8))
        other.step()
    agree(ours, theirs)
    assert "depend on one example alone" in loop.statement().words()


def test_keyword_inputs_and_token_losses():
    g = torch.Generator().manual_seed(3)
    tokens, target = (torch.randint(11, (8, 5), generator=g) for _ in range(2))
    mask = torch.ones(8, 5)
    ours, theirs = Words(), Words()
    loop, plain = make(ours), make(theirs)
    _ = loop.optimizer
    nn.functional.cross_entropy(ours(tokens, mask=mask), target).backward()
    loop.optimizer.step()
    from noshuffle.clipping import ModelLoss

    loss = ModelLoss(lambda m, a, b, c: nn.functional.cross_entropy(m(a, mask=b), c))
    plain.step(loss, tokens, mask, target)
    agree(ours, theirs)


class Apart(torch.autograd.Function):
    """All outputs of a model go through it, and outputs without a gradient get None from it: what
    DistributedDataParallel puts behind a model."""

    @staticmethod
    def forward(ctx, *outputs):
        ctx.set_materialize_grads(False)
        return tuple(one.view_as(one) for one in outputs)

    @staticmethod
    def backward(ctx, *grads):
        return grads


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x):
        return self.first(x), self.second(x)


def test_an_output_that_gets_none_for_its_gradient_has_none():
    g = torch.Generator().manual_seed(5)
    x, y = torch.randn(8, 3, generator=g), torch.randint(2, (8,), generator=g)
    ours, theirs = TwoOutputs(), TwoOutputs()
    loop, plain = make(ours), make(theirs)
    optimizer = loop.optimizer
    first, _ = Apart.apply(*ours(x))
    nn.functional.cross_entropy(first, y).backward()
    optimizer.step()
    plain.step(lambda out, y: nn.functional.cross_entropy(out[0], y, reduction="none"), x, y)
    agree(ours, theirs)


def test_accumulation_and_two_losses_on_one_output():
    g = torch.Generator().manual_seed(4)
    x, y = torch.randn(8, 1, 6, 6, generator=g), torch.randint(4, (8,), generator=g)
    ours, theirs = convolutional(), convolutional()
    loop, plain = make(ours), make(theirs)
    optimizer, loss_fn = loop.optimizer, nn.CrossEntropyLoss()
    for i in (0, 4):
        out = ours(x[i : i + 4])
        loss_fn(out, y[i : i + 4]).backward(retain_graph=True)
        loss_fn(out, y[i : i + 4]).backward()
    with torch.no_grad():
        ours(x)  # evaluation leaves no trace
    ours(x)  # nor does a pass without backward
    optimizer.step(ids=range(8))
    assert loop.steps_released == 1

    def twice(out, target):
        return 2.0 * loss_fn(out, target)

    plain.step(twice, x, y, ids=range(8))
    agree(ours, theirs)
    with pytest.raises(InvalidInput, match="no backward pass"):
        optimizer.step()


def test_violation_releases_nothing():
    model = convolutional()
    loop = make(model)
    x, y = torch.randn(8, 1, 6, 6), torch.randint(4, (8,))
    optimizer, loss_fn = loop.optimizer, nn.CrossEntropyLoss()
    loss_fn(model(x), y).backward()
    optimizer.step(ids=range(8))
    before = [p.detach().clone() for p in model.parameters()]
    loss_fn(model(x), y).backward()
    with pytest.raises(ParticipationViolation):
        optimizer.step(ids=range(7, 15))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    loss_fn(model(x + 1), y).backward()
    with pytest.raises(InvalidInput, match="8 examples, got 9"):
        optimizer.step(ids=range(8, 17))
    assert loop.steps_released == 1


def test_mixing_both_forms_and_private_step_leaves_no_pass_behind():
    model = convolutional()
    loop = make(model)
    optimizer = loop.optimizer
    x, y = torch.randn(8, 1, 6, 6), torch.randint(4, (8,))
    loop.step(nn.CrossEntropyLoss(), x, y)
    with pytest.raises(InvalidInput, match="no backward pass"):
        optimizer.step()


def test_refusals():
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    loop = make(model)
    model.eval()
    model(torch.randn(8, 3)).sum().backward()
    with pytest.raises(InvalidInput, match="no backward pass"):
        loop.optimizer.step()
    with pytest.raises(Unsupported, match="before privatize"):
        loop.optimizer.add_param_group({"params": []})


def epochs(path=None):
    model = convolutional()
    plan = Plan(participation=Epochs(2, 2), strategy=tree(), noise_multiplier=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    return model, privatize(model, optimizer, plan, clip_norm=0.3, batch_size=4, run=path)


def test_a_listened_model_can_be_copied_and_saved(tmp_path):
    model, loop = epochs()
    twin = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    x = torch.randn(2, 1, 6, 6)
    for other in (twin, again):
        other(x).sum().backward()
    with pytest.raises(InvalidInput, match="no backward pass"):
        loop.optimizer.step()
    hooks = len(model._forward_hooks)
    del loop
    gc.collect()
    assert len(model._forward_hooks) == hooks - 1


def test_what_does_not_come_through_the_output_is_refused():
    x, y, loss_fn = torch.randn(8, 3), torch.randint(2, (8,)), nn.CrossEntropyLoss()
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    loop = make(model)
    before = [p.detach().clone() for p in model.parameters()]
    decay = 1e-2 * sum(p.square().sum() for p in model.parameters())
    (loss_fn(model(x), y) + decay).backward()
    with pytest.raises(Unsupported, match="penalty on weights"):
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    (loss_fn(model(x), y) + model[0](x).square().mean()).backward()
    with pytest.raises(Unsupported, match="parts of it called by themselves"):
        loop.optimizer.step()
    assert loop.steps_released == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_norm_clipped_before_the_step_does_no_harm():
    torch.manual_seed(0)
    x, y, loss_fn = torch.randn(16, 3), torch.randint(2, (16,)), nn.CrossEntropyLoss()
    models = [nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    loop, plain = make(models[0]), make(models[1])
    loss_fn(models[0](x[8:]), y[8:]).backward()
    nn.utils.clip_grad_norm_(models[0].parameters(), 1e-3)
    with pytest.warns(ProbablyNotMeant, match="has no effect"):
        loop.optimizer.step()
    plain.step(loss_fn, x[8:], y[8:])
    agree(*models)


@pytest.mark.parametrize("how", ["autocast", "bfloat16", "double"])
def test_other_precisions_are_not_taken_for_something_missing(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 5))
    model = model.to({"bfloat16": torch.bfloat16, "double": torch.float64}.get(how, torch.float32))
    loop = make(model)
    x = torch.randn(8, 12, dtype=next(model.parameters()).dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        out = model(x)
    nn.functional.cross_entropy(out.float(), torch.randint(5, (8,))).backward()
    loop.optimizer.step()
    assert loop.steps_released == 1


def ordinary_step(private, x, y):
    private.optimizer.zero_grad()
    nn.functional.cross_entropy(private.model(x), y).backward()
    private.optimizer.step()


@pytest.mark.parametrize("engine", [Ghost, PerExample])
def test_a_model_in_which_one_large_row_moves_all_others_is_refused(engine):
    """Examples taken one by one in the second pass would be clipped with outputs of the first."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x if bool((x.abs() < 50).all()) else x / 255)

    torch.manual_seed(0)
    private = make(Scaled(4, 3), engine=engine())
    before = private.model.weight.detach().clone()
    with pytest.raises(Unsupported, match="must not mix"):
        ordinary_step(private, torch.randn(8, 4), torch.randint(3, (8,)))
    assert torch.equal(private.model.weight, before)
    with pytest.raises(NoshuffleError, match="half-way"):  # its row is written, and stays charged
        ordinary_step(private, torch.randn(8, 4), torch.randint(3, (8,)))
    assert private.steps_released == 1


def test_the_losses_of_other_models_are_left_alone(monkeypatch):
    """Nothing of a private run is looked at while somebody else captures a graph of his own: a
    number that is read from a GPU meanwhile ends the capture."""
    looked, plain = [], passes.are_cleared

    def counted(parameters, **options):
        if parameters is private._listener.own:  # runs of other tests may still listen
            looked.append(1)
        return plain(parameters, **options)

    monkeypatch.setattr(passes, "are_cleared", counted)
    x, y = torch.randn(8, 1, 6, 6), torch.randint(4, (8,))
    loss_fn, other = nn.CrossEntropyLoss(), convolutional()
    private = make(convolutional())
    private.step(loss_fn, x, y)  # leaves private gradients in .grad
    loss_fn(other(x), y).backward()
    assert looked == []
    private = make(ours := convolutional())
    for is_captured in (False, True):
        monkeypatch.setattr(passes, "is_capturing", lambda _, is_it=is_captured: is_it)
        loss_fn(ours(x), y).backward()
        assert looked == [1]
        loss_fn(other(x), y).backward()
        assert len(looked) == 1 + (not is_captured)
        looked.clear()
    private.optimizer.zero_grad()

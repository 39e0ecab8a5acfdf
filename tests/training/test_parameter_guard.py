"""A run keeps to the parameters it was built for, and nobody else moves its optimizer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import noshuffle as ns
from noshuffle.errors import InvalidInput, NoshuffleError, Unsupported
from noshuffle.training.hooks import ParameterGuard, has_hooks

LOSS = nn.CrossEntropyLoss()
PLAN = ns.Plan.fit(ns.SinglePass(steps=6), mechanism="tree", noise_multiplier=2.0)


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def made() -> tuple[nn.Sequential, torch.optim.Optimizer, ns.Private]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, ns.privatize(model, optimizer, PLAN, clip_norm=1.0, batch_size=8)


def other() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 3))


def exchanged(model: nn.Sequential) -> None:
    model[0][0] = nn.Linear(4, 5)


def exchanged_above(model: nn.Sequential) -> None:
    model[0] = nn.Sequential(nn.Linear(4, 5), nn.Tanh())


def replaced(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(model[1].weight.detach().clone())


def assigned(model: nn.Sequential) -> None:
    model.load_state_dict(other().state_dict(), assign=True)


@pytest.mark.parametrize("change", [exchanged, exchanged_above, replaced, assigned])
def test_a_parameter_that_was_replaced_is_refused(change: Callable[[nn.Sequential], None]) -> None:
    model, _, private = made()
    private.step(LOSS, *data(0))
    change(model)
    with pytest.raises(InvalidInput, match="no longer the one that was privatized"):
        private.step(LOSS, *data(1))
    assert private.steps_released == 1


def test_freezing_and_adding_is_refused_before_anything_is_released() -> None:
    model, _, private = made()
    private.step(LOSS, *data(0))
    model[1].bias.requires_grad_(False)
    with pytest.raises(InvalidInput, match=r"parameter '1\.bias' was frozen after privatize"):
        private.step(LOSS, *data(1))
    assert private.steps_released == 1
    model[1].bias.requires_grad_(True)
    model.append(nn.Linear(3, 3))
    with pytest.raises(InvalidInput, match=r"parameter '2\.(weight|bias)' became trainable"):
        private.step(LOSS, *data(1))
    del model[2]
    with pytest.raises(NoshuffleError, match="half-way"):
        private.step(LOSS, *data(1))


def test_values_may_be_loaded_in_place() -> None:
    model, _, private = made()
    private.step(LOSS, *data(0))
    model.load_state_dict(other().state_dict())
    model.eval()
    private.step(LOSS, *data(1))


def test_an_old_loop_with_the_old_optimizer_is_refused() -> None:
    model, optimizer, private = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    x, y = data(0)
    before = [p.detach().clone() for p in model.parameters()]
    LOSS(model(x), y).backward()
    with pytest.raises(Unsupported, match=r"would train on raw gradients; use private\.step"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    private.optimizer.zero_grad()
    private.criterion(LOSS)(model(x), y).backward()
    private.optimizer.step()  # the same pass, the private way
    scheduler.step()
    private.step(LOSS, *data(1))
    with pytest.raises(Unsupported, match="belongs to a private run"):
        optimizer.step()
    with pytest.raises(InvalidInput):
        private.step(LOSS, torch.zeros(3, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(Unsupported, match="belongs to a private run"):  # also after a failure
        optimizer.step()


def test_the_optimizer_is_free_again_when_the_run_is_over() -> None:
    model, optimizer, private = made()
    second = ns.privatize(model, optimizer, PLAN, clip_norm=1.0, batch_size=8)
    private.step(LOSS, *data(0))
    second.step(LOSS, *data(0))
    private.close()
    with pytest.raises(Unsupported, match="belongs to a private run"):
        optimizer.step()
    del second
    optimizer.step()


def test_a_guard_is_no_hook_of_somebody_else() -> None:
    _, optimizer, private = made()
    assert not has_hooks(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *given: None)
    assert has_hooks(optimizer)
    handle.remove()
    optimizer.register_step_post_hook(lambda *given: None)
    assert has_hooks(optimizer)
    assert private.steps_released == 0


def test_optimizers_that_cannot_be_private_are_refused() -> None:
    model = nn.Linear(2, 1)
    for optimizer in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(Unsupported, match=optimizer.__name__):
            ns.privatize(model, optimizer(model.parameters()), PLAN, clip_norm=1.0, batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True)
    with pytest.raises(Unsupported, match="differentiable"):
        ns.privatize(model, optimizer, PLAN, clip_norm=1.0, batch_size=8)


@pytest.mark.parametrize("kind", ["nested", "sparse", "inference"])
def test_tensors_that_cannot_be_cut_are_refused_in_one_line(kind: str) -> None:
    _, _, private = made()
    x, y = data(0)
    with torch.inference_mode():
        made_there = x.clone()
    kinds = {"nested": torch.nested.nested_tensor(list(x)), "inference": made_there}
    with pytest.raises(InvalidInput, match=kind):
        private.step(LOSS, {**kinds, "sparse": x.to_sparse()}[kind], y)
    assert private.steps_released == 0


def test_a_parameter_that_joins_the_optimizer_later_is_refused() -> None:
    """Its raw gradient moved it in every private step, and the model learned from it."""
    _, optimizer, private = made()
    private.step(LOSS, *data(0))
    scale = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [scale]})
    scale.grad = torch.ones(3)
    with pytest.raises(InvalidInput, match=r"shape \(3,\) outside the private model joined"):
        private.step(LOSS, *data(1))
    assert private.steps_released == 1
    assert torch.equal(scale, torch.ones(3))
    scale.requires_grad_(False)
    scale.grad = None
    private.step(LOSS, *data(1))


def test_tied_and_shared_places() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    guarded = ParameterGuard(model, dict(model.named_parameters()))
    guarded.check()
    guarded.check_names(["0.weight"])
    model[1].weight = nn.Parameter(torch.zeros(5, 4))  # has a name of its own now
    guarded.check()
    with pytest.raises(InvalidInput, match=r"'1\.weight' became trainable"):
        guarded.check_names([name for name, _ in model.named_parameters()])


def test_arguments_of_the_wrong_kind_are_named() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"clip_norm": 1.0, "batch_size": 8}
    with pytest.raises(InvalidInput, match="engine must be a clipping engine"):
        ns.privatize(model, optimizer, PLAN, engine="ghost", **options)
    with pytest.raises(InvalidInput, match="must be noshuffle's Source, got int"):
        ns.privatize(model, optimizer, PLAN, source=3, **options)


def test_a_loss_cannot_step_the_optimizer() -> None:
    model, optimizer, private = made()
    before = [p.detach().clone() for p in model.parameters()]

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.step()
        return LOSS(out, y)

    with pytest.raises(Unsupported, match="belongs to a private run"):
        private.step(loss, *data(0))
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before))

"""No other optimizer moves the parameters of a private run; those of other models go on."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import noshuffle as ns
from noshuffle.clipping.captured import memory
from noshuffle.errors import Unsupported
from noshuffle.noise import test_source as make_source

LOSS = nn.CrossEntropyLoss()
PLAN = ns.Plan.fit(ns.SinglePass(steps=6), mechanism="tree", noise_multiplier=2.0)
REFUSED = r"this (SGD|AdamW|LBFGS) is not the optimizer of the private run that trains '"


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def private_of(model: nn.Module, optimizer: Any = None, **options: Any) -> ns.Private:
    own = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return ns.privatize(model, own, PLAN, clip_norm=1.0, batch_size=8, **options)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def raw_pass(model: nn.Module) -> None:
    x, y = data(9)
    LOSS(model(x), y).backward()


def same(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def one_of_them(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([list(model.parameters())[-1], nn.Parameter(torch.zeros(2))])


def view(model: nn.Module) -> torch.optim.Optimizer:
    """A parameter of its own, in a part of the same memory."""
    part = nn.Parameter(model.get_parameter("2.weight").data[1:])
    part.grad = torch.ones_like(part)
    return torch.optim.SGD([part], lr=0.1)


def by_closure(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters())


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("make", [same, one_of_them, view, by_closure])
def test_a_second_optimizer_is_refused_before_it_moves_anything(
    make: Callable[[nn.Module], torch.optim.Optimizer], is_before: bool
) -> None:
    model = model_of()
    raw = make(model) if is_before else None
    private = private_of(model)
    raw = raw or make(model)
    private.step(LOSS, *data(0))
    raw_pass(model)
    before = values(model)
    with pytest.raises(Unsupported, match=REFUSED) as told:
        raw.step(lambda: torch.zeros(()))
    assert "\n" not in str(told.value)
    assert all(map(torch.equal, before, values(model)))
    private.step(LOSS, *data(1))
    private.close()
    raw.step(lambda: torch.zeros(()))


def test_the_unchanged_loop_refuses_it_too_and_goes_on() -> None:
    model = model_of()
    private, raw = private_of(model), same(model)
    raw_pass(model)
    with pytest.raises(Unsupported, match=REFUSED):
        raw.step()
    private.optimizer.step()
    with private.accumulate() as step:
        step.add(LOSS, data(1))
        with pytest.raises(Unsupported, match=REFUSED):
            raw.step()
    assert private.steps_released == 2


def test_parameters_are_found_where_their_values_went() -> None:
    model = model_of()
    private = private_of(model)
    for p in model.parameters():
        p.data = p.data.clone()  # as `model.to` does
    other = nn.Parameter(torch.zeros(2))
    other.data = model.get_parameter("0.bias").data[:2]
    with pytest.raises(Unsupported, match=r"trains '0\.bias'"):
        torch.optim.SGD([other], lr=0.1).step()
    assert private.steps_released == 0


def test_optimizers_of_other_models_schedulers_and_averages_go_on() -> None:
    model = model_of()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    private = private_of(model, own)
    scheduler = torch.optim.lr_scheduler.StepLR(own, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    twin = copy.deepcopy(model)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    before = values(twin)
    for step in range(3):
        private.step(LOSS, *data(step))
        raw_pass(twin)
        other.step()
        scheduler.step()
        average.update_parameters(model)
        with torch.no_grad():
            model.get_parameter("2.weight").clamp_(-1.0, 1.0)
    assert not any(map(torch.equal, before, values(twin)))


def test_two_runs_on_one_model_go_on_beside_each_other() -> None:
    model = model_of()
    first, second = private_of(model), private_of(model)
    for step in range(2):
        first.step(LOSS, *data(step))
        second.step(LOSS, *data(step))
    assert first.steps_released == second.steps_released == 2


class Outer(torch.optim.SGD):
    """An optimizer that holds another one over the same parameters (Lookahead and its like)."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.base = torch.optim.SGD(self.param_groups, **settings)

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


def test_an_optimizer_may_hold_another_one() -> None:
    ends = []
    for kind in (Outer, torch.optim.SGD):
        model = model_of()
        private = private_of(model, kind(model.parameters(), lr=0.1), source=make_source(seed=1))
        private.step(LOSS, *data(0))
        ends.append(values(model))
    assert all(map(torch.equal, *ends))


def test_a_private_step_of_another_thread_excuses_nobody() -> None:
    model = model_of()
    other, raw = model_of(), same(model)
    private, beside = private_of(model), private_of(other)
    told: list[str] = []

    def stray() -> None:
        try:
            raw.step()
        except Unsupported as error:
            told.append(str(error))

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            thread = threading.Thread(target=stray)
            thread.start()
            thread.join()

    beside.close()
    beside = private_of(other, Slow(other.parameters(), lr=0.1))
    beside.step(LOSS, *data(0))
    assert len(told) == 1
    assert private.steps_released == 0


def test_nothing_is_kept_of_runs_that_are_gone() -> None:
    gc.collect()
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    model = model_of()
    private, raw = private_of(model), same(model)
    assert len(torch_optimizer._global_optimizer_pre_hooks) == max(before, 1)
    parameter, run = weakref.ref(model.get_parameter("0.weight")), weakref.ref(private)
    private.step(LOSS, *data(0))
    del private
    gc.collect()
    assert run() is None
    raw.step()
    del model, raw
    gc.collect()
    assert parameter() is None
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before


def test_a_compiled_step_of_another_optimizer_is_seen() -> None:
    model = model_of()
    twin = copy.deepcopy(model)
    raw, free = same(model), same(twin)
    steps = [torch.compile(one.step, backend="eager") for one in (raw, free)]
    raw_pass(model)
    raw_pass(twin)
    steps[0]()  # before there is a run
    private = private_of(model)
    raw_pass(model)
    before = values(model)
    with pytest.raises(Unsupported, match=REFUSED):
        steps[0]()
    assert all(map(torch.equal, before, values(model)))
    before = values(twin)
    steps[1]()
    assert not any(map(torch.equal, before, values(twin)))
    private.close()
    steps[0]()


def test_tensors_without_memory_have_no_place() -> None:
    assert memory(torch.empty(3, device="meta")) == 0
    assert memory(torch.empty(0)) == 0
    assert memory(torch.eye(2).to_sparse()) == 0
    one = torch.zeros(4)
    assert memory(one) == memory(one[2:]) != 0

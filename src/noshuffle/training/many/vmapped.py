"""K copies of any network with their own weights, run side by side by vmap.

    G[i, k] = ∇ loss(θ_k; x_i)          vmap over runs of vmap over examples of the gradient

Every layer that `torch.func.vmap` knows may occur; attention and recurrent layers run by the same
rewrites as in `clipping.per_example`. Dropout draws a mask of its own for every example of every
run. Buffers and frozen parameters are those of each run; layers that mix examples or write
statistics are refused, as for a single run.

The gradient of a linear layer is an outer product of what goes in and the gradient of what comes
out. Layers that are called once, with one vector an example, are found on a first example (their
names are `known`); their gradients stay in that form, which saves most of the time and memory.

State: the module that the calls go through, and the stacked tensors that are not trained.

>>> import torch
>>> net = lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))
>>> runs = Vmapped([net(), net()], loss_fn=nn.CrossEntropyLoss())
>>> params = {n: torch.stack([p, p]).detach() for n, p in net().named_parameters()}
>>> x, y = torch.randn(5, 3), torch.zeros(5, dtype=torch.int64)
>>> grads, losses = runs.example_gradients(params, (x, y))
>>> tuple(grads["0.weight"].squares().shape), tuple(losses.shape)    # examples × runs
((5, 2), (5, 2))
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from noshuffle.clipping import ModelLoss, validate
from noshuffle.clipping.check import evaluated, trainable
from noshuffle.clipping.objective import Criterion, _is_vmap_limit, batch_axes, one, take
from noshuffle.clipping.per_example import PerExample, _Bound
from noshuffle.clipping.stateless import call_with
from noshuffle.clipping.tape import GradientTape, rewritten
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.training.many.stacked import DenseByRun, Gradients, OuterByRun


class Vmapped:
    """One network to be run with stacked parameters (runs first)."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        loss_fn: Criterion | ModelLoss,
        device: torch.device | str = "cpu",
        known: Sequence[str] = (),
    ) -> None:
        self.runs = len(models)
        self._model = copy.deepcopy(models[0]).to(device)
        validate(self._model)
        self._bound = _Bound(self._model, loss_fn)
        self._fixed = {
            name: torch.stack([own[name] for own in map(_untrained, models)]).to(device)
            for name in _untrained(models[0])
        }
        self._known: dict[str, Any] = {n: self._model.get_submodule(n) for n in known}
        held = sum(layer.weight.numel() for layer in self._known.values())
        self.written = sum(p.numel() for p in trainable(self._model).values()) - held

    def scores(self, params: Mapping[str, Tensor], x: Any) -> Tensor:
        """Outputs of every network in eval mode: (batch, runs, …)."""

        def call(theta: dict[str, Tensor], fixed: dict[str, Tensor]) -> Tensor:
            out: Tensor = call_with(self._model, {**theta, **fixed}, (x,))
            return out

        with evaluated(self._model), self._vmap():
            found: Tensor = vmap(call, randomness="different")(dict(params), self._fixed)
        return found.transpose(0, 1)

    def example_gradients(
        self, params: Mapping[str, Tensor], batch: tuple[Any, ...]
    ) -> tuple[Gradients, Tensor]:
        """Gradient of each example's loss by parameter name, and the losses (batch, runs)."""
        inputs: dict[str, Tensor] = {}

        def loss(
            rest: dict[str, Tensor], probes: dict[str, Tensor], example: tuple[Any, ...], own: Any
        ) -> tuple[Tensor, dict[str, Tensor]]:
            inputs.clear()
            theta = {f"model.{name}": value for name, value in {**own, **rest}.items()}

            def forward(name: str, x: Tensor) -> Tensor:
                layer: Any = self._known[name]
                if name in inputs or x.numel() != layer.in_features:
                    raise InvalidInput(f"layer {name} is called in another way than at first")
                inputs[name] = x.reshape(-1)
                out: Tensor = nn.functional.linear(x, layer.weight, layer.bias) + probes[name]
                return out

            with _forwards(self._known, forward):
                value: Tensor = call_with(self._bound, theta, one(example))
            return value, dict(inputs)

        own = {name: value.detach() for name, value in params.items()}
        probed = {name for name in own if name.rpartition(".")[0] in self._known}
        rest = {name: value for name, value in own.items() if name not in probed}
        own = {**{name: own[name] for name in probed}, **self._fixed}
        probes = {name: torch.zeros_like(layer.weight[:, 0]) for name, layer in self._known.items()}
        gradient = grad_and_value(loss, argnums=(0, 1), has_aux=True)
        rows = (None, None, batch_axes(batch), None)
        by_row = vmap(gradient, in_dims=rows, randomness="different")
        by_run = vmap(by_row, in_dims=(0, None, None, 0), randomness="different")
        with self._vmap():
            found_by_run = by_run(rest, probes, batch, own)
        # Examples first. Not by out_dims, which fails for what is the same in all runs.
        (grads, outer), (losses, given) = tree_map(lambda t: t.transpose(0, 1), found_by_run)
        found: Gradients = {name: DenseByRun(value) for name, value in grads.items()}
        for name, g in outer.items():
            a = given[name]
            found[f"{name}.weight"] = OuterByRun(g, a[:, :1] if a.stride(1) == 0 else a)
            if f"{name}.bias" in params:
                found[f"{name}.bias"] = DenseByRun(g)
        return found, losses

    def check_memory(self, batch: tuple[Any, ...]) -> None:
        """Raise if the model keeps something of one example that the next one meets."""
        PerExample().check_state(self._model, self._bound.loss_fn, batch)

    def linear_layers(self, batch: tuple[Any, ...]) -> list[str]:
        """Linear layers that the first example of a batch calls once, with one vector.

        Neither their weights nor their biases are used in any other way: the loss does not depend
        on them once they are detached in that call.
        """
        owners = Counter(id(p) for _, p in self._model.named_parameters(remove_duplicate=False))
        layers = {
            name: layer
            for name, layer in self._model.named_modules()
            if type(layer) is nn.Linear
            and name
            and all(p.requires_grad and owners[id(p)] == 1 for p in layer.parameters())
        }
        calls: dict[str, list[bool]] = {name: [] for name in layers}

        def forward(name: str, x: Tensor) -> Tensor:
            layer = layers[name]
            calls[name].append(x.numel() == layer.in_features)
            bias = None if layer.bias is None else layer.bias.detach()
            return nn.functional.linear(x, layer.weight.detach(), bias)

        with self._vmap(), _forwards(layers, forward), torch.random.fork_rng():
            loss = self._bound(*take(batch, slice(0, 1)))
        held = [(name, p) for name, layer in layers.items() for p in layer.parameters()]
        if held and loss.requires_grad:
            grads = torch.autograd.grad(loss, [p for _, p in held], allow_unused=True)
            for (name, _), g in zip(held, grads):
                calls[name] += [False] * (g is not None)
        return [name for name, own in calls.items() if own == [True]]

    @contextmanager
    def _vmap(self) -> Iterator[None]:
        """With layers in the forms that vmap knows; what it cannot do is said in one line."""
        try:
            # Fused attention has no batching rule and would be run example by example.
            with rewritten(self._model, GradientTape(1, is_on=False)), sdpa_kernel(SDPBackend.MATH):
                yield
        except RuntimeError as error:
            if not _is_vmap_limit(error):
                raise
            line = " ".join(str(error).split())[:160]
            raise Unsupported(f"vmap cannot run many of this model at once: {line}") from error


def _untrained(model: nn.Module) -> dict[str, Tensor]:
    """Buffers and frozen parameters, by name."""
    names = trainable(model)
    frozen = {n: p.detach() for n, p in model.named_parameters() if n not in names}
    return {**frozen, **dict(model.named_buffers())}


@contextmanager
def _forwards(
    layers: Mapping[str, nn.Module], forward: Callable[[str, Tensor], Tensor]
) -> Iterator[None]:
    """With `forward(name, x)` in place of what these layers do."""
    try:
        for name, layer in layers.items():
            layer.__dict__["forward"] = partial(forward, name)
        yield
    finally:
        for layer in layers.values():
            layer.__dict__.pop("forward", None)

"""Many runs at once, for studies: K seeds or settings of one small model in one program.

    g[k, i] = ∇ loss(θ_k; x_i)          per run k and example i
    θ_k ← momentum step on (Σ_i clip(g[k, i], ζ_k) + z_k ζ_k · row t of C⁻¹Z_k) / B

All runs share the data order, the strategy C and the batch size; noise multiplier, clip norm,
learning rate, momentum and initial weights are their own, and so is every element of their noise.
The K models run side by side in `stacked`: convolutions as groups, linear layers as batched
products, and per-example gradients of a layer as one batched product of its saved inputs and output
gradients. Each run is private by itself with the noise of its own setting; a study as a whole is
not (it shows many models of the same data), so it keeps no ledger and makes no statement.

The slow twin is `privatize`: one run here equals one run there to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from noshuffle.errors import InvalidInput, non_negative, positive, whole
from noshuffle.noise.rounding import single
from noshuffle.noise.source import Source, new_key
from noshuffle.noise.stream import NoiseStream
from noshuffle.strategies import Strategy
from noshuffle.training.stacked import Stacked

Batch = tuple[Tensor, Tensor, Tensor | None]
#: Rounding of the clip factor must not lift a norm above the clip norm.
_SHRINK = 1 - 2.0**-20


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one of the runs has for itself. A noise multiplier of 0 and no clip: not private."""

    noise_multiplier: float
    learning_rate: float
    momentum: float = 0.9
    clip_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        non_negative(noise_multiplier=self.noise_multiplier, momentum=self.momentum)
        positive(learning_rate=self.learning_rate, clip_norm=self.clip_norm)


def train_many(
    make_model: Callable[[], nn.Module],
    batches: Iterable[Batch],
    settings: Sequence[Setting],
    *,
    strategy: Strategy,
    steps: int,
    batch_size: int,
    learning_rates: Sequence[float] = (),
    source: Source | None = None,
    device: torch.device | str = "cpu",
    on_step: Callable[[int], None] | None = None,
) -> tuple[Stacked, dict[str, Tensor]]:
    """Train every setting over the same batches; returns the models and their parameters.

    `batches` gives (inputs, class labels, weights) in order; weights of 0 mark padding, None means
    ones. `learning_rates` is a schedule of factors, one a step (empty: constant). The model is a
    Sequential of convolutions, linear layers, activations and pooling; the loss is cross-entropy.
    """
    whole(steps=steps, batch_size=batch_size)
    if not settings:
        raise InvalidInput("settings must hold at least one run, got none")
    if learning_rates and len(learning_rates) < steps:
        raise InvalidInput(f"the schedule has {len(learning_rates)} factors for {steps} steps")
    models = [_seeded(make_model, setting.seed) for setting in settings]
    stacked = Stacked(models[0], runs=len(models))
    params = {
        name: torch.stack([model.get_parameter(name).detach() for model in models]).to(device)
        for name, _ in models[0].named_parameters()
    }
    noise_scale, clip, rate, inertia = _columns(settings, device)
    stream = None
    if bool((noise_scale > 0).any()):
        shapes = {name: tuple(value.shape) for name, value in params.items()}
        source = source or Source(key=new_key())
        recipe = strategy.recipe(steps)
        stream = NoiseStream(recipe, source, shapes, scale=1.0, steps=steps, device=device)
    noise = {name: torch.zeros_like(value) for name, value in params.items()}
    velocity = {name: torch.zeros_like(value) for name, value in params.items()}
    done = 0
    for x, y, weights in batches:
        if done == steps:
            break
        if weights is None:
            weights = torch.ones(len(x), device=device)
        sums = clipped_sums(stacked, params, x.to(device), y.to(device), weights, clip)
        if stream is not None:
            for value in noise.values():
                value.zero_()
            stream.add_(noise)
            sums = single(sums, scale=1.0)
        factor = learning_rates[done] if learning_rates else 1.0
        for name, value in params.items():
            gradient = torch.addcmul(
                sums[name].to(value.dtype), noise[name], _wide(noise_scale, value)
            )
            v = velocity[name]
            v.mul_(_wide(inertia, v)).add_(gradient, alpha=1.0 / batch_size)
            value.addcmul_(_wide(rate, v), v, value=-factor)
        done += 1
        if on_step is not None:
            on_step(done)
    if done < steps:
        raise InvalidInput(f"{steps} steps were planned, the data gave {done}")
    return stacked, params


def clipped_sums(
    stacked: Stacked,
    params: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor,
    weights: Tensor,
    clip: Tensor,
) -> dict[str, Tensor]:
    """Per run, the sum of clipped per-example gradients; non-finite ones contribute zero."""
    grads = stacked.example_gradients(params, x, y)
    norms = torch.stack([g.squares() for g in grads.values()]).sum(0).sqrt()  # examples × runs
    factor = torch.clamp(clip * _SHRINK / norms.clamp_min(1e-30), max=1.0) * weights[:, None]
    factor = torch.where(torch.isfinite(norms), factor, 0.0)
    return {name: g.total(factor).reshape(params[name].shape) for name, g in grads.items()}


def accuracies(
    stacked: Stacked, params: Mapping[str, Tensor], x: Tensor, y: Tensor, *, chunk: int = 500
) -> Tensor:
    """Share of right answers of every run on held-out data."""
    device = next(iter(params.values())).device
    right = torch.zeros(stacked.runs, device=device)
    with torch.no_grad():
        for begin in range(0, len(x), chunk):
            part, target = x[begin : begin + chunk].to(device), y[begin : begin + chunk].to(device)
            scores = stacked.scores(params, part)
            right += (scores.argmax(2) == target[:, None]).sum(0)
    return right / len(x)


def _seeded(make_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make_model()


def _columns(settings: Sequence[Setting], device: torch.device | str) -> list[Tensor]:
    rows = [
        [s.noise_multiplier * s.clip_norm, s.clip_norm, s.learning_rate, s.momentum]
        for s in settings
    ]
    return list(torch.tensor(rows, dtype=torch.float32, device=device).unbind(1))


def _wide(column: Tensor, like: Tensor) -> Tensor:
    """One value a run, shaped to multiply a stacked tensor."""
    return column.reshape(-1, *([1] * (like.dim() - 1)))

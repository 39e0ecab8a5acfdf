"""The peers of `step_gpu`: Opacus in its three modes, fastDP, and jax-privacy under one jit.

Same CNN, batches, clip norm and update rule as ours. A peer is imported when its step is made, so
one that is not there costs its own row and no other. `wait` hangs on a step that torch cannot wait
for. The other benchmarks have fastDP's step from here, too.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch
from step_methods import BATCH, LOSS, Step, network, sgd
from torch import Tensor, nn

from noshuffle.training import Batch

#: fastDP's rows, and whether each uses its origin parameters.
FASTDP = {"fastDP, MixOpt": False, "fastDP, MixOpt, origin parameters": True}
#: The share of a model's numbers that fastDP may leave as they are, before its row is refused.
LEFT_AT_MOST = 0.01


def opacus(batches: list[Batch], mode: str) -> Step:
    from opacus import PrivacyEngine

    model = network()
    inner = sgd(model)
    data = torch.utils.data.TensorDataset(torch.zeros(BATCH, 1), torch.zeros(BATCH))
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH)
    options = {
        "module": model,
        "optimizer": inner,
        "data_loader": loader,
        "poisson_sampling": False,
    }
    options |= {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "grad_sample_mode": mode}
    if mode == "ghost":
        made = PrivacyEngine().make_private(criterion=nn.CrossEntropyLoss(), **options)
        model, optimizer, criterion, _ = made
    else:
        model, optimizer, _ = PrivacyEngine().make_private(**options)
        criterion = LOSS

    def step(i: int) -> None:
        x, y = batches[i % len(batches)].data
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step


def fastdp_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Tensor],
    *,
    batch_size: int,
    has_origin: bool,
    noise: float = 1.0,
) -> Callable[..., None]:
    """A step of fastDP for a loss that is a mean over examples; `note` is what it does not train.

    Book-keeping ("MixOpt") with one clip norm for all layers. It clips ("Abadi"), where its default
    divides every gradient by its norm. With `has_origin` autograd computes the gradients of its
    origin parameters only, those of the first layer, since fastDP computes all by itself.

    fastDP leaves alone what it has no rule for, and takes the norm of a tied weight from one of its
    uses: the clipped gradient of one example then had a norm of up to 1.03 clip norms. Neither
    is a step to compare with.
    """
    from fastDP import PrivacyEngine

    count = len(list(model.parameters()))
    if len(list(model.named_parameters(remove_duplicate=False))) > count:
        raise RuntimeError("fastDP does not bound the gradient of a tied weight")
    with contextlib.redirect_stdout(io.StringIO()):
        engine = PrivacyEngine(
            model,
            batch_size=batch_size,
            sample_size=100 * batch_size,
            epochs=1,
            noise_multiplier=noise,
            max_grad_norm=1.0,
            clipping_mode="MixOpt",
            clipping_fn="Abadi",
            clipping_style="all-layer",
            origin_params=_first(model) if has_origin else None,
        )
        engine.attach(optimizer)

    def step(*which: int) -> None:
        optimizer.zero_grad()
        loss(*which).backward()
        optimizer.step()

    step.note = _leave_out(model, engine)  # type: ignore[attr-defined]
    return step


def _first(model: nn.Module) -> list[str]:
    """Where the backward pass ends: tables of embeddings, else the first layer with a weight."""
    layers = {n: m for n, m in model.named_modules() if getattr(m, "weight", None) is not None}
    tables = [f"{n}.weight" for n, m in layers.items() if isinstance(m, nn.Embedding)]
    name, layer = next(iter(layers.items()))
    own = "weight" if getattr(layer, "bias", None) is None else "bias"
    return tables or [f"{name}.{own}"]


def _leave_out(model: nn.Module, engine: Any) -> str:
    """Freeze the few parameters that fastDP has no rule for, and name them; refuse if many."""
    ruled = {id(p) for _, layer in engine.named_layers for p in layer.parameters(recurse=False)}
    left = {n: p for n, p in engine.named_params if id(p) not in ruled}
    if not left:
        return ""
    names = ", ".join(left)
    share = sum(p.numel() for p in left.values()) / sum(p.numel() for p in model.parameters())
    if share > LEFT_AT_MOST:
        raise RuntimeError(f"fastDP has no rule for {share:.0%} of the model: {names}")
    for parameter in left.values():
        parameter.requires_grad_(False)
    # Its hooks read this list; it would drop them at the first step, with a line among our rows.
    engine.named_params[:] = [pair for pair in engine.named_params if pair[0] not in left]
    return f"does not train {names}"


def fastdp(batches: list[Batch], *, has_origin: bool) -> Step:
    model = network()

    def loss(i: int) -> Tensor:
        x, y = batches[i % len(batches)].data
        return LOSS(model(x), y)

    return fastdp_step(model, sgd(model), loss, batch_size=BATCH, has_origin=has_origin)


def jax_privacy(batches: list[Batch]) -> Step:
    """Its clipped gradient and independent noise under one jit, with optax's SGD."""
    import jax
    import jax.numpy as jnp
    import optax
    from jax_privacy import clipping, noise_addition

    jax.config.update("jax_platforms", "cuda,cpu")
    params = {n: jnp.asarray(p.detach().cpu().numpy()) for n, p in network().named_parameters()}

    def scores(p: dict, x: jax.Array) -> jax.Array:
        def conv(v: jax.Array, n: str, stride: int, pad: int) -> jax.Array:
            out = jax.lax.conv_general_dilated(
                v, p[f"{n}.weight"], (stride, stride), [(pad, pad)] * 2
            )
            return jnp.tanh(out + p[f"{n}.bias"][None, :, None, None])

        def pool(v: jax.Array) -> jax.Array:
            ones = (1, 1, 1, 1)
            return jax.lax.reduce_window(v, -jnp.inf, jax.lax.max, (1, 1, 2, 2), ones, "VALID")

        v = pool(conv(pool(conv(x, "0", 2, 3)), "3", 2, 0)).reshape(x.shape[0], -1)
        v = jnp.tanh(v @ p["7.weight"].T + p["7.bias"])
        return v @ p["9.weight"].T + p["9.bias"]

    def loss(p: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(scores(p, x), y).mean()

    clipped = clipping.clipped_grad(loss, l2_clip_norm=1.0, batch_argnums=(1, 2))
    noise = noise_addition.gaussian_privatizer(stddev=1.0, prng_key=jax.random.key(0))
    rule = optax.sgd(0.05, momentum=0.9)

    @jax.jit
    def update(p: dict, s: object, m: object, x: jax.Array, y: jax.Array) -> tuple:
        grads = clipped(p, x, y)
        noisy, s = noise.update(grads, s)
        moved, m = rule.update(jax.tree.map(lambda v: v / BATCH, noisy), m, p)
        return optax.apply_updates(p, moved), s, m

    data = [tuple(jnp.asarray(t.cpu().numpy()) for t in b.data) for b in batches]
    state = [params, noise.init(params), rule.init(params)]

    def step(i: int) -> None:
        state[:] = update(*state, *data[i % len(data)])

    step.wait = lambda: jax.block_until_ready(state[0])  # type: ignore[attr-defined]
    return step

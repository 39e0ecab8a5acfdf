"""The peers of `step_gpu`: Opacus in its three modes, and jax-privacy under one jit.

Same CNN, batches, clip norm and update rule as ours. A peer is imported when its step is made, so
one that is not there costs its own row and no other. `wait` hangs on a step that torch cannot wait
for.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch
from step_methods import BATCH, LOSS, Step, network, sgd
from torch import nn

from noshuffle.training.batches import Batch


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

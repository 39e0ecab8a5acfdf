"""The obvious twin of the engines: plain autograd, one example after the other, clip, add."""

import torch
from torch.utils._pytree import tree_leaves, tree_map

from noshuffle.clipping import ModelLoss


def flat(values):
    return torch.cat([v.double().reshape(-1) for v in values.values()])


def loop(model, loss_fn, batch, norm=None, *, share=1.0):
    """The clipped sum, the norms, and what was clipped to: by default a share of their median."""
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    each, norms = [], []
    for i in range(len(tree_leaves(batch)[0])):
        one = tree_map(lambda t: t[i : i + 1], batch)  # noqa: B023
        if isinstance(loss_fn, ModelLoss):
            loss = loss_fn.fn(model, *one)
        else:
            loss = loss_fn(model(one[0]), *one[1:])
        grads = torch.autograd.grad(loss.sum(), list(params.values()), allow_unused=True)
        each.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(params.values(), grads)]
        )
        norms.append(torch.sqrt(sum(g.double().square().sum() for g in each[-1])))
    norm = share * float(torch.stack(norms).median()) if norm is None else norm
    wide = {n: torch.promote_types(p.dtype, torch.float32) for n, p in params.items()}
    total = {n: torch.zeros(p.shape, dtype=wide[n]) for n, p in params.items()}
    for grads, size in zip(each, norms):
        factor = min(1.0, norm / float(size)) if size > 0 else 1.0
        for name, grad in zip(params, grads):
            total[name] += grad.to(wide[name]) * factor
    return total, torch.stack(norms), norm

"""More loops of `loops`, in the style of tutorials and of real projects, beside per-example twins.

Most twins are `by_hand`, and know nothing of this package but its noise.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from tests.training.loops import (
    CE,
    PADS,
    Forward,
    X,
    Y,
    Z,
    by_hand,
    by_step,
    each,
    every,
    loop,
    losses,
    mlp,
    one_loss,
    plain,
    rows,
)
from torch import nn
from torch.nn import functional as F

GATE = Z > 0


def hand_losses(name: str, loss_fn: Any, own: Any = None, y: Any = Y, **more: Any) -> None:
    """A plain loop with this loss, beside `by_hand` with the loss of one example."""
    mine = own or loss_fn
    if "expected" not in more or more["expected"].startswith("equal"):
        more["twin"] = by_hand(lambda m, x, z: mine(m(x), z), X, y)
    loop("losses", name, **more)(lambda on: plain(on, loss_fn, X, y))


# ---- the loop


@loop("the loop", "zero_grad between forward and backward", twin=by_hand())
def _(on: Any) -> None:
    for x, y in rows():
        loss = CE(on.model(x), y)
        on.optimizer.zero_grad()
        loss.backward()
        on.optimizer.step()


@loop(
    "the loop",
    "a batch given up after backward: model.zero_grad(); continue",
    twin=by_hand(one_loss, X[8:], Y[8:]),
)
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows()):
        CE(on.model(x), y).backward()
        if i == 0:
            on.model.zero_grad()
            continue
        on.optimizer.step()
        on.model.zero_grad()


@loop(
    "the loop",
    "a batch given up from the second step on: model.zero_grad(); continue",
    twin=by_hand(one_loss, X[[*range(8), *range(16, 24)]], Y[[*range(8), *range(16, 24)]]),
)
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows()):
        CE(on.model(x), y).backward()
        if i == 1:
            on.model.zero_grad()
            continue
        on.optimizer.step()
        on.model.zero_grad()


@loop(
    "the loop",
    "a batch given up: gradients zeroed in place, continue",
    twin=by_hand(one_loss, X[[*range(8), *range(16, 24)]], Y[[*range(8), *range(16, 24)]]),
)
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows()):
        CE(on.model(x), y).backward()
        if i != 1:
            on.optimizer.step()
        for p in on.model.parameters():
            p.grad.zero_()


@loop("the loop", "zero_grad after backward, then step", expected="zero_grad() came after")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.optimizer.zero_grad()
        on.optimizer.step()


@loop("the loop", "model.zero_grad() after backward, then step", expected="cleared")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.model.zero_grad()
        on.optimizer.step()


@loop("the loop", "step twice after one backward", expected="no backward pass")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.optimizer.step()
        on.optimizer.step()


@loop("the loop", "step under torch.no_grad()", twin=by_hand())
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        with torch.no_grad():
            on.optimizer.step()
            on.optimizer.zero_grad()


@loop("the loop", "phases with torch.set_grad_enabled (transfer learning tutorial)", twin=by_hand())
def _(on: Any) -> None:
    for x, y in rows():
        for phase in ("train", "val"):
            on.model.train(phase == "train")
            on.optimizer.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                out = on.model(x)
                loss = CE(out, y)
                if phase == "train":
                    loss.backward()
                    on.optimizer.step()
        on.model.train()


@loop("the loop", "an evaluation of the same model between forward and backward", twin=by_hand())
def _(on: Any) -> None:
    for x, y in rows():
        loss = CE(on.model(x), y)
        on.model.eval()
        with torch.no_grad():
            on.model(X).argmax(1)
        on.model.train()
        on.optimizer.zero_grad()
        loss.backward()
        on.optimizer.step()


@loop("the loop", "backward(create_graph=True)", twin=by_hand())
def _(on: Any) -> None:
    for x, y in rows():
        on.optimizer.zero_grad()
        CE(on.model(x), y).backward(create_graph=True)
        on.optimizer.step()


@loop("the loop", "under torch.autograd.set_detect_anomaly", twin=by_hand())
def _(on: Any) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        plain(on)


@loop("the loop", "a trained copy: copy.deepcopy(model)", expected="or a copy were called")
def _(on: Any) -> None:
    other = copy.deepcopy(on.model)
    for x, y in rows():
        CE(other(x), y).backward()
        on.optimizer.step()


@loop("the loop", "a copy evaluated after each epoch", twin=by_hand())
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.optimizer.step()
        on.optimizer.zero_grad()
        best = copy.deepcopy(on.model).eval()
        CE(best(x), y).item()


@loop("the loop", "torch.func.functional_call with the model's own parameters", twin=by_hand())
def _(on: Any) -> None:
    for x, y in rows():
        own = dict(on.model.named_parameters())
        on.optimizer.zero_grad()
        CE(torch.func.functional_call(on.model, own, (x,)), y).backward()
        on.optimizer.step()


@loop(
    "the loop",
    "functional_call with scaled weights, from the second step on",
    expected="beyond those",
)
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows()):
        own = {k: (1.0 + 0.3 * (i > 0)) * p for k, p in on.model.named_parameters()}
        on.optimizer.zero_grad()
        CE(torch.func.functional_call(on.model, own, (x,)), y).backward()
        on.optimizer.step()


@loop(
    "the loop", "sharpness-aware steps: weights moved, second pass, moved back", expected="weights"
)
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        moves = [0.05 * p.grad / p.grad.norm() for p in on.model.parameters()]
        with torch.no_grad():
            for p, e in zip(on.model.parameters(), moves):
                p += e
        on.optimizer.zero_grad()
        CE(on.model(x), y).backward()
        with torch.no_grad():
            for p, e in zip(on.model.parameters(), moves):
                p -= e
        on.optimizer.step()


@loop(
    "the loop",
    "noise on weights for the pass, taken back before step, from the second step on",
    expected="weights",
)
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows()):
        noise = [0.05 * (i > 0) * torch.randn_like(p) for p in on.model.parameters()]
        with torch.no_grad():
            for p, e in zip(on.model.parameters(), noise):
                p += e
        on.optimizer.zero_grad()
        CE(on.model(x), y).backward()
        with torch.no_grad():
            for p, e in zip(on.model.parameters(), noise):
                p -= e
        on.optimizer.step()


@loop(
    "the loop", "average weights swapped in to evaluate between backward and step", twin=by_hand()
)
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        kept = copy.deepcopy(on.model.state_dict())
        on.model.load_state_dict({k: 0.5 * v for k, v in kept.items()})
        with torch.no_grad():
            on.model(X)
        on.model.load_state_dict(kept)
        on.optimizer.step()
        on.optimizer.zero_grad()


@loop("the loop", "early stopping on a held-out loss", twin=by_hand(one_loss, X[:16], Y[:16]))
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows()):
        CE(on.model(x), y).backward()
        on.optimizer.step()
        on.optimizer.zero_grad()
        if i == 1:
            break


@loop(
    "the loop",
    "unfreezing midway",
    expected="became trainable",
    optimizer=lambda m: torch.optim.SGD(m[2].parameters(), lr=0.2),
    model=lambda: (lambda m: (m[0].requires_grad_(False), m)[1])(mlp()),
)
def _(on: Any) -> None:
    for x, y in rows():
        on.optimizer.zero_grad()
        CE(on.model(x), y).backward()
        on.optimizer.step()
        on.model[0].requires_grad_(True)


@loop("the loop", "backward(retain_graph=True), zero_grad, backward again", twin=by_hand())
def _(on: Any) -> None:
    for x, y in rows():
        loss = CE(on.model(x), y)
        loss.backward(retain_graph=True)
        on.optimizer.zero_grad()
        loss.backward()
        on.optimizer.step()


# ---- accumulation


@loop("accumulation", "a buffer that every part is copied into", expected="written to")
def _(on: Any) -> None:
    buffer = torch.empty(4, 6)
    for i, (x, y) in enumerate(rows(size=4)):
        buffer.copy_(x)
        CE(on.model(buffer), y).backward()
        if i % 2:
            on.optimizer.step()
            on.optimizer.zero_grad()


@loop("accumulation", "a buffer of one batch after the other", twin=by_hand())
def _(on: Any) -> None:
    buffer = torch.empty(8, 6)
    for x, y in rows():
        buffer.copy_(x)
        CE(on.model(buffer), y).backward()
        on.optimizer.step()
        on.optimizer.zero_grad()


@loop(
    "accumulation",
    "inputs overwritten after the forward pass, from the second step on",
    expected="written to",
)
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows()):
        mine = x.clone()
        loss = CE(on.model(mine), y)
        on.optimizer.zero_grad()
        loss.backward()
        if i:
            mine.zero_()
        on.optimizer.step()


@loop(
    "accumulation",
    "three parts, the last one short, loss * len / total",
    expected="different numbers",
)
def _(on: Any) -> None:
    for x, y in rows():
        for a, b in zip(x.split(3), y.split(3)):
            (CE(on.model(a), b) * len(a) / 8).backward()
        on.optimizer.step()


@loop("accumulation", "parts as sums over the whole size: CE(sum) / 8", twin=by_hand())
def _(on: Any) -> None:
    for x, y in rows():
        on.optimizer.zero_grad()
        for a, b in zip(x.split(3), y.split(3)):
            (F.cross_entropy(on.model(a), b, reduction="sum") / 8).backward()
        on.optimizer.step()


# ---- losses

MASK = torch.arange(4) < PADS[:, None].clamp(max=4)


def vae() -> nn.Module:
    def forward(m: Any, x: Any) -> Any:
        h = torch.tanh(m.enc(x))
        mu, logvar = m.mu(h), m.logvar(h)
        return m.dec(mu + 0.1 * torch.exp(0.5 * logvar)), mu, logvar

    return Forward(
        forward,
        enc=nn.Linear(6, 8),
        mu=nn.Linear(8, 3),
        logvar=nn.Linear(8, 3),
        dec=nn.Linear(3, 6),
    )


def elbo(out: Any, x: Any) -> Any:
    """As the VAE of pytorch/examples has it."""
    recon, mu, logvar = out
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return F.binary_cross_entropy(recon.sigmoid(), x.sigmoid(), reduction="sum") + kld


def elbo_mean(out: Any, x: Any) -> Any:
    recon, mu, logvar = out
    own = torch.mean(-0.5 * torch.sum(1 + logvar - mu**2 - logvar.exp(), dim=1), dim=0)
    return F.mse_loss(recon, x) + 0.00025 * own


every("losses", "VAE: BCE(sum) + -0.5 * torch.sum(…)", lambda m, x, y: elbo(m(x), x), model=vae)


every(
    "losses",
    "VAE: MSE + weight * mean over rows of a sum",
    lambda m, x, y: elbo_mean(m(x), x),
    model=vae,
)


@loop(
    "losses",
    "VAE: the second term from the second step on",
    model=vae,
    twin=lambda on: (
        [
            by_hand(
                lambda m, x, y, i=i: elbo_mean(m(x), x) if i else F.mse_loss(m(x)[0], x),
                X[8 * i : 8 * i + 8],
                Y[8 * i : 8 * i + 8],
            )(on)
            for i in range(3)
        ]
        and None
    ),
)
def _(on: Any) -> None:
    for i, (x, _y) in enumerate(rows()):
        on.optimizer.zero_grad()
        out = on.model(x)
        (elbo_mean(out, x) if i else F.mse_loss(out[0], x)).backward()
        on.optimizer.step()


@loop("losses", "VAE: BCE(sum) + 0.37 * KL(sum)", model=vae, expected="different numbers")
def _(on: Any) -> None:
    for x, _y in rows():
        recon, mu, logvar = on.model(x)
        kld = torch.sum(mu.pow(2) + logvar.exp() - logvar)
        (F.mse_loss(recon, x, reduction="sum") + 0.37 * kld).backward()
        on.optimizer.step()


@loop(
    "losses",
    "deep supervision: a loss of the logits and one of the layer below",
    twin=by_hand(lambda m, x, y: CE(m(x)["logits"], y) + 0.1 * m(x)["hidden"].square().mean()),
    model=lambda: Forward(
        lambda m, x: {"hidden": (h := torch.tanh(m.a(x))), "logits": m.b(h)},
        a=nn.Linear(6, 8),
        b=nn.Linear(8, 4),
    ),
)
def _(on: Any) -> None:
    for x, y in rows():
        on.optimizer.zero_grad()
        out = on.model(x)
        (CE(out["logits"], y) + 0.1 * out["hidden"].square().mean()).backward()
        on.optimizer.step()


hand_losses(
    "a masked mean: (l * mask).sum() / mask.sum()",
    lambda o, y: ((o - y[:, :4]).square() * y[:, 4:]).sum() / y[:, 4:].sum(),
    lambda o, y: ((o - y[:, :4]).square() * y[:, 4:]).sum() / y[:, 4:].sum(),
    y=torch.cat([Z, MASK.float()], 1),
    expected="different, warned",
)
hand_losses(
    "weights of samples, (w * l).sum() / w.sum()",
    lambda o, y: (y[:, 4] * (o - y[:, :4]).square().mean(1)).sum() / y[:, 4].sum(),
    y=torch.cat([Z, Z[:, :1].abs()], 1),
    expected="changes with the batch",
)
hand_losses(
    "weights of samples, (w * l).mean()",
    lambda o, y: (y[:, 4] * (o - y[:, :4]).square().mean(1)).mean(),
    y=torch.cat([Z, Z[:, :1].abs()], 1),
)
hand_losses(
    "CE with ignore_index",
    nn.CrossEntropyLoss(ignore_index=2),
    lambda o, y: CE(o, y) if y != 2 else 0 * o.sum(),
)
hand_losses(
    "CE with ignore_index and label smoothing",
    nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.1),
    expected="refused",
)
hand_losses(
    "CE with class weights and label smoothing",
    nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0, 1.0]), label_smoothing=0.1),
    expected="refused",
)
hand_losses(
    "BCE with pos_weight",
    nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2, 3, 1])),
    y=GATE.float(),
)
hand_losses(
    "GaussianNLLLoss", lambda o, y: F.gaussian_nll_loss(o[:, :2], y, o[:, 2:].exp()), y=Z[:, :2]
)
hand_losses(
    "CosineEmbeddingLoss",
    lambda o, y: F.cosine_embedding_loss(o[:, :2], o[:, 2:], y),
    y=2.0 * (Y > 1) - 1,
)
hand_losses(
    "MarginRankingLoss of two scores",
    lambda o, y: F.margin_ranking_loss(o[:, 0], o[:, 1], y, margin=0.1),
    y=2.0 * (Y > 1) - 1,
)
hand_losses(
    "HingeEmbeddingLoss", lambda o, y: F.hinge_embedding_loss(o[:, 0], y), y=2.0 * (Y > 1) - 1
)
hand_losses("SoftMarginLoss", nn.SoftMarginLoss(), y=2.0 * GATE - 1)
hand_losses(
    "KLDivLoss, mean, log_target",
    lambda o, y: F.kl_div(o.log_softmax(1), y.log_softmax(1), log_target=True),
    y=Z,
)
hand_losses(
    "quantile (pinball) loss", lambda o, y: torch.max(0.9 * (y - o), -0.1 * (y - o)).mean(), y=Z
)
hand_losses("log cosh", lambda o, y: torch.log(torch.cosh(o - y)).mean(), y=Z)
hand_losses(
    "Dice over the whole batch",
    lambda o, y: 1 - 2 * (o.sigmoid() * y).sum() / (o.sigmoid().sum() + y.sum()),
    y=GATE.float(),
    expected="refused",
)
hand_losses(
    "Dice of each example",
    lambda o, y: (1 - 2 * (o.sigmoid() * y).sum(1) / (o.sigmoid().sum(1) + y.sum(1) + 1)).mean(),
    y=GATE.float(),
)
hand_losses(
    "flooding: (loss - b).abs() + b", lambda o, y: (CE(o, y) - 0.5).abs() + 0.5, expected="refused"
)
hand_losses("loss.clamp(max=2)", lambda o, y: CE(o, y).clamp(max=2.0), expected="refused")
hand_losses("loss.log()", lambda o, y: CE(o, y).log(), expected="refused")
hand_losses(
    "torch.stack of losses, mean",
    lambda o, y: torch.stack([CE(a[None], b[None]) for a, b in zip(o, y)]).mean(),
    expected="refused",
)
hand_losses(
    "Python's sum of losses of rows / len",
    lambda o, y: sum(CE(o[i : i + 1], y[i : i + 1]) for i in range(len(y))) / len(y),
    expected="by themselves",
)
hand_losses(
    "multi-task on the rows of each task",
    lambda o, y: CE(o[y < 2], y[y < 2]) + CE(o[y > 1], y[y > 1]),
    expected="selected",
)
hand_losses(
    "CE + CE of torch.where",
    lambda o, y: torch.where(y > 1, 2.0, 1.0).mul(F.cross_entropy(o, y, reduction="none")).mean(),
)
losses(
    "losses",
    "class-balanced weights of the batch in CE(weight=…): of one label, they cancel",
    lambda o, y: F.cross_entropy(o, y, weight=1 / (1 + y.bincount(minlength=4)).float()),
    CE,
)
hand_losses(
    "pos_weight of the batch",
    lambda o, y: F.binary_cross_entropy_with_logits(
        o, y, pos_weight=(1 - y).sum(0) / (1 + y.sum(0))
    ),
    y=GATE.float(),
    expected="refused",
)
hand_losses(
    "normalised by the batch's largest target",
    lambda o, y: F.mse_loss(o / y.max(), y / y.max()),
    y=Z,
    expected="refused",
)
hand_losses(
    "correlation with targets",
    lambda o, y: -((o - o.mean(0)) * (y - y.mean(0))).mean(),
    y=Z,
    expected="refused",
)
hand_losses(
    "a penalty that decorrelates outputs (Barlow)",
    lambda o, y: CE(o, y) + ((o.T @ o) / len(o)).square().mean(),
    expected="refused",
)
hand_losses(
    "a penalty on the mean prediction (diversity)",
    lambda o, y: CE(o, y) + (o.softmax(1).mean(0) * o.softmax(1).mean(0).log()).sum(),
    expected="refused",
)
hand_losses(
    "a penalty on outputs, CE + 0.01 * out.pow(2).mean()",
    lambda o, y: CE(o, y) + 0.01 * o.pow(2).mean(),
)
hand_losses(
    "a penalty on outputs, 0.01 * out.norm(dim=1).mean()",
    lambda o, y: CE(o, y) + 0.01 * o.norm(dim=1).mean(),
)
hand_losses(
    "a penalty on outputs, 0.01 * out.norm()",
    lambda o, y: CE(o, y) + 0.01 * o.norm(),
    expected="refused",
)
hand_losses(
    "cutmix of labels: lam * CE(a) + (1 - lam) * CE(b)",
    lambda o, y: 0.3 * CE(o, y[:, 0]) + 0.7 * CE(o, y[:, 1]),
    y=torch.stack([Y, Y.roll(1)], 1),
)
hand_losses("CE of logits / temperature", lambda o, y: CE(o / 0.07, y))
hand_losses(
    "distillation, T² · KL",
    lambda o, y: (
        F.kl_div((o / 2).log_softmax(1), (y / 2).softmax(1), reduction="batchmean") * 4.0
        + CE(o, y.argmax(1))
    ),
    y=Z,
)
hand_losses(
    "evidential: digamma",
    lambda o, y: (
        torch.digamma((o.exp() + 1).sum(1)) - torch.digamma(o.exp() + 1).gather(1, y[:, None])[:, 0]
    ).mean(),
)


@loop(
    "losses",
    "a learned weight of the loss with an optimizer of its own (log_var)",
    expected="cannot be seen",
)
def _(on: Any) -> None:
    log_var = nn.Parameter(torch.zeros(()))
    other = torch.optim.SGD([log_var], lr=0.0)
    for x, y in rows():
        on.optimizer.zero_grad()
        other.zero_grad()
        out = on.model(x)
        (CE(out, y) * (-log_var).exp() + log_var).backward()
        on.optimizer.step()
        other.step()


@loop(
    "losses",
    "a head outside the private model, trained by an optimizer of its own",
    expected="equal, warned",
    twin=None,
)
def _(on: Any) -> None:
    head = nn.Linear(4, 4)
    with torch.no_grad():
        head.weight.copy_(torch.eye(4))
        head.bias.zero_()
    other = torch.optim.SGD(head.parameters(), lr=0.0)
    for x, y in rows():
        on.optimizer.zero_grad()
        CE(head(on.model(x)), y).backward()
        on.optimizer.step()
        other.step()


@loop(
    "losses",
    "a teacher without no_grad",
    expected="equal, warned",
    twin=each(
        lambda on, i, x, y: on.private.step(lambda o, t: F.mse_loss(o, t), x, 0.0 * Z[:8] + 1.0)
    ),
)
def _(on: Any) -> None:
    teacher = nn.Linear(6, 4)
    nn.init.zeros_(teacher.weight)
    nn.init.ones_(teacher.bias)
    for x, _y in rows():
        on.optimizer.zero_grad()
        out = on.model(x)
        F.mse_loss(out, teacher(x)).backward()
        on.optimizer.step()


@loop(
    "losses",
    "mean teacher: an average of weights as teacher",
    twin=by_hand(lambda m, x, y: CE(m(x), y) + 0 * m(x).sum()),
)
def _(on: Any) -> None:
    teacher = copy.deepcopy(on.model)
    for x, y in rows():
        with torch.no_grad():
            target = teacher(x)
        on.optimizer.zero_grad()
        out = on.model(x)
        (CE(out, y) + 0.0 * F.mse_loss(out, target)).backward()
        on.optimizer.step()
        with torch.no_grad():
            for t, p in zip(teacher.parameters(), on.model.parameters()):
                t.lerp_(p, 0.1)


@loop(
    "losses",
    "a penalty on weights from the second step on, model.zero_grad()",
    expected="penalty on weights",
)
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows()):
        on.model.zero_grad()
        loss = CE(on.model(x), y)
        if i:
            loss = loss + 0.1 * on.model[0].weight.reshape(8, -1).square().mean()
        loss.backward()
        on.optimizer.step()


@loop("losses", "L1 of all weights, F.l1_loss style", expected="refused")
def _(on: Any) -> None:
    for x, y in rows():
        on.optimizer.zero_grad()
        loss = CE(on.model(x), y)
        for p in on.model.parameters():
            loss = loss + 1e-4 * p.abs().sum()
        loss.backward()
        on.optimizer.step()


@loop("losses", "a penalty on activations that a forward hook kept", expected="beyond those")
def _(on: Any) -> None:
    kept: list[Any] = []
    on.model[1].register_forward_hook(lambda m, a, out: kept.append(out))
    for x, y in rows():
        on.optimizer.zero_grad()
        kept.clear()
        out = on.model(x)
        (CE(out, y) + 0.1 * kept[0].square().mean()).backward()
        on.optimizer.step()


@loop("losses", "a gradient penalty (WGAN-GP)", expected="refused")
def _(on: Any) -> None:
    for x, y in rows():
        on.optimizer.zero_grad()
        v = x.clone().requires_grad_()
        out = on.model(v)
        (g,) = torch.autograd.grad(out.sum(), v, create_graph=True)
        (CE(out, y) + (g.norm(dim=1) - 1).square().mean()).backward()
        on.optimizer.step()


# ---- gradients by hand


@loop(
    "gradients by hand",
    "FGSM as in the tutorial: model.zero_grad()",
    twin=each(
        lambda on, i, x, y: on.private.step(
            CE,
            x
            + 0.1
            * torch.autograd.grad(CE(on.model(v := x.clone().requires_grad_()), y), v)[0].sign(),
            y,
        )
    ),
)
def _(on: Any) -> None:
    for x, y in rows():
        v = x.clone().requires_grad_()
        loss = CE(on.model(v), y)
        on.model.zero_grad()
        loss.backward()
        on.model.zero_grad()
        CE(on.model(x + 0.1 * v.grad.sign()), y).backward()
        on.optimizer.step()


@loop(
    "gradients by hand",
    "saliency by autograd.grad on a second pass",
    expected="equal",
    twin=by_hand(),
)
def _(on: Any) -> None:
    for x, y in rows():
        v = x.clone().requires_grad_()
        on.model.eval()
        torch.autograd.grad(on.model(v).sum(), v)
        on.model.train()
        on.optimizer.zero_grad()
        CE(on.model(x), y).backward()
        on.optimizer.step()


@loop(
    "gradients by hand",
    "clip_grad_norm_ from the second step on, model.zero_grad()",
    expected="equal, warned",
    twin=by_hand(),
)
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows()):
        on.model.zero_grad()
        CE(on.model(x), y).backward()
        if i:
            nn.utils.clip_grad_norm_(on.model.parameters(), 0.01)
        on.optimizer.step()


@loop("gradients by hand", "a full backward hook of the user that only looks", twin=by_hand())
def _(on: Any) -> None:
    seen = []
    on.model[0].register_full_backward_hook(lambda m, gi, go: seen.append(go[0].norm()) or None)
    plain(on)


@loop("gradients by hand", "a forward hook of the user that scales the output", expected="refused")
def _(on: Any) -> None:
    on.model.register_forward_hook(lambda m, a, out: 2.0 * out)
    plain(on)


@loop("gradients by hand", "a tensor hook on parameters after privatize", expected="hook")
def _(on: Any) -> None:
    for p in on.model.parameters():
        p.register_hook(lambda g: g.clamp(-0.01, 0.01))
    plain(on)


def scale(optimizer: Any, args: Any, kwargs: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_(0.1)


@loop(
    "gradients by hand",
    "optimizer.register_step_pre_hook",
    twin=lambda on: (on.private._parts.optimizer.register_step_pre_hook(scale), by_step()(on)),
)
def _(on: Any) -> None:
    on.optimizer.register_step_pre_hook(scale)
    plain(on)

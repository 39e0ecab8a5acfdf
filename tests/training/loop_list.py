"""The loops of `loops`, by what they vary. Each is added to its list when this is imported."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from tests.training.loops import (
    CE,
    IMAGES,
    TOKENS,
    Forward,
    X,
    Y,
    Z,
    by_step,
    each,
    loop,
    losses,
    mlp,
    models,
    optimizers,
    rows,
    sequence,
    table,
)  # fmt: skip
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import noshuffle
from noshuffle.clipping import ModelLoss
from noshuffle.noise import grid

# ---- the loop itself


@loop("the loop", "zero_grad, backward, step")
def _(on: Any) -> None:
    for x, y in rows():
        on.optimizer.zero_grad()
        CE(on.model(x), y).backward()
        on.optimizer.step()


@loop("the loop", "zero_grad after the step, set_to_none=False")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.optimizer.step()
        on.optimizer.zero_grad(set_to_none=False)


@loop("the loop", "model.zero_grad()")
def _(on: Any) -> None:
    for x, y in rows():
        on.model.zero_grad()
        CE(on.model(x), y).backward()
        on.optimizer.step()


@loop("the loop", "no zero_grad at all")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.optimizer.step()


@loop("the loop", "p.grad = None by hand")
def _(on: Any) -> None:
    for x, y in rows():
        for p in on.model.parameters():
            p.grad = None
        CE(on.model(x), y).backward()
        on.optimizer.step()


@loop("the loop", "a closure")
def _(on: Any) -> None:
    for x, y in rows():

        def closure(x=x, y=y):
            on.optimizer.zero_grad()
            loss = CE(on.model(x), y)
            loss.backward()
            return loss

        on.optimizer.step(closure)


@loop("the loop", "loss.item() and the norm of .grad in a log")
def _(on: Any) -> None:
    log = []
    for x, y in rows():
        loss = CE(on.model(x), y)
        loss.backward()
        log.append((loss.item(), sum(p.grad.norm().item() for p in on.model.parameters())))
        on.optimizer.step()
        on.optimizer.zero_grad()


@loop("the loop", "evaluation between steps: model.eval(), no_grad, model.train()")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.optimizer.step()
        on.model.eval()
        with torch.no_grad():
            on.model(X).argmax(1)
        on.model.train()


@loop("the loop", "evaluation without no_grad")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.model(X[:3]).argmax(1)
        on.optimizer.step()


@loop("the loop", "model.eval() that was left on", expected="no backward pass")
def _(on: Any) -> None:
    on.model.eval()
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.optimizer.step()


@loop("the loop", "the old optimizer's step", expected="belongs to a private run")
def _(on: Any) -> None:
    inner = on.private._parts.optimizer
    for x, y in rows():
        CE(on.model(x), y).backward()
        inner.step()


@loop(
    "the loop",
    "a second optimizer over the same parameters",
    expected="not the optimizer of the private run",
)
def _(on: Any) -> None:
    raw = torch.optim.SGD(on.model.parameters(), lr=0.1)
    for x, y in rows():
        CE(on.model(x), y).backward()
        raw.step()
        on.optimizer.step()


@loop("the loop", "step without backward", expected="no backward pass")
def _(on: Any) -> None:
    on.optimizer.step()


@loop("the loop", "backward twice with retain_graph", twin=by_step(lambda o, y: 2 * CE(o, y)))
def _(on: Any) -> None:
    for x, y in rows():
        loss = CE(on.model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        on.optimizer.step()


@loop("the loop", "torch.autograd.grad, put into .grad", expected="other than by loss.backward")
def _(on: Any) -> None:
    for x, y in rows():
        own = list(on.model.parameters())
        for p, g in zip(own, torch.autograd.grad(CE(on.model(x), y), own)):
            p.grad = g
        on.optimizer.step()


@loop("the loop", "loss.backward(gradient=torch.tensor(0.25))")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward(torch.tensor(0.25))
        on.optimizer.step()


@loop("the loop", "torch.autograd.backward of two losses", expected="several losses")
def _(on: Any) -> None:
    for x, y in rows():
        out = on.model(x)
        torch.autograd.backward([CE(out, y), out.square().mean()])
        on.optimizer.step()


@loop("the loop", "loss.backward(inputs=[…]) for some parameters", expected="gave gradients beyond")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward(inputs=list(on.model[2].parameters()))
        on.optimizer.step()


@loop("the loop", "per-example losses, backward(torch.ones(8) / 8)", expected="call loss.mean()")
def _(on: Any) -> None:
    for x, y in rows():
        F.cross_entropy(on.model(x), y, reduction="none").backward(torch.ones(8) / 8)
        on.optimizer.step()


@loop("the loop", "a step passed over when the loss is NaN (`if loss.isnan(): continue`)")
def _(on: Any) -> None:
    for x, y in rows():
        loss = CE(on.model(x), y)
        if loss.isnan():
            continue
        loss.backward()
        on.optimizer.step()


@loop("the loop", "weights saved and loaded midway")
def _(on: Any) -> None:
    for x, y in rows():
        on.model.load_state_dict(copy.deepcopy(on.model.state_dict()))
        on.optimizer.load_state_dict(copy.deepcopy(on.optimizer.state_dict()))
        CE(on.model(x), y).backward()
        on.optimizer.step()


@loop("the loop", "load_state_dict(assign=True) midway", expected="no longer the one")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.optimizer.step()
        on.model.load_state_dict(copy.deepcopy(on.model.state_dict()), assign=True)


@loop("the loop", "a layer that is frozen midway", expected="was frozen after privatize")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.optimizer.step()
        on.model[0].requires_grad_(False)


@loop("the loop", "a layer exchanged midway", expected="no longer the one")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.optimizer.step()
        on.model[2] = nn.Linear(16, 4)


@loop("the loop", "parameters added midway", expected="before privatize")
def _(on: Any) -> None:
    on.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@loop("the loop", "an average of weights by hand (EMA), and torch's AveragedModel")
def _(on: Any) -> None:
    mean = [p.detach().clone() for p in on.model.parameters()]
    swa = torch.optim.swa_utils.AveragedModel(on.model)
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.optimizer.step()
        for m, p in zip(mean, on.model.parameters()):
            m.mul_(0.9).add_(p.detach(), alpha=0.1)
        swa.update_parameters(on.model)


# ---- accumulation


@loop("accumulation", "two parts, each loss / 2")
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows(size=4)):
        (CE(on.model(x), y) / 2).backward()
        if i % 2:
            on.optimizer.step()
            on.optimizer.zero_grad()


@loop("accumulation", "two parts, not divided")
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows(size=4)):
        CE(on.model(x), y).backward()
        if i % 2:
            on.optimizer.step()


@loop("accumulation", "unequal parts")
def _(on: Any) -> None:
    for x, y in rows():
        for cut in (slice(0, 5), slice(5, 8)):
            (CE(on.model(x[cut]), y[cut]) / 2).backward()
        on.optimizer.step()


@loop("accumulation", "parts with different factors", expected="different numbers")
def _(on: Any) -> None:
    for x, y in rows():
        for cut in (slice(0, 5), slice(5, 8)):
            (CE(on.model(x[cut]), y[cut]) * len(x[cut]) / 8).backward()
        on.optimizer.step()


@loop("accumulation", "one example after the other")
def _(on: Any) -> None:
    for x, y in rows():
        for i in range(8):
            CE(on.model(x[i : i + 1]), y[i : i + 1]).backward()
        on.optimizer.step()


@loop("accumulation", "losses of parts added up, one backward", expected="more than once")
def _(on: Any) -> None:
    for x, y in rows():
        sum(CE(on.model(a), b) for a, b in zip(x.split(4), y.split(4))).backward()
        on.optimizer.step()


@loop("accumulation", "the same rows twice before a step", expected="would count twice")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.model(x).square().sum(1).mean().backward()
        on.optimizer.step()


@loop("accumulation", "nearly the same rows twice before a step", expected="different, warned")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        CE(on.model(x + 0.01), y).backward()
        on.optimizer.step()


# ---- losses

S = torch.softmax(Z, 1)
losses("losses", "functional cross entropy", F.cross_entropy)
losses("losses", 'reduction="sum"', nn.CrossEntropyLoss(reduction="sum"))
losses(
    "losses",
    'reduction="none", then .mean()',
    lambda o, y: F.cross_entropy(o, y, reduction="none").mean(),
    CE,
)
losses("losses", "sum() / len(x)", lambda o, y: F.cross_entropy(o, y, reduction="sum") / len(y), CE)
losses("losses", "NLLLoss of log_softmax", lambda o, y: F.nll_loss(F.log_softmax(o, 1), y))
losses("losses", "class weights", nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0, 1.0])))
losses("losses", "label smoothing", nn.CrossEntropyLoss(label_smoothing=0.1))
losses("losses", "labels as probabilities", CE, y=S)
losses("losses", "MSELoss", nn.MSELoss(), y=Z)
losses("losses", "((out - y) ** 2).mean()", lambda o, y: ((o - y) ** 2).mean(), y=Z)
losses("losses", "L1Loss", nn.L1Loss(), y=Z)
losses("losses", "HuberLoss", nn.HuberLoss(), y=Z)
losses("losses", "SmoothL1Loss", nn.SmoothL1Loss(), y=Z)
losses("losses", "BCEWithLogitsLoss", nn.BCEWithLogitsLoss(), y=(Z > 0).float())
losses(
    "losses",
    "BCELoss of a sigmoid",
    lambda o, y: F.binary_cross_entropy(o.sigmoid(), y),
    y=(Z > 0).float(),
)
losses("losses", "MultiLabelSoftMarginLoss", nn.MultiLabelSoftMarginLoss(), y=(Z > 0).float())
losses("losses", "MultiMarginLoss", nn.MultiMarginLoss())
losses("losses", "PoissonNLLLoss", nn.PoissonNLLLoss(), y=Z.abs().round())
losses(
    "losses",
    "KLDivLoss, batchmean",
    lambda o, y: F.kl_div(F.log_softmax(o, 1), y, reduction="batchmean"),
    y=S,
)
losses(
    "losses",
    "focal loss",
    lambda o, y: (
        (1 - o.softmax(1).gather(1, y[:, None])[:, 0]) ** 2
        * F.cross_entropy(o, y, reduction="none")
    ).mean(),
)
losses(
    "losses",
    "an entropy bonus",
    lambda o, y: CE(o, y) - 0.01 * -(o.softmax(1) * o.log_softmax(1)).sum(1).mean(),
)
losses(
    "losses",
    "distillation, 0.5·CE + 0.5·KL",
    lambda o, y: (
        0.5 * CE(o, y.argmax(1)) + 0.5 * F.kl_div(o.log_softmax(1), y, reduction="batchmean")
    ),
    y=S,
)
losses(
    "losses",
    "a weight of a term that is a tensor",
    lambda o, y: CE(o, y) + torch.tensor(0.1) * o.square().mean(),
    expected="multiplied by a tensor",
)
losses(
    "losses",
    "a weight of the batch",
    lambda o, y: CE(o, y) + o.detach().std() * o.square().mean(),
    expected="multiplied by a tensor",
)
losses(
    "losses", "a root: RMSE", lambda o, y: F.mse_loss(o, y).sqrt(), y=Z, expected="cannot be seen"
)
losses(
    "losses",
    "L2 penalty by hand",
    lambda o, y: CE(o, y) + 1e-2 * o.square().sum(),
    expected="different numbers",
)
losses(
    "losses",
    "contrastive (examples against each other)",
    lambda o, y: CE(o @ o.T, torch.arange(len(o))),
    expected="with each other",
)
losses(
    "losses",
    "triplets from the same batch",
    lambda o, y: F.triplet_margin_loss(o, o.roll(1, 0), o.roll(2, 0)),
    expected="with each other",
)
losses(
    "losses",
    "hard examples only: topk",
    lambda o, y: F.cross_entropy(o, y, reduction="none").topk(4)[0].mean(),
    expected="with each other",
)
losses(
    "losses",
    "a mask of rows, .mean()",
    lambda o, y: F.cross_entropy(o[y > 0], y[y > 0]),
    expected="selected",
)
losses(
    "losses",
    "a mask of rows, a sum over a constant",
    lambda o, y: ((y > 0) * F.cross_entropy(o, y, reduction="none")).sum() / 8,
    lambda o, y: ((y > 0) * F.cross_entropy(o, y, reduction="none")).sum(),
)
losses(
    "losses",
    "outputs [8, 1] against targets [8]",
    lambda o, y: F.mse_loss(o[:, :1], y.float()),
    expected="more terms than outputs",
)


# Examples that meet, seen in the graph or by other rows, and twins in which they do not.


def terms(o: Any, y: Any) -> Any:
    return F.cross_entropy(o, y, reduction="none")


def without_gradient(o: Any, y: Any) -> Any:
    with torch.no_grad():
        weights = 8 * terms(o, y).softmax(0)
    return (weights * terms(o, y)).mean()


def share(y: Any) -> Any:
    return F.one_hot(y, 4).float().mean(0)


def hardest(o: Any, y: Any) -> Any:
    own = terms(o, y)
    return (own * (own.detach() >= own.detach().median())).sum() / 8


def together(name: str, loss_fn: Any, **more: Any) -> None:
    losses("losses", name, loss_fn, expected="with each other", **more)


together("rows against the first one", lambda o, y: CE(o, y) + (o - o[:1]).square().mean())
together("rows against the first one, detached", lambda o, y: (o - o[0].detach()).abs().mean())
together("one half of a batch against the other", lambda o, y: (o[:4] - o[4:]).square().mean())
together("outputs less their mean, detached", lambda o, y: CE(o - o.detach().mean(0), y))
together(
    "ranks: rows against others, detached", lambda o, y: (o - o.detach().flip(0)).relu().mean()
)
together("softmax weights of a batch, under no_grad", without_gradient)
together("hard examples by a mask", hardest)
together("sorted weights", lambda o, y: (terms(o, y) * terms(o, y).detach().argsort()).mean())
together("weights by counts of labels", lambda o, y: (terms(o, y) / y.bincount()[y]).mean())
together(
    "labels smoothed by their shares", lambda o, y: CE(o, 0.9 * F.one_hot(y, 4) + 0.1 * share(y))
)
together("logits adjusted by shares of labels", lambda o, y: CE(o + (0.1 + share(y)).log(), y))
together("two labels, one of another row", lambda o, y: 0.5 * CE(o, y) + 0.5 * CE(o, y.flip(0)))
together("1 / a number by .item()", lambda o, y: CE(o * (1 / o.detach().std().item()), y))
together(
    "a factor of the batch through NumPy",
    lambda o, y: CE(o * torch.from_numpy(o.detach().std(0).numpy().copy()), y),
)
together("a factor of the batch by .item()", lambda o, y: CE(o * o.detach().std().item(), y))
losses(
    "losses",
    "loss / loss.detach()",
    lambda o, y: CE(o, y) / CE(o, y).detach(),
    expected="changes with the batch",
)
together(
    "an if on the batch",
    lambda o, y: CE(o * (30.0 if o.detach().abs().max() > 30 else 1.0), y),
)
losses(
    "losses",
    "an if on labels of the batch",
    lambda o, y: CE(o * (30.0 if (y > 9).any() else 1.0), y),
    CE,
    expected="equal, warned",
)
losses(
    "losses",
    "an if on a number by .item()",
    lambda o, y: CE(o * (30.0 if o.detach().abs().max().item() > 30 else 1.0), y),
    CE,
    expected="equal, warned",
)
losses(
    "losses",
    "a factor of the batch by more arithmetic",
    lambda o, y: CE(o / (o.detach().std(correction=0).item() + 1e-3) ** 1.1, y),
    CE,
    expected="different, warned",
)
losses(
    "losses",
    "hard examples by NumPy",
    lambda o, y: (hard_rows(terms(o, y).detach().numpy()) * terms(o, y)).mean(),
    CE,
    expected="different, warned",
)


def hard_rows(found: Any) -> Any:
    return torch.from_numpy((found > found.mean()).astype("float32"))


@loop("losses", "a centre made before the model is called", expected="different, warned")
def _(on: Any) -> None:
    for x, y in rows():
        centre = x.mean(0)[:4]
        CE(on.model(x) - centre, y).backward()
        on.optimizer.step()


@loop("losses", "a factor made before the model is called", expected="with each other")
def _(on: Any) -> None:
    for x, y in rows():
        factor = 1 / x.std().item()
        CE(on.model(x) * factor, y).backward()
        on.optimizer.step()


@loop("losses", "a running mean of outputs, of earlier batches", expected="different, warned")
def _(on: Any) -> None:
    centre = torch.zeros(4)
    for x, y in rows():
        out = on.model(x)
        CE(out - centre, y).backward()
        centre = 0.9 * centre + 0.1 * out.detach().mean(0)
        on.optimizer.step()


@loop("losses", "logs before backward: .item(), NumPy, f-strings, if loss < best")
def _(on: Any) -> None:
    log, best = [], 9.0
    for x, y in rows():
        out = on.model(x)
        loss = CE(out, y)
        hits = (out.argmax(1) == y).float().mean().item()
        log.append((loss.item(), hits, out.detach().cpu().numpy().mean(), f"{loss:.2f}"))
        if loss.item() < best:
            best = loss.item()
        loss.backward()
        on.optimizer.step()


@loop("losses", "if torch.isnan(loss), assert torch.isfinite(loss), before backward")
def _(on: Any) -> None:
    for x, y in rows():
        loss = CE(on.model(x), y)
        assert torch.isfinite(loss)
        if torch.isnan(loss):
            continue
        loss.backward()
        on.optimizer.step()


losses(
    "losses",
    "torch.distributions, which checks its arguments",
    lambda o, y: -torch.distributions.Categorical(logits=o).log_prob(y).mean(),
)
losses("losses", "rows by their own norms", lambda o, y: CE(o / o.detach().norm(dim=1)[:, None], y))
losses(
    "losses",
    "a factor that is a number by .item()",
    lambda o, y: CE(o * torch.tensor(0.7).item(), y),
)
losses(
    "losses",
    "outputs picked by label",
    lambda o, y: -o.log_softmax(1)[torch.arange(len(o)), y].mean(),
)
losses(
    "losses",
    "weights looked up by label",
    lambda o, y: (torch.tensor([0.5, 1.0, 1.5, 1.0])[y] * terms(o, y)).mean(),
)
losses("losses", "noise on logits", lambda o, y: CE(o + torch.zeros_like(o).normal_() * 0, y))
losses(
    "losses",
    "losses of single rows, added up",
    lambda o, y: sum(
        F.cross_entropy(o[i : i + 1], y[i : i + 1], reduction="sum") for i in range(len(y))
    ),
)
losses("losses", "triplets of one's own", lambda o, z: F.triplet_margin_loss(o, z, -z), y=Z)
losses("losses", "cosine similarity", lambda o, z: (1 - F.cosine_similarity(o, z)).mean(), y=Z)


@loop("losses", "a factor of the inputs: x.std(0)", expected="with each other")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x) * x.std(0)[:4], y).backward()
        on.optimizer.step()


@loop("losses", "a teacher with BatchNorm that was left in training", expected="with each other")
def _(on: Any) -> None:
    teacher = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    for x, y in rows():
        out = on.model(x)
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        (0.5 * CE(out, y) + 0.5 * CE(out, wanted)).backward()
        on.optimizer.step()


@loop("losses", "a penalty on weights", expected="penalty on weights")
def _(on: Any) -> None:
    for x, y in rows():
        (
            CE(on.model(x), y) + 1e-3 * sum(p.square().mean() for p in on.model.parameters())
        ).backward()
        on.optimizer.step()


@loop("losses", "a penalty on weights from the second step on", expected="penalty on weights")
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows()):
        on.optimizer.zero_grad()
        loss = CE(on.model(x), y)
        if i:
            loss = loss + 0.1 * on.model[0].weight.reshape(8, -1).square().mean()
        loss.backward()
        on.optimizer.step()


@loop("losses", "a factor that changes with the batch", expected="changes with the batch")
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows()):
        (CE(on.model(x), y) * (1 + 0.3 * i)).backward()
        on.optimizer.step()


def mixed(on: Any, i: int, x: Any, y: Any) -> None:
    lam = 0.2 + 0.3 * i
    on.private.step(lambda out, y: lam * CE(out, y) + (1 - lam) * CE(out, (y + 1) % 4), x, y)


@loop(
    "losses",
    "λ·CE(a) + (1 − λ)·CE(b), another λ each time",
    twin=each(mixed),
    expected="equal, warned",
)
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows()):
        lam, out = 0.2 + 0.3 * i, on.model(x)
        (lam * CE(out, y) + (1 - lam) * CE(out, (y + 1) % 4)).backward()
        on.optimizer.step()


# ---- gradients by hand


@loop("gradients by hand", "clip_grad_norm_", expected="equal, warned")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        clip_grad_norm_(on.model.parameters(), 0.01)
        on.optimizer.step()


@loop("gradients by hand", "clip_grad_norm_ that clips nothing")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        clip_grad_norm_(on.model.parameters(), 1e6)
        on.optimizer.step()


@loop("gradients by hand", "clip_grad_value_", expected="gave gradients beyond")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        clip_grad_value_(on.model.parameters(), 0.001)
        on.optimizer.step()


@loop("gradients by hand", "p.grad *= 0.1", expected="equal, warned")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        for p in on.model.parameters():
            p.grad *= 0.1
        on.optimizer.step()


@loop("gradients by hand", "noise on p.grad", expected="gave gradients beyond")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        for p in on.model.parameters():
            p.grad += torch.randn_like(p)
        on.optimizer.step()


@loop("gradients by hand", "the gradient of one layer set to 0", expected="gave gradients beyond")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.model[0].weight.grad.zero_()
        on.optimizer.step()


def hooked() -> nn.Module:
    model = mlp()
    model[0].weight.register_hook(lambda g: 0.1 * g)
    return model


models("a hook on a parameter", hooked, expected="hook")


@loop("gradients by hand", "a hook on the outputs", expected="equal, warned")
def _(on: Any) -> None:
    for x, y in rows():
        out = on.model(x)
        out.register_hook(lambda g: 0.1 * g)
        CE(out, y).backward()
        on.optimizer.step()


def adversarial(on: Any, i: int, x: Any, y: Any) -> None:
    v = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(CE(on.model(v), y), v)
    on.private.step(CE, x + 0.1 * grad.sign(), y)


@loop("gradients by hand", "adversarial inputs (FGSM), zero_grad between", twin=each(adversarial))
def _(on: Any) -> None:
    for x, y in rows():
        v = x.clone().requires_grad_()
        CE(on.model(v), y).backward()
        on.optimizer.zero_grad()
        CE(on.model(x + 0.1 * v.grad.sign()), y).backward()
        on.optimizer.step()


# ---- precision


def cast(on: Any, scaler: Any = None, **more: Any) -> None:
    for x, y in rows():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = CE(on.model(x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if more.get("unscale"):
            scaler.unscale_(on.optimizer)
        if scaler is None:
            on.optimizer.step()
        else:
            scaler.step(on.optimizer)
            scaler.update()
        on.optimizer.zero_grad()


def cast_twin(on: Any) -> None:
    def half(model: Any, x: Any, y: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(model(x), y, reduction="none")

    for x, y in rows():
        on.private.step(ModelLoss(half, by_row=True), x, y)


LOW = {"twin": cast_twin, "tolerance": 3e-2}
loop("precision", "autocast to bfloat16", **LOW)(cast)
loop("precision", "autocast and a GradScaler", **LOW)(
    lambda on: cast(on, torch.amp.GradScaler("cpu"))
)
loop("precision", "a GradScaler, unscale_", **LOW)(
    lambda on: cast(on, torch.amp.GradScaler("cpu"), unscale=True)
)
loop("precision", "model.double()", model=lambda: mlp().double(), twin=by_step(CE, X.double()))(
    lambda on: (
        [(CE(on.model(x.double()), y).backward(), on.optimizer.step()) for x, y in rows()] and None
    )
)


@loop("precision", "the loss in another precision: CE(out.double(), y)")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model(x).double(), y).backward()
        on.optimizer.step()


# ---- optimizers and schedules

optimizers(
    "SGD with momentum, Nesterov, weight decay",
    lambda m: torch.optim.SGD(
        m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2
    ),
)
optimizers("Adam", lambda m: torch.optim.Adam(m.parameters(), lr=0.01), tolerance=1e-3)
optimizers("AdamW", lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), tolerance=1e-3)
optimizers("RMSprop", lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01), tolerance=1e-3)
optimizers("Adagrad", lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01), tolerance=1e-3)
optimizers(
    "two parameter groups",
    lambda m: torch.optim.SGD(
        [{"params": m[0].parameters(), "lr": 0.01}, {"params": m[2].parameters()}], lr=0.2
    ),
)
optimizers(
    "a parameter that the optimizer lacks",
    lambda m: torch.optim.SGD(m[2].parameters(), lr=0.2),
    expected="not in the optimizer",
)
optimizers("LBFGS", lambda m: torch.optim.LBFGS(m.parameters()), expected="LBFGS")


def scheduled(name: str, make: Any) -> None:
    """A schedule that is stepped after every step, on `private.optimizer` and on the twin's own."""

    def twin(on: Any) -> None:
        schedule = make(on.private._parts.optimizer)
        for x, y in rows():
            on.private.step(CE, x, y)
            schedule.step()

    @loop("optimizers", name, twin=twin)
    def run(on: Any) -> None:
        schedule = make(on.optimizer)
        for x, y in rows():
            CE(on.model(x), y).backward()
            on.optimizer.step()
            schedule.step()


scheduled("StepLR", lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5))
scheduled("OneCycleLR", lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=8))
scheduled("CosineAnnealingLR", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8))
scheduled(
    "LambdaLR warm-up",
    lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / 4)),
)


def slower(on: Any, i: int, x: Any, y: Any) -> None:
    on.private._parts.optimizer.param_groups[0]["lr"] = 0.1 * (i + 1)
    on.private.step(CE, x, y)


@loop("optimizers", "a learning rate set by hand", twin=each(slower))
def _(on: Any) -> None:
    for i, (x, y) in enumerate(rows()):
        on.optimizer.param_groups[0]["lr"] = 0.1 * (i + 1)
        CE(on.model(x), y).backward()
        on.optimizer.step()


@loop("optimizers", "two optimizers for two parts of the model", expected="not in the optimizer",
      optimizer=lambda m: torch.optim.SGD(m[0].parameters(), lr=0.2))  # fmt: skip
def _(on: Any) -> None:
    other = torch.optim.SGD(on.model[2].parameters(), lr=0.2)
    for x, y in rows():
        CE(on.model(x), y).backward()
        on.optimizer.step()
        other.step()


# ---- models


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return 2 * g


def tied() -> nn.Module:
    model = Forward(
        lambda m, t: (m.out(m.embed(t).mean(1)))[:, :4],
        embed=nn.Embedding(11, 8),
        out=nn.Linear(8, 11, bias=False),
    )
    model.out.weight = model.embed.weight
    return model


def attention() -> nn.Module:
    def forward(m: Any, t: Any) -> Any:
        h = m.embed(t)
        return m.out((h + m.mix(h, h, h, need_weights=False)[0]).mean(1))

    return Forward(
        forward,
        embed=nn.Embedding(11, 8),
        mix=nn.MultiheadAttention(8, 2, batch_first=True),
        out=nn.Linear(8, 4),
    )


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


models(
    "Dropout", lambda: nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4))
)
models(
    "LayerNorm and GELU",
    lambda: nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)),
)
models(
    "ReLU(inplace=True)",
    lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)),
)
models(
    "an OrderedDict of layers",
    lambda: nn.Sequential(OrderedDict(a=nn.Linear(6, 8), b=nn.SiLU(), c=nn.Linear(8, 4))),
)
models(
    "convolutions, GroupNorm, pooling",
    lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 4),
    ),
    IMAGES,
)
models(
    "channels_last",
    lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(168, 4)).to(
        memory_format=torch.channels_last
    ),
    IMAGES.to(memory_format=torch.channels_last),
)
models(
    "BatchNorm",
    lambda: nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)),
    expected="mixes examples",
)
models(
    "BatchNorm, after noshuffle.fix(model)",
    lambda: (
        noshuffle.fix(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(168, 4))
        ).model
    ),
    IMAGES,
)
models("Embedding and LSTM", sequence(nn.LSTM), TOKENS)
models("Embedding and GRU", sequence(nn.GRU), TOKENS)
models("MultiheadAttention", attention, TOKENS)
models(
    "TransformerEncoderLayer",
    lambda: Forward(
        lambda m, t: m.out(m.mix(m.embed(t)).mean(1)),
        embed=nn.Embedding(11, 8),
        mix=nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        out=nn.Linear(8, 4),
    ),
    TOKENS,
)
models("weights used twice (tied)", tied, TOKENS)
models(
    "a layer called twice",
    lambda: Forward(
        lambda m, x: m.out(m.mid(torch.tanh(m.mid(m.first(x))))),
        first=nn.Linear(6, 8),
        mid=nn.Linear(8, 8),
        out=nn.Linear(8, 4),
    ),
)
models("a frozen layer", frozen)
models(
    "an autograd.Function of one's own",
    lambda: Forward(
        lambda m, x: m.out(Doubled.apply(m.first(x))), first=nn.Linear(6, 8), out=nn.Linear(8, 4)
    ),
)
models(
    "weight_norm",
    lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 4)
    ),
    expected="equal, warned",
)
models(
    "spectral_norm (keeps a vector of its own)",
    lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 4)),
    expected="",
)
models(
    "activation checkpointing",
    lambda: Forward(
        lambda m, x: m.out(checkpoint(m.first, x, use_reentrant=False)),
        first=nn.Linear(6, 8),
        out=nn.Linear(8, 4),
    ),
)
models(
    "statistics of the batch in forward",
    lambda: Forward(
        lambda m, x: m.out((h := m.first(x)) - h.mean(0)),
        first=nn.Linear(6, 8),
        out=nn.Linear(8, 4),
    ),
    expected="",
)
models(
    "torch.compile",
    lambda: torch.compile(mlp(), backend="eager"),
    expected="privatize the model before torch.compile",
)
models("DataParallel", lambda: nn.DataParallel(mlp()), expected="the module inside")


@loop("models", "torch.compile after privatize")
def _(on: Any) -> None:
    fast = torch.compile(on.model, backend="eager")
    for x, y in rows():
        CE(fast(x), y).backward()
        on.optimizer.step()


def two_heads() -> nn.Module:
    return Forward(
        lambda m, x: (m.a(h := torch.tanh(m.first(x))), m.b(h)),
        first=nn.Linear(6, 8),
        a=nn.Linear(8, 4),
        b=nn.Linear(8, 4),
    )


def both(out: Any, y: Any, z: Any) -> Any:
    return CE(out[0], y) + 0.5 * F.mse_loss(out[1], z)


def heads(weight: float) -> Any:
    """The twin: both losses of an example."""

    def own(m: Any, x: Any, y: Any, z: Any) -> Any:
        a, b = m(x)
        return CE(a, y) + weight * F.mse_loss(b, z)

    return each(lambda on, i, *batch: on.private.step(ModelLoss(own), *batch), X, Y, Z)


@loop("models", "two heads, two losses added up", model=two_heads, twin=heads(0.5))
def _(on: Any) -> None:
    for x, y, z in zip(X.split(8), Y.split(8), Z.split(8)):
        both(on.model(x), y, z).backward()
        on.optimizer.step()


@loop("models", "two heads, two backward passes", model=two_heads, twin=heads(1.0))
def _(on: Any) -> None:
    for x, y, z in zip(X.split(8), Y.split(8), Z.split(8)):
        a, b = on.model(x)
        CE(a, y).backward(retain_graph=True)
        F.mse_loss(b, z).backward()
        on.optimizer.step()


@loop(
    "models",
    "two heads, two backward passes with different weights",
    model=two_heads,
    expected="different factors",
)
def _(on: Any) -> None:
    for x, y, z in zip(X.split(8), Y.split(8), Z.split(8)):
        a, b = on.model(x)
        CE(a, y).backward(retain_graph=True)
        (0.5 * F.mse_loss(b, z)).backward()
        on.optimizer.step()


def huggingface() -> nn.Module:
    def forward(m: Any, input_ids: Any, labels: Any = None) -> Any:
        logits = m.out(m.embed(input_ids).mean(1))
        return {"loss": None if labels is None else CE(logits, labels), "logits": logits}

    return Forward(forward, embed=nn.Embedding(11, 8), out=nn.Linear(8, 4))


HF_TWIN = {"twin": by_step(lambda o, y: CE(o["logits"], y), TOKENS), "model": huggingface}


@loop("models", "outputs as a dictionary, model(**batch)['loss']", **HF_TWIN)
def _(on: Any) -> None:
    for x, y in rows(TOKENS):
        on.model(**{"input_ids": x, "labels": y})["loss"].backward()
        on.optimizer.step()


@loop("models", "outputs as a dictionary, a loss of ['logits']", **HF_TWIN)
def _(on: Any) -> None:
    for x, y in rows(TOKENS):
        CE(on.model(input_ids=x)["logits"], y).backward()
        on.optimizer.step()


@loop("models", "parts of the model called by themselves", expected="no backward pass")
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model[2](on.model[1](on.model[0](x))), y).backward()
        on.optimizer.step()


@loop("models", "two passes in one loss (siamese)", expected="more than once")
def _(on: Any) -> None:
    for x, _y in rows():
        (on.model(x) - on.model(x + 0.1)).square().mean().backward()
        on.optimizer.step()


# ---- data


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(zip(X, Y))


def loaded(name: str, loader: Any, twin: Any = None, expected: str = "equal") -> None:
    @loop("data", name, twin=twin, expected=expected)
    def run(on: Any) -> None:
        for x, y in loader():
            CE(on.model(x), y).backward()
            on.optimizer.step()


loaded("a DataLoader", lambda: DataLoader(TensorDataset(X, Y), batch_size=8))
loaded("an IterableDataset", lambda: DataLoader(Stream(), batch_size=8))
loaded("a generator", lambda: ((x, y) for x, y in rows()))
loaded("a last batch that is short", lambda: rows(X[:20], Y[:20]), by_step(CE, X[:20], Y[:20]))
loaded(
    "drop_last=True",
    lambda: DataLoader(TensorDataset(X[:20], Y[:20]), batch_size=8, drop_last=True),
    by_step(CE, X[:16], Y[:16]),
)
loaded(
    "batches of twice the planned size", lambda: rows(size=16), by_step(size=16), "equal, warned"
)
loaded(
    "a second epoch that the plan does not have", lambda: [*rows(), *rows()], expected="seen before"
)


def shuffled(on: Any) -> None:
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True):
        on.private.step(CE, x, y)


@loop("data", "a shuffled DataLoader, one pass", twin=shuffled)
def _(on: Any) -> None:
    for x, y in DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True):
        CE(on.model(x), y).backward()
        on.optimizer.step()


@loop("data", "batches as dictionaries")
def _(on: Any) -> None:
    for batch in DataLoader([{"x": x, "y": y} for x, y in zip(X, Y)], batch_size=8):
        CE(on.model(batch["x"]), batch["y"]).backward()
        on.optimizer.step()


def noisy(on: Any, i: int, x: Any, y: Any) -> None:
    on.private.step(CE, (x - 0.1) / 2 + 0.01 * torch.randn(x.shape), y)


@loop("data", "inputs normalised by constants, noise on inputs", twin=each(noisy))
def _(on: Any) -> None:
    for x, y in rows():
        CE(on.model((x - 0.1) / 2 + 0.01 * torch.randn(x.shape)), y).backward()
        on.optimizer.step()


@loop("data", "mixup", expected="with each other")
def _(on: Any) -> None:
    for x, y in rows():
        order = torch.randperm(len(x))
        out = on.model(0.7 * x + 0.3 * x[order])
        (0.7 * CE(out, y) + 0.3 * CE(out, y[order])).backward()
        on.optimizer.step()


@loop("data", "mixup of inputs, after private.check(loader)", expected="different, warned")
def _(on: Any) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=8)
    on.private.check(loader)
    for x, y in loader:
        CE(on.model(0.7 * x + 0.3 * x[torch.randperm(len(x))]), y).backward()
        on.optimizer.step()


if __name__ == "__main__":
    from tests.training import loop_list_kinds, loop_list_more  # noqa: F401

    grid.grid_step = lambda _: 0.0  # sums that differ in their last bits may meet other points
    print(table())

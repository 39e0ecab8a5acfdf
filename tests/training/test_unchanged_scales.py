"""Dropout, factors and reductions in the unchanged loop: as in `private.step`, or refused."""

from __future__ import annotations

import gc
from weakref import WeakSet

import pytest
import torch
from tests.runs import agree
from torch import nn
from torch.nn import functional as F

from noshuffle.clipping import Ghost, ModelLoss
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise import test_source
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import tree
from noshuffle.training import heard_backward, privatize

G = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 3, generator=G), torch.randint(4, (8,), generator=G)
CE = nn.CrossEntropyLoss()


@pytest.fixture(autouse=True)
def _off_grid(monkeypatch):
    """Sums that differ in their last bits may be rounded to neighbouring points of the grid."""
    monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)


def make(model, run=None, **more):
    plan = Plan(participation=SinglePass(steps=6), strategy=tree(), noise_multiplier=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    options = {"clip_norm": 2.4, "batch_size": 8, "source": test_source(seed=1)}
    return privatize(model, optimizer, plan, run=run, **options, **more)


def net(seed=0, kind=nn.Dropout):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), kind(0.4), nn.Linear(16, 4))


class Plain(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 4))


class Functional(Plain):
    """Random numbers that no layer tells of."""

    def forward(self, x):
        hidden = self[1](self[0](x))
        return self[2](hidden * (torch.rand_like(hidden) > 0.4))


@pytest.mark.parametrize("kind", [net, Functional])
def test_dropout_masks_of_both_passes_are_one_and_those_of_private_step(kind):
    ours, theirs = kind(), kind()
    loop, plain = make(ours), make(theirs)
    torch.manual_seed(5)
    for t in range(3):
        CE(ours(X + t), Y).backward()
        loop.optimizer.step()
        plain.step(CE, X + t, Y)
    agree(ours, theirs)
    after = torch.rand(4)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(4))  # the user's generator was not touched
    assert not torch.equal(ours(X), ours(X))  # masks are drawn all the same


def test_a_gradient_by_hand_of_the_masks_of_the_first_pass():
    """Per example, by autograd, of the very outputs that the loop saw."""
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    loop = make(model)
    out = model(X)
    want = [torch.zeros_like(p) for p in model.parameters()]
    for i in range(8):
        loss = CE(out[i : i + 1], Y[i : i + 1])
        grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        norm = torch.stack([g.norm() for g in grads]).norm()
        for total, g in zip(want, grads):
            total += g * min(1.0, 2.4 / float(norm))
    loop.optimizer.zero_grad()  # the hand's own gradients came other than by backward()
    CE(out, Y).backward()
    plain = make(other := net())
    empty = plain.step(CE, X[:0], Y[:0])
    assert empty != empty  # noise alone
    loop.optimizer.step()
    for p, q, old, total in zip(model.parameters(), other.parameters(), before, want):
        torch.testing.assert_close(p - q, -0.2 * total / 8, rtol=1e-4, atol=1e-6)
        assert not torch.equal(old, p)


def test_masks_that_cannot_be_had_again_are_refused_and_nothing_is_updated():
    model = nn.Sequential(nn.Dropout(0.3), *net())
    loop = make(model, engine=Ghost(mode="lean"))  # in two parts: the masks come in another order
    CE(model(X), Y).backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(Unsupported, match="other dropout masks"):
        loop.optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


SCALED = {
    "accumulation": lambda out, y: CE(out, y) / 4,
    "scaler": lambda out, y: torch.tensor(65536.0) * CE(out, y),
    "in place": lambda out, y: CE(out, y).mul_(0.01).div_(torch.tensor([3.0]).squeeze()),
    "of the data": lambda out, y: CE(out, y) * (1 + out.detach().abs().max()),
    "sum": lambda out, y: F.cross_entropy(out, y, reduction="sum"),
    "none, mean": lambda out, y: F.cross_entropy(out, y, reduction="none").mean() / 3,
    "none, sum over 8": lambda out, y: F.cross_entropy(out, y, reduction="none").sum() / 8,
    "by index": lambda out, y: -F.log_softmax(out, 1)[torch.arange(8), y].mean(0),
    "probabilities": lambda out, y: F.cross_entropy(out, F.one_hot(y, 4).float()),
    "shifted": lambda out, y: 2 * (1 - (3 - CE(out, y))),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_factor_on_the_loss_never_reaches_the_clip(name):
    ours, theirs = Plain(), Plain()
    loop, plain = make(ours), make(theirs)
    SCALED[name](ours(X), Y).backward()
    loop.optimizer.step()
    plain.step(CE, X, Y)
    assert bool((plain.outcome.norms > 2.4).any())
    assert bool((plain.outcome.norms < 2.4).any())  # a factor would show either way
    agree(ours, theirs)


def test_unequal_parts_and_labels_that_are_left_out():
    """Every example counts alike, whatever part it is in and who else has a label there."""
    ours, theirs = Plain(), Plain()
    loop, plain = make(ours), make(theirs)
    y = Y.clone()
    y[5] = -100
    for rows in (slice(0, 1), slice(1, 6), slice(6, 8)):
        (CE(ours(X[rows]), y[rows]) / 3).backward()
    loop.optimizer.step()
    plain.step(CE, X, y)
    assert plain.outcome.nonfinite == 1  # 0/0: the loss of example 5 alone
    agree(ours, theirs)


def test_weighted_labels_and_means_over_tokens():
    weight = torch.tensor([0.1, 3.0, 1.0, 0.5])
    tokens = torch.randn(8, 5, 3, generator=G)
    labels = torch.randint(4, (8, 5), generator=G)
    labels[labels == 0] = -100
    labels[:, 0] = 1
    for flat in (False, True):
        ours, theirs = Plain(), Plain()
        loop, plain = make(ours), make(theirs)
        loss = nn.CrossEntropyLoss(weight=weight)
        out = ours(tokens)
        (loss(out.flatten(0, 1), labels.flatten()) if flat else loss(out.mT, labels)).backward()
        loop.optimizer.step()
        plain.step(lambda o, t: nn.CrossEntropyLoss(weight=weight)(o.mT, t), tokens, labels)
        agree(ours, theirs)


SOFT = torch.softmax(torch.randn(8, 4, generator=G), 1)


def softly(out, p, temperature=2.0):
    """Distillation as it is usually written."""
    log = F.log_softmax(out / temperature, 1)
    return temperature**2 * F.kl_div(log, p, reduction="batchmean")


def smooth(out, y):
    return F.cross_entropy(out, y, label_smoothing=0.1)


def three(out, y, p):
    return CE(out, y) + 0.2 * F.cross_entropy(out, p) + 0.3 * F.mse_loss(out, p)


TERMS = {
    "distillation": lambda out, y, p: 0.5 * CE(out, y) + 0.5 * F.cross_entropy(out, p),
    "with a temperature": lambda out, y, p: 0.3 * CE(out, y) + 0.7 * softly(out, p),
    "smooth labels": lambda out, y, p: smooth(out, y),
    "smooth and more": lambda out, y, p: smooth(out, y) + 0.01 * out.square().mean(),
    "two labels": lambda out, y, p: 0.3 * CE(out, y) + (1 - 0.3) * CE(out, (y + 1) % 4),
    "an entropy": lambda out, y, p: CE(out, y) - 0.1 * (-out.softmax(1) * out).sum(1).mean(),
    "a weight below 0": lambda out, y, p: CE(out, y) + (-0.1) * out.square().mean(),
    "a weight of 0": lambda out, y, p: CE(out, y) + 0.0 * out.square().mean(),
    "three, scaled": lambda out, y, p: three(out, y, p) / 4,
    "over their number": lambda out, y, p: CE(out, y) + out.square().sum() / len(out),
    "a mask of everything": lambda out, y, p: CE(out, y) + out.square().sum() / (y > -1).sum(),
}


@pytest.mark.parametrize("name", TERMS)
def test_sums_of_means_keep_the_weights_of_their_terms(name):
    """Also where a batch comes in unequal parts, each divided by its own size."""
    loss_fn, ours, theirs = TERMS[name], Plain(), Plain()
    loop, plain = make(ours), make(theirs)
    for rows in (slice(0, 5), slice(5, 8)):
        loss_fn(ours(X[rows]), Y[rows], SOFT[rows]).backward()
    loop.optimizer.step()
    own = three if name == "three, scaled" else loss_fn
    plain.step(ModelLoss(lambda model, x, y, p: own(model(x), y, p)), X, Y, SOFT)
    assert bool((plain.outcome.norms < 2.4).any())  # a factor would show
    agree(ours, theirs)


REFUSED = {
    "a weight of the batch": (
        lambda out, y: CE(out, y) + out.square().mean() * out.detach().abs().max(),
        "multiplied by a tensor",
    ),
    "a weight of the batch, before": (
        lambda out, y: CE(out, y) / (y > 0).sum() + out.square().mean(),
        "multiplied by a tensor",
    ),
    "a weight in double precision": (
        lambda out, y: CE(out, y) + out.square().mean() * out.detach().double().std(),
        "multiplied by a tensor",
    ),
    "a weight of the batch inside": (
        lambda out, y: 2 * ((CE(out, y) + out.mean()) * out.detach().mean() ** 2) + out.mean(),
        "multiplied by a tensor",
    ),
    "a mean by hand over a mask": (
        lambda out, y: CE(out, y) + (out.square() * (y > 0)[:, None]).sum() / (y > 0).sum(),
        "different numbers",
    ),
    "the same as a number": (
        lambda out, y: CE(out, y) + (out.square() * (y > 0)[:, None]).sum() / int((y > 0).sum()),
        "different numbers",
    ),
    "a sum over another number": (lambda out, y: CE(out, y) + out.square().sum() / 16, "different"),
    "smooth labels, one left out": (
        lambda out, y: F.cross_entropy(out, y.where(y > 0, -100), label_smoothing=0.1),
        "different numbers",
    ),
    "root of a mean": (lambda out, y: F.mse_loss(out, X @ X.T[:, :4]).sqrt(), "cannot be seen"),
    "product of means": (lambda out, y: CE(out, y) * out.square().mean(), "cannot be seen"),
    "norm": (lambda out, y: out.norm(), "cannot be seen"),
    "selected": (
        lambda out, y: F.cross_entropy(out, y, reduction="none")[y > 0].mean(),
        "selected",
    ),
    "negative": (lambda out, y: -2.0 * CE(out, y), "multiplied by -2"),
    "zero": (lambda out, y: 0.0 * CE(out, y), "multiplied by 0"),
    "nan": (lambda out, y: CE(out, y) * torch.tensor(torch.inf), "multiplied by inf"),
    "stack": (lambda out, y: torch.stack([CE(out, y), out.mean()]).sum(), "cannot be seen"),
    "means first": (lambda out, y: out.square().mean(0).sum(), "cannot be seen"),
    "sum and mean": (lambda out, y: CE(out, y) + out.square().sum(), "different numbers"),
    "two sums": (lambda out, y: out.exp().sum() / 31 + 1e-4 * out.square().sum() / 31, "different"),
    "masked labels": (lambda out, y: CE(out[y > 0], y[y > 0]), "selected"),
    "chosen labels": (lambda out, y: CE(out[[0, 1]], y[[0, 1]]), "selected"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_line_to_change(name):
    loss_fn, words = REFUSED[name]
    model = Plain()
    loop = make(model)
    loss_fn(model(X), Y).backward()
    with pytest.raises(Unsupported, match=words):
        loop.optimizer.step()
    assert loop.steps_released == 0


def test_one_loss_over_two_passes_and_gradients_without_backward_are_refused():
    model = Plain()
    loop = make(model)
    (CE(model(X), Y) + CE(model(-X), Y)).backward()  # each example would count twice
    with pytest.raises(Unsupported, match="more than once"):
        loop.optimizer.step()
    torch.autograd.grad(CE(model(X), Y), list(model.parameters()))
    with pytest.raises(Unsupported, match="other than by"):
        loop.optimizer.step()
    CE(model(X), Y).backward()
    (CE(model(-X), Y) / 2).backward()
    with pytest.raises(InvalidInput, match="different numbers"):
        loop.optimizer.step()
    assert loop.steps_released == 0


def test_a_factor_may_change_like_a_scaler_between_steps_and_not_with_the_batch():
    model = Plain()
    loop = make(model)
    for factor in (65536.0, 32768.0):
        (CE(model(X * factor), Y) * factor).backward()
        loop.optimizer.step()
    (CE(model(X), Y) * 20000.0).backward()
    with pytest.raises(InvalidInput, match="changes with the batch"):
        loop.optimizer.step()


def test_a_grad_scaler_steps_even_when_raw_gradients_are_infinite():
    """Whether an example is infinite must not be seen in whether a step is taken."""
    ours, theirs = Plain(), Plain()
    loop, plain = make(ours), make(theirs)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = X.clone()
    x[3] = torch.inf
    scaler.scale(CE(ours(x), Y)).backward()
    scaler.step(loop.optimizer)
    scaler.update()
    plain.step(CE, x, Y)
    assert loop.steps_released == plain.steps_released == 1
    agree(ours, theirs)


class Own(Plain):
    """Computes its loss, as Hugging Face models do."""

    def forward(self, x, labels=None, num_items_in_batch=None):
        out = super().forward(x)
        loss = None
        if labels is not None:
            reduction = "mean" if num_items_in_batch is None else "sum"
            loss = CE.__class__(reduction=reduction)(out.view(-1, 4), labels.view(-1))
            loss = loss if num_items_in_batch is None else loss / num_items_in_batch
        return {"loss": loss, "logits": out}


@pytest.mark.parametrize("scale", [1.0, 1 / 7, 1024.0])
@pytest.mark.parametrize("how", ["loss", "logits", "items"])
def test_models_that_give_their_loss_and_outputs_in_a_mapping(scale, how):
    ours, theirs = Own(), Plain()
    loop, plain = make(ours), make(theirs)
    if how == "logits":
        loss = CE(ours(x=X)["logits"], Y)
    else:
        items = torch.tensor(77) if how == "items" else None
        loss = ours(X, labels=Y, num_items_in_batch=items)["loss"]
    (loss * scale).backward()
    loop.optimizer.step()
    if how == "items":  # a sum over an example's tokens, of which there is one
        assert "num_items" not in str(loop.fallbacks)
    plain.step(CE, X, Y)
    agree(ours, theirs)


def test_torch_has_its_own_backward_when_nobody_listens(monkeypatch):
    plain = heard_backward._plain_backward
    monkeypatch.setattr(heard_backward, "_HEARING", WeakSet())  # other tests may still listen
    monkeypatch.setattr(torch.autograd, "backward", plain)
    loop = make(Plain())
    assert torch.autograd.backward is not plain
    loop.close()
    assert torch.autograd.backward is plain
    loop = make(Plain())
    assert torch.autograd.backward is not plain
    del loop
    gc.collect()
    torch.ones(1, requires_grad=True).sum().backward()  # forgets those that are gone
    assert torch.autograd.backward is plain


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_mean_over_tokens_that_is_written_out_is_a_sum(is_padded):
    """One token less must not turn a sum into a mean, or every row would grow by their number."""
    tokens = torch.randn(8, 5, 3, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(4, (8, 5), generator=torch.Generator().manual_seed(2))
    if is_padded:
        labels[0, 4] = -100
    ours, theirs = Plain(), Plain()
    loop, plain = make(ours), make(theirs)
    mask = (labels >= 0).float()
    each = F.cross_entropy(ours(tokens).mT, labels, reduction="none")
    ((each * mask).sum() / mask.sum()).backward()
    loop.optimizer.step()
    plain.step(lambda o, t: F.cross_entropy(o.mT, t, reduction="sum"), tokens, labels)
    agree(ours, theirs)


def test_a_loss_is_tried_with_other_rows_and_nothing_of_the_loop_changes():
    """What a loss writes to is written once, generators go on, and no mode stays behind."""
    modes = torch.overrides._get_current_function_mode_stack
    before = modes()  # a loop of an earlier test may still wait for its loss
    model, seen = Plain(), torch.zeros(4)
    loop = make(model)
    torch.manual_seed(7)
    out = model(X)
    seen += out.detach().sum(0)
    CE(out + 0.1 * torch.rand_like(out), Y).backward()
    after = torch.rand(2)
    loop.optimizer.step()
    torch.testing.assert_close(seen, out.detach().sum(0))
    torch.manual_seed(7)
    assert torch.equal(after, (torch.rand_like(out), torch.rand(2))[1])
    assert all(any(one is old for old in before) for one in modes())
    assert loop.steps_released == 1

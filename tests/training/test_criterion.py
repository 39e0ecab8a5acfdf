"""The loop with `private.criterion` takes the steps of `private.step`, or is refused."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.clipping.test_engines import LAYERS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import noshuffle as ns
from noshuffle.clipping import Flat, Ghost, ModelLoss, PerExample
from noshuffle.errors import (
    InvalidInput,
    NoshuffleError,
    ParticipationViolation,
    ProbablyNotMeant,
    Unsupported,
)
from noshuffle.noise import test_source as make_source
from noshuffle.training import privatize

G = torch.Generator().manual_seed(0)
X, Y = 4 * torch.randn(8, 3, generator=G), torch.randint(4, (8,), generator=G)
SOFT = torch.softmax(torch.randn(8, 4, generator=G), 1)
CE = nn.CrossEntropyLoss()
PLAN = ns.Plan.fit(ns.SinglePass(steps=6), mechanism="tree", noise_multiplier=0.5)


def net(last: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, last))


def begin(model: nn.Module | None = None, kind: Any = torch.optim.SGD, **more: Any) -> ns.Private:
    model = net() if model is None else model
    options = {"clip_norm": 1.0, "batch_size": 8, "source": make_source(seed=1), **more}
    optimizer = kind(model.parameters(), lr=0.2)
    return privatize(model, optimizer, options.pop("plan", PLAN), **options)


def weights(private: ns.Private) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in private.model.parameters()])


def loop_step(private: ns.Private, criterion: Any, x: Any, *targets: Any) -> float:
    loss = criterion(private.model(x), *targets)
    loss.backward()
    assert all(p.grad is None for p in private.model.parameters())
    private.optimizer.step()
    return float(loss)


LOSSES: dict[str, tuple[Any, tuple[Tensor, ...]]] = {
    "mean": (CE, (Y,)),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), (Y,)),
    "function": (F.cross_entropy, (Y,)),
    "weighted": (nn.CrossEntropyLoss(weight=torch.tensor([0.1, 3.0, 1.0, 0.5])), (Y,)),
    "left out": (CE, (Y.where(Y > 0, -100),)),
    "smooth": (nn.CrossEntropyLoss(label_smoothing=0.1), (Y,)),
    "soft": (F.cross_entropy, (SOFT,)),
    "squares": (nn.MSELoss(), (SOFT,)),
    "huber": (nn.HuberLoss(), (SOFT,)),
    "logits": (nn.BCEWithLogitsLoss(), (SOFT,)),
    "margin": (nn.MultiMarginLoss(), (Y,)),
    "distilled": (lambda out, y, p: CE(out, y) + F.kl_div(out.log_softmax(1), p), (Y, SOFT)),
    "root": (lambda out, p: F.mse_loss(out, p).sqrt(), (SOFT,)),
}  # fmt: skip


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_private_step_to_the_bit(name: str, kind: Any) -> None:
    """The first step is the trial's; the others read the user's own pass, with its dropout."""
    fn, targets = LOSSES[name]
    loop, plain = begin(kind=kind), begin(kind=kind)
    criterion = loop.criterion(fn)
    torch.manual_seed(5)
    for t in range(3):
        loss = loop_step(loop, criterion, X + t, *targets)
        assert loss == pytest.approx(plain.step(fn, X + t, *targets), rel=1e-5)
        assert torch.equal(weights(loop), weights(plain))
    after = torch.rand(4)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(4))  # the user's generator was not touched


class Small(nn.Module):
    """Layers of many kinds, with an input by keyword and a shared table of positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.lstm, self.out = (
            nn.LayerNorm(8),
            nn.LSTM(8, 6, batch_first=True),
            nn.Linear(6, 11),
        )

    def forward(self, tokens: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
        h = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0]) * mask[..., None]
        return {"logits": self.out(self.lstm(h)[0]), "hidden": h}


def test_keyword_inputs_a_part_of_the_output_and_layers_of_many_kinds() -> None:
    tokens, labels = torch.randint(11, (8, 5)), torch.randint(11, (8, 5))
    mask = torch.ones(8, 5)
    loop, plain = begin(Small()), begin(Small())
    criterion = loop.criterion(lambda out, y: F.cross_entropy(out.mT, y))

    def rows(model: Any, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(model(a, mask=b)["logits"].mT, y, reduction="none")
        return each.mean(1)

    for t in range(3):
        criterion(loop.model((tokens + t) % 11, mask=mask)["logits"], labels).backward()
        loop.optimizer.step()
        plain.step(ModelLoss(rows, by_row=True), (tokens + t) % 11, mask, labels)
        torch.testing.assert_close(weights(loop), weights(plain), rtol=1e-5, atol=1e-6)
    assert loop.fallbacks == []


@pytest.mark.parametrize(
    "name", [n for n in LAYERS if "fallback" not in n and "written out" not in n]
)
def test_every_layer_with_a_rule_is_recorded(name: str) -> None:
    torch.manual_seed(0)
    model, x = LAYERS[name]()
    model = model.to(x.dtype if x.is_floating_point() else torch.float64)
    y = torch.arange(len(x)) % 2
    loop, plain = begin(copy.deepcopy(model)), begin(copy.deepcopy(model))
    criterion = loop.criterion(F.cross_entropy)
    for _ in range(2):
        loop_step(loop, criterion, x, y)
        plain.step(F.cross_entropy, x, y)
        torch.testing.assert_close(weights(loop), weights(plain), rtol=1e-9, atol=1e-9)


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mu, log_var = self.inner(x).chunk(2, 1)
        return self.outer(mu + torch.randn_like(mu) * (log_var / 2).exp()), x, mu, log_var


def test_several_outputs_of_which_one_is_made_from_others() -> None:
    def loss(out: tuple[Tensor, ...]) -> Tensor:
        back, x, mu, log_var = out
        return F.mse_loss(back, x) + 0.1 * (mu.square() + log_var.exp() - log_var).mean()

    loop, plain = begin(Autoencoder()), begin(Autoencoder())
    criterion = loop.criterion(loss)
    for _ in range(3):
        back, x, mu, log_var = loop.model(X)
        criterion((back, x, mu, log_var)).backward()
        loop.optimizer.step()
        plain.step(loss, X)
        torch.testing.assert_close(weights(loop), weights(plain), rtol=1e-5, atol=1e-6)


class Pair(nn.Module):
    """A discriminator, which sees true and made-up rows side by side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.d = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(), nn.Linear(8, 1))

    def forward(self, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        return self.d(real), self.d(fake)


def test_a_gan_whose_discriminator_is_private() -> None:
    private, generator = begin(Pair()), nn.Linear(2, 3)
    optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    criterion = private.criterion(lambda out: (F.softplus(-out[0]) + F.softplus(out[1])).mean())
    for _ in range(3):
        fake = generator(torch.randn(8, 2))
        private.optimizer.zero_grad()
        criterion(private.model(X, fake.detach())).backward()
        private.optimizer.step()
        before = generator.weight.detach().clone()
        optimizer.zero_grad()
        F.softplus(-private.model.d(fake)).mean().backward()
        optimizer.step()
        assert not torch.equal(before, generator.weight)
    assert private.steps_released == 3


def test_what_is_in_front_of_the_model_is_not_trained_and_a_warning_says_so() -> None:
    private, encoder = begin(), nn.Linear(3, 3)
    with pytest.warns(ProbablyNotMeant, match="nothing is sent back into it"):
        loop_step(private, private.criterion(CE), encoder(X), Y)
    assert encoder.weight.grad is None


def test_two_criteria_in_turn_need_no_second_pass() -> None:
    private, calls = begin(), []
    private.model.register_forward_hook(lambda *_: calls.append(1))
    criteria = [(private.criterion(CE), Y), (private.criterion(nn.MSELoss()), SOFT)]
    for _ in range(3):
        calls.clear()
        for criterion, target in criteria:
            criterion(private.model(X), target).backward()
        private.optimizer.step()
    assert len(calls) == 2


def test_the_model_runs_once_from_the_second_batch_of_a_kind_on() -> None:
    private, calls = begin(), []
    private.model.register_forward_hook(lambda *_: calls.append(1))
    criterion = private.criterion(CE)
    for t in range(3):
        calls.clear()
        loop_step(private, criterion, X[: 8 - t], Y[: 8 - t])
        assert len(calls) == 1 or t == 0


FACTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "4": lambda loss: 4 * loss,
    "1e30": lambda loss: 1e30 * loss,
    "itself": lambda loss: loss * loss.item(),
    "log": lambda loss: loss.log(),
    "nan": lambda loss: loss * float("nan"),
    "twice": lambda loss: loss + loss,
}


def test_what_becomes_of_the_number_changes_nothing() -> None:
    found = []
    for scale in (lambda loss: loss, *FACTORS.values()):
        private = begin()
        criterion = private.criterion(CE)
        for _ in range(2):
            scale(criterion(private.model(X), Y)).backward()
            private.optimizer.step()
        found.append(weights(private))
    assert all(torch.equal(own, found[0]) for own in found)


class Sums(list[Tensor]):
    """The clipped sums of a run, without noise."""

    def __init__(self, private: ns.Private) -> None:
        release = private._parts.release
        close = release.close

        def recorded(ticket: Any, values: dict[str, Tensor], **more: Any) -> None:
            self.append(torch.cat([v.detach().double().reshape(-1) for v in values.values()]))
            close(ticket, values, **more)

        release.close = recorded  # type: ignore[method-assign]


def test_a_second_loss_on_a_kept_activation_cannot_reach_the_clip() -> None:
    """Hooks in the user's own backward pass took it in: one unit moved the sum by 2.18 of 1."""
    found, kept = [], list[Tensor]()
    far = X.clone()
    far[3] *= 30
    for x in (X, far):
        private = begin()
        sums, criterion = Sums(private), private.criterion(CE)
        loop_step(private, criterion, X, Y)
        private.model[0].register_forward_hook(lambda *call: kept.append(call[-1]))
        loop_step(private, criterion, X, Y)
        private.model.eval()  # without dropout, all is a function of x
        for _ in range(2):
            loss = criterion(private.model(x), Y)
            (loss + 100 * (kept[-1] - kept[-1].mean(0)).square().sum()).backward()
            with pytest.raises(InvalidInput, match=r"did not come from private\.criterion"):
                private.optimizer.step()
            private.model.zero_grad()
            private.optimizer.step()
        found.append(sums[2])
    assert 0.0 < float((found[0] - found[1]).norm()) <= 2.0  # a row is replaced: twice its bound


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(36, 16), nn.Tanh(), nn.Linear(16, 4)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 4)
    ),
    "lstm": lambda: nn.Sequential(nn.Unflatten(1, (6, 6)), LastStep(), nn.Linear(8, 4)),
}


class LastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0][:, -1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", MODELS)
def test_one_row_more_moves_the_sum_by_one_clip_norm_at_most(name: str) -> None:
    """A mean loss under autocast(bfloat16) moved it by up to 2.35: 1/B was rounded."""
    draw = torch.Generator().manual_seed(3)
    x, y = 3 * torch.randn(24, 36, generator=draw), torch.randint(4, (24,), generator=draw)

    def sum_of(rows: int) -> Tensor:
        torch.manual_seed(0)
        private = begin(MODELS[name]())
        sums, criterion = Sums(private), private.criterion(CE)
        private.optimizer.param_groups[0]["lr"] = 0.0
        for size in (8, rows):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = criterion(private.model(x[:size]), y[:size])
            loss.backward()
            private.optimizer.step()
        return sums[-1]

    for rows in (8, 19):
        assert float((sum_of(rows) - sum_of(rows + 1)).norm()) <= 1.001


def test_float16_keeps_gradients_that_would_vanish() -> None:
    """Its products are rounded to steps of 6e-8, and 2⁸ is sent and divided out."""
    private, x = begin(clip=Flat(10.0), clip_norm=None), X / 4
    criterion = private.criterion(lambda out, y: 1e-6 * F.cross_entropy(out.float(), y))
    norms = []
    for is_half in (False, False, True, True):
        with torch.autocast("cpu", dtype=torch.float16, enabled=is_half):
            loss = criterion(private.model(x), Y)
        loss.backward()
        private.optimizer.param_groups[0]["lr"] = 0.0
        private.optimizer.step()
        assert private.outcome is not None
        norms.append(private.outcome.norms)
    assert float((norms[3] / norms[1] - 1).abs().median()) < 0.5


# -- parts, units, folders -------------------------------------------------------------------------


def test_several_losses_before_one_step_are_parts_of_one_batch() -> None:
    loop, plain = begin(), begin()
    criterion = loop.criterion(CE)
    for first in (0, 8):
        for rows in (slice(0, 1), slice(1, 6), slice(6, 8)):
            ids = range(first + rows.start, first + rows.stop)
            (criterion(loop.model(X[rows]), Y[rows], ids=ids) / 3).backward()
        with torch.no_grad():
            criterion(loop.model(X), Y)  # evaluation leaves no trace
        loop.model(X)  # nor does a pass without a loss
        loop.optimizer.step()
        with plain.accumulate() as step:
            for rows in (slice(0, 1), slice(1, 6), slice(6, 8)):
                step.add(CE, (X[rows], Y[rows]), ids=range(first + rows.start, first + rows.stop))
        torch.testing.assert_close(weights(loop), weights(plain), rtol=1e-5, atol=1e-6)
    assert loop.steps_released == 2
    criterion(loop.model(X[:4]), Y[:4], ids=range(20, 24)).backward()
    with pytest.raises(ParticipationViolation):
        criterion(loop.model(X[:4]), Y[:4], ids=range(23, 27)).backward()


def test_a_batch_that_is_refused_leaves_the_run_as_it_was() -> None:
    private = begin()
    criterion = private.criterion(CE)
    for ids, words in ((range(8), ""), (range(7, 15), "unit 7"), (range(8, 17), "got 9")):
        loss = criterion(private.model(X), Y, ids=ids)
        if not words:
            loss.backward()
            private.optimizer.step()
            continue
        before = weights(private)
        with pytest.raises((ParticipationViolation, InvalidInput), match=words):
            loss.backward()
        with pytest.raises(InvalidInput, match="no loss of"):
            private.optimizer.step()
        assert torch.equal(before, weights(private))
    criterion(private.model(X), Y, ids=range(8, 16)).backward()
    private.optimizer.step()
    assert private.steps_released == 2


def test_rows_are_named_by_private_batches_and_a_run_goes_on(tmp_path: Any) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
    plan = ns.Plan.fit(ns.Epochs(2, 2), mechanism="tree", noise_multiplier=0.5)
    found = []
    for stops in ((4,), (1, 2, 4)):
        for stop in stops:
            private = begin(run=tmp_path / str(len(stops)), plan=plan, save_every=0)
            private.resume()
            criterion = private.criterion(CE)
            while private.steps_released < stop:
                for x, y in private.batches(loader):
                    loop_step(private, criterion, x, y)
                    if private.steps_released == stop:
                        break
            assert private.statement().participation_checked
            private.close()
        found.append(weights(private))
    assert torch.equal(*found)


def test_users_and_rows_that_are_dropped() -> None:
    plan = ns.Plan.fit(ns.SinglePass(steps=6), mechanism="tree", noise_multiplier=0.5, unit="user")
    ids = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4])
    loop, plain = (begin(nn.Linear(3, 4), plan=plan, on_violation="drop") for _ in range(2))
    plain.model.load_state_dict(loop.model.state_dict())
    criterion = loop.criterion(CE)
    for t in range(3):
        criterion(loop.model(X), Y, ids=ids + 4 * t).backward()
        loop.optimizer.step()
        plain.step(CE, X, Y, ids=ids + 4 * t)
        torch.testing.assert_close(weights(loop), weights(plain), rtol=1e-5, atol=1e-6)
        assert loop.outcome is not None
        assert plain.outcome is not None
        assert loop.outcome.dropped == plain.outcome.dropped


def test_batches_that_are_drawn_in_secret() -> None:
    rule = ns.Poisson(steps=4, rate=0.5)
    plan = ns.Plan.fit(rule, mechanism="identity", noise_multiplier=1.0, delta=1e-5)
    loop, plain = begin(plan=plan), begin(plan=plan)
    criterion, draws = loop.criterion(CE), plain.sampler(8)
    for step, rows in enumerate(loop.sampler(8)):
        criterion(loop.model(X[rows]), Y[rows], ids=rows).backward()
        loop.optimizer.step()
        assert list(draws.draw(step)) == list(rows)
        plain.step(CE, X[rows], Y[rows], ids=rows)
        torch.testing.assert_close(weights(loop), weights(plain), rtol=1e-5, atol=1e-6)
    assert loop.steps_released == 4


def test_huge_nan_and_no_rows() -> None:
    private = begin()
    criterion = private.criterion(CE)
    x = X.clone()
    x[2], x[5] = 1e30, torch.nan
    for rows in (X, x, X[:0], X[:1]):
        loop_step(private, criterion, rows, Y[: len(rows)])
        assert bool(weights(private).isfinite().all())
    assert private.steps_released == 4


# -- state of the model ----------------------------------------------------------------------------


class Keeps(nn.Module):
    """Keeps something of the data of its `when`-th pass: a buffer, or a parameter."""

    def __init__(self, what: str, when: int) -> None:
        super().__init__()
        self.what, self.when, self.passes = what, when, 0
        self.shift = nn.Linear(1, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.passes >= self.when:
            with torch.no_grad():
                own = self.mean if self.what == "buffer" else self.shift.bias
                own.copy_(x.mean(0))
        return x + self.shift(x[:, :1]) - self.mean


@pytest.mark.parametrize("what", ["buffer", "parameter"])
@pytest.mark.parametrize("when", [1, 500])
def test_what_a_pass_keeps_of_its_data_is_refused_or_undone(what: str, when: int) -> None:
    private = begin(nn.Sequential(Keeps(what, when), *net()))
    criterion = private.criterion(CE)
    loop_step(private, criterion, X, Y) if when > 1 else None
    private.model[0].passes += when
    if when > 1 and what == "buffer":  # the trial is over: what it writes is undone
        loop_step(private, criterion, X, Y)
        assert private.steps_released == 2
    else:
        with pytest.raises(Unsupported, match=r"set by the forward pass|beside other examples"):
            loop_step(private, criterion, X, Y)
        assert private.steps_released == (when > 1)
    assert not private.model[0].mean.any()


# -- refusals --------------------------------------------------------------------------------------


def plain_loss(private: ns.Private, criterion: Any) -> None:
    CE(private.model(X), Y).backward()
    private.optimizer.step()


def raw_gradients(private: ns.Private, criterion: Any) -> None:
    criterion(private.model(X), Y).backward()
    CE(private.model(X), Y).backward()
    private.optimizer.step()


def penalty(private: ns.Private, criterion: Any) -> None:
    decay = sum(p.square().sum() for p in private.model.parameters())
    (criterion(private.model(X), Y) + decay).backward()
    private.optimizer.step()


def grad_scaler(private: ns.Private, criterion: Any) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(criterion(private.model(X), Y)).backward()
    scaler.step(private.optimizer)


def two_criteria(private: ns.Private, criterion: Any) -> None:
    out = private.model(X)
    (criterion(out, Y) + criterion(out, Y.flip(0))).backward()


def two_backward_passes(private: ns.Private, criterion: Any) -> None:
    loss = criterion(private.model(X), Y)
    loss.backward(retain_graph=True)
    loss.backward()


def two_passes(private: ns.Private, criterion: Any) -> None:
    criterion((private.model(X), private.model(-X)), Y)


def changed_output(private: ns.Private, criterion: Any) -> None:
    criterion(private.model(X) / 2, Y)


def mixed_output(private: ns.Private, criterion: Any) -> None:
    out = private.model(X)
    criterion(out - out.mean(0), Y)


def changed_in_place(private: ns.Private, criterion: Any) -> None:
    out = private.model(X)
    out -= out.mean(0)
    criterion(out, Y)


def hooked(private: ns.Private, criterion: Any) -> None:
    out = private.model(X)
    loss = criterion(out, Y)
    out.register_hook(lambda g: g - g.mean(0))
    loss.backward()


def changed_input(private: ns.Private, criterion: Any) -> None:
    x = X.clone()
    loss = criterion(private.model(x), Y)
    x.zero_()
    loss.backward()


def other_model(private: ns.Private, criterion: Any) -> None:
    criterion(net()(X), Y)


def cleared(private: ns.Private, criterion: Any) -> None:
    criterion(private.model(X), Y).backward()
    private.optimizer.zero_grad()


def other_step(private: ns.Private, criterion: Any) -> None:
    criterion(private.model(X), Y).backward()
    private.step(CE, X, Y)


def joined(private: ns.Private, criterion: Any) -> None:
    private.optimizer.add_param_group({"params": []})


def old_optimizer(private: ns.Private, criterion: Any) -> None:
    criterion(private.model(X), Y).backward()
    private._parts.optimizer.step()


def closed(private: ns.Private, criterion: Any) -> None:
    private.close()
    criterion(private.model(X), Y).backward()


def model_loss(private: ns.Private, criterion: Any) -> None:
    private.criterion(ModelLoss(lambda model, x, y: CE(model(x), y)))  # type: ignore[arg-type]


def detached(private: ns.Private, criterion: Any) -> None:
    private.criterion(lambda out, y: CE(out.detach(), y))(private.model(X), Y)


def distributed(private: ns.Private, criterion: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(private.model)(X)
    finally:
        torch.distributed.destroy_process_group()


REFUSALS = {
    plain_loss: "write criterion = private.criterion",
    raw_gradients: "did not come from private.criterion",
    penalty: "weight_decay of the optimizer",
    grad_scaler: "a GradScaler has no gradients to scale here; leave it out",
    two_criteria: "add the terms up in one function",
    two_backward_passes: "call loss.backward() once",
    two_passes: "let one forward take all inputs",
    changed_output: "put what stands between into its function",
    mixed_output: "put what stands between into its function",
    changed_in_place: "put what stands between into its function",
    hooked: "put what stands between into its function",
    changed_input: "give the model a tensor of its own",
    other_model: "put what stands between into its function",
    cleared: "take it by private.optimizer.step()",
    other_step: "take it by private.optimizer.step()",
    joined: "add them before privatize",
    old_optimizer: "use private.step, or private.criterion",
    closed: "this run was closed",
    model_loss: "use private.step",
    detached: "the loss must depend on the trainable parameters",
    distributed: "call the module that was given to privatize",
}


@pytest.mark.parametrize("call", REFUSALS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("is_first", [True, False])
def test_refused_with_the_line_to_change(call: Any, is_first: bool) -> None:
    private = begin()
    criterion = private.criterion(CE)
    if not is_first:
        loop_step(private, criterion, X, Y)
    before = weights(private)
    with pytest.raises(NoshuffleError) as told:
        call(private, criterion)
    assert REFUSALS[call] in str(told.value)
    assert "\n" not in str(told.value)
    assert torch.equal(before, weights(private))


class Checkpointed(nn.Module):
    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.is_reentrant = nn.Linear(3, 5), nn.Linear(6, 4), is_reentrant
        self.inner = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.3), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.inner, self.first(x), use_reentrant=self.is_reentrant)
        return self.last(h)  # type: ignore[no-any-return]


def test_checkpoints_run_again_in_the_private_backward_pass() -> None:
    loop, plain = begin(Checkpointed(False)), begin(Checkpointed(False))
    criterion = loop.criterion(CE)
    for _ in range(3):
        loop_step(loop, criterion, X, Y)
        plain.step(CE, X, Y)
        assert torch.equal(weights(loop), weights(plain))
    private = begin(Checkpointed(True))
    with pytest.raises(Unsupported, match="use_reentrant=False"):
        loop_step(private, private.criterion(CE), X, Y)


class OwnParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def test_models_without_layer_rules_and_compiled_ones_are_refused() -> None:
    for private in (begin(OwnParameters()), begin(engine=PerExample())):
        with pytest.raises(Unsupported, match=r"needs layer rules \(.*use private.step"):
            private.criterion(CE)
    private = begin(nn.Sequential(nn.Linear(3, 5), Mixing(), nn.Linear(5, 4)))
    for _ in range(2):
        with pytest.raises(Unsupported, match=r"needs layer rules \(.*changes.*use private.step"):
            loop_step(private, private.criterion(CE), X, Y)
    assert private.steps_released == 0
    compiled: Any = torch.compile(net(), backend="eager")
    with pytest.raises(Unsupported, match="as it was before"):
        begin(compiled).criterion(CE)
    with pytest.raises(Unsupported, match="augment="):
        begin(augment=2).criterion(CE)


def test_a_norm_clipped_before_the_step_has_nothing_to_act_on() -> None:
    loop, plain = begin(), begin()
    criterion = loop.criterion(CE)
    criterion(loop.model(X), Y).backward()
    assert float(nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)) == 0.0
    loop.optimizer.step()
    plain.step(CE, X, Y)
    assert torch.equal(weights(loop), weights(plain))


def test_closures_schedules_and_copies_of_the_model() -> None:
    private = begin(engine=Ghost())
    criterion, optimizer = private.criterion(CE), private.optimizer
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def closure(private: ns.Private, criterion: Any) -> Tensor:
        private.optimizer.zero_grad()
        loss: Tensor = criterion(private.model(X), Y)
        loss.backward()
        return loss

    assert float(optimizer.step(partial(closure, private, criterion))) > 0
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.1
    twin = copy.deepcopy(private.model)
    again = pickle.loads(pickle.dumps(private.model))
    for other in (twin, again):
        CE(other(X), Y).backward()
    hooks = len(private.model._forward_hooks)
    model = private.model
    del private, criterion, optimizer, schedule
    gc.collect()
    assert len(model._forward_hooks) == hooks - 1

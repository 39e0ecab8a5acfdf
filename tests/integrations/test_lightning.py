"""PrivateCallback: Lightning's loop is `private.step` by hand, stopped and resumed, or refused."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import noshuffle as ns
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.noise import test_source
from noshuffle.training import privatize

pl = pytest.importorskip("pytorch_lightning")
from noshuffle.integrations.lightning import PrivateCallback, trained_part  # noqa: E402

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
G = torch.Generator().manual_seed(0)
X, Y = torch.randn(18, 1, 6, 6, generator=G), torch.randint(4, (18,), generator=G)


@pytest.fixture(autouse=True)
def _off_grid(monkeypatch):
    """Sums that differ in their last bits may be rounded to neighbouring points of the grid."""
    monkeypatch.setattr("noshuffle.noise.grid.grid_step", lambda _: 0.0)


def cnn(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.Tanh(),
        nn.GroupNorm(1, 3),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(48, 4),
    )


class Module(pl.LightningModule):
    criterion = staticmethod(nn.functional.cross_entropy)

    def __init__(self, seed=0):
        super().__init__()
        self.net = cnn(seed)

    def training_step(self, batch, index):
        loss = self.criterion(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


PLANS = {}


def planned(steps, epochs=2):
    if (steps, epochs) not in PLANS:
        rule = ns.Epochs(epochs=epochs, steps_per_epoch=steps)
        PLANS[steps, epochs] = ns.Plan.fit(rule, mechanism="blt", noise_multiplier=0.5, delta=1e-5)
    return PLANS[steps, epochs]


SETTINGS = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


def fit(
    root,
    module,
    *,
    run=None,
    plan=None,
    parts=1,
    shuffle=False,
    is_plain=False,
    extra=(),
    **options,
):
    private = PrivateCallback(
        plan or planned(-(-5 // parts)),
        clip_norm=0.5,
        batch_size=4 * parts,
        run=run,
        source=test_source(seed=1),
    )
    settings = {**SETTINGS, "max_epochs": 2, "default_root_dir": root}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            **{**settings, **options}, accumulate_grad_batches=parts, callbacks=[private, *extra]
        )
        if not is_plain:
            module.criterion = private.criterion(nn.functional.cross_entropy)
        loader = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=shuffle)
        trainer.fit(module, private.batches(loader))
    return private.private


def by_hand(parts, *, is_loop, epochs=2, lost=()):
    """`private.step` in parts, or the loop with a criterion."""
    model, plan = cnn(), planned(-(-5 // parts), epochs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    size = {"clip_norm": 0.5, "batch_size": 4 * parts, "source": test_source(seed=1)}
    private = privatize(model, optimizer, plan, **size)
    criterion = private.criterion(nn.functional.cross_entropy)
    for _ in range(epochs):
        for start in range(0, 18, 4 * parts):
            if private.steps_released in lost:
                private.skip()
                continue
            if is_loop:
                for at in range(start, min(start + 4 * parts, 18), 4):
                    rows = slice(at, min(at + 4, 18))
                    (criterion(model(X[rows]), Y[rows]) / parts).backward()
                private.optimizer.step()
                continue
            with private.accumulate() as step:
                for at in range(start, min(start + 4 * parts, 18), 4):
                    rows = slice(at, min(at + 4, 18))
                    step.add(nn.CrossEntropyLoss(), (X[rows], Y[rows]))
        schedule.step()
    return model


def agree(a, b, **how):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, **how)


EXACT = {"rtol": 0, "atol": 0}


class Stop(pl.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_step == self.step:
            raise RuntimeError("killed")


@pytest.mark.parametrize("parts", [1, 2])
def test_the_same_as_by_hand_to_the_bit(tmp_path, parts):
    whole = fit(tmp_path, Module(), parts=parts)
    agree(whole.model, by_hand(parts, is_loop=True), **EXACT)
    agree(whole.model, by_hand(parts, is_loop=False), rtol=1e-5, atol=1e-6)
    assert whole.epsilon == whole.plan.epsilon()


@pytest.mark.parametrize(("parts", "stop"), [(1, 7), (2, 4), (1, 5)])
def test_a_stopped_run_goes_on_with_the_next_epoch(tmp_path, parts, stop):
    length = -(-5 // parts)
    how = {"plan": planned(length, 3), "parts": parts, "max_epochs": 3}
    run = tmp_path / "run"
    with pytest.raises(RuntimeError, match="killed"):
        fit(tmp_path, Module(), run=run, extra=[Stop(stop)], **how)
    again = fit(tmp_path, Module(seed=5), run=run, **how)
    assert again.steps_released == again.plan.steps == 3 * length
    lost = range(stop, -(-stop // length) * length)
    agree(again.model, by_hand(parts, is_loop=True, epochs=3, lost=lost), **EXACT)
    assert again.epsilon == again.plan.epsilon()


class OwnForward(Module):
    """Everything is trained by its own forward."""

    def __init__(self):
        super().__init__()
        self.net, layers = None, cnn()
        self.first, self.last = layers[:4], layers[4:]

    def forward(self, x):
        return self.last(self.first(x))

    def training_step(self, batch, index):
        return self.criterion(self(batch[0]), batch[1])


class PastForward(OwnForward):
    def training_step(self, batch, index):
        return self.criterion(self.last(self.first(batch[0])), batch[1])


def test_which_module_is_heard(tmp_path):
    assert isinstance(trained_part(Module()), nn.Sequential)
    private = fit(tmp_path, module := OwnForward())
    assert private.model is module
    assert private.steps_released == 10
    with pytest.raises(Unsupported, match="what the private model returned"):
        fit(tmp_path, PastForward())
    with pytest.raises(InvalidInput, match=r"write criterion = private\.criterion"):
        fit(tmp_path, Module(), is_plain=True)


def test_names_and_half_precision(tmp_path):
    private = fit(tmp_path, Module(), precision="bf16-mixed")
    assert private.statement().participation_checked
    assert private.steps_released == 10


class Nothing(Module):
    """Passes over a batch because of what is in it, which nobody may see."""

    def training_step(self, batch, index):
        return super().training_step(batch, index) if index else None


class Clips(Module):
    def configure_gradient_clipping(self, optimizer, *rest, **more):
        nn.utils.clip_grad_norm_(self.parameters(), 1e-3)


def test_clips_by_hand_have_nothing_to_act_on(tmp_path):
    agree(fit(tmp_path, Clips()).model, by_hand(1, is_loop=True), **EXACT)


def test_the_last_step_has_all_its_batches(tmp_path):
    """Its row is written with the first of them."""
    callback = PrivateCallback(planned(2, 1), clip_norm=0.5, batch_size=8)
    module = Module()
    module.criterion = callback.criterion(nn.functional.cross_entropy)
    trainer = pl.Trainer(**SETTINGS, max_epochs=1, callbacks=[callback], accumulate_grad_batches=2)
    data = DataLoader(TensorDataset(X[:16], Y[:16]), batch_size=4)
    trainer.fit(module, callback.batches(data))
    assert len(callback.private.outcome.losses) == 8


def test_a_checkpoint_of_lightning_names_the_run_and_holds_no_noise(tmp_path):
    saved = pl.callbacks.ModelCheckpoint(tmp_path / "saved", save_last=True)
    run = tmp_path / "run"
    fit(tmp_path, Module(), run=run, extra=[saved], enable_checkpointing=True)
    state = torch.load(tmp_path / "saved" / "last.ckpt", weights_only=False)
    (own,) = [value for key, value in state["callbacks"].items() if "Private" in key]
    assert own == {"step": 10, "run": str(run)}


def test_independent_noise_may_be_shuffled_and_a_callback_is_for_one_fit(tmp_path):
    plan = ns.Plan.fit(ns.Epochs(2, 5), mechanism="identity", noise_multiplier=0.5)
    made = fit(tmp_path, Module(), plan=plan, shuffle=True)
    assert made.steps_released == 10
    assert made.statement().participation_checked
    private = PrivateCallback(planned(5), clip_norm=0.5, batch_size=4, source=test_source(seed=1))
    for times in range(2):
        trainer = pl.Trainer(
            **SETTINGS, max_epochs=1, callbacks=[private], default_root_dir=tmp_path
        )
        loader = private.batches(DataLoader(TensorDataset(X, Y), batch_size=4))
        module = Module()
        module.criterion = private.criterion(module.criterion)
        if times:
            with pytest.raises(InvalidInput, match="another trainer"):
                trainer.fit(module, loader)
        else:
            trainer.fit(module, loader)


class PastOptimizer(Module):
    """Takes no private step."""

    def optimizer_step(self, epoch, index, optimizer, closure):
        closure()
        assert all(p.grad is None for p in self.parameters())


class Plateau(Module):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


def test_raw_steps_and_raw_choices_are_refused(tmp_path):
    with pytest.raises(InvalidInput, match=r"take it by private\.optimizer|had taken the first"):
        fit(tmp_path, PastOptimizer())
    for module, extra in (
        (Plateau(), []),
        (Module(), [pl.callbacks.EarlyStopping("loss_epoch", check_on_train_epoch_end=True)]),
    ):
        with pytest.raises(InvalidInput, match="is logged by training_step"):
            fit(tmp_path, module, extra=extra)
    module = Module()
    before = [p.clone() for p in module.parameters()]
    with pytest.raises(Unsupported, match="LearningRateFinder"):
        fit(tmp_path, module, extra=[pl.callbacks.LearningRateFinder(num_training_steps=2)])
    assert all(map(torch.equal, before, module.parameters()))


def test_what_the_guarantee_does_not_cover_is_refused(tmp_path):
    class Manual(Module):
        pass

    Manual.automatic_optimization = property(lambda self: False)
    with pytest.raises(Unsupported, match="manual optimisation"):
        fit(tmp_path, Manual())
    with pytest.raises(Unsupported, match="gradient_clip_val"):
        fit(tmp_path, Module(), gradient_clip_val=1.0)
    with pytest.raises(Unsupported, match="the strategy DDPStrategy"):
        fit(tmp_path, Module(), strategy="ddp", devices=1)
    torch.distributed.destroy_process_group()  # Lightning leaves it; Trainers of others join it
    with pytest.raises(Unsupported, match="a compiled module"):
        fit(tmp_path, torch.compile(Module(), backend="eager"))
    with pytest.raises(InvalidInput, match="no loss of private"):
        fit(tmp_path, Nothing())
    callback = PrivateCallback(planned(5), clip_norm=0.5, batch_size=4)
    trainer = pl.Trainer(max_epochs=2, default_root_dir=tmp_path, callbacks=[callback], **SETTINGS)
    with pytest.raises(InvalidInput, match=r"callback\.batches\(loader\)"):
        trainer.fit(Module(), DataLoader(TensorDataset(X, Y), batch_size=4))
    with pytest.raises(InvalidInput, match="makes 15 steps"):
        fit(tmp_path, Module(), max_epochs=3)


def test_an_epoch_of_another_length_is_refused_before_the_first_step(tmp_path):
    callback = PrivateCallback(planned(3), clip_norm=1.0, batch_size=8)
    with pytest.raises(InvalidInput, match="nothing was trained yet"):
        callback.statement()
    loader = DataLoader(TensorDataset(torch.randn(16, 1, 6, 6), torch.arange(16) % 4), batch_size=8)
    trainer = pl.Trainer(max_epochs=2, default_root_dir=tmp_path, callbacks=[callback], **SETTINGS)
    with pytest.raises(InvalidInput, match="the plan has 3 steps per epoch, the data has 2"):
        trainer.fit(Module(), callback.batches(loader))
    assert not callback.private.steps_released


def test_a_plan_of_fewer_passes_is_refused_before_the_first_step(tmp_path):
    """The second epoch was refused, when the first was trained and paid for."""
    plan = ns.Plan.fit(ns.SinglePass(12), mechanism="tree", noise_multiplier=0.5, delta=1e-5)
    for shuffle in (False, True):
        with pytest.raises(InvalidInput, match=r"same rows 2 times.*Epochs\(epochs=2"):
            fit(tmp_path, Module(), plan=plan, shuffle=shuffle)
    assert fit(tmp_path, Module(), plan=plan, max_epochs=1).steps_released == 5

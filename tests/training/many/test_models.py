"""Models that many runs at once can have: gradients of both forms equal those of a single run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.clipping import Flat, ModelLoss, PerExample
from noshuffle.errors import Unsupported
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.strategies import identity
from noshuffle.training.augment import mean_over_copies
from noshuffle.training.many import Setting, Study
from noshuffle.training.many import sum as many_sum
from noshuffle.training.many.stacked import Stacked, _patches
from noshuffle.training.many.sum import clipped_sums, network_for, products
from noshuffle.training.many.vmapped import Vmapped
from noshuffle.training.models import build


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Sequential(nn.Conv2d(3, 4, 2, bias=False), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(4 * 2 * 2, 5),
        nn.Flatten(),
        nn.SiLU(),
        nn.Linear(5, 3, bias=False),
    )


def shared_activation() -> nn.Module:
    act = nn.Tanh()
    return nn.Sequential(nn.Flatten(), nn.Linear(98, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 3))


def group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same"), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
        nn.Flatten(), nn.Linear(4 * 49, 3),
    )  # fmt: skip


def used_twice() -> nn.Module:
    middle = nn.Linear(4, 4)
    return nn.Sequential(nn.Flatten(), nn.Linear(98, 4), middle, nn.Tanh(), middle, nn.Linear(4, 3))


def frozen() -> nn.Module:
    model = conv()
    model[0].weight.requires_grad_(False)
    return model


class Features(nn.Module):
    """A random projection, of each run its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(98, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.flatten(1) @ self.projection).cos())


class Scaled(nn.Module):
    """Weights outside of any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(98, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(7, 1, batch_first=True)
        self.norm, self.head = nn.LayerNorm(7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)
        return self.head(self.norm(x + self.mix(x, x, x, need_weights=False)[0]).mean(1))


class Tied(nn.Module):
    """Tokens in, tokens out, by one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lift = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.lift(self.table(x)))).transpose(1, 2)


IMAGES = {
    "conv": (conv, "stacked"),
    "an activation used twice": (shared_activation, "stacked"),
    "a layer used twice": (used_twice, "frozen or used twice"),
    "frozen": (frozen, "frozen or used twice"),
    "group norm": (group_norm, "vmap (layer 0 (Conv2d)"),
    "buffers": (Features, "vmap (Features"),
    "attention": (Attention, "vmap (Attention"),
}
TEXTS = {
    "tied": (Tied, "vmap, written out (Tied"),
    "lstm": (lambda: build("char_lstm", (6,), 5), "vmap, written out (CharLSTM"),
}


def images(rows: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 2, 7, 7), torch.randint(3, (rows,))


def texts(rows: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randint(5, (rows, 6)), torch.randint(5, (rows, 6))


def compare(make: Callable[[], nn.Module], batch: Any, loss_fn: Any, **how: Any) -> str:
    """Sums of three runs beside the engine's for each; the fourth row is left out."""
    models = [make() for _ in range(3)]
    names = [n for n, p in models[0].named_parameters() if p.requires_grad]
    params = {n: torch.stack([m.get_parameter(n).detach() for m in models]) for n in names}
    clips = torch.tensor([0.05, 1.0, 1e6], dtype=torch.float64)
    keep = torch.tensor([True, True, True, False, True])
    network, why = network_for(models, params, batch, loss_fn=loss_fn, **how)
    sums, losses = clipped_sums(network, params, batch, keep=keep, clip=clips)
    for k, model in enumerate(models):
        kept = tuple(leaf[keep] for leaf in batch)
        right = PerExample().clipped_sum(model, loss_fn, kept, clip=Flat(float(clips[k])))
        torch.testing.assert_close(losses[keep][:, k], right.losses.detach(), rtol=1e-4, atol=1e-5)
        for name, value in right.values.items():
            torch.testing.assert_close(sums[name][k], value, rtol=1e-4, atol=2e-6)
    return why


@pytest.mark.parametrize("name", IMAGES)
def test_sums_of_images_equal_the_engine(name: str) -> None:
    torch.manual_seed(0)
    make, form = IMAGES[name]
    assert form in compare(make, images(), nn.CrossEntropyLoss())


@pytest.mark.parametrize("name", TEXTS)
def test_sums_of_texts_equal_the_engine(name: str) -> None:
    torch.manual_seed(0)
    make, form = TEXTS[name]
    assert form in compare(make, texts(), nn.CrossEntropyLoss())


def test_other_losses() -> None:
    torch.manual_seed(0)
    x, _ = images()
    targets = torch.randn(5, 3)
    for loss_fn in (nn.MSELoss(), nn.HuberLoss(), nn.L1Loss(reduction="sum")):
        assert "stacked" in compare(conv, (x, targets), loss_fn)
    weighted = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert "stacked" in compare(conv, images(), weighted)

    def own(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + 0.1 * model[5].weight.square().sum()

    assert "calls the model itself" in compare(conv, images(), ModelLoss(own))


def test_linear_layers_that_are_outer_products() -> None:
    """Not those that are tied, used twice, called with several vectors, or used past their call."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.plain = nn.Linear(98, 4), nn.Linear(4, 4, bias=False)
            self.twice, self.past, self.wide = (nn.Linear(4, 4) for _ in range(3))
            self.tied, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
            self.other.weight = self.tied.weight
            self.never, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.twice(F.gelu(self.twice(self.plain(self.first(x.flatten(1))))))
            x = self.past(x) * self.past.bias + self.other(self.tied(x))
            x = self.wide(torch.stack([x, x * x], 1)).mean(1)
            return self.last(F.layer_norm(x, (4,)))

    torch.manual_seed(0)
    batch = images()
    form = Vmapped([Mixed()], loss_fn=nn.CrossEntropyLoss())
    assert form.linear_layers(batch) == ["first", "plain", "last"]
    assert compare(Mixed, batch, nn.CrossEntropyLoss()) == "vmap (Mixed is no nn.Sequential)"


def test_linear_layers_over_several_axes_are_not_stacked() -> None:
    """Rows that look like runs: the second axis of the input is as long as the study."""
    torch.manual_seed(0)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 3))

    batch = torch.randn(5, 3, 4), torch.randint(3, (5,))
    assert "several axes" in compare(make, batch, nn.CrossEntropyLoss())


def test_other_shapes_may_take_another_form() -> None:
    """One word first, so that the layers see one vector; then texts of three."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 5))

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.transpose(1, 2), y)

    torch.manual_seed(0)
    setting = Setting(noise_multiplier=0.0, learning_rate=0.5, momentum=0.0, clip_norm=0.1)
    study = Study(make, [setting], steps=3, batch_size=1, loss_fn=loss_fn)
    model = study.model(0)
    for length in (1, 3, 1):
        x, y = (torch.randint(5, (4, length)) for _ in range(2))
        study.step(x, y)
        assert study.why.startswith("vmap, written" if length > 1 else "vmap (")
        right = PerExample().clipped_sum(model, loss_fn, (x, y), clip=Flat(0.1))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(0.5 * right.values[name])
                torch.testing.assert_close(study.params[name][0], p, rtol=1e-4, atol=1e-6)


def test_a_form_that_disagrees_is_not_taken(monkeypatch) -> None:
    monkeypatch.setattr(
        Stacked, "_conv_weight", lambda self, layer, given, g: 2 * _true(self, layer, given, g)
    )
    torch.manual_seed(0)
    assert "other gradients" in compare(conv, images(), nn.CrossEntropyLoss())


_true = Stacked._conv_weight


@pytest.mark.parametrize("make", [conv, Features])
def test_rows_in_parts_give_the_same(make, monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setitem(many_sum.MOST_NUMBERS, "cpu", 1)  # one row at a time
    compare(make, images(), nn.CrossEntropyLoss())


def test_runs_in_turn_have_the_same_sums_and_scores() -> None:
    torch.manual_seed(0)
    norms, cross_entropy = (0.05, 1.0, 1e6), nn.CrossEntropyLoss()
    for make in (conv, group_norm, frozen, Features):
        assert compare(make, images(), cross_entropy, in_turn=norms) == "layer rules, in turn"
    x, y = images()
    copies = torch.stack([x, x.flip(3), 2.0 * x], 1)
    assert "in turn" in compare(
        group_norm, (copies, y), mean_over_copies(cross_entropy), in_turn=norms
    )
    assert "no layer rules" in compare(Scaled, images(), cross_entropy, in_turn=norms)
    settings = [Setting(noise_multiplier=0.0, learning_rate=0.5, seed=s) for s in (1, 2)]
    common = {"steps": 1, "batch_size": 5}
    turned, beside = (Study(conv, settings, in_turn=turn, **common) for turn in (True, False))
    batch = images()
    torch.testing.assert_close(turned.step(*batch), beside.step(*batch))
    torch.testing.assert_close(turned.scores(batch[0]), beside.scores(batch[0]))


def test_half_precision_in_turn_is_near_and_within_the_clip_norm() -> None:
    """The sum of one row must not pass the clip norm, however its gradients were rounded."""
    torch.manual_seed(0)
    models = [conv() for _ in range(2)]
    params = {
        name: torch.stack([m.get_parameter(name).detach() for m in models])
        for name, _ in models[0].named_parameters()
    }
    batch, clip = images(6), torch.tensor([0.01, 0.1])
    norms = tuple(clip.tolist())
    network, _ = network_for(
        models, params, batch, loss_fn=nn.CrossEntropyLoss(), in_turn=norms, half=True
    )
    for row in range(6):
        keep = torch.arange(6) == row
        sums, whole = (
            clipped_sums(network, params, batch, keep=keep, clip=clip, half=half)[0]
            for half in (True, False)
        )
        flat, right = (
            torch.cat([v.double().flatten(1) for v in found.values()], 1) for found in (sums, whole)
        )
        assert bool((flat.norm(dim=1) <= clip.double()).all())
        assert bool((0.99 * clip.double() <= flat.norm(dim=1)).all())
        assert bool(((flat - right).norm(dim=1) <= 0.05 * clip.double()).all())


@pytest.mark.parametrize("form", ["stacked", "vmap"])
def test_a_bad_example_contributes_zero_to_every_run(form: str) -> None:
    torch.manual_seed(0)
    model = conv()
    params = {name: p.detach()[None].clone() for name, p in model.named_parameters()}
    x, y = images(4)
    loss_fn, clip = nn.CrossEntropyLoss(), torch.ones(1)
    network = Stacked(model, runs=1) if form == "stacked" else Vmapped([model], loss_fn=loss_fn)
    three, four = torch.ones(3, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    clean, _ = clipped_sums(network, params, (x[1:], y[1:]), keep=three, clip=clip)
    for bad in (float("nan"), float("inf"), 3e38):
        x[0] = bad
        spoiled, _ = clipped_sums(network, params, (x, y), keep=four, clip=clip)
        if bad != 3e38:  # a finite image with a saturated gradient may count, and is clipped
            for name, value in clean.items():
                torch.testing.assert_close(spoiled[name], value)
        assert all(bool(torch.isfinite(value).all()) for value in spoiled.values())


def test_dropout_differs_between_runs_and_rests_in_scores() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(98, 4), nn.Linear(4, 3))

    torch.manual_seed(0)
    setting = Setting(noise_multiplier=0.0, learning_rate=0.1, seed=1)
    study = Study(make, [setting] * 2, steps=1, batch_size=4)
    x, y = images()
    before = [study.model(k)(x) for k in (0, 1)]
    assert not torch.equal(*before)  # one model, other masks
    study.step(x, y)
    assert not torch.equal(*study.params["2.weight"])
    scores = study.scores(x)
    assert torch.equal(scores, study.scores(x))
    for k in (0, 1):
        torch.testing.assert_close(scores[:, k], study.model(k).eval()(x))


@pytest.mark.parametrize("neighbours", ["zero-out", "add-remove"])
def test_masks_are_secret(neighbours: str) -> None:
    rule = {"participation": SinglePass(2), "strategy": identity(), "noise_multiplier": 1.0}
    setting = Setting(plan=Plan(neighbours=neighbours, **rule), learning_rate=0.1)
    seen, (x, y) = [], images()
    for _ in range(2):
        torch.manual_seed(3)
        study = Study(lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(98, 3)),
                      [setting], steps=2, batch_size=5)  # fmt: skip
        seen.append(study.step(x, y, ids=range(5)))  # before any noise
    assert not torch.equal(*seen)


def test_double_precision_trains() -> None:
    setting = Setting(noise_multiplier=0.0, learning_rate=0.1)
    study = Study(lambda: conv().double(), [setting], steps=1, batch_size=5)
    x, y = images()
    study.step(x.double(), y)
    assert study.params["0.weight"].dtype == torch.float64


def test_models_that_cannot_be() -> None:
    setting = Setting(noise_multiplier=0.0, learning_rate=0.1)
    x, y = images()

    def study(make: Callable[[], nn.Module]) -> Study:
        return Study(make, [setting] * 2, steps=1, batch_size=2)

    with pytest.raises(Unsupported, match="BatchNorm"):
        study(lambda: nn.Sequential(nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(98, 3))).step(x, y)
    with pytest.raises(Unsupported, match="float32 or float64"):
        study(lambda: conv().half())


class Branching(nn.Module):
    """What vmap cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.drop = nn.Linear(98, 3), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x.flatten(1))
        return self.head(x) if not x.abs().sum().item() > 1e9 else self.head(-x)


def test_what_vmap_cannot_do_is_done_one_by_one() -> None:
    torch.manual_seed(0)
    setting = Setting(noise_multiplier=0.0, learning_rate=0.1)
    study = Study(Branching, [setting, setting], steps=1, batch_size=2)
    x, y = images()
    weights = torch.tensor([1.0, 1, 1, 0, 1])
    x[3] = float("nan")  # left out
    before = {name: value.clone() for name, value in study.params.items()}
    study.step(x, y, weights=weights)
    assert study.why.startswith("one by one (vmap cannot run many of this model at once")
    keep = weights.bool()
    right = PerExample().clipped_sum(
        _loaded(before), nn.CrossEntropyLoss(), (x[keep], y[keep]), clip=Flat(1.0)
    )
    for name, value in right.values.items():
        torch.testing.assert_close(study.params[name][0], before[name][0] - 0.1 * value / 2)
    scores = study.scores(x[:2])
    torch.testing.assert_close(scores[:, 1], study.model(1)(x[:2]))


def _loaded(params: dict[str, Tensor]) -> nn.Module:
    model = Branching()
    model.load_state_dict({name: value[0] for name, value in params.items()})
    return model


@pytest.mark.parametrize("name", IMAGES)
def test_large_convolutions_on_a_cpu_are_done_one_by_one(name: str, monkeypatch) -> None:
    torch.manual_seed(0)
    make, _ = IMAGES[name]
    monkeypatch.setattr(many_sum, "MANY_PRODUCTS", 1)
    has_conv = any(isinstance(layer, nn.Conv2d) for layer in make().modules())
    assert ("convolutions" in compare(make, images(), nn.CrossEntropyLoss())) == has_conv


def test_products_of_convolutions() -> None:
    x, y = images()
    assert products(conv(), nn.CrossEntropyLoss(), (x, y)) == 3 * 16 * 18 + 4 * 4 * 12
    assert products(Features(), nn.CrossEntropyLoss(), (x, y)) == 0


@pytest.mark.parametrize("options", [{}, {"stride": (2, 1), "padding": (0, 2)}, {"dilation": 2}])
def test_patches_are_those_of_unfold(options) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 2, (2, 3), **options)
    x = torch.randn(4, 3, 8, 9).to(memory_format=torch.channels_last)
    settings = {n: getattr(layer, n) for n in ("stride", "padding", "dilation")}
    expected = F.unfold(x, layer.kernel_size, **settings)
    assert torch.equal(_patches(layer, x), expected)


@pytest.mark.parametrize("make", [conv, group_norm])
@pytest.mark.parametrize("how", ["bfloat16", "float16", "autocast"])
def test_half_precision_stays_within_the_clip_norm(make: Callable[[], nn.Module], how: str) -> None:
    """Rounded norms, factors and sums passed it by up to 0.2 %."""
    torch.manual_seed(0)
    dtype = torch.float32 if how == "autocast" else getattr(torch, how)
    models = [make().to(dtype) for _ in range(2)]
    params = {
        name: torch.stack([dict(m.named_parameters())[name].detach() for m in models])
        for name, _ in models[0].named_parameters()
    }
    x, y = torch.randn(6, 2, 7, 7).to(dtype), torch.randint(3, (6,))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        network, _ = network_for(models, params, (x, y), loss_fn=nn.CrossEntropyLoss())
        for row in range(len(x)):
            keep, clip = torch.arange(len(x)) == row, torch.tensor([0.01, 0.1])
            sums, _ = clipped_sums(network, params, (x, y), keep=keep, clip=clip)
            assert all(value.dtype == torch.float32 for value in sums.values())
            flat = torch.cat([value.double().flatten(1) for value in sums.values()], 1)
            assert bool((flat.norm(dim=1) <= clip.double()).all())


def test_squares_that_vanish_beside_huge_ones_are_clipped() -> None:
    models = [nn.Linear(4, 2, bias=False)]
    params = {"weight": models[0].weight.detach()[None]}
    x, y = torch.full((2, 4), 1e-24), torch.full((2, 2), 1e18)
    network = Stacked(nn.Sequential(models[0]), runs=1, loss_fn=nn.MSELoss())
    own = {"0.weight": params["weight"]}
    keep, clip = torch.tensor([True, False]), torch.tensor([1e-7], dtype=torch.float64)
    sums, _ = clipped_sums(network, own, (x, y), keep=keep, clip=clip)
    assert 0.0 < float(sums["0.weight"].double().norm()) <= 1e-7


def test_a_model_that_remembers_the_example_before_is_refused() -> None:
    class Recall(nn.Module):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            before, self.last = self.last, x.detach()
            return x if before is None else x + before

    models = [nn.Sequential(Recall(), nn.Flatten(), nn.Linear(98, 3))]
    params = {n: p.detach()[None] for n, p in models[0].named_parameters()}
    batch = (torch.randn(4, 2, 7, 7), torch.randint(3, (4,)))
    with pytest.raises(Unsupported, match="keeps something of one example"):
        network_for(models, params, batch, loss_fn=nn.CrossEntropyLoss())


class Gated(nn.Module):
    """Mixes examples where a buffer says so."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("gate", torch.tensor(gate))

    def forward(self, x: Tensor) -> Tensor:
        shared = x.mean(0).nan_to_num(0.0, 0.0, 0.0)  # a closed gate keeps infinite rows back, too
        return self.layer(x + self.gate * shared)


def test_runs_in_turn_that_mix_examples_are_found() -> None:
    """A later run by its own buffers."""
    torch.manual_seed(0)
    left = [0.0, 1.0]
    settings = [Setting(noise_multiplier=0.0, learning_rate=0.1, seed=s) for s in (1, 2)]
    study = Study(lambda: Gated(left.pop(0)), settings, steps=8, batch_size=5, in_turn=True)
    study.step(torch.randn(5, 6), torch.randint(3, (5,)))
    assert "run 1 mixes examples" in study.why

"""Many runs at once equal the same runs one by one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from noshuffle.errors import HorizonExceeded, InvalidInput, ParticipationViolation, Unsupported
from noshuffle.noise import Source, new_key, test_source
from noshuffle.participation import (
    BallsInBins,
    CyclicPoisson,
    Epochs,
    FixedSize,
    MinSeparation,
    Participation,
    Poisson,
    SeparatedBins,
    TruncatedPoisson,
)
from noshuffle.plan import Plan
from noshuffle.release.facts import ISOLATION_OF_STUDIES
from noshuffle.strategies import blt, identity, tree
from noshuffle.training import privatize
from noshuffle.training.many import Setting, Study, accuracies, joint_mu, train_many
from noshuffle.training.many.release import StudyRelease, _unit_noise, joint_multiplier

DRAWN = [
    FixedSize(3, 4, 12),
    CyclicPoisson(3, 2, 0.5),
    BallsInBins(1, 3),
    TruncatedPoisson(3, 0.4, 8, 12),
    SeparatedBins(1, 3, 2),
]


def stacked_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(3 * 3 * 3, 5),
        nn.GELU(),
        nn.Linear(5, 3, bias=False),
    )


class Residual(nn.Module):
    """Nothing that has a stacked form."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Flatten(), nn.Linear(2 * 7 * 7, 6))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
            for _ in range(2)
        )
        self.leave = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def data(rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    return torch.randn(rows, 2, 7, 7, generator=g), torch.randint(3, (rows,), generator=g)


def batches(size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor, None]]:
    x, y = data()
    return [(x[i : i + size], y[i : i + size], None) for i in range(0, len(x), size)]


def plan(strategy, noise: float, steps: int = 3) -> Plan:
    return Plan(
        participation=Epochs(1, steps), strategy=strategy, noise_multiplier=noise, delta=1e-5
    )


#: z·ζ is a power of two, so that a study and a single run round to the same grid.
SETTINGS = [
    Setting(plan=plan(blt((0.9,), (0.3,)), 0.5), learning_rate=0.2, seed=1),
    Setting(plan=plan(tree(), 2.0), learning_rate=0.1, momentum=0.0, clip_norm=0.25, seed=2),
    Setting(plan=plan(blt((0.9,), (0.3,)), 4.0), learning_rate=0.05, clip_norm=0.5, seed=3),
    Setting(noise_multiplier=0.0, learning_rate=0.3, seed=4),
]


def near(found: torch.Tensor, expected: torch.Tensor, *, cell: float) -> None:
    """Almost all rounded alike; a coin near its edge may fall to the other side."""
    gaps = (found - expected).abs()
    assert float(gaps.median()) < 2e-6
    assert float(gaps.max()) < cell


class Named(nn.Module):
    """A model whose tensors are called "k/name", as those of run k of a study are."""

    def __init__(self, inner: nn.Module, run: int) -> None:
        super().__init__()
        self.__dict__["inner"] = inner
        for name, child in inner.named_children():
            self.add_module(f"{run}/{name}", child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def alone(make, setting: Setting, run: int, source, schedule=(1.0, 1.0, 1.0)) -> nn.Module:
    """One run by privatize: the slow twin."""
    torch.manual_seed(setting.seed)
    inner = make()
    model = Named(inner, run)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=setting.learning_rate, momentum=setting.momentum
    )
    own = setting.plan or plan(identity(), 0.0)
    private = privatize(
        model, optimizer, own, clip_norm=setting.clip_norm, batch_size=5, source=source
    )
    for factor, (x, y, _) in zip(schedule, batches()):
        for group in optimizer.param_groups:
            group["lr"] = setting.learning_rate * factor
        private.step(nn.CrossEntropyLoss(), x, y)
    return inner


@pytest.mark.parametrize(
    ("make", "form"), [(stacked_net, "stacked"), (Residual, "vmap"), (Residual, "layer rules")]
)
def test_a_study_equals_the_runs_of_privatize(make, form: str) -> None:
    """Other strategies, noise, clip norms, rates, momenta and seeds side by side."""
    source, schedule = test_source(seed=3), (1.0, 0.5, 0.25)
    common = {"steps": 3, "batch_size": 5, "learning_rates": schedule, "source": source}
    study = Study(make, SETTINGS, in_turn=form == "layer rules", **common)
    for x, y, _ in batches():
        study.step(x, y)
    assert study.why.startswith(form)
    x, y = data()
    right = study.accuracies(x, y, chunk=5)
    for k, setting in enumerate(SETTINGS):
        model = alone(make, setting, k, source, schedule)
        own = study.model(k)
        for name, p in model.named_parameters():
            near(study.params[name][k], p.detach(), cell=2e-4)
            torch.testing.assert_close(own.get_parameter(name), study.params[name][k])
        expected = (model(x).argmax(1) == y).float().mean()
        assert float(right[k]) == pytest.approx(float(expected))


@pytest.mark.parametrize("make", [stacked_net, Residual])
def test_a_run_does_not_depend_on_its_neighbours(make) -> None:
    """Also where the noise is no power of two."""
    settings = [
        Setting(noise_multiplier=z, learning_rate=0.1, clip_norm=0.7, seed=k)
        for k, z in enumerate((0.3, 1.1, 2.7))
    ]
    common = {"strategy": blt((0.8,), (0.2,)), "steps": 3, "batch_size": 4}
    common["source"] = test_source(seed=8)
    network, params = train_many(make, batches(), settings, **common)
    for others in ([5.0, 0.1], [0.0, 0.0]):
        changed = [
            settings[0],
            *(replace(s, noise_multiplier=z) for s, z in zip(settings[1:], others)),
        ]
        _, again = train_many(make, batches(), changed, **common)
        for name, value in again.items():
            near(params[name][0], value[0], cell=1e-3)
    assert accuracies(network, params, *data()).shape == (3,)


def test_noise_of_no_power_of_two_is_the_noise_of_privatize_up_to_the_grid() -> None:
    setting = Setting(plan=plan(identity(), 3.0), learning_rate=1.0, momentum=0.0, seed=1)
    study = Study(Residual, [setting], steps=3, batch_size=5, source=test_source(seed=1))
    for x, y, _ in batches():
        study.step(x, y)
    model = alone(Residual, setting, 0, test_source(seed=1))
    for name, p in model.named_parameters():
        gap = (study.params[name][0] - p.detach()).abs().max()
        assert float(gap) < 3 * 2 * 3.0 * 2**-10 / 5  # three steps, two grids


def test_runs_do_not_share_noise() -> None:
    setting = Setting(noise_multiplier=1.0, learning_rate=1.0, seed=0)
    x, y, _ = batches()[0]
    study = Study(stacked_net, [setting] * 2, strategy=identity(), steps=1, batch_size=1)
    study.step(x, y)
    # Values lie on a grid, so two independent ones are alike once in about 4,000 pairs.
    alike = [torch.isclose(value[0], value[1]).flatten() for value in study.params.values()]
    assert torch.cat(alike).float().mean() < 0.05


def test_runs_of_several_strategies_under_one_test_key_share_no_noise() -> None:
    shapes, plans = {"w": (20_000,)}, [plan(identity(), 1.0), plan(tree(), 1.0)]
    release = StudyRelease(
        plans, shapes, multipliers=[1.0, 1.0], clip_norms=[1.0, 1.0],
        device=torch.device("cpu"), source=test_source(seed=1),
    )  # fmt: skip
    release.open(release.admit())
    sums = {"w": torch.zeros(2, 20_000)}
    release.add_(sums)
    assert abs(float(torch.corrcoef(sums["w"])[0, 1])) < 0.05  # 7 standard deviations


def test_two_studies_with_one_source_share_no_noise() -> None:
    """A key serves one ledger: fresh entropy goes into the first one."""
    given, found = Source(new_key()), []
    for _ in range(2):
        release = StudyRelease(
            [plan(identity(), 1.0)], {"w": (20_000,)}, multipliers=[1.0], clip_norms=[1.0],
            device=torch.device("cpu"), source=given,
        )  # fmt: skip
        release.open(release.admit())
        release.add_(sums := {"w": torch.zeros(1, 20_000)})
        found.append(sums["w"][0])
    assert abs(float(torch.corrcoef(torch.stack(found))[0, 1])) < 0.05  # 7 standard deviations


@pytest.mark.parametrize("multipliers", [[0.3], [0.7, 1.9, 11.0], [1e-3, 5.0], [3.3] * 64])
def test_noise_of_a_study_has_the_size_of_its_settings(multipliers: list[float]) -> None:
    """20,000 normals: a deviation that is 5 % off is 10 standard deviations off."""
    clips = [0.5 + k for k in range(len(multipliers))]
    release = StudyRelease(
        [plan(identity(), 1.0)] * len(clips), {"w": (20_000,)}, multipliers=multipliers,
        clip_norms=clips, device=torch.device("cpu"),
    )  # fmt: skip
    release.open(release.admit())
    release.add_(sums := {"w": torch.zeros(len(clips), 20_000)})
    for k, (z, clip) in enumerate(zip(multipliers, clips)):
        assert float(sums["w"][k].std()) == pytest.approx(z * clip, rel=0.05)
    z, bound = _unit_noise(joint_multiplier(multipliers))
    assert z * bound == 1.0
    assert joint_multiplier(multipliers) * (1 - 1e-14) <= z <= joint_multiplier(multipliers)


def test_statement_of_a_study() -> None:
    """One strategy: exact, as one plan with less noise. Several: squares add up."""
    x, y = data()
    same = [replace(s, plan=plan(tree(), z)) for s, z in zip(SETTINGS, (2.0, 3.0, 6.0))]
    other = [*same, replace(SETTINGS[0], plan=plan(identity(), 4.0))]
    for settings in (same, other):
        study = Study(stacked_net, settings, steps=3, batch_size=4)
        for part in range(3):
            rows = slice(4 * part, 4 * part + 4)
            study.step(x[rows], y[rows], ids=range(12)[rows])
        stated = study.statement()
        expected = joint_mu(setting.plan for setting in settings)
        assert stated.mu == pytest.approx(expected, rel=1e-9)
        assert stated.exact == (settings is same)
        assert any(f"showing {len(settings)} runs" in line for line in stated.assumptions)
        assert ISOLATION_OF_STUDIES in stated.assumptions  # as every run by itself says
    # Of several strategies it says of all of them what it says of one.
    for setting in other:
        own = setting.plan.statement()
        assert own.mechanism in stated.mechanism
        assert set(own.assumptions) <= {*stated.assumptions}
    assert stated.sensitivity == pytest.approx(stated.mu * stated.noise_multiplier)
    assert not any("NOT PRIVATE" in line for line in stated.assumptions)
    tested = Study(stacked_net, same, steps=3, batch_size=4, source=test_source(seed=1))
    tested.step(x[:4], y[:4], ids=range(4))
    assert any("NOT PRIVATE" in line for line in tested.statement().assumptions)
    assert tested.statement().epsilon < stated.epsilon  # one of three steps


def test_a_study_checks_participation() -> None:
    x, y = data()
    study = Study(stacked_net, [SETTINGS[0]], steps=3, batch_size=4)
    study.step(x[:4], y[:4], ids=[0, 1, 2, 3])
    before = {name: value.clone() for name, value in study.params.items()}
    with pytest.raises(ParticipationViolation, match="unit 3"):
        study.step(x[3:7], y[3:7], ids=[3, 4, 5, 6])
    with pytest.raises(InvalidInput, match="each of the 4 examples, got 3 ids"):
        study.step(x[4:8], y[4:8], ids=[4, 5, 6])
    with pytest.raises(InvalidInput, match="names came"):
        study.step(x[4:8], y[4:8], ids=["4", "5", "6", "7"])
    assert all(torch.equal(study.params[name], value) for name, value in before.items())
    weights = torch.tensor([0.0, 1, 1, 1])  # who is left out did not take part
    study.step(x[3:7], y[3:7], weights=weights, ids=[3, 4, 5, 6])
    study.statement()
    with pytest.raises(InvalidInput, match="in every step, or in none"):
        study.step(x[8:], y[8:])
    study.step(x[8:], y[8:], ids=[8, 9, 10, 11])
    assert study.statement().epsilon == pytest.approx(SETTINGS[0].plan.epsilon())


@pytest.mark.parametrize("part", DRAWN, ids=lambda part: part.kind)
def test_secret_draws_are_those_of_the_study_and_are_stated(part: Participation) -> None:
    """Batches that nobody drew are refused; drawn ones are stated, for all runs together."""
    x, y = data()
    secret = Plan(participation=part, strategy=identity(), noise_multiplier=2.0)
    settings = [replace(SETTINGS[0], plan=secret), replace(SETTINGS[1], plan=secret)]
    study = Study(stacked_net, settings, steps=3, batch_size=4)
    with pytest.raises((ParticipationViolation, InvalidInput), match="sampler"):
        study.step(x[:4], y[:4], ids=range(4))
    for rows in study.sampler(12):
        foreign = np.setdiff1d(np.arange(12), rows)
        for other in (foreign, rows[1:], np.append(rows, foreign[:1])):
            if not np.array_equal(other, rows):
                with pytest.raises(ParticipationViolation, match="secret sampler"):
                    study.step(x[other], y[other], ids=other)
        study.step(x[rows], y[rows], ids=rows)
    stated = study.statement()
    assert stated.epsilon == pytest.approx(replace(secret, noise_multiplier=2**0.5).epsilon())
    assert stated.epsilon > 1.1 * secret.epsilon()
    assert any("showing 2 runs" in line for line in stated.assumptions)
    free = Study(stacked_net, settings, steps=3, batch_size=4)
    free.step(x[:4], y[:4])
    with pytest.raises(InvalidInput, match="ids="):
        free.statement()


def test_runs_that_share_no_draw_have_no_sampler() -> None:
    parts = [Poisson(3, 0.5), Poisson(3, 0.25)]
    plans = [Plan(participation=p, strategy=identity(), noise_multiplier=1.0) for p in parts]
    mixed = [replace(SETTINGS[0], plan=each) for each in plans]
    bare = [mixed[0], replace(SETTINGS[0], plan=replace(plans[0], noise_multiplier=0.0))]
    for settings in (mixed, bare):
        with pytest.raises(Unsupported, match="make a study for each"):
            Study(stacked_net, settings, steps=3, batch_size=4).sampler(12)


def test_what_has_no_statement() -> None:
    x, y = data()
    for settings, words in (([SETTINGS[0], SETTINGS[3]], "plan"), (SETTINGS[:1], "ids=")):
        study = Study(stacked_net, settings, steps=3, batch_size=4)
        study.step(x[:4], y[:4])
        with pytest.raises(InvalidInput, match=words):
            study.statement()
    free = replace(SETTINGS[0], plan=plan(identity(), 0.0))
    study = Study(stacked_net, [SETTINGS[0], free], steps=3, batch_size=4)
    study.step(x[:4], y[:4], ids=range(4))
    with pytest.raises(Unsupported, match="run 1 has no noise"):
        study.statement()
    study = Study(stacked_net, [SETTINGS[3]], steps=3, batch_size=4)
    with pytest.raises(InvalidInput, match="give every setting a plan"):
        study.step(x[:4], y[:4], ids=range(4))


def test_padding_and_weights_leave_rows_out() -> None:
    """Rows of weight zero, NaN included, change nothing."""
    x, y = data()
    padded = torch.cat([x[:4], torch.full_like(x[:2], float("nan"))])
    labels = torch.cat([y[:4], torch.zeros(2, dtype=torch.int64)])
    weights = torch.tensor([1.0, 1, 1, 1, 0, 0])
    common = {"steps": 1, "batch_size": 4, "source": test_source(seed=1)}
    for make in (stacked_net, Residual):
        plain, other = (Study(make, SETTINGS, **common) for _ in range(2))
        first, second = plain.step(x[:4], y[:4]), other.step(padded, labels, weights=weights)
        torch.testing.assert_close(first, second)
        for name, value in plain.params.items():
            near(other.params[name], value, cell=2e-4)


def test_an_empty_batch_releases_noise_alone() -> None:
    """As for privatize; also before a form is chosen."""
    x, y = data()
    setting = Setting(plan=plan(tree(), 2.0), learning_rate=0.5, seed=1)
    study = Study(Residual, [setting], steps=3, batch_size=4, source=test_source(seed=1))
    torch.manual_seed(setting.seed)
    inner = Residual()
    model = Named(inner, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    options = {"clip_norm": 1.0, "batch_size": 4, "source": test_source(seed=1)}
    private = privatize(model, optimizer, setting.plan, **options)
    for part in (slice(0, 0), slice(0, 4), slice(0, 0)):
        study.step(x[part], y[part])
        private.step(nn.CrossEntropyLoss(), x[part], y[part], ids=torch.arange(12)[part])
    for name, p in inner.named_parameters():
        near(study.params[name][0], p.detach(), cell=2e-3)


def test_the_staged_step_equals_the_eager_one(monkeypatch) -> None:
    """What a graph holds, without the capture: buffers, padding, a larger batch in between."""
    x, y = data()
    parts = [slice(0, 4), slice(4, 7), slice(0, 9), slice(7, 11), slice(0, 1)]
    settings = [
        Setting(noise_multiplier=1.0, learning_rate=0.1, seed=1),
        Setting(noise_multiplier=0.0, learning_rate=0.2, seed=2),
    ]
    common = {"strategy": tree(), "steps": 5, "batch_size": 4, "source": test_source(seed=1)}
    eager, staged = (Study(Residual, settings, **common) for _ in range(2))
    monkeypatch.setattr(staged, "_not_captured", "")
    monkeypatch.setattr(staged._release, "prepare", lambda sums: None)
    monkeypatch.setattr(staged._release, "announce", lambda: None)
    for place, part in enumerate(parts):
        weights = torch.tensor([1.0, 0, 1, 1]) if place == 3 else None
        losses = [s.step(x[part], y[part], weights=weights) for s in (eager, staged)]
        torch.testing.assert_close(*losses)
    for name, value in eager.params.items():
        near(staged.params[name], value, cell=5e-4)
    assert "CUDA graph" in staged.why
    assert staged.fallbacks == ["a batch of 9 rows is larger than the captured 4: eager"]


def test_joint_mu_adds_squares() -> None:
    plans = [plan(tree(), 2.0), plan(identity(), 5.0)]
    assert joint_mu(plans) == pytest.approx(math.hypot(plans[0].mu(), plans[1].mu()))
    sampled = Plan(participation=Poisson(3, 0.1), strategy=identity(), noise_multiplier=1.0)
    with pytest.raises(Unsupported, match="sampled"):
        joint_mu([sampled])
    replaced = Plan(
        participation=Epochs(1, 3),
        strategy=identity(),
        noise_multiplier=1.0,
        neighbours="replace-one",
    )
    with pytest.raises(Unsupported, match="neighbour"):
        joint_mu([plans[0], replaced])


def test_refusals() -> None:
    x, y, _ = batches()[0]
    setting = Setting(noise_multiplier=0.0, learning_rate=1.0)
    common = {"strategy": identity(), "batch_size": 2}
    with pytest.raises(InvalidInput, match="gave 1"):
        train_many(stacked_net, [(x, y, None)], [setting], steps=2, **common)
    for batch, came in (((x, y), "got 2 parts"), (x, "got Tensor")):
        with pytest.raises(InvalidInput, match=came):
            train_many(stacked_net, [batch], [setting], steps=1, **common)
    with pytest.raises(InvalidInput, match="at least one"):
        Study(stacked_net, [], steps=1, **common)
    with pytest.raises(InvalidInput, match="schedule"):
        Study(stacked_net, [setting], steps=2, learning_rates=(1.0,), **common)
    with pytest.raises(InvalidInput, match="exactly one"):
        Setting(learning_rate=1.0)
    with pytest.raises(InvalidInput, match="exactly one"):
        Setting(learning_rate=1.0, noise_multiplier=1.0, plan=plan(identity(), 1.0))
    with pytest.raises(InvalidInput, match="is for 3 steps"):
        Study(stacked_net, [SETTINGS[0]], steps=4, batch_size=2)
    noisy = Setting(noise_multiplier=1.0, learning_rate=1.0)
    with pytest.raises(InvalidInput, match="strategy="):
        Study(stacked_net, [noisy], steps=1, batch_size=2)
    with pytest.raises(InvalidInput, match="source must be a noshuffle"):
        Study(stacked_net, SETTINGS[:1], steps=1, batch_size=2, source=[])
    user = Plan(
        participation=MinSeparation(3, 1, 3),
        strategy=identity(),
        noise_multiplier=1.0,
        unit="user",
    )
    with pytest.raises(Unsupported, match="user"):
        Setting(plan=user, learning_rate=1.0)
    study = Study(stacked_net, [setting], steps=1, **common)
    with pytest.raises(InvalidInput, match="first step"):
        study.scores(x)
    with pytest.raises(InvalidInput, match="weights"):
        study.step(x, y, weights=torch.ones(3))
    study.step(x, y)
    with pytest.raises(HorizonExceeded, match="all are done"):
        study.step(x, y)

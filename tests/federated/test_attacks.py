"""Ways to undo noise, to release a row of it twice, or to be promised too little; all closed."""

from __future__ import annotations

import math
import multiprocessing
import random
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.federated.blobs import killed

from noshuffle import MinSeparation, Plan, Poisson
from noshuffle.clipping import ClippedSum
from noshuffle.clipping.adaptive import QuantileClip
from noshuffle.errors import InvalidInput, ReuseRefused
from noshuffle.federated import Rounds, ServerOptimizer, clip_delta, read_log, statement_for
from noshuffle.federated.clients import clip_flat
from noshuffle.federated.timer import Timer, separation_from_times
from noshuffle.noise import test_source as a_source
from noshuffle.noise.grid import grid_step
from noshuffle.release.log import read
from noshuffle.release.verify import verify
from noshuffle.strategies import tree

USERS = [f"user {i}" for i in range(20)]


@lru_cache
def a_plan(mechanism: Any = "blt") -> Plan:
    part = MinSeparation(10, 3, 3)
    return Plan.fit(part, mechanism=mechanism, noise_multiplier=0.7, unit="user")


def a_server(run: Path | None, plan: Plan | None = None, **more: Any) -> ServerOptimizer:
    settings: dict[str, Any] = {"clip": 1.0, "cohort_size": 4, "source": a_source(seed=4), **more}
    given = settings.pop("parameters", {"w": torch.zeros(3)})
    optimizer_fn = lambda p: torch.optim.SGD(p, lr=0.5)  # noqa: E731
    return ServerOptimizer(given, plan or a_plan(), optimizer_fn=optimizer_fn, run=run, **settings)


def one_round(rounds: Rounds, seed: int = 0) -> Any:
    order = random.Random(100 * seed + rounds.server.round).sample(USERS, 20)
    work = rounds.begin(order)
    assert work is not None
    for user in work.users:
        g = torch.Generator().manual_seed(1000 * seed + 10 * work.step + USERS.index(str(user)))
        rounds.receive(user, {"w": torch.randn(3, generator=g)})
    return rounds.finish()


# Low bits. Float32 noise on a float64 sum: released − guess is a float32 if the guess is right.


def test_a_guess_of_a_float64_sum_cannot_be_checked_by_its_low_bits() -> None:
    g = torch.Generator().manual_seed(3)
    truth = torch.rand(200, generator=g, dtype=torch.float64) / 20
    server = a_server(None, cohort_size=1, parameters={"w": torch.zeros(200, dtype=torch.float64)})
    released = -2 * server.step({"w": truth}, cohort=["ada"])["w"]  # lr 0.5, cohort of one
    other = truth + torch.rand(200, generator=g, dtype=torch.float64) / 20

    def fits(guess: torch.Tensor) -> int:
        noise = -released - guess
        return int((noise == noise.float().double()).sum())

    assert fits(truth) <= fits(other) + 10  # it was nearly all of 200 against none


@pytest.mark.parametrize("clip", [1.0, QuantileClip(initial=0.7, units=1, bit_noise=5.0)])
def test_no_low_bit_rules_a_candidate_out(clip: Any) -> None:
    """Of raw float32 sums plus noise, 2 to 8 % of the coordinates ruled a wrong candidate out.

    On the grid of the noise every answer is a multiple of one public number, whatever the sum, and
    2¹³ values of the noise lead to it from any candidate.
    """
    g = torch.Generator().manual_seed(3)
    size, plan = 20_000, a_plan("identity")
    weights = torch.zeros(size, dtype=torch.float64)
    server = a_server(None, plan, clip=clip, cohort_size=1, parameters={"w": weights})
    zeta, scale = server.clip_norm, server._release.noise.scale
    step = grid_step(scale) * (zeta if server.needs_norms else 1.0)
    rounds = Rounds(server)
    rounds.begin(["ada"])
    rounds.receive("ada", {"w": 0.9 * zeta * torch.randn(size, generator=g) / size**0.5})
    released = 2 * rounds.finish().parameters["w"] / step  # lr 0.5, cohort of one
    assert float((released - released.round()).abs().max()) < 1e-9
    assert len(released.round().unique()) > 2000  # and there are many of them


def test_a_reply_in_double_changes_nothing_in_how_others_are_added() -> None:
    def after(dtype: torch.dtype) -> torch.Tensor:
        rounds = Rounds(a_server(None))
        rounds.begin(USERS[:4])
        for i, user in enumerate(USERS[:4]):
            value = torch.full((3,), 0.1 * i)
            rounds.receive(user, {"w": value.to(dtype) if i == 2 else value})
        return rounds.finish().parameters["w"]

    assert torch.equal(after(torch.float32), after(torch.float64))


@pytest.mark.parametrize("seed", range(5))
def test_one_user_moves_the_sum_by_no_more_than_the_clip_norm(seed: int) -> None:
    """All deltas alike and long: the sums are large, and so is whatever rounding adds to them."""
    g = torch.Generator().manual_seed(seed)
    direction = torch.randn(5000, generator=g)
    deltas = [direction + 1e-3 * torch.randn(5000, generator=g) for _ in range(60)]
    plan = Plan.fit(MinSeparation(1, 1, 1), mechanism="identity", noise_multiplier=0.0, unit="user")

    def total(without: int | None) -> torch.Tensor:
        rounds = Rounds(a_server(None, plan, cohort_size=60, parameters={"w": torch.zeros(5000)}))
        rounds.begin([f"{i:02d}" for i in range(60)])
        for i, delta in enumerate(deltas):
            if i != without:
                rounds.receive(f"{i:02d}", {"w": delta})
        return rounds._sum(rounds._now()).values["w"]

    moved = torch.linalg.vector_norm((total(None) - total(0)).double())
    assert 0.999 < float(moved) <= 1.0


def test_clipping_holds_for_mixed_types_and_many_doubles() -> None:
    for seed in range(200):
        g = torch.Generator().manual_seed(seed)
        delta = {
            "narrow": 100 * torch.randn(1 + seed % 3, generator=g),
            "wide": torch.randn(2, generator=g, dtype=torch.float64),
        }
        sent = clip_delta(delta, clip_norm=1.0).values
        assert math.fsum(float(x) ** 2 for v in sent.values() for x in v) <= 1.0
    g = torch.Generator().manual_seed(1)
    kept, _, _ = clip_flat(torch.rand(100_000, generator=g, dtype=torch.float64), clip_norm=1.0)
    assert math.fsum(float(x) ** 2 for x in kept) <= 1.0


@pytest.mark.parametrize("value", [-0.0, 1e-45, 1e38, 3e38])
def test_clipping_of_extreme_entries(value: float) -> None:
    sent = clip_delta({"w": torch.full((7,), value), "none": torch.zeros(0, 3)}, clip_norm=0.5)
    length = math.sqrt(math.fsum(float(x) ** 2 for x in sent.values["w"]))
    assert length <= 0.5
    assert not sent.is_nonfinite
    assert (length > 0.49) == (value > 1)


@pytest.mark.parametrize("clip_norm", [1.0, 0.01, 0.001])
@pytest.mark.parametrize("value", [1e38, 3.4e38, 1.7e308])
@pytest.mark.parametrize("size", [1, 100, 105_617])
def test_factors_too_small_for_float32_clip_as_well(
    size: int, value: float, clip_norm: float
) -> None:
    """0.001 / ‖Δ‖ had a few bits left here, and the result was up to 6 % too long."""
    dtype = torch.float64 if value > 1e39 else torch.float32
    huge = torch.full((size,), value, dtype=dtype) * torch.linspace(0.7, 1, size, dtype=dtype)
    kept, norm, is_bad = clip_flat(huge, clip_norm=clip_norm)
    length = float(torch.linalg.vector_norm(kept, dtype=torch.float64))
    assert length <= clip_norm
    assert is_bad != math.isfinite(norm)
    assert is_bad or length > 0.999 * clip_norm


def test_a_huge_reply_does_not_end_the_run() -> None:
    rounds = Rounds(a_server(None, clip=0.01, cohort_size=1, parameters={"w": torch.zeros(10_000)}))
    rounds.begin(["ada"])
    rounds.receive("ada", {"w": torch.full((10_000,), 3.4e38)})
    assert rounds.finish().answered == 1


# One row of noise, two sums.


def test_rounds_after_the_last_checkpoint_are_never_released_again(tmp_path: Path) -> None:
    def first() -> None:
        rounds = Rounds(a_server(tmp_path / "run"), save_every=3)
        for _ in range(5):
            one_round(rounds)

    killed(first)  # saved after three
    resumed, twin = Rounds(a_server(tmp_path / "run"), save_every=3), Rounds(a_server(None))
    assert resumed.resume() == (3, 4)
    for _ in range(3):
        one_round(twin)
    assert torch.equal(resumed.server.parameters()["w"], twin.server.parameters()["w"])
    for users in read_log(tmp_path / "run")[3:]:
        assert len(users) == 4
        twin.begin(random.Random(twin.server.round).sample(USERS, 20))
        twin.abandon()
    while resumed.server.round < 8:  # other users, other updates
        got, expected = one_round(resumed, seed=7), one_round(twin, seed=7)
    assert torch.equal(got.parameters["w"], expected.parameters["w"])
    resumed.close()
    assert verify(tmp_path / "run").refuted == ()


@pytest.mark.parametrize("mechanism", ["identity", "blt"])
def test_two_continuations_of_one_folder_have_independent_noise(
    tmp_path: Path, mechanism: str
) -> None:
    """A clone, a snapshot or a restored backup is a second release, and cancels nothing."""
    size = 20_000
    plan, zero = a_plan(mechanism), {"w": torch.zeros(size)}

    def go_on(run: Path) -> Rounds:
        server = a_server(run, plan, source=None, parameters=zero)
        rounds = Rounds(server)
        rounds.resume()
        return rounds

    first = Rounds(a_server(tmp_path / "run", plan, source=None, parameters=zero))
    assert first.begin(USERS[:4]) is not None
    first.finish()
    first.close()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    steps = []
    for run in (tmp_path / "run", tmp_path / "copy"):
        rounds = go_on(run)
        before = rounds.server.parameters()["w"]
        assert rounds.begin(USERS[4:8]) is not None
        steps.append(rounds.finish().parameters["w"] - before)
        rounds.close()
        assert verify(run).is_verified
    a, b = steps
    scale = float(a.std())
    assert scale > 0.05  # rate 0.5, four users, noise 0.7: 0.0875 for independent noise
    # Of 20,000 pairs: a correlation of 0.05 is 7 standard deviations; under one key it is 1, and
    # under a strategy with memory the row of the first round, which both have, is left in it.
    shared = _memory(plan) ** 2 / (1 + _memory(plan) ** 2)
    correlation = float(torch.corrcoef(torch.stack([a, b]))[0, 1])
    assert abs(correlation - shared) < 0.05
    assert shared < 0.5


def _memory(plan: Plan) -> float:
    """How much of the first draw is in the second row of noise."""
    row = plan.strategy.noising(plan.steps)[1]
    return float(row[0] / row[1])


@pytest.mark.parametrize("what", ["lost", "older"])
def test_a_secret_without_its_whole_log_is_refused(tmp_path: Path, what: str) -> None:
    run = tmp_path / "run"
    one_round(rounds := Rounds(a_server(run)))
    older = (run / "log.jsonl").read_bytes()
    one_round(rounds)
    rounds.close()
    if what == "lost":
        (run / "log.jsonl").unlink()
    else:
        (run / "log.jsonl").write_bytes(older)
    for _ in range(2):
        with pytest.raises((InvalidInput, ReuseRefused), match=r"bring the (log|newer one) back"):
            a_server(run)
    assert (run / "log.jsonl").exists() == (what == "older")


def test_no_tensor_takes_the_noise_of_the_counts() -> None:
    with pytest.raises(InvalidInput, match="name the tensor otherwise"):
        a_server(None, parameters={"(clip count)": torch.zeros(2)})


# Sums that are not what they say.


def a_sum(*, bound: float, norms: int) -> ClippedSum:
    return ClippedSum(
        values={"w": torch.zeros(3)},
        bound=bound,
        norms=torch.zeros(norms),
        losses=torch.empty(0),
        bad=torch.zeros(norms, dtype=torch.bool),
        present=torch.ones(norms, dtype=torch.bool),
    )


def test_a_sum_clipped_to_another_norm_or_of_more_users_is_refused() -> None:
    server = a_server(None)
    for wrong in (a_sum(bound=2.0, norms=2), a_sum(bound=1.0, norms=3)):
        with pytest.raises(InvalidInput, match="at most 2 clipped to 1"):
            server.step(wrong, cohort=["ada", "bob"])
    assert server.round == 0
    server.step(a_sum(bound=1.0, norms=2), cohort=["ada", "bob"])


def test_a_norm_beyond_all_floats_costs_nobody_a_round() -> None:
    clip = QuantileClip(initial=1.0, units=4, bit_noise=5.0)
    rounds = Rounds(a_server(None, a_plan("identity"), clip=clip))
    rounds.begin(USERS[:4])
    assert rounds.receive(USERS[0], {"w": torch.ones(3)}, norm=10**400) is None
    assert rounds.receive(USERS[1], {"w": torch.ones(3)}, norm=-(10**400)) is None
    assert rounds.finish().answered == 2


# Too small a promise.


def test_secret_draws_give_nobody_a_smaller_epsilon_and_stay_secret(tmp_path: Path) -> None:
    plan = Plan.fit(Poisson(8, 0.5), mechanism="identity", noise_multiplier=1.0, unit="user")
    server = a_server(tmp_path / "run", plan)
    server.sampler(10)
    rounds = Rounds(server)
    work = rounds.begin(list(range(10)))
    assert work is not None
    rounds.finish()
    for user in range(10):
        own = statement_for(server, user)
        assert own == server.statement()
        assert own.epsilon > 1
    steps = [row for row in read(tmp_path / "run" / "log.jsonl") if row["kind"] == "step"]
    assert [row.keys() for row in steps] == [{"kind", "step", "link"}]
    with pytest.raises(InvalidInput, match="does not say who took part"):
        read_log(tmp_path / "run")
    rounds.close()
    assert verify(tmp_path / "run").refuted == ()


def test_a_users_own_epsilon_names_what_it_rests_on() -> None:
    server = a_server(None)
    server.step({"w": torch.zeros(3)}, cohort=["ada"])
    for _ in range(9):
        server.step({"w": torch.zeros(3)}, cohort=[])
    own = statement_for(server, "ada")
    assert own.epsilon < server.statement().epsilon
    assert any("did not depend on released models" in words for words in own.assumptions)


@pytest.mark.parametrize("mechanism", ["identity", tree(restart_every=2)])
def test_an_adaptive_run_is_verified_at_every_round(tmp_path: Path, mechanism: Any) -> None:
    clip = QuantileClip(initial=1.0, units=4, bit_noise=5.0)
    rounds = Rounds(a_server(tmp_path / "run", a_plan(mechanism), clip=clip))
    for _ in range(3):
        one_round(rounds)
        assert verify(tmp_path / "run").refuted == ()


# Timers.


def _claim(path: str, moments: Any) -> int:
    return sum(Timer(path, seconds=10, most=5).claim(now=float(m)) for m in moments)


def test_a_timer_is_claimed_once_by_processes_at_once(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(4) as pool:
        work = [(str(tmp_path / "timer.json"), np.full(20, 1000.0))] * 8
        assert sum(pool.starmap(_claim, work)) == 1


def test_late_claims_are_allowed_for() -> None:
    """Claimed at once in round 0 and 40 s late in round 6: 100 s apart, sent 60 s apart."""
    times = [10.0 * t for t in range(30)]
    assert separation_from_times(times, seconds=100) == 10
    assert separation_from_times(times, seconds=100, delay=40) == 6
    assert separation_from_times(times, seconds=100, delay=200) == 1
    rng = np.random.default_rng(1)
    seen = len(times)
    for _ in range(200):
        last = (-math.inf, -1)
        for t in sorted(rng.choice(30, 12, replace=False).tolist()):
            moment = times[t] + 40 * rng.integers(0, 2)
            if moment - last[0] >= 100:
                seen = min(seen, t - last[1]) if last[1] >= 0 else seen
                last = (moment, t)
    assert seen == 6

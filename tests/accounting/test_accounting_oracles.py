"""Every privacy number of the oracle file that accounting covers, one test each.

The numbers were computed by other libraries. `equal` rows must agree within the tolerance of the
row; `bound` rows are values of looser accountants, which ours must not exceed; `wrong` rows are
known mistakes, which ours must not repeat.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from noshuffle.accounting import calibrate, composition, fourier, gaussian, mechanisms, renyi
from noshuffle.accounting.bins import Overlaps
from noshuffle.participation import BallsInBins, CyclicPoisson
from noshuffle.strategies import banded, identity
from noshuffle.strategies.positions import overlaps

_ROOT = Path(__file__).resolve().parents[2]
_SHARED = Path(os.environ.get("NOSHUFFLE_SHARED", _ROOT.parent / "shared"))
_FILE = _SHARED / "oracles" / "accounting.json"
_ENTRIES: list[dict[str, Any]] = json.loads(_FILE.read_text())["entries"] if _FILE.exists() else []
pytestmark = pytest.mark.skipif(not _ENTRIES, reason=f"no oracle file at {_FILE}")

OLD_ORDERS = [a for a in renyi.DEFAULT_ORDERS if a < 64 and a != 11]
REPO_ORDERS = [1 + k / 10 for k in range(1, 1990)]
#: Groups whose rows are tested with the strategies: tests/strategies/test_tree_sensitivity.py
#: (every row of a group in one test) and test_sensitivity.py.
ELSEWHERE = ("tree", "mf_sens")
_taken: set[str] = set()


def rows(*groups: str, has: str = "", ends: tuple[str, ...] = ("",)) -> list[Any]:
    chosen = [
        e for e in _ENTRIES if e["group"] in groups and has in e["id"] and e["id"].endswith(ends)
    ]
    _taken.update(e["id"] for e in chosen)
    return [pytest.param(e, id=e["id"]) for e in chosen]


@functools.cache
def pld(sigma: float, q: float, steps: int, delta: float, direction: str, bound: str) -> float:
    return fourier.epsilon(
        noise_multiplier=sigma,
        rate=q,
        steps=steps,
        delta=delta,
        direction=direction,
        bound=bound,
    )


def bracket(p: dict[str, Any], direction: str = "both") -> tuple[float, float]:
    sigma = p.get("sigma", p.get("sigma_over_max_colnorm"))
    args = sigma, p.get("q", p.get("q_in_group")), p.get("steps", p.get("rounds")), p["delta"]
    return pld(*args, direction, "lower"), pld(*args, direction, "upper")


def rdp(p: dict[str, Any], **options: Any) -> float:
    return renyi.epsilon(
        noise_multiplier=p.get("sigma", p.get("sigma_over_max_colnorm")),
        rate=p.get("q", p.get("q_in_group", 1.0)),
        steps=p.get("steps", p.get("rounds", 1)),
        delta=p["delta"],
        **options,
    )


def equal(value: float, e: dict[str, Any]) -> None:
    assert value == pytest.approx(e["value"], abs=max(e["tolerance"], 1e-12 * abs(value)), rel=0)


def bounded(value: float, e: dict[str, Any], *, within: float) -> None:
    """Not above a looser accountant, and not implausibly far below."""
    assert e["value"] * (1 - within) <= value <= e["value"] + e["tolerance"]


@pytest.mark.parametrize("e", rows("gaussian"))
def test_gaussian(e: dict[str, Any]) -> None:
    p, name = e["params"], e["id"]
    if name.endswith("_zcdp_classic"):
        equal(rdp(p, conversion="classical", real_orders=True), e)
    elif name.endswith("_real_alpha"):
        equal(rdp(p, real_orders=True), e)
    elif name.endswith("_default_orders"):
        equal(rdp(p), e)
    else:
        assert name.endswith(("_exact", "_exact_da", "_pld"))
        equal(gaussian.epsilon(mu=p["sensitivity"] / p["sigma"], delta=p["delta"]), e)


@pytest.mark.parametrize("e", rows("stress", has="gauss"))
def test_stress_gaussian(e: dict[str, Any]) -> None:
    equal(gaussian.epsilon(mu=1 / e["params"]["sigma"], delta=e["params"]["delta"]), e)


@pytest.mark.parametrize("e", rows("stress", ends=("_prv", "T1000000_pld")))
def test_stress_fourier(e: dict[str, Any]) -> None:
    equal(bracket(e["params"])[1], e)


@pytest.mark.parametrize(
    "e", [*rows("stress", has="_vi"), *rows("stress", has="mnist_s1_d", ends=("_pld",))]
)
def test_stress_bounds(e: dict[str, Any]) -> None:
    """Coarse grids of another library: upper bounds that ours must not exceed."""
    low, high = bracket(e["params"])
    assert low <= e["value"]
    assert high <= e["value"] * (1 + 1e-4)


@pytest.mark.parametrize(
    "e",
    rows(
        "stress", "dpsgd", "bandmf", "opacus", "published", ends=("_rdp", "_classic_conv", "_E100")
    ),
)
def test_renyi_of_sampled_steps(e: dict[str, Any]) -> None:
    """Where the other library adds up absolute values at fractional orders, ours is below."""
    p, name = e["params"], e["id"]
    if name.startswith("sigma_"):
        found = calibrate.noise_multiplier(
            epsilon=p["epsilon"], delta=p["delta"], rate=p["q"], steps=p["steps"], accountant="rdp"
        )
        assert e["value"] * (1 - 1e-3) <= found <= e["value"] + e["tolerance"]
    elif e["group"] == "opacus":
        equal(rdp(p, orders=OLD_ORDERS), e)
    elif name.endswith("_E100"):
        equal(rdp(p, orders=OLD_ORDERS, conversion="classical"), e)
    else:
        kind = "classical" if name.endswith("_classic_conv") else "cks"
        bounded(rdp(p, conversion=kind), e, within=5e-3)


@pytest.mark.parametrize("e", rows("rdp_curve"))
def test_divergence(e: dict[str, Any]) -> None:
    p = e["params"]
    value = renyi.divergence(noise_multiplier=p["sigma"], rate=p["q"], order=p["alpha"])
    if e["id"].endswith("_da"):
        assert e["value"] is None or value <= e["value"] * (1 + 1e-9)
    else:
        assert value == pytest.approx(e["value"], rel=1e-9)


@pytest.mark.parametrize("e", rows("dpsgd", "bandmf", ends=("_pld", "_prv", "_fa")))
def test_sampled_steps(e: dict[str, Any]) -> None:
    p = e["params"]
    if e["group"] == "bandmf":
        cyclic = CyclicPoisson.of(
            steps=p["n_steps"],
            groups=p["bands"],
            batch=p["expected_batch"],
            population=p["dataset"],
        )
        assert (cyclic.rate, cyclic.most) == (p["q_in_group"], p["rounds"])
    low, high = bracket(p)
    equal(high, e)
    assert low <= high <= low * (1 + 1e-3)


@pytest.mark.parametrize("e", rows("fourier_accountant"))
def test_other_fourier_accountant(e: dict[str, Any]) -> None:
    equal(bracket(e["params"], "replace" if e["id"].endswith("_S") else "both")[1], e)


@pytest.mark.parametrize("e", rows("opacus", ends=("_prv",)))
def test_opacus_prv(e: dict[str, Any]) -> None:
    """It returns the upper end of its interval, 0.01 above its estimate."""
    assert bracket(e["params"])[1] == pytest.approx(e["value"] - 0.01, abs=2e-3)


@pytest.mark.parametrize("e", rows("opacus", has="NOT_A_BOUND"))
def test_central_limit_is_no_bound(e: dict[str, Any]) -> None:
    low, high = bracket(e["params"])
    assert not low * 0.95 <= e["value"] <= high * 1.05


@pytest.mark.parametrize("e", rows("replace_one"))
def test_replace_one(e: dict[str, Any]) -> None:
    p, name = e["params"], e["id"]
    if "poisson_q" in name:
        equal(bracket(p, "replace")[1], e)
    elif name.startswith("nested"):
        equal(renyi.epsilon(noise_multiplier=2.0 / math.sqrt(4), rate=0.01, delta=p["delta"]), e)
    else:
        composed = fourier.compose([(p["sigma"], 1.0, 1)], direction="replace")
        value = composed.epsilon(delta=p["delta"])
        if "WRONG" in name:
            assert value > 1.5 * e["value"]
        else:
            equal(value, e)


@pytest.mark.parametrize("e", rows("wor"))
def test_fixed_size_and_no_sampling(e: dict[str, Any]) -> None:
    p = e["params"]
    if "epochs" in p:
        equal(gaussian.epsilon(mu=math.sqrt(p["epochs"]) / p["sigma"], delta=p["delta"]), e)
    else:
        equal(rdp({**p, "q": p["m"] / p["n"]}, sampling="fixed"), e)


@pytest.mark.parametrize("e", rows("autodp"))
def test_autodp(e: dict[str, Any]) -> None:
    if "_wor_" in e["id"]:
        equal(rdp(e["params"], sampling="fixed"), e)
    else:
        bounded(rdp(e["params"]), e, within=0.02)


@pytest.mark.parametrize("e", rows("bandmf", has="mog_"))
def test_mixture_of_gaussians(e: dict[str, Any]) -> None:
    p = e["params"]
    release = fourier.MixtureRelease(
        p["sigma"], tuple(p["sensitivities"]), tuple(p["probs"]), p["steps"]
    )
    composed = fourier.compose([release])
    equal(composed.epsilon(delta=p["delta"]), e)
    assert composed.epsilon(delta=p["delta"], bound="lower") <= e["value"]


@pytest.mark.parametrize("e", rows("composition"))
def test_composition(e: dict[str, Any]) -> None:
    p, name = e["params"], e["id"]
    if name.startswith("comp_"):
        k = {"epsilon": p["epsilon"], "count": p["k"]}
        slack = p["delta_slack"]
        if name.endswith("_basic"):
            equal(composition.basic(**k).epsilon, e)
        elif name.endswith("_drv2010"):
            equal(composition.advanced(**k, slack=slack, form="original").epsilon, e)
        elif name.endswith("_drv_tanh"):
            equal(composition.advanced(**k, slack=slack).epsilon, e)
        else:
            best = composition.optimal(**k, slack=slack)
            equal(best.epsilon, e)
            assert best.delta == pytest.approx(slack, rel=1e-9)
    elif name.startswith("kov_delta"):
        equal(composition.optimal_delta(epsilon=p["epsilon"], count=p["k"], total=p["eps_g"]), e)
    elif name.startswith("group_gauss"):
        equal(gaussian.epsilon(mu=p["group"] * p["mu"], delta=p["delta"]), e)
    elif name.startswith("group_"):
        found = composition.group(epsilon=p["epsilon"], delta=p["delta"], size=p["group"])
        assert list(found) == pytest.approx(e["value"], rel=1e-12)
    else:
        assert name.startswith("subsample_lemma")
        equal(composition.subsample(epsilon=p["epsilon"], rate=p["m"] / p["n"]).epsilon, e)


@pytest.mark.parametrize("e", rows("published", has="sigma_gauss"))
def test_gaussian_calibration(e: dict[str, Any]) -> None:
    p = e["params"]
    equal(calibrate.noise_multiplier(epsilon=p["epsilon"], delta=p["delta"]), e)
    fitted = mechanisms.Gaussian.fit(epsilon=p["epsilon"], delta=p["delta"])
    equal(fitted.deviation, e)


@pytest.mark.parametrize("e", rows("published", has="sigma_dpsgd", ends=("_pld",)))
def test_fourier_calibration(e: dict[str, Any]) -> None:
    p = e["params"]
    found = calibrate.noise_multiplier(
        epsilon=p["epsilon"],
        delta=p["delta"],
        rate=p["q"],
        steps=p["steps"],
        accountant="fourier",
        tolerance=1e-5,
    )
    equal(found, e)


@pytest.mark.parametrize("e", rows("tree_eps", "dpftrl_repo"))
def test_tree_epsilon(e: dict[str, Any]) -> None:
    p, name = e["params"], e["id"]
    if e["quantity"] == "squared_sensitivity":
        pytest.skip("a sensitivity: test_lists_of_trees_in_the_oracle")
    sigma = p.get("sigma", p.get("noise_multiplier"))
    note = re.search(r"total squared sensitivity (\d+)", e.get("note", ""))
    square = p.get("squared_sensitivity", p.get("height", note and int(note[1])))
    if e["quantity"] == "rho_zcdp":
        equal(mechanisms.Gaussian(sigma, math.sqrt(square)).rho, e)
        return
    args = {"noise_multiplier": sigma, "delta": p["delta"], "squared_sensitivity": square}
    if "exact" in name:
        equal(gaussian.epsilon(mu=math.sqrt(square) / sigma, delta=p["delta"]), e)
    elif name.startswith("so_"):
        equal(renyi.epsilon(**args, conversion="classical", orders=OLD_ORDERS), e)
    elif name.endswith("_zcdp_classic"):
        equal(renyi.epsilon(**args, conversion="classical", real_orders=True), e)
    elif e["group"] == "dpftrl_repo":
        equal(renyi.epsilon(**args, orders=REPO_ORDERS), e)
    else:
        equal(renyi.epsilon(**args), e)


@pytest.mark.parametrize("e", rows("bnb"))
def test_secret_positions(e: dict[str, Any]) -> None:
    p = e["params"]
    part = BallsInBins(p["n_steps"] // p["bins"], p["bins"])
    first = p["first_column"]
    strategy = banded(first) if len(first) > 1 else identity()
    found = Overlaps(overlaps(strategy, part, part.steps))
    stated = found.delta(noise_multiplier=p["sigma"], epsilon=p["epsilon"])
    assert stated >= e["value"] - e["tolerance"]
    if len(first) == 1 and p["direction"] == "positive":  # no overlap: the bound is exact
        assert stated <= e["value"] + e["tolerance"] + 0.01 * e["value"]


@pytest.mark.parametrize("e", rows("bandmf", has="truncated_poisson"))
def test_cut_batches(e: dict[str, Any]) -> None:
    p = e["params"]
    release = fourier.TruncatedRelease(
        p["sigma"], p["q"], p["max_batch"], p["dataset"], steps=p["steps"]
    )
    found = fourier.compose([release]).epsilon(delta=p["delta"])  # for one other unit less, too
    assert e["value"] - e["tolerance"] < found < 1.002 * e["value"] + e["tolerance"]


def test_every_row_of_the_file_has_a_test() -> None:
    left = {e["id"] for e in _ENTRIES if e["group"] not in ELSEWHERE} - _taken
    assert not left
    assert len(_ENTRIES) >= 1159
    assert {e["group"] for e in _ENTRIES} >= set(ELSEWHERE)

"""One argmin, three doors: `Leader` against the torch optimizer, sets in numpy against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from noshuffle.convex.solvers import domains
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.optim import FTRL, box, elastic_net, group_lasso, l1_ball, l2_ball, lasso, simplex
from noshuffle.optim.constraints import Box, Constraint, Everywhere, L1Ball, L2Ball, Simplex
from noshuffle.optim.leader import Leader
from noshuffle.optim.lp_ball import LpBall

SETS = {
    "none": None,
    "everywhere": Everywhere(),
    "l2": l2_ball(0.7),
    "box": box(-0.3, 0.5),
    "simplex": simplex(1.2),
    "l1": l1_ball(0.8),
}
PENALTIES = {"none": None, "lasso": lasso(0.1), "elastic": elastic_net(0.05, 0.4)}


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("name", SETS)
def test_leader_is_the_optimizer(name: str, penalty: str) -> None:
    rng = np.random.default_rng(1)
    theta = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    settings = {"constraint": SETS[name], "composite": PENALTIES[penalty]}
    optimizer, leader = FTRL([theta], 0.2, **settings), Leader(6, **settings)
    for _ in range(10):
        g = rng.normal(size=6)
        theta.grad = torch.from_numpy(g.copy())
        optimizer.step()
        found = leader.follow(g, rate=0.2)
        np.testing.assert_allclose(found, theta.detach().numpy(), atol=1e-12)


def test_quadratic_part_free_coordinates_and_uneven_rates() -> None:
    """l2 beside a penalty, against elastic_net; what is free only follows the sum."""
    rng = np.random.default_rng(2)
    leader = Leader(5, free=2, l2=0.4, composite=lasso(0.1), constraint=l2_ball(0.5))
    twin = Leader(3, composite=elastic_net(0.1, 0.4), constraint=l2_ball(0.5))
    total = np.zeros(5)
    for rate in (0.5, 0.1, 2.0, 0.7):
        g = rng.normal(size=5)
        total += rate * g
        found = leader.follow(g, rate=rate)
        np.testing.assert_allclose(found[:3], twin.follow(g[:3], rate=rate), atol=1e-12)
        np.testing.assert_array_equal(found[3:], -total[3:])


def test_groups_go_to_zero_together() -> None:
    groups = [np.array([0, 1]), np.array([2, 3])]
    leader = Leader(4, composite=group_lasso(1.0), constraint=l2_ball(10.0), groups=groups)
    found = leader.follow(-np.array([0.1, 0.1, 3.0, 4.0]), rate=1.0)
    np.testing.assert_allclose(found, [0, 0, 2.4, 3.2])
    rows = Leader(4, composite=group_lasso(1.0), groups=[np.array([[0, 1], [2, 3]])])
    np.testing.assert_allclose(rows.follow(-np.array([0.1, 0.1, 3, 4.0]), rate=1.0), found)
    with pytest.raises(InvalidInput, match="groups"):
        Leader(4, composite=group_lasso(1.0))
    with pytest.raises(Unsupported, match="closed form"):
        Leader(4, composite=group_lasso(1.0), constraint=l1_ball(1.0), groups=groups)


@pytest.mark.parametrize("name", [n for n in SETS if n != "none"])
def test_a_vector_of_numpy_is_projected_as_tensors_are(name: str) -> None:
    rng, made = np.random.default_rng(3), SETS[name]
    assert isinstance(made, Constraint)
    for scale in (0.1, 1.0, 30.0):
        v = scale * rng.normal(size=7)
        before = v.copy()
        whole = made.project([torch.from_numpy(v)])[0].numpy()
        cut = made.project([torch.from_numpy(v[:3]), torch.from_numpy(v[3:])])
        np.testing.assert_array_equal(made.project(v), whole)
        np.testing.assert_allclose(np.concatenate([c.numpy() for c in cut]), whole, atol=1e-14)
        v.flags.writeable = False
        np.testing.assert_array_equal(made.project(v), whole)
        np.testing.assert_array_equal(v, before)


def test_solvers_and_optimizers_share_their_sets() -> None:
    assert domains.Ball is L2Ball
    assert domains.Domain is Constraint
    assert (domains.L1Ball, domains.Simplex, domains.LpBall) == (L1Ball, Simplex, LpBall)
    assert domains.Box(0.5) == Box(-0.5, 0.5)
    with pytest.raises(InvalidInput):
        domains.Box(-1.0)


def test_minimisers_of_boxes_that_are_not_centred() -> None:
    g = np.array([1.0, -1.0, 0.0])
    assert Box(-0.3, 0.5).lmo(g).tolist() == [-0.3, 0.5, 0.0]
    assert Box(0.2, 0.5).lmo(g).tolist() == [0.2, 0.5, 0.2]
    assert Box(-0.3, 0.5).euclidean(4) == 1.0
    with pytest.raises(Unsupported):
        Box(-np.inf, 1.0).lmo(g)

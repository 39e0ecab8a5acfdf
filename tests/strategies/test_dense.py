"""The explicit strategy: what it accepts, and that it is a value."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from noshuffle.errors import HorizonExceeded, InvalidInput, Unsupported
from noshuffle.strategies import dense, from_dict


def random_lower(n, seed=0):
    rng = np.random.default_rng(seed)
    return np.tril(rng.normal(size=(n, n)), -1) * 0.3 + np.diag(rng.uniform(0.5, 1.5, n))


def test_leading_blocks_are_shorter_runs():
    C = random_lower(9)
    strategy = dense(C)
    for n in (1, 4, 9):
        np.testing.assert_array_equal(strategy.encoder(n), C[:n, :n])
        np.testing.assert_allclose(strategy.noising(n), np.linalg.inv(C[:n, :n]), atol=1e-13)
    np.testing.assert_allclose(strategy.noising(9)[:4, :4], strategy.noising(4), atol=1e-14)
    with pytest.raises(HorizonExceeded, match="9 steps, 10"):
        strategy.noising(10)


def test_is_a_value():
    C = random_lower(5)
    a, b = dense(C), dense(C.copy())
    assert a == b
    assert hash(a) == hash(b)
    assert a != dense(random_lower(5, seed=1))
    assert a != "dense"
    assert dense([[1.0], [0.0, 1.0]]) == dense([[1.0], [-0.0, 1.0]])
    assert hash(dense([[1.0], [0.0, 1.0]])) == hash(dense([[1.0], [-0.0, 1.0]]))
    C[3, 0] = 99.0
    assert a == b, "the strategy must not share memory with its argument"
    with pytest.raises(ValueError, match="read-only"):
        a.matrix[0, 0] = 2.0


def test_encoder_is_a_copy():
    strategy = dense(random_lower(4))
    strategy.encoder(4)[0, 0] = 7.0
    assert strategy.matrix[0, 0] != 7.0


def test_json_holds_the_lower_triangle():
    strategy = dense(random_lower(6))
    record = json.loads(json.dumps(strategy.to_dict()))
    assert [len(row) for row in record["matrix"]] == [1, 2, 3, 4, 5, 6]
    assert from_dict(record) == strategy


@pytest.mark.parametrize(
    "matrix",
    [
        [],
        3,
        [[0.0]],
        [[-1.0]],
        [[math.nan]],
        [[1.0, 2.0], [0.0, 1.0]],
        [[1.0], [1.0, 1.0, 1.0]],
        [[1.0], ["a", 1.0]],
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]],
        np.zeros((2, 2, 2)),
    ],
)
def test_bad_matrices_are_refused_in_one_line(matrix):
    with pytest.raises(InvalidInput) as caught:
        dense(matrix)
    assert "\n" not in str(caught.value)


def test_too_large_is_refused():
    with pytest.raises(Unsupported, match="8192"):
        dense([[1.0]] * 8193)

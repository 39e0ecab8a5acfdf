"""Tree aggregation against its slow twin, golden values and the definition of its noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies.slow_recipes import materialize

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.strategies.recipe import Forest, Rows, rows
from noshuffle.strategies.tree import VARIANTS, Tree, tree

SHAPES = [
    (None, False),
    *((every, completion) for every in (1, 2, 3, 5, 8, 12, 40) for completion in (False, True)),
]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    every, completion = draw(st.sampled_from(SHAPES))
    return tree(draw(st.sampled_from(VARIANTS)), every, completion)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("every", "completion"), SHAPES)
@pytest.mark.parametrize("n", [1, 2, 3, 8, 13, 36])
def test_noising_inverts_the_encoder(
    n: int, every: int | None, completion: bool, variant: str
) -> None:
    strategy = tree(variant, every, completion)
    encoder, noising = strategy.encoder(n), strategy.noising(n)
    assert noising.shape == encoder.shape[::-1] == (n, rows(strategy.recipe(n), n))
    np.testing.assert_allclose(noising @ encoder, np.eye(n), atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(1, 45))
def test_noising_is_what_the_recipe_streams(strategy: Tree, n: int) -> None:
    streamed = materialize(strategy.recipe(n), n)
    np.testing.assert_allclose(strategy.noising(n), streamed, atol=1e-13)


@settings(max_examples=60, deadline=None)
@given(trees(), st.integers(1, 60))
def test_prefix_variance_is_the_row_norm_of_the_decoder(strategy: Tree, n: int) -> None:
    decoder = np.cumsum(strategy.noising(n), axis=0)
    np.testing.assert_allclose(strategy.prefix_variance(n), (decoder**2).sum(axis=1), rtol=1e-11)


@settings(max_examples=40, deadline=None)
@given(trees(), st.integers(1, 30))
def test_rows_are_complete_dyadic_nodes_in_order_of_completion(strategy: Tree, n: int) -> None:
    """Twin of the encoder: every dyadic interval inside a block, sorted by its end."""
    if strategy.variant == "full":
        strategy = tree("plain", strategy.restart_every, strategy.completion)
    expected = []
    for start, real, full in strategy.blocks(n):
        nodes = [
            (first + width, width, first)
            for width in (1 << h for h in range(full.bit_length()))
            for first in range(0, full - width + 1, width)
        ]
        for end, _, first in sorted(nodes):
            row = np.zeros(n)
            row[start + first : start + min(end, real)] = 1.0
            expected.append(row)
    np.testing.assert_array_equal(strategy.encoder(n), np.stack(expected))


@pytest.mark.parametrize(("every", "completion"), SHAPES)
def test_full_is_least_squares_over_all_nodes(every: int | None, completion: bool) -> None:
    n = 21
    full, nodes = tree("full", every, completion), tree("plain", every, completion).encoder(n)
    encoder = full.encoder(n)
    assert encoder.shape == (n, n)
    np.testing.assert_array_equal(np.triu(encoder, 1), 0)
    np.testing.assert_allclose(encoder.T @ encoder, nodes.T @ nodes, atol=1e-12)
    best = np.tril(np.ones((n, n))) @ np.linalg.pinv(nodes)
    np.testing.assert_allclose(full.prefix_variance(n), (best**2).sum(axis=1), rtol=1e-10)


def test_golden_variances() -> None:
    t = np.array([1, 2, 3, 4, 7, 8, 1023, 1024, 1600]) - 1
    plain, honaker = tree("plain").prefix_variance(1600), tree().prefix_variance(1600)
    np.testing.assert_array_equal(plain[t], [1, 1, 2, 1, 3, 1, 10, 1, 3])
    expected = [1, 0.666667, 1.666667, 0.571429, 2.238095, 0.533333, 5.802859, 0.500244, 1.504670]
    np.testing.assert_allclose(honaker[t], expected, atol=5e-7)


def test_golden_outputs_when_every_draw_is_one() -> None:
    plain = np.cumsum(tree("plain").noising(31).sum(axis=1))
    np.testing.assert_allclose(plain, [t.bit_count() for t in range(1, 32)], atol=1e-12)
    honaker = np.cumsum(tree().noising(1024).sum(axis=1))
    expected = [1, 4 / 3, 7 / 3, 12 / 7, 19 / 7, 64 / 21, 85 / 21, 32 / 15]
    np.testing.assert_allclose(honaker[:8], expected, rtol=1e-13)
    assert honaker[-1] == pytest.approx(11 / (2 - 2**-10), rel=1e-12)


def test_completion_leaves_one_root_behind() -> None:
    """100 leaves: 1.583 without completion, the root of 128 leaves with it."""
    without, completed = tree(restart_every=100), tree(restart_every=100, completion=True)
    assert without.prefix_variance(250)[99] == pytest.approx(1.583, abs=5e-4)
    variance = completed.prefix_variance(250)
    assert variance[99] == pytest.approx(1 / (2 - 2**-7))
    assert variance[199] == pytest.approx(2 / (2 - 2**-7))
    assert variance[249] == pytest.approx(variance[199] + tree().prefix_variance(50)[-1])
    assert tree("plain", 100, True).prefix_variance(250)[199] == 2


def test_published_errors_of_one_pass() -> None:
    """max / rms error times √11 at 1024 steps."""
    expected = {"plain": (10.49, 7.42), "honaker": (7.99, 5.65), "full": (4.438, 3.686)}
    for variant, (largest, rms) in expected.items():
        variance = 11 * tree(variant).prefix_variance(1024)
        assert math.sqrt(variance.max()) == pytest.approx(largest, abs=6e-3)
        assert math.sqrt(variance.mean()) == pytest.approx(rms, abs=6e-3)


def test_prefix_variance_of_a_million_steps() -> None:
    variance = tree(restart_every=1000, completion=True).prefix_variance(10**6)
    assert variance.shape == (10**6,)
    assert variance[999_000 - 1] == pytest.approx(999 / (2 - 2**-10), rel=1e-12)


def test_buffers_and_recipes() -> None:
    assert tree().buffers(1600) == 11
    assert tree(restart_every=100).buffers(1600) == 7
    assert tree(restart_every=100, completion=True).buffers(1600) == 8
    assert tree(restart_every=100, completion=True).buffers(100) == 7  # the last is not completed
    assert tree("full").buffers(1600) == 0
    assert tree("plain", 7, True).recipe(20) == Forest("plain", 20, 7, True)
    assert isinstance(tree("full").recipe(5), Rows)


def test_the_stack_never_outgrows_the_buffers() -> None:
    for strategy in (tree(), tree(restart_every=13), tree(restart_every=13, completion=True)):
        for n in range(1, 60):
            blocks = list(strategy.blocks(n))
            stack = max(leaf.bit_count() for _, _, full in blocks for leaf in range(1, full + 1))
            assert stack <= strategy.buffers(n) <= max(stack + 1, 1)


def test_record_and_words() -> None:
    assert tree().to_dict() == {"name": "tree"}
    record = tree("plain", 100, True).to_dict()
    assert record == {
        "name": "tree",
        "variant": "plain",
        "restart_every": 100,
        "completion": True,
    }
    record.pop("name")
    assert Tree(**record) == tree("plain", 100, True)
    assert "one tree" in tree().words()
    assert "every 100 steps" in tree("full", 100, True).words()
    assert "virtual" in tree("full", 100, True).words()


@pytest.mark.parametrize(
    "fields",
    [
        {"variant": "best"},
        {"restart_every": 0},
        {"restart_every": 2.5},
        {"restart_every": 4, "completion": 1},
        {"completion": True},
    ],
)
def test_bad_fields_are_refused_in_one_line(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidInput) as caught:
        Tree(**fields)  # type: ignore[arg-type]
    assert "got" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_sizes_are_refused() -> None:
    for call in (tree().encoder, tree().noising, tree().recipe, tree().buffers):
        with pytest.raises(InvalidInput):
            call(0)
    with pytest.raises(InvalidInput):
        tree().prefix_variance(0)
    for call in (tree().encoder, tree("full").noising, tree("full").recipe):
        with pytest.raises(Unsupported):
            call(100_000)
    with pytest.raises(Unsupported):
        tree("full").prefix_variance(100_000)
    assert len(tree("full", 16).prefix_variance(100_000)) == 100_000

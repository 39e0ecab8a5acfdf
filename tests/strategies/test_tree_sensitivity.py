"""Exact tree sensitivities: every pattern by brute force, the oracle file, published values."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.participation import (
    Epochs,
    FixedSize,
    MinSeparation,
    Participation,
    Poisson,
    Restarted,
    SinglePass,
)
from noshuffle.strategies.tree import Tree, tree
from noshuffle.strategies.tree_factor import Part, largest_node_count
from noshuffle.strategies.tree_search import TreeSearch
from noshuffle.strategies.tree_sensitivity import PatternLimits, tree_squared_sensitivity

SHARED = Path(os.environ.get("NOSHUFFLE_SHARED", Path(__file__).parents[3] / "shared"))
Pattern = tuple[int, ...]


def forest_squared_sensitivity(
    steps: int, *, separation: int, max_participations: int, nodes: str = "forest"
) -> int:
    """S² of one tree: all nodes ("forest", "completed" to a power of two), or no right children
    ("prefix": what plain prefix sums read)."""
    limits = PatternLimits.of(MinSeparation(steps, separation, max_participations))
    steps = int(steps)
    full = 1 << (steps - 1).bit_length() if nodes == "completed" else steps
    search = TreeSearch(*limits, counts_all=nodes != "prefix")
    return int(search.best([Part(steps, steps, full)]).max())


def fixed_order_squared_sensitivity(
    epochs: int, steps_per_epoch: int, *, completion: bool = False
) -> int:
    """S² of one tree over epochs in the same order, optionally completed to a power of two."""
    steps = int(Epochs(epochs, steps_per_epoch).steps)
    full = 1 << (steps - 1).bit_length() if completion else steps
    return largest_node_count([(0, steps, full)], steps_per_epoch)


# --- slow twins -----------------------------------------------------------------------------------


def value(gram: np.ndarray, pattern: Iterable[int]) -> int:
    steps = list(pattern)
    return round(float(gram[np.ix_(steps, steps)].sum()))


def separated(first: int, last: int, b: int, most: int) -> list[Pattern]:
    """All patterns in [first, last) with at most `most` steps, b apart."""
    found: list[Pattern] = [()]
    if most:
        for step in range(first, last):
            found += [(step, *rest) for rest in separated(step + b, last, b, most - 1)]
    return found


@cache
def indicators(n: int, b: int) -> np.ndarray:
    """All patterns of n steps, b apart, one in a row."""
    patterns = separated(0, n, b, n)
    chosen = np.zeros((len(patterns), n))
    for row, pattern in zip(chosen, patterns):
        row[list(pattern)] = 1
    return chosen


def classes(first: int, last: int, b: int) -> list[Pattern]:
    return [tuple(range(j, last, b)) for j in range(first, min(first + b, last))]


def by_brute_force(gram: np.ndarray, promise: Participation) -> int:
    n = len(gram)
    if isinstance(promise, SinglePass):
        return max(value(gram, [t]) for t in range(n))
    if isinstance(promise, Epochs):
        return max(value(gram, p) for p in classes(0, n, promise.steps_per_epoch))
    if isinstance(promise, MinSeparation):
        b, k = promise.separation, promise.max_participations
        return max(value(gram, p) for p in separated(0, n, b, k))
    assert isinstance(promise, Restarted)
    base, ends = promise.participation, np.cumsum((0, *promise.blocks)).tolist()
    spans = list(itertools.pairwise(ends))
    if isinstance(base, SinglePass):
        return max(value(gram, [t]) for t in range(n))
    if isinstance(base, Epochs):
        b = base.steps_per_epoch
        return sum(max(value(gram, p) for p in classes(s, e, b)) for s, e in spans)
    k = base.max_participations
    best = {0: 0}  # total count: value
    for s, e in spans:
        inside: dict[int, int] = {}
        for p in separated(s, e, base.separation, k):
            inside[len(p)] = max(inside.get(len(p), 0), value(gram, p))
        merged: dict[int, int] = {}
        for (c1, v1), (c2, v2) in itertools.product(best.items(), inside.items()):
            if c1 + c2 <= k:
                merged[c1 + c2] = max(merged.get(c1 + c2, 0), v1 + v2)
        best = merged
    return max(best.values())


def node_gram(steps: int, nodes: str) -> np.ndarray:
    """X[i, j]: how many nodes of the named set hold both i and j."""
    full = 1 << (steps - 1).bit_length() if nodes == "completed" else steps
    gram = np.zeros((steps, steps))
    for h in range(full.bit_length()):
        for index in range(full >> h):
            if nodes == "prefix" and index % 2:
                continue
            inside = slice(index << h, (index + 1) << h)
            gram[inside, inside] += 1
    return gram


def gap_table(real: int, height: int, b: int, most: int) -> np.ndarray:
    """Best value by (count, steps closed at entry, steps closed at exit): no shortcut at all."""
    out = np.full((most + 1, b, b), -(10**9))
    half = 1 << height >> 1
    if height == 0:
        for e in range(b):
            out[0, e, max(e - 1, 0)] = 0
        out[1, 0, b - 1] = 0
    elif real <= half:
        out = gap_table(real, height - 1, b, most)
    else:
        out = in_a_row(
            gap_table(half, height - 1, b, most), gap_table(real - half, height - 1, b, most)
        )
    return out + (np.arange(most + 1) ** 2)[:, None, None]


def in_a_row(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    out = np.full_like(left, -(10**9))
    for c1, c2 in itertools.product(range(len(left)), repeat=2):
        if c1 + c2 < len(left):
            both = (left[c1][:, :, None] + right[c2][None]).max(axis=1)
            out[c1 + c2] = np.maximum(out[c1 + c2], both)
    return out


# --- brute force ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", ["forest", "completed", "prefix"])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 11, 13, 16])
def test_one_tree_equals_the_maximum_over_all_patterns(n: int, nodes: str) -> None:
    gram = node_gram(n, nodes)
    for b in range(1 if n <= 13 else 2, n + 2):
        chosen = indicators(n, b)
        values = np.zeros(n + 1, dtype=int)
        of_all = np.rint(((chosen @ gram) * chosen).sum(axis=1)).astype(int)
        np.maximum.at(values, chosen.sum(axis=1).astype(int), of_all)
        for k in range(1, n + 2):
            got = forest_squared_sensitivity(n, separation=b, max_participations=k, nodes=nodes)
            assert got == values[: k + 1].max(), (b, k)


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> tuple[Tree, Participation]:
    every = draw(st.none() | st.integers(1, 12))
    completion = every is not None and draw(st.booleans())
    strategy = tree(draw(st.sampled_from(["plain", "honaker", "full"])), every, completion)
    kind = draw(st.sampled_from(["single", "epochs", "separation"]))
    base: SinglePass | Epochs | MinSeparation
    if kind == "single":
        base = SinglePass(draw(st.integers(1, 60)))
    elif kind == "epochs":
        base = Epochs(draw(st.integers(1, 9)), draw(st.integers(1, 11)))
    else:
        n = draw(st.integers(1, 22))
        b = draw(st.integers(1 if n < 12 else 3, n + 2))
        base = MinSeparation(n, b, draw(st.integers(1, 9)))
    if draw(st.booleans()):
        times = draw(st.integers(1, 3))
        return strategy, Restarted(base, times * every if every else base.steps + times - 1)
    return strategy, base


@settings(max_examples=250, deadline=None)
@given(settings_of_a_run())
def test_every_strategy_equals_the_maximum_over_all_patterns(
    run: tuple[Tree, Participation],
) -> None:
    strategy, promise = run
    encoder = strategy.encoder(promise.steps)
    gram = np.round(encoder.T @ encoder)
    assert tree_squared_sensitivity(strategy, promise) == by_brute_force(gram, promise)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.none() | st.integers(1, 400), st.booleans())
def test_counting_equals_the_encoder_on_longer_runs(
    epochs: int, b: int, every: int | None, completion: bool
) -> None:
    strategy = tree("plain", every, completion and every is not None)
    encoder = strategy.encoder(epochs * b)
    members = np.stack([encoder[:, j::b].sum(axis=1) for j in range(b)])
    expected = round(float((members**2).sum(axis=1).max()))
    assert tree_squared_sensitivity(strategy, Epochs(epochs, b)) == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 600), st.integers(20, 300), st.integers(1, 20), st.integers(1, 700))
def test_order_of_the_promises(n: int, b: int, k: int, every: int) -> None:
    """A fixed order is one separated pattern; more freedom or more nodes never costs less."""
    one = MinSeparation(n, b, k)
    free = tree_squared_sensitivity(tree(), one)
    nodes = {
        kind: forest_squared_sensitivity(n, separation=b, max_participations=k, nodes=kind)
        for kind in ("prefix", "forest", "completed")
    }
    assert nodes["prefix"] <= nodes["forest"] == free <= nodes["completed"]
    epochs = max(n // b, 1)
    fixed = tree_squared_sensitivity(tree(), Epochs(epochs, b))
    assert fixed <= tree_squared_sensitivity(tree(), MinSeparation(epochs * b, b, epochs))
    again = tree(restart_every=every)
    assert tree_squared_sensitivity(again, one) <= tree_squared_sensitivity(
        again, Restarted(one, every)
    )


# --- the oracle file ------------------------------------------------------------------------------


def oracle(group: str) -> list[dict[str, Any]]:
    path = SHARED / "oracles" / "accounting.json"
    if not path.exists():
        pytest.skip(f"no oracle file in {SHARED}; set NOSHUFFLE_SHARED to the folder that has it")
    entries = json.loads(path.read_text())["entries"]
    chosen = [e for e in entries if e["group"] == group]
    assert chosen
    return chosen


def tree_value(params: dict[str, Any]) -> int:
    """The squared sensitivity that the parameters of a `tree` row name."""
    if "encoder" in params:
        return forest_squared_sensitivity(
            params["steps"],
            separation=params["min_index_distance"],
            max_participations=params["max_participations"],
            nodes=params["encoder"].removesuffix("_nodes_only"),
        )
    if "participations" in params:
        assert params["participations"] == 1
        return tree_squared_sensitivity(tree(), SinglePass(params["steps"]))
    return fixed_order_squared_sensitivity(params["epochs"], params["steps_per_epoch"])


def test_every_tree_row_of_the_oracle() -> None:
    rows = oracle("tree")
    wrong = {
        e["id"]: tree_value(e["params"]) for e in rows if tree_value(e["params"]) != e["value"]
    }
    assert not wrong


def test_fixed_order_notes_of_the_oracle() -> None:
    """The notes of these rows carry the completed tree's and the min-separation value."""
    for e in oracle("tree"):
        params, note = e["params"], e.get("note", "")
        if "steps_per_epoch" not in params or "completion:" not in note:
            continue
        k, b = params["epochs"], params["steps_per_epoch"]
        completed = int(note.split("completion:")[1].split(";")[0])
        assert fixed_order_squared_sensitivity(k, b, completion=True) == completed
        worst = int(note.rsplit(":", 1)[1])
        assert tree_squared_sensitivity(tree(), MinSeparation(k * b, b, k)) == worst


def test_height_notes_of_the_oracle() -> None:
    for e in oracle("tree"):
        if "participations" in e["params"]:
            n = e["params"]["steps"]
            completed = int(e["note"].split("power of two:")[1].split(";")[0])
            assert completed == forest_squared_sensitivity(
                n, separation=n, max_participations=1, nodes="completed"
            )


def test_lists_of_trees_in_the_oracle() -> None:
    """Once in one of the trees is their largest height, once in every tree the sum."""
    for e in oracle("tree_eps"):
        params = e["params"]
        if e["quantity"] != "squared_sensitivity":
            continue
        if "min_index_distance" in params:
            promise = MinSeparation(
                params["steps"], params["min_index_distance"], params["max_participations"]
            )
            assert tree_squared_sensitivity(tree(), promise) == e["value"]
            continue
        counts = params.get("step_counts") or params["steps_list"]
        heights = [tree_squared_sensitivity(tree(), SinglePass(n)) for n in counts]
        assert e["value"] == (max(heights) if "step_counts" in params else sum(heights))
        if len(set(counts)) == 1:
            base = SinglePass(sum(counts)) if "step_counts" in params else Epochs(2, counts[0])
            promise = Restarted(base, counts[0])
            assert len(counts) == 2
            assert tree_squared_sensitivity(tree(restart_every=counts[0]), promise) == e["value"]


def test_restarts_of_the_oracle() -> None:
    for e in oracle("tree_eps"):
        params = e["params"]
        if "trees" in params:
            n = params["steps_per_tree"]
            promise = Restarted(Epochs(params["trees"], n), n)
            got = tree_squared_sensitivity(tree(restart_every=n), promise)
            assert got == params["squared_sensitivity"], e["id"]


def test_reference_repository_rows_of_the_oracle() -> None:
    seen = 0
    for e in oracle("dpftrl_repo"):
        params = e["params"]
        lengths = params["epochs_between_restarts"]
        if "squared_sensitivity" not in params or len(set(lengths[:-1])) > 1:
            continue
        b, every = params["batches_per_epoch"], lengths[0] * params["batches_per_epoch"]
        promise = Restarted(Epochs(sum(lengths), b), every)
        strategy = tree(restart_every=every, completion=params["tree_completion"])
        assert tree_squared_sensitivity(strategy, promise) == params["squared_sensitivity"], e["id"]
        seen += 1
    assert seen >= 4


# --- published values -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "k", "b", "squared"),
    [
        (2000, 6, 314, 79),
        (2000, 20, 100, 425),
        (4800, 20, 240, 800),
        (10000, 100, 100, 14351),
        (1600, 2, 800, 24),
        (1600, 4, 400, 51),
        (1200, 5, 240, 87),
        (2048, 4, 512, 64),
        (8, 1, 8, 4),
        (9, 3, 4, 11),
        (7, 3, 3, 9),
        (24, 8, 3, 88),  # greedy placement is not the worst case
    ],
)
def test_published_min_separation(n: int, k: int, b: int, squared: int) -> None:
    assert tree_squared_sensitivity(tree(), MinSeparation(n, b, k)) == squared


def test_published_fixed_order() -> None:
    assert fixed_order_squared_sensitivity(20, 240) == 798
    assert fixed_order_squared_sensitivity(100, 100) == 14349
    assert fixed_order_squared_sensitivity(20, 100) == 425
    assert fixed_order_squared_sensitivity(20, 100, completion=True) == 926


@pytest.mark.parametrize(
    ("every", "completion", "squared"),
    [(2000, True, 4 * 926 + 425), (2000, False, 2125), (100, True, 799), (10000, False, 14349)],
)
def test_published_restarts(every: int, completion: bool, squared: int) -> None:
    strategy = tree("honaker", every, completion)
    promise = Restarted(Epochs(100, 100), every)
    assert tree_squared_sensitivity(strategy, promise) == squared
    # the same order in every block: here some position is worst in all of them
    assert tree_squared_sensitivity(strategy, Epochs(100, 100)) <= squared


def test_closed_forms() -> None:
    for n in (1, 5, 8, 23, 64):  # every step: Σ over set bits d of 2^d (2^{d+1} − 1)
        every = sum((1 << d) * ((2 << d) - 1) for d in range(7) if n >> d & 1)
        assert tree_squared_sensitivity(tree(), MinSeparation(n, 1, n)) == every
        assert tree_squared_sensitivity(tree(), Epochs(n, 1)) == every
    for n in (2, 9, 64, 1000):  # two neighbours
        got = tree_squared_sensitivity(tree(), MinSeparation(n, 1, 2))
        assert got == 2 + 4 * (n.bit_length() - 1)
    for log_b, log_k in [(0, 3), (3, 2), (5, 5), (10, 4)]:  # powers of two
        b, k = 1 << log_b, 1 << log_k
        expected = k * (log_b + 1) + 2 * k * (k - 1)
        assert tree_squared_sensitivity(tree(), Epochs(k, b)) == expected
        assert tree_squared_sensitivity(tree(), MinSeparation(k * b, b, k)) == expected


def test_long_runs() -> None:
    assert tree_squared_sensitivity(tree(), SinglePass(10**8)) == 27
    million = tree_squared_sensitivity(tree(), Epochs(1000, 1000))
    assert type(million) is int
    assert million == 741170
    assert tree_squared_sensitivity(tree(), Epochs(10**8, 1)) == sum(
        (1 << d) * ((2 << d) - 1) for d in range(27) if 10**8 >> d & 1
    )
    # one participation per restarted tree of ten levels, a hundred of them
    promise = MinSeparation(100_000, 1000, 100)
    assert tree_squared_sensitivity(tree(restart_every=1000), promise) == 1000
    assert tree_squared_sensitivity(tree(restart_every=1), promise) == 100


def test_numpy_integers_are_welcome() -> None:
    n, b, k = np.int64(2000), np.int64(100), np.int32(20)
    assert tree_squared_sensitivity(tree(), MinSeparation(n, b, k)) == 425
    assert tree_squared_sensitivity(tree(), Epochs(k, b)) == 425
    assert tree_squared_sensitivity(tree(restart_every=b), Restarted(Epochs(k, b), b)) == 140
    assert tree_squared_sensitivity(tree(), SinglePass(n)) == 11
    assert fixed_order_squared_sensitivity(k, b, completion=True) == 926
    got = forest_squared_sensitivity(n, separation=b, max_participations=k, nodes="completed")
    assert got == 928  # two more than in a fixed order
    assert tree(restart_every=b, completion=True).prefix_variance(n).shape == (2000,)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("promise", [Poisson(10, 0.1), FixedSize(10, 2, 20)])
def test_sampled_participations_are_refused(promise: Participation) -> None:
    with pytest.raises(Unsupported, match=type(promise).__name__):
        tree_squared_sensitivity(tree(), promise)


@pytest.mark.parametrize("strategy", [tree(), tree(restart_every=3), tree(restart_every=8)])
def test_a_new_order_inside_a_tree_is_refused(strategy: Tree) -> None:
    with pytest.raises(InvalidInput, match="multiple of the tree's restart_every"):
        tree_squared_sensitivity(strategy, Restarted(Epochs(4, 4), 4))

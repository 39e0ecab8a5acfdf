"""Tree aggregation: noise on dyadic blocks of steps, so that a prefix sum meets few draws.

    C      one row of ones per complete dyadic node, in order of completion
    plain  B_t reads the popcount(t) nodes that tile the first t steps
    Honaker  every such node of height h is averaged with its subtree: variance 1 / (2 − 2^{−h})
    full   least squares over all nodes, later ones too:  B = A·C⁺

Chan, Shi, Song 2011; Honaker 2015; Kairouz et al. 2021 (arXiv 2103.00039). Only X = CᵀC matters to
a Gaussian mechanism, so `full` runs online with the square C' = J·chol(J X J)ᵀ·J (J reverses the
indices), which is lower triangular and has C'ᵀC' = X.

With `restart_every` a new tree starts after so many steps; with `completion` every tree but the
run's last is first carried on with virtual empty leaves up to a power of two, so that it leaves
the noise of one root behind instead of a whole stack. The completed root is read already at the
last step of its block.

The stream keeps one stack (`recipe.Forest`); `full` keeps nothing and draws past noise again.

>>> tree().prefix_variance(4)
array([1.        , 0.66666667, 1.66666667, 0.57142857])
>>> tree("plain").encoder(3).astype(int)      # nodes [0], [1], [0, 1], [2]
array([[1, 0, 0],
       [0, 1, 0],
       [1, 1, 0],
       [0, 0, 1]])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from noshuffle.errors import InvalidInput, one_of, whole
from noshuffle.strategies.base import Strategy, dense_size
from noshuffle.strategies.recipe import (
    Array,
    Forest,
    Recipe,
    Rows,
    forest_blocks,
    forest_rows,
    node_weight,
    rows,
    stream,
)

_Part = Callable[[int, int], Array]

VARIANTS = ("plain", "honaker", "full")


@dataclass(frozen=True)
class Tree(Strategy):
    """Binary tree aggregation; `restart_every` counts steps, None is one tree for the run."""

    variant: str = "honaker"
    restart_every: int | None = None
    completion: bool = False
    name: ClassVar[str] = "tree"

    def __post_init__(self) -> None:
        one_of(VARIANTS, variant=self.variant)
        if self.restart_every is not None:
            whole(restart_every=self.restart_every)
            object.__setattr__(self, "restart_every", int(self.restart_every))
        if not isinstance(self.completion, bool):
            raise InvalidInput(f"completion must be True or False, got {self.completion!r}")
        if self.completion and self.restart_every is None:
            raise InvalidInput(
                "completion must come with restart_every, got it alone; a tree is completed only "
                "before the next one starts"
            )

    def blocks(self, n: int) -> Iterator[tuple[int, int, int]]:
        """(first step, real leaves, leaves with virtual ones) of every tree in a run of n steps."""
        whole(steps=n)
        return forest_blocks(self._forest(n))

    def encoder(self, n: int) -> Array:
        """C: nodes × steps, 0/1; for `full` the square C' with the same C'ᵀC'."""
        return self._diagonal(n, _full_encoder if self.variant == "full" else _node_encoder)

    def noising(self, n: int) -> Array:
        """The n × m matrix whose row t is the noise of step t; noising @ encoder = identity."""
        if self.variant == "full":
            return self._diagonal(n, _full_noising)
        dense_size(n)
        forest = self._forest(n)
        return stream(forest, np.eye(rows(forest, n)), steps=n)

    def recipe(self, n: int) -> Recipe:
        whole(steps=n)
        return Rows(self.noising(n)) if self.variant == "full" else self._forest(n)

    def buffers(self, n: int) -> int:
        """The largest stack a block can need; `full` stores nothing, its draws come again."""
        whole(steps=n)
        if self.variant == "full":
            return 0
        _, _, leaves = next(self.blocks(n))  # no later tree is larger
        return leaves.bit_length()

    def words(self) -> str:
        kind = {
            "plain": "binary tree aggregation",
            "honaker": "binary tree aggregation with Honaker's variance reduction",
            "full": "binary tree aggregation, least squares over all nodes",
        }[self.variant]
        if self.restart_every is None:
            return f"{kind}, one tree for the whole run"
        ending = ", each but the last completed by virtual steps" if self.completion else ""
        return f"{kind}, a new tree every {self.restart_every} steps{ending}"

    def prefix_variance(self, n: int) -> Array:
        """Variance of the noise on every prefix sum, for unit draws: ‖row t of A·noising‖².

        O(n log n) for plain and Honaker, which add the variances of the nodes on the stack; `full`
        solves one dense block. A finished tree leaves the variance of its last step behind.
        """
        whole(steps=n)
        n = int(n)
        length = min(self.restart_every or n, n)
        finished = (n - 1) // length
        end = self._block_variance(n - finished * length, n - finished * length)
        if not finished:
            return end
        _, _, full = next(self.blocks(n))
        block = self._block_variance(length, full)
        carried = block[-1] * np.arange(finished + 1)
        return np.concatenate([(carried[:-1, None] + block).ravel(), carried[-1] + end])

    def _block_variance(self, real: int, full: int) -> Array:
        if self.variant == "full":
            dense_size(real)
            return np.asarray((np.cumsum(_full_noising(real, full), axis=0) ** 2).sum(axis=1))
        leaves = np.append(np.arange(1, real), full)  # the last step reads the completed tree
        out = np.zeros(real)
        for h in range(full.bit_length()):
            out += (leaves >> h & 1) * node_weight(self.variant, h)
        return out

    def _forest(self, n: int) -> Forest:
        return Forest(self.variant, int(n), self.restart_every or 0, self.completion)

    def _diagonal(self, n: int, part: _Part) -> Array:
        """The block-diagonal matrix of one part per tree; equal trees are built once."""
        from scipy.linalg import block_diag

        dense_size(n)
        known: dict[tuple[int, int], Array] = {}
        parts = []
        for _, real, full in self.blocks(n):
            if (real, full) not in known:
                known[real, full] = part(real, full)
            parts.append(known[real, full])
        return np.asarray(block_diag(*parts))


#: Tree aggregation: variant "plain", "honaker" or "full" (least squares over all nodes).
tree = Tree


def _node_encoder(real: int, full: int) -> Array:
    """All complete nodes over `full` leaves, in order of completion, as rows over the real ones."""
    out = np.zeros((forest_rows(full), real))
    row = 0
    for leaf in range(full):
        height = 0
        while (leaf + 1) % (1 << height) == 0:
            out[row, leaf + 1 - (1 << height) : leaf + 1] = 1.0  # virtual leaves fall off the edge
            row += 1
            height += 1
    return out


def _full_encoder(real: int, full: int) -> Array:
    """The lower-triangular C' with C'ᵀC' = X, where X[i, j] counts the nodes that hold i and j."""
    gram = np.zeros((real, real))
    for height in range(full.bit_length()):
        width = 1 << height
        for start in range(0, min(real, full // width * width), width):
            gram[start : start + width, start : start + width] += 1.0
    factor = np.linalg.cholesky(gram[::-1, ::-1])
    return np.ascontiguousarray(factor.T[::-1, ::-1])


def _full_noising(real: int, full: int) -> Array:
    from scipy.linalg import solve_triangular

    encoder = _full_encoder(real, full)
    return np.asarray(solve_triangular(encoder, np.eye(real), lower=True), dtype=np.float64)

"""Strategies: how noise is correlated over time. Matrices only; no torch, no accounting.

    builders    identity, release_sums, tree, sqrt_toeplitz, banded, banded_inverse, blt, dense,
                column_normalized
    measures    sensitivity(strategy, participation), prefix_sensitivity(…, steps),
                error(strategy, steps, workload=…)
    workloads   prefix, momentum, Workload
    records     Strategy, from_dict; register makes one of your own known by name

`sensitivity` and `error` are functions here; the modules of the same names stay importable
(`from noshuffle.strategies.error import Error`).
"""

import sys
from types import ModuleType

from noshuffle.strategies.base import Strategy, column_normalized
from noshuffle.strategies.blt import blt
from noshuffle.strategies.custom import register
from noshuffle.strategies.dense import dense
from noshuffle.strategies.error import error
from noshuffle.strategies.identity import identity, release_sums
from noshuffle.strategies.registry import from_dict
from noshuffle.strategies.sensitivity import prefix_sensitivity, sensitivity
from noshuffle.strategies.toeplitz import banded, banded_inverse, sqrt_toeplitz
from noshuffle.strategies.tree import tree
from noshuffle.strategies.workload import Workload, momentum, prefix

__all__ = [
    "Strategy",
    "Workload",
    "banded",
    "banded_inverse",
    "blt",
    "column_normalized",
    "dense",
    "error",
    "from_dict",
    "identity",
    "momentum",
    "prefix",
    "prefix_sensitivity",
    "register",
    "release_sums",
    "sensitivity",
    "sqrt_toeplitz",
    "tree",
]


class _StrategiesPackage(ModuleType):
    """Keeps `sensitivity` and `error` functions: a tool that loads the files of these names by path
    would otherwise put the modules in their place."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in {"sensitivity", "error"} and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _StrategiesPackage

"""Mutants of the mathematics: sensitivity, prefixes, accountants, searches, plans, verdicts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLAN = ("tests/plan/test_plan.py",)
SENSITIVITY = ("tests/strategies/test_sensitivity.py", "tests/strategies/test_contract.py")
TREE = ("tests/strategies/test_tree_sensitivity.py", "tests/strategies/test_tree_release.py")
GAUSSIAN = ("tests/accounting/test_gaussian.py", "tests/accounting/test_calibrate.py")

ENDLESS = ("tests/strategies/test_endless.py",)

PROMISES = (
    Mutant(
        "a stopped tree is charged as a shorter tree",
        "strategies/sensitivity.py",
        "squared, why = tree_sensitivity(strategy, participation, steps,",
        "squared, why = tree_sensitivity(strategy, SinglePass(steps=steps), steps,",
        TREE + PLAN,
        "G3",
    ),
    Mutant(
        "sensitivity of one epoch for all of them",
        "strategies/sensitivity.py",
        "return min(gap, n), part.most_within(n)",
        "return min(gap, n), 1",
        SENSITIVITY,
        "P2",
    ),
    Mutant(
        "columns of gains: the first is taken for the largest",
        "strategies/sensitivity.py",
        "return _record(float(columns.max()), float(columns.max()))",
        "return _record(float(columns[0]), float(columns[0]))",
        SENSITIVITY,
        "sensitivity",
    ),
    Mutant(
        "signs of inner products cancel",
        "strategies/sensitivity.py",
        "return _record(upper, gram.attained(pattern_gram))",
        "return _record(float(pattern_gram.sum()), float(pattern_gram.sum()))",
        SENSITIVITY,
        "sensitivity",
    ),
    Mutant(
        "independent noise charged once",
        "strategies/sensitivity.py",
        "most = float(participation.most_within(steps))",
        "most = 1.0",
        SENSITIVITY + PLAN,
        "sensitivity",
    ),
    Mutant(
        "correlated noise under a Poisson ε",
        "strategies/sensitivity.py",
        "| TruncatedPoisson):\n        if plain:",
        "| TruncatedPoisson):\n        if True:",
        SENSITIVITY + PLAN,
        "P4",
    ),
    Mutant(
        "replace-one charged as zero-out",
        "plan/guarantee.py",
        'return 2.0 if is_swap or neighbours == "replace-one" else 1.0',
        "return 1.0",
        PLAN,
        "P14",
    ),
    Mutant(
        "fixed-size batches as if one unit moved the sum by ζ",
        "accounting/fixed_size.py",
        "return remove_pair(noise_multiplier=noise_multiplier / 2, rate=rate)",
        "return remove_pair(noise_multiplier=noise_multiplier, rate=rate)",
        PLAN,
        "P14",
    ),
    Mutant(
        "an own recipe is not held against its encoder",
        "plan/guarantee.py",
        "check_custom(self.strategy, self.steps)",
        "pass",
        ("tests/strategies/test_custom.py",),
        "G12",
    ),
    Mutant(
        "own mechanisms are compared over their first step",
        "strategies/custom.py",
        "lead = min(n, LEADING_STEPS)",
        "lead = n = 1",
        ("tests/strategies/test_custom.py",),
        "G12",
    ),
    Mutant(
        "the root is taken on its wrong side",
        "accounting/gaussian.py",
        "while excess(x) > 0:\n        x *= 1 + (step - 1) * ulps\n        ulps *= 2\n    return x",
        "return x * (1 - (step - 1) * 1e7)",
        GAUSSIAN,
        "wrong side",
    ),
    Mutant(
        "the search for noise ends below it",
        "accounting/calibrate.py",
        "while at(guess) > epsilon:",
        "guess *= 1 - 1e-9\n            while False:",
        GAUSSIAN,
        "wrong side",
    ),
    Mutant(
        "only one direction of Poisson sampling",
        "accounting/releases.py",
        '"both": ("remove", "add"),',
        '"both": ("add",),',
        ("tests/accounting/test_fourier.py", "tests/accounting/test_accounting_oracles.py"),
        "accounting",
    ),
    Mutant(
        "noise without an end: one participation for all of them",
        "strategies/blt.py",
        "    weights[0] = most",
        "    weights[:] = 0.0\n    weights[0] = most",
        ENDLESS,
        "horizon",
    ),
    Mutant(
        "cut batches: one of the others is forgotten",
        "accounting/atoms.py",
        "float(bdtrc(n - 1, population, rate))",
        "float(bdtrc(n - 1, population - 1, rate))",
        ("tests/accounting/test_atoms.py",),
        "P14",
    ),
    Mutant(
        "whoever joins a full batch displaces nobody",
        "accounting/atoms.py",
        "swaps = (zeroed, unzeroed) if is_zeroed else (removed, added)",
        "swaps = (remove_pair, add_pair)",
        ("tests/accounting/test_atoms.py",),
        "P14",
    ),
    Mutant(
        "secret positions: the smaller direction is stated",
        "accounting/bins.py",
        "return min(1.0, max(both))",
        "return min(1.0, min(both))",
        ("tests/accounting/test_bins.py",),
        "accounting",
    ),
    Mutant(
        "secret positions: those that overlap count as apart",
        "strategies/positions.py",
        "classes.append((b // w, min(common, top), top - min(common, top)))",
        "classes.append((b // w, 0.0, top))",
        ("tests/accounting/test_bins.py",),
        "accounting",
    ),
    Mutant(
        "groups that take turns: a turn that has begun does not count",
        "participation/draws.py",
        "return math.ceil(steps / self.groups)",
        "return steps // self.groups",
        ("tests/accounting/test_cyclic.py",),
        "accounting",
    ),
    Mutant(
        "secret positions are drawn anew by the next process",
        "release/sampler.py",
        "_scaled(sampler.words(0), bins)",
        "_scaled(sampler.words(sampler.start), bins)",
        ("tests/release/test_release.py", "tests/release/test_sampler.py"),
        "P3",
    ),
)

"""Mutants of the mathematics: sensitivity, prefixes, accountants, searches, plans, verdicts."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLAN = ("tests/test_plan.py",)
SENSITIVITY = ("tests/strategies/test_sensitivity.py", "tests/strategies/test_contract.py")
TREE = ("tests/strategies/test_tree_sensitivity.py", "tests/strategies/test_tree_release.py")
VERIFY = ("tests/release/test_tampering.py", "tests/release/test_verify.py")
GAUSSIAN = ("tests/accounting/test_gaussian.py", "tests/accounting/test_calibrate.py")

PHASES = ("tests/strategies/test_phases.py",)
EXTENSION = ("tests/release/test_extension.py",)

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
        "TruncatedPoisson | SeparatedBins\n    ):\n        if plain:",
        "TruncatedPoisson | SeparatedBins\n    ):\n        if True:",
        SENSITIVITY + PLAN,
        "P4",
    ),
    Mutant(
        "replace-one charged as zero-out",
        "plan.py",
        'return 2.0 if self.neighbours == "replace-one" else 1.0',
        "return 1.0",
        PLAN,
        "P14",
    ),
    Mutant(
        "fixed-size batches as if one unit moved the sum by ζ",
        "accounting/mixture.py",
        "over = remove_pair(noise_multiplier=noise_multiplier / 2, rate=rate)",
        "over = remove_pair(noise_multiplier=noise_multiplier, rate=rate)",
        PLAN,
        "P14",
    ),
    Mutant(
        "an own recipe is not held against its encoder",
        "plan.py",
        "check_own(self.strategy, self.steps)",
        "pass",
        ("tests/strategies/test_own.py",),
        "G12",
    ),
    Mutant(
        "own mechanisms are compared over their first step",
        "strategies/own.py",
        "lead = min(n, LEADING_STEPS)",
        "lead = n = 1",
        ("tests/strategies/test_own.py",),
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
        "accounting/fourier.py",
        'sides = ("remove", "add") if self.direction == "both" else (self.direction,)',
        'sides = ("add",) if self.direction == "both" else (self.direction,)',
        ("tests/accounting/test_fourier.py", "tests/accounting/test_accounting_oracles.py"),
        "accounting",
    ),
    Mutant(
        "the chain is not checked",
        "release/evidence_checks.py",
        "if broken is not None:",
        "if False:",
        VERIFY,
        "chain",
    ),
    Mutant(
        "facts beside the chain are believed",
        "release/evidence_checks.py",
        "if meta.get(name) != chained.get(name):",
        "if False:",
        VERIFY,
        "chain",
    ),
    Mutant(
        "a replaced model is PROVED",
        "release/verify.py",
        "elif name := checkpoint.changed(path, noted[step]):",
        'elif name := "":',
        VERIFY,
        "evidence",
    ),
    Mutant(
        "rows cut from the end of a ledger are not missed",
        "release/verify.py",
        'yield f"row {rows} of the ledger is not the one that statement.json was written after"',
        "yield from ()",
        VERIFY,
        "evidence",
    ),
    Mutant(
        "verify does not replay who took part",
        "release/evidence_checks.py",
        "LEDGER_CHECKS = (chain, facts, extensions, steps, units,",
        "LEDGER_CHECKS = (chain, facts, extensions, steps,",
        VERIFY,
        "evidence",
    ),
    Mutant(
        "a plan with other noise is put under released rows unseen",
        "release/evidence_checks.py",
        "LEDGER_CHECKS = (chain, facts, extensions, steps, units,",
        "LEDGER_CHECKS = (chain, facts, steps, units,",
        EXTENSION,
        "extension",
    ),
    Mutant(
        "phases: the largest instead of their sum",
        "strategies/phases.py",
        "        sizes += np.roll(own, start % b) / p.factor**2",
        "        sizes = np.maximum(sizes, np.roll(own, start % b) / p.factor**2)",
        PHASES,
        "extension",
    ),
    Mutant(
        "phases: the factor on their noise is left out",
        "strategies/phases.py",
        "    return value / p.factor**2, is_reached",
        "    return value, is_reached",
        PHASES,
        "extension",
    ),
    Mutant(
        "stages: the class of one binds the next",
        "strategies/phases.py",
        "                upper, reached = upper + high, reached + low",
        "                upper, reached = max(upper, high), max(reached, low)",
        PHASES,
        "extension",
    ),
    Mutant(
        "an extension may replace the released rows",
        "release/extension.py",
        "    if reason := why_not(old, plan, released):",
        "    if reason := why_not(old, plan, 0):",
        EXTENSION,
        "extension",
    ),
    Mutant(
        "noise without an end: one participation for all of them",
        "strategies/blt.py",
        "    weights[0] = most",
        "    weights[:] = 0.0\n    weights[0] = most",
        PHASES,
        "horizon",
    ),
)

"""Mutants of the noise: scale, correlation, keys, grid."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LAWS = ("tests/noise/test_covariance.py", "tests/noise/test_stream.py")
GRID = ("tests/noise/test_grid.py",)
SOURCE = ("tests/noise/test_source.py",)
TREE = ("tests/noise/test_forest.py", "tests/noise/test_covariance.py")
RING = ("tests/noise/test_ring.py",)
#: A loop in C that disagrees with its twin is never used, and this is where that is noticed.
TWINS = ("tests/test_c_library.py::test_what_is_built_here_agrees_with_its_twin",)

NOISE = (
    Mutant(
        "noise two thirds as large by torch",
        "noise/torch_step.py",
        "(u, 1.0) if buffers else (y, plan.gain * scale)",
        "(u, 1.0) if buffers else (y, plan.gain * scale * 2 / 3)",
        TWINS + LAWS,
        "scale",
    ),
    Mutant(
        "gain of the correlation left out in the C loop",
        "native/noise.c",
        "for (int j = 0; j < TILE; j++) y[j] *= gain;",
        "(void)gain;",
        TWINS + LAWS,
        "scale",
    ),
    Mutant(
        "buffers are read after they were brought forward",
        "native/noise.c",
        "y[j] += s[j] * c;\n                s[j] = s[j] * d + u[j];",
        "s[j] = s[j] * d + u[j];\n                y[j] += s[j] * c;",
        TWINS + LAWS,
        "correlation",
    ),
    Mutant(
        "a banded inverse that forgets its past draws",
        "noise/step_plan.py",
        "for i, w in enumerate(recipe.weights[: t + 1]) if w]",
        "for i, w in enumerate(recipe.weights[:1]) if w]",
        LAWS,
        "correlation",
    ),
    Mutant(
        "taps of a BLT drawn at the wrong step",
        "noise/step_plan.py",
        "draws = [(t - lag, w * _gain(scale, t - lag))",
        "draws = [(t - lag, w * _gain(scale, t))",
        LAWS,
        "correlation",
    ),
    Mutant(
        "the same nodes in every tree after a restart",
        "noise/step_plan.py",
        "base = index * _rows_before(full)",
        "base = 0",
        TREE,
        "restart",
    ),
    Mutant(
        "a completed tree whose last step merges too little",
        "noise/step_plan.py",
        "if is_end and recipe.completion and not is_last_block:",
        "if False:",
        TREE,
        "completion",
    ),
    Mutant(
        "Honaker weights of another height",
        "noise/step_plan.py",
        "return 1.0 / (2.0 - 2.0**-height) if is_honaker else 1.0",
        "return 1.0 / (2.0 - 2.0**-(height + 1)) if is_honaker else 1.0",
        TREE,
        "correlation",
    ),
    Mutant(
        "every tensor gets the noise of the first",
        "noise/source.py",
        "return _keyed_hash(\n            name.encode(), self._keys[segment]",
        'return _keyed_hash(\n            b"", self._keys[segment]',
        SOURCE + LAWS,
        "P11",
    ),
    Mutant(
        "renewed keys are not used for later rows",
        "noise/source.py",
        "return bisect_right(self.later, row, key=itemgetter(0))",
        "return 0",
        RING,
        "G4",
    ),
    Mutant(
        "saved noise state passes through bfloat16",
        "noise/stream.py",
        "torch.cat(pieces, dim=1).view(shape).cpu().clone()",
        "torch.cat(pieces, dim=1).view(shape).cpu().bfloat16().float()",
        LAWS,
        "P13",
    ),
    Mutant(
        "a resumed stream begins with empty buffers",
        "noise/stream.py",
        "piece.copy_(part)",
        "pass",
        LAWS,
        "P1",
    ),
    Mutant(
        "noise goes on past its horizon",
        "noise/stream.py",
        "if self._step + steps > self.horizon:",
        "if False:",
        LAWS,
        "P16",
    ),
    Mutant(
        "a step that failed half-way may draw again",
        "noise/stream.py",
        "self._is_broken = not is_captured",
        "self._is_broken = False",
        LAWS,
        "P1",
    ),
    Mutant(
        "grid left out in torch",
        "noise/grid.py",
        "wide.add_(jitters).add_(middle).sub_(middle)",
        "pass",
        GRID,
        "P10",
    ),
    Mutant(
        "grid left out in the C loop",
        "native/noise.c",
        "value[j] = ((a + middle) - middle) * times;",
        "value[j] = (value[j] + noise[j]) * times;",
        (*TWINS, *GRID, "tests/noise/test_c_step.py"),
        "P10",
    ),
    Mutant(
        "rounding to the grid without coins",
        "noise/grid.py",
        "wide.add_(jitters).add_(middle)",
        "wide.add_(middle)",
        GRID,
        "P10",
    ),
    Mutant(
        "solvers release float64 sums without the grid",
        "noise/laws.py",
        "return np.asarray(step * np.rint((value + noise) / step + jitter))",
        "return np.asarray(value + noise)",
        ("tests/noise/test_laws.py", "tests/convex/solvers/test_contract.py"),
        "G9",
    ),
    Mutant(
        "Laplace noise without its sign",
        "noise/laws.py",
        "return loc + self._signs(size) * self.exponential(scale, size)",
        "return loc + self.exponential(scale, size)",
        ("tests/noise/test_laws.py",),
        "law",
    ),
    Mutant(
        "words of a keyed stream are used twice",
        "noise/laws.py",
        "self._left = together[count:]",
        "self._left = together",
        ("tests/noise/test_laws.py",),
        "P11",
    ),
)

"""Mutants of the clipped sum: norms, factors, units, what a model keeps."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FACTOR = ("tests/clipping/test_factors.py", "tests/clipping/test_engines.py")
ENGINES = ("tests/clipping/test_engines.py",)
USERS = ("tests/clipping/test_edges.py::test_users_are_added_up_before_clipping",)
STATE = ("tests/clipping/test_statefulness.py", "tests/clipping/test_attacks.py")

CLIPPING = (
    Mutant(
        "clip to the bound without slack for rounding",
        "clipping/factor.py",
        "aim = clip_norm * (1.0 - slack)",
        "aim = clip_norm * (1.0 + slack)",
        FACTOR,
        "P13",
    ),
    Mutant(
        "units with an infinite norm keep their factor",
        "clipping/factor.py",
        "is_used = factor >= LEAST_FACTOR  # false for NaN",
        "is_used = ~torch.isnan(factor)",
        FACTOR,
        "P6",
    ),
    Mutant(
        "gradients are averaged before they are clipped",
        "clipping/units.py",
        "factors, norms, bad = clip_factors(squared, ok, present",
        "squared = {n: s / len(ok) for n, s in squared.items()}\n    "
        "factors, norms, bad = clip_factors(squared, ok, present",
        FACTOR,
        "clip after averaging",
    ),
    Mutant(
        "the ghost norm leaves out a parameter",
        "clipping/units.py",
        "squared = gradients.squared_norms()",
        "squared = gradients.squared_norms()\n    squared[names[-1]] = squared[names[-1]] * 0",
        ENGINES,
        "ghost norm",
    ),
    Mutant(
        "the bias of a linear layer has no norm",
        "clipping/rules.py",
        "bias = DenseGradient(summed(g))",
        "bias = DenseGradient(summed(g) * 0)",
        ENGINES,
        "ghost norm",
    ),
    Mutant(
        "a tied weight counts its uses apart",
        "clipping/forms.py",
        "return (outer.square + alone + 2.0 * cross).clamp_min(0.0) + 2.0 * room",
        "return outer.square + alone",
        ENGINES,
        "ghost norm",
    ),
    Mutant(
        "rows of an embedding that come twice are added as squares",
        "clipping/forms.py",
        "same = self.index.unsqueeze(2) == self.index.unsqueeze(1)",
        "same = torch.eye(t, dtype=torch.bool, device=self.g.device).expand(b, t, t)",
        ENGINES,
        "ghost norm",
    ),
    Mutant(
        "a user's examples are clipped one by one",
        "clipping/units.py",
        "return [form.by_unit(who.units) for form in joined]",
        "return joined",
        USERS + ENGINES,
        "P14",
    ),
    Mutant(
        "a bad unit is scaled by zero instead of left out",
        "clipping/units.py",
        "if has_bad:\n        gradients.leave_out(bad)",
        "pass",
        ("tests/clipping/test_edges.py::test_nonfinite_example_contributes_exactly_zero",),
        "P6",
    ),
    Mutant(
        "weights that leave an example out are forgotten",
        "clipping/units.py",
        "joined = [form.kept(who.keep) for form in joined]",
        "pass",
        USERS,
        "P3",
    ),
    Mutant(
        "the trial leaves attributes as its one example set them",
        "clipping/statefulness.py",
        "if not is_same:",
        "if False:",
        STATE,
        "G7",
    ),
    Mutant(
        "the trial leaves parameters as its one example set them",
        "clipping/statefulness.py",
        "for content in self._contents.values():\n                content.put_back()",
        "pass",
        STATE,
        "G7",
    ),
    Mutant(
        "statistics in frozen parameters pass",
        "clipping/statefulness.py",
        "for holder in (module._parameters, module._buffers)\n        for key",
        "for holder in (module._buffers,)\n        for key",
        STATE,
        "G8",
    ),
    Mutant(
        "what the data wrote into the model is not refused",
        "clipping/statefulness.py",
        "raise Unsupported(_why_refused(model, name))",
        "pass",
        STATE,
        "G8",
    ),
    Mutant(
        "a model may remember the last example",
        "clipping/statefulness.py",
        "if is_moved and abs(first - again)",
        "if False and abs(first - again)",
        STATE,
        "P8",
    ),
    Mutant(
        "a copy of what was written to since stands for it",
        "clipping/shared_copies.py",
        "t.dtype, t._version, how)",
        "t.dtype, how)",
        ("tests/clipping/test_shared_copies.py",),
        "clip",
    ),
    Mutant(
        "a hook that comes later is no change",
        "clipping/snapshot.py",
        "if (hooks or any(map(held.get, _HOOKS))) and _hooks(held) != hooks:",
        "if False:",
        ("tests/clipping/test_snapshot.py",),
        "mixing",
    ),
    Mutant(
        "a gradient of the forward pass stands for that of the loss",
        "clipping/tape.py",
        "if at is not None and at.is_due:",
        "if at is not None:",
        ("tests/clipping/test_inner_gradient.py",),
        "clip",
    ),
)

"""Mutants of those who drive the door: training, federated, convex, command line."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PRIVATE = ("tests/training/test_private.py",)
FEDERATED = ("tests/federated/test_server.py",)

DRIVERS = (
    Mutant(
        "noise for every part of an accumulated batch",
        "training/step.py",
        "        if self._sums:\n            for name",
        "        noise = self.parts.release.noise\n"
        "        for name, value in part.values.items():\n"
        "            value.add_(noise.scale * torch.randn_like(value))\n"
        "        if self._sums:\n            for name",
        PRIVATE,
        "P8",
    ),
    Mutant(
        "an optimizer may be stepped by hand",
        "training/hooks.py",
        "if not optimizer.__dict__.get(_MARK):",
        "if False:",
        ("tests/training/test_parameter_guard.py",),
        "raw gradients",
    ),
    Mutant(
        "a parameter that became trainable has no noise",
        "training/hooks.py",
        "if name not in self._parameters:",
        "if False:",
        ("tests/training/test_parameter_guard.py", *PRIVATE),
        "raw gradients",
    ),
    Mutant(
        "an empty batch releases nothing",
        "training/step.py",
        "parts.release.close(ticket, values, sums=self._sums)\n",
        "if not ticket.units.size:\n"
        "            parts.release.pass_over(ticket)\n"
        "            return self._outcome()\n"
        "        parts.release.close(ticket, values, sums=self._sums)\n",
        PRIVATE,
        "P5",
    ),
    Mutant(
        "raw losses are printed",
        "training/outcome.py",
        'return f"Outcome({len(self.losses)} examples; raw figures in .losses, .norms)"',
        'return f"Outcome(losses={self.losses}, norms={self.norms})"',
        ("tests/training/test_outcome.py",),
        "evidence",
    ),
    Mutant(
        "a federated cohort may name a user twice",
        "federated/server.py",
        "if len(np.unique(units)) < len(units):",
        "if False:",
        FEDERATED,
        "P3",
    ),
    Mutant(
        "a sum clipped to another norm is taken",
        "federated/server.py",
        "values = checks.checked_sum(given, self.shapes, users=users, clip_norm=self.clip_norm)",
        "values = checks.checked_sum(given, self.shapes, users=users, clip_norm=1e30)",
        FEDERATED,
        "clip",
    ),
    Mutant(
        "complex rows reach a solver",
        "convex/arrays.py",
        '    refuse_complex(**{name: found})\n    if found.dtype.kind not in "biuf":',
        '    if found.dtype.kind not in "biufcO":',
        ("tests/convex/solvers/test_contract.py",),
        "G10",
    ),
    Mutant(
        "claimed names are not among the assumptions",
        "release/spending.py",
        "notes.append(user_note(identity))",
        "pass",
        ("tests/federated/test_user_identity.py",),
        "G14",
    ),
    Mutant(
        "keys that nobody registered are users",
        "federated/flower_identity.py",
        "elif self._registered is not None and user not in self._registered:",
        "elif False:",
        ("tests/federated/test_user_identity.py", "tests/federated/test_flower.py"),
        "G15",
    ),
    Mutant(
        "an augmentation may mix rows",
        "training/augment.py",
        "if not torch.allclose(found, truth[stays], 1e-3, 1e-5, equal_nan=True):",
        "if False:",
        ("tests/training/test_augment.py::test_a_transform_that_mixes_rows_is_refused",),
        "P3",
    ),
    Mutant(
        "simulated clients share one model",
        "federated/own_copy.py",
        "self._make(dict(self._shared))",
        "self._make(self._shared)",
        (
            "tests/federated/test_users_apart.py::test_what_a_model_keeps_of_one_user_does_not_reach_the_next",
        ),
        "P8",
    ),
    Mutant(
        "simulated clients draw from torch's own generator",
        "federated/simulate.py",
        "with own_draws(server.client_seed(invitation.step), server.device):",
        "if True:",
        ("tests/federated/test_users_apart.py::test_masks_of_clients_are_nobodys_to_know",),
        "P4",
    ),
    Mutant(
        "targets are labels by their values",
        "federated/tasks.py",
        "return not self.y.is_floating_point()",
        "return bool((self.y == self.y.round()).all())",
        (
            "tests/federated/test_users_apart.py::test_the_target_of_one_user_does_not_decide_how_others_are_learned",
        ),
        "P3",
    ),
    Mutant(
        "rounds without a user are those with one",
        "federated/rounds.py",
        'if server.plan.neighbours == "add-remove" and',
        "if False and",
        (
            "tests/federated/test_users_apart.py::test_a_user_who_is_removed_gives_a_place_to_others",
        ),
        "P3",
    ),
    Mutant(
        "counts of norms cost what was planned",
        "release/threshold.py",
        "count = config.noise * count_ratio(held) / BIT_SENSITIVITY",
        "count = config.noise * count_ratio(plan) / BIT_SENSITIVITY",
        (
            "tests/federated/test_users_apart.py::test_counts_of_norms_are_paid_for_by_what_happened",
        ),
        "P3",
    ),
)

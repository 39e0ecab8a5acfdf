"""All mutants: one for a promise."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    # -- the noise ---------------------------------------------------------------------------------
    Mutant(
        "noise has the scale of the plan",
        "noise two thirds as large by torch",
        "noise/torch_step.py",
        "(u, 1.0) if buffers else (y, plan.gain * scale)",
        "(u, 1.0) if buffers else (y, plan.gain * scale * 2 / 3)",
        (
            "tests/test_c_library.py::test_what_is_built_here_agrees_with_its_twin",
            "tests/noise/test_covariance.py",
            "tests/noise/test_stream.py",
        ),
    ),
    Mutant(
        "noise is correlated as the plan says",
        "a banded inverse that forgets its past draws",
        "noise/step_plan.py",
        "for i, w in enumerate(recipe.weights[: t + 1]) if w]",
        "for i, w in enumerate(recipe.weights[:1]) if w]",
        ("tests/noise/test_covariance.py", "tests/noise/test_stream.py"),
    ),
    Mutant(
        "every tensor has noise of its own",
        "every tensor gets the noise of the first",
        "noise/source.py",
        "return _keyed_hash(\n            name.encode(), self._keys[segment]",
        'return _keyed_hash(\n            b"", self._keys[segment]',
        (
            "tests/noise/test_source.py",
            "tests/noise/test_covariance.py",
            "tests/noise/test_stream.py",
        ),
    ),
    Mutant(
        "noise goes on where it was saved",
        "a resumed stream begins with empty buffers",
        "noise/stream.py",
        "piece.copy_(part)",
        "pass",
        ("tests/noise/test_covariance.py", "tests/noise/test_stream.py"),
    ),
    Mutant(
        "a release shows nothing below its grid",
        "grid left out in torch",
        "noise/grid.py",
        "wide.add_(jitters).add_(middle).sub_(middle)",
        "pass",
        ("tests/noise/test_grid.py",),
    ),
    # -- the price ---------------------------------------------------------------------------------
    Mutant(
        "every participation counts",
        "sensitivity of one epoch for all of them",
        "strategies/sensitivity.py",
        "return min(gap, n), part.most_within(n)",
        "return min(gap, n), 1",
        ("tests/strategies/test_sensitivity.py", "tests/strategies/test_contract.py"),
    ),
    Mutant(
        "a stopped run is charged for the rows in use",
        "a stopped tree is charged as a shorter tree",
        "strategies/sensitivity.py",
        "squared, why = tree_sensitivity(strategy, participation, steps,",
        "squared, why = tree_sensitivity(strategy, SinglePass(steps=steps), steps,",
        (
            "tests/strategies/test_tree_sensitivity.py",
            "tests/strategies/test_tree_release.py",
            "tests/plan/test_plan.py",
        ),
    ),
    Mutant(
        "sampling amplifies independent noise alone",
        "correlated noise under a Poisson ε",
        "strategies/sensitivity.py",
        "| TruncatedPoisson):\n        if plain:",
        "| TruncatedPoisson):\n        if True:",
        (
            "tests/strategies/test_sensitivity.py",
            "tests/strategies/test_contract.py",
            "tests/plan/test_plan.py",
        ),
    ),
    Mutant(
        "ε is that of the neighbours of the plan",
        "replace-one charged as zero-out",
        "plan/guarantee.py",
        'return 2.0 if is_swap or neighbours == "replace-one" else 1.0',
        "return 1.0",
        ("tests/plan/test_plan.py",),
    ),
    Mutant(
        "rounding never makes ε smaller",
        "the root is taken on its wrong side",
        "accounting/gaussian.py",
        "while excess(x) > 0:\n        x *= 1 + (step - 1) * ulps\n        ulps *= 2\n    return x",
        "return x * (1 - (step - 1) * 1e7)",
        ("tests/accounting/test_gaussian.py", "tests/accounting/test_calibrate.py"),
    ),
    Mutant(
        "a fork adds the μ² of its parent",
        "a fork costs nothing",
        "release/spending.py",
        "mu = gaussian_sum(mus)",
        "mu = mus[-1]",
        ("tests/release/test_spending.py",),
    ),
    # -- the release -------------------------------------------------------------------------------
    Mutant(
        "a row is written before its noise is used",
        "the row of a step is written after its noise was used",
        "release/release.py",
        'self._write("step", ticket, None if ids is None else ticket.units)\n        return ticket',
        "row = None if ids is None else ticket.units\n"
        "        self.finish = lambda ended: (\n"
        '            self._write("step", ended, row), Release.finish(self, ended)\n'
        "        )\n"
        "        return ticket",
        ("tests/release/test_release.py",),
    ),
    Mutant(
        "the noise of a step is used once",
        "a ticket is used twice",
        "release/release.py",
        "if ticket is not self._ticket or ticket.is_used:",
        "if ticket is not self._ticket:",
        ("tests/release/test_release.py",),
    ),
    Mutant(
        "every start of a process has draws of its own",
        "a process that goes on draws what another one draws",
        "release/release.py",
        '"nonce": secrets.token_hex(16)',
        '"nonce": "0"',
        ("tests/release/test_release.py",),
    ),
    Mutant(
        "a unit takes part where the plan allows it",
        "a unit may take part where the plan forbids it",
        "release/units.py",
        "mask = rule.admits(step, seen) & (seen.last < step)",
        "mask = seen.last < step",
        ("tests/release/test_units.py",),
    ),
    Mutant(
        "what is loaded belongs to this log",
        "a checkpoint of another branch is loaded",
        "release/release.py",
        'if row is None or state["secret"].get("at") != row["at"]:',
        "if False:",
        ("tests/release/test_release.py",),
    ),
    Mutant(
        "a log that was edited is refused",
        "a line of the log may be changed",
        "release/log.py",
        "if stored != link.encode() + b'\"}\\n':",
        "if False:",
        ("tests/release/test_log.py",),
    ),
    Mutant(
        "a row is on the disk before what came of it",
        "rows may still wait for the disk when a checkpoint is there",
        "release/log.py",
        "self._changed.wait_for(lambda: self._done == self._asked or self._error is not None)",
        "pass",
        ("tests/release/test_release.py::test_rows_are_on_the_disk_before_what_came_of_them",),
    ),
    Mutant(
        "an ended run has no secret",
        "secrets stay in the folder of an ended run",
        "release/open_run.py",
        "    folder.remove_secrets()\n\n\ndef seal",
        "\n\ndef seal",
        ("tests/release/test_release.py",),
    ),
    Mutant(
        "who was drawn in secret stays secret",
        "the log lists who was drawn in secret",
        "release/release.py",
        "if units is not None and not self.plan.participation.is_sampled:",
        "if units is not None:",
        ("tests/release/test_release.py",),
    ),
    Mutant(
        "a sum is divided by a planned constant",
        "division by the realised batch",
        "release/release.py",
        "self.noise.add_(values, times=norm / self.divisor)",
        "self.noise.add_(values, times=norm / max(1, len(ticket.units)))",
        ("tests/release/test_release.py::test_a_sum_is_divided_by_the_planned_constant",),
    ),
    Mutant(
        "a moving clip norm is released with noise",
        "noise of the counts left out of the moving clip",
        "release/threshold.py",
        "noisy = self._adders[1](step)(count)",
        "noisy = count",
        ("tests/release/test_threshold.py", "tests/clipping/test_adaptive.py"),
    ),
    Mutant(
        "a statement says what was not checked",
        "rows that nobody named count as checked",
        "release/history.py",
        'participation_checked=facts.get("ids")',
        'participation_checked=True or facts.get("ids")',
        ("tests/release/test_release.py",),
    ),
    Mutant(
        "verify computes a statement anew",
        "a statement is believed",
        "release/verify.py",
        "if not _agree(stated.get(name), expected.get(name)):",
        "if False:",
        ("tests/release/test_verify.py",),
    ),
    Mutant(
        "a copy of a run is charged to the budget",
        "a copy of a run takes its place in a budget while the run is open",
        "budget/budget.py",
        "(entry.run == run or not entry.is_open)",
        "True",
        ("tests/budget/test_budget.py",),
    ),
    # -- the clipped sum ---------------------------------------------------------------------------
    Mutant(
        "one unit moves the sum by the clip norm at most",
        "clip to the bound without slack for rounding",
        "clipping/factor.py",
        "aim = clip_norm * (1.0 - slack)",
        "aim = clip_norm * (1.0 + slack)",
        ("tests/clipping/test_factors.py", "tests/clipping/test_engines.py"),
    ),
    Mutant(
        "what is normed is what is summed",
        "the norm leaves out a parameter",
        "clipping/units.py",
        "squared[name] = zeros if not own else",
        "squared[name] = zeros if not own or name == names[-1] else",
        ("tests/clipping/test_engines.py",),
    ),
    Mutant(
        "a unit is clipped once, with all of its examples",
        "a user's examples are clipped one by one",
        "clipping/units.py",
        "return [form.by_unit(who.units) for form in joined]",
        "return joined",
        (
            "tests/clipping/test_edges.py::test_users_are_added_up_before_clipping",
            "tests/clipping/test_engines.py",
        ),
    ),
    Mutant(
        "a unit that is not finite contributes zero",
        "a bad unit is scaled by zero instead of left out",
        "clipping/units.py",
        "(used.total(factor) if is_clean else used.spent(factor))",
        "used.total(factor)",
        ("tests/clipping/test_edges.py::test_nonfinite_example_contributes_exactly_zero",),
    ),
    Mutant(
        "a model that mixes examples is written out",
        "the trial exchanges no rows",
        "clipping/trial.py",
        "for other in _exchanges(rows, rest, on_host=self.on_host):",
        "for other in [rows]:",
        ("tests/clipping/test_odd_models.py", "tests/clipping/test_attacks.py"),
    ),
    Mutant(
        "layer rules give what autograd gives",
        "the trial does not ask autograd",
        "clipping/trial.py",
        "self.by_autograd(full, own)",
        "pass",
        ("tests/clipping/test_outside_use.py",),
    ),
    Mutant(
        "a pass that writes trained parameters is refused",
        "a trained parameter that a pass writes is not refused",
        "clipping/state.py",
        "if p._version != version:",
        "if False:",
        ("tests/clipping/test_state.py",),
    ),
    Mutant(
        "a pass leaves nothing in the model",
        "buffers and attributes stay as a pass leaves them",
        "clipping/state.py",
        "holder.clear()\n            holder.update(before)",
        "pass",
        ("tests/clipping/test_state.py::test_a_pass_leaves_nothing_behind",),
    ),
    Mutant(
        "a pass leaves nothing in lists and dictionaries",
        "containers stay as a pass leaves them",
        "clipping/state.py",
        "            _fill(container, before)",
        "            pass",
        ("tests/clipping/test_state.py",),
    ),
    Mutant(
        "in isolation no example sees another one",
        "isolation reads one pass over the whole batch",
        "clipping/ghost.py",
        "            return Reading(layers, None)\n        least",
        "            from noshuffle.clipping.layers import find_layout\n"
        "            from noshuffle.clipping.trial import _Trial\n"
        "\n"
        "            one = _Trial(model, loss_fn, batch)\n"
        "            layers = read(model)\n"
        "            run = lambda count: one._losses_of(batch, count)\n"
        "            return Reading(layers, find_layout(model, layers, run))\n"
        "        least",
        ("tests/clipping/test_odd_models.py::test_no_example_can_meet_another_one_in_isolation",),
    ),
    # -- the step and the loop ---------------------------------------------------------------------
    Mutant(
        "rows are admitted before their sum",
        "a part is summed before it is admitted",
        "training/step.py",
        "        own = named_units(parts, ids, size)\n        if self._ticket is None:",
        "        own = named_units(parts, ids, size)\n"
        "        early = clipped_sum(None, own if parts.groups_users else None)\n"
        "        clipped_sum = lambda keep, ids: early\n"
        "        if self._ticket is None:",
        (
            "tests/training/test_private.py::test_a_unit_too_soon_is_stopped_before_its_gradient_is_computed",
        ),
    ),
    Mutant(
        "the criterion sends 1 to every row",
        "a factor of the loss reaches the gradients",
        "training/criterion.py",
        "        ctx.send()",
        "        sent = ctx.send.args[0]\n"
        "        with torch.enable_grad():\n"
        "            sent.rows = sent.rows * grad\n"
        "        ctx.send()",
        ("tests/training/test_criterion.py::test_what_becomes_of_the_number_changes_nothing",),
    ),
    Mutant(
        "no raw gradient reaches the optimizer",
        "a raw gradient of a second loss is released",
        "training/criterion.py",
        "if parameter.grad is not None:",
        "if False:",
        ("tests/training/test_criterion.py",),
    ),
    Mutant(
        "an empty batch releases noise alone",
        "an empty batch releases nothing",
        "training/step.py",
        "parts.release.close(ticket, values, sums=self._sums)\n",
        "if not ticket.units.size:\n"
        "            parts.release.pass_over(ticket)\n"
        "            return self._outcome()\n"
        "        parts.release.close(ticket, values, sums=self._sums)\n",
        ("tests/training/test_private.py",),
    ),
    Mutant(
        "raw figures are not printed",
        "raw losses are printed",
        "training/outcome.py",
        'return f"Outcome({len(self.losses)} examples; raw figures in .losses, .norms)"',
        'return f"Outcome(losses={self.losses}, norms={self.norms})"',
        ("tests/training/test_outcome.py",),
    ),
    Mutant(
        "a server takes sums of its own clip norm alone",
        "a sum clipped to another norm is taken",
        "federated/server.py",
        "values = checks.checked_sum(given, self.shapes, users=users, clip_norm=self.clip_norm)",
        "values = checks.checked_sum(given, self.shapes, users=users, clip_norm=1e30)",
        ("tests/federated/test_server.py",),
    ),
    Mutant(
        "a client starts from what the server sent",
        "simulated clients share one model",
        "federated/own_copy.py",
        "self._make(dict(self._shared))",
        "self._make(self._shared)",
        (
            "tests/federated/test_users_apart.py::test_what_a_model_keeps_of_one_user_does_not_reach_the_next",
        ),
    ),
)

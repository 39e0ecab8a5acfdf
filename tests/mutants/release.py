"""Mutants of the door: keys, replay, guard, ledger, chain, verify."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

REPLAY = ("tests/release/test_replay.py", "tests/release/test_attacks.py")
COPIES = ("tests/release/test_copies.py",)
TAMPER = ("tests/release/test_tampering.py",)
LEDGER = ("tests/release/test_ledger.py", "tests/release/test_units.py")
VERIFY = ("tests/release/test_verify.py", "tests/release/test_tampering.py")
CONTRACT = ("tests/release/test_contract.py",)

RELEASE = (
    Mutant(
        "a repeated step is not compared with the released sum", "release/release.py",
        "if not released or not hmac.compare_digest(released, found):", "if False:", REPLAY, "G1",
    ),
    Mutant(
        "a step whose digest was lost is repeated", "release/release.py",
        "if not released or not hmac.compare_digest(released, found):",
        "if released and not hmac.compare_digest(released, found):", REPLAY + CONTRACT, "G1",
    ),
    Mutant(
        "random layers draw other masks in a replay", "release/release.py",
        'data = f"{self._rng_seed} {step} {part}"',
        'data = f"{torch.rand(()).item()} {step} {part}"',
        ("tests/training/test_replay_loop.py", *REPLAY), "G2",
    ),
    Mutant(
        "one key for the whole life of a run", "release/keys.py",
        "if self.is_test:\n            return self\n        kept", "return self\n        kept",
        COPIES, "G4",
    ),
    Mutant(
        "a ledger that lost its newest rows goes on", "release/opening.py",
        "if ledger.released < known_steps(folder):", "if False:", COPIES + TAMPER, "G5",
    ),
    Mutant(
        "a key that is given serves several runs", "release/keys.py",
        "mixed = hashlib.blake2b(os.urandom(_BYTES), key=source.key, digest_size=_BYTES).digest()",
        "mixed = source.key", ("tests/release", ), "G6",
    ),
    Mutant(
        "keys of a clock", "noise/source.py",
        "return os.urandom(KEY_BYTES)",
        "return hashlib.blake2b(b'0', digest_size=KEY_BYTES).digest()",
        ("tests/noise/test_source.py", *COPIES), "keys",
    ),
    Mutant(
        "integers and names in one run", "release/release.py",
        "if self._kind_of_ids:\n", "if False:\n",
        ("tests/release/test_attacks.py", "tests/release/test_units.py", *CONTRACT), "G13",
    ),
    Mutant(
        "the row is written after the noise was used", "release/release.py",
        "elif not self.commit(admission, of_sum):\n            raise self.refusal(admission.step)\n"
        "        self.add_noise_(values)",
        "self.add_noise_(values)\n        if not is_open and not self.commit(admission, of_sum):\n"
        "            raise self.refusal(admission.step)", CONTRACT + REPLAY, "ledger after release",
    ),
    Mutant(
        "noise without a row", "release/release.py",
        "if self._leave != self.step and not is_new:", "if False:", REPLAY, "ledger after release",
    ),
    Mutant(
        "the digest leaves out the clip norm that moves", "release/release.py",
        "group.append(torch.tensor([norm], dtype=torch.float64, device=self._device))", "pass",
        ("tests/release/test_digest.py", "tests/release/test_threshold.py", *REPLAY), "G1",
    ),
    Mutant(
        "a step that is passed over draws nothing", "release/release.py",
        "self.noise.add_({n: torch.zeros(s, device=self._device) for n, s in self._shapes.items()})",
        "self.noise._step += 1", REPLAY + CONTRACT, "skipped step",
    ),
    Mutant(
        "a skipped step gives its charge back", "release/release.py",
        'self.ledger.note("skip", step=step)', "self.ledger._released -= 0", REPLAY, "skipped step",
    ),
    Mutant(
        "division by the realised batch", "release/release.py",
        "self.noise.add_(values, times=norm / self.divisor)",
        "self.noise.add_(values, times=norm / max(1, len(self.ledger.row(self.step).units)))",
        ("tests/training/test_private.py", *CONTRACT), "P5",
    ),
    Mutant(
        "units may come before their separation is over", "release/guard.py",
        "far: Mask = step - seen.last >= rule.separation",
        "far: Mask = step - seen.last >= rule.separation - 1", LEDGER, "P3",
    ),
    Mutant(
        "one participation too many", "release/guard.py",
        "far & (seen.count < rule.max_participations)",
        "far & (seen.count <= rule.max_participations)", LEDGER, "P3",
    ),
    Mutant(
        "a party may come at any place of an epoch", "release/guard.py",
        "return (step - first) % rule.steps_per_epoch == 0 and last < step",
        "return last < step", LEDGER, "P2",
    ),
    Mutant(
        "an epoch may be shuffled", "release/guard.py",
        "same_place: Mask = (step - first) % rule.steps_per_epoch == 0",
        "same_place: Mask = step - first >= 1", LEDGER, "P2",
    ),
    Mutant(
        "batches without ids may change between epochs", "release/ledger.py",
        "is_fine = is_fine and (before is None or self._file.batch(before) == batch)",
        "is_fine = bool(is_fine)", LEDGER + CONTRACT, "P2",
    ),
    Mutant(
        "one example twice in a batch", "release/guard.py",
        "if len(units) == len(ids) or groups:", "if True:", LEDGER, "P3",
    ),
    Mutant(
        "a sampled plan takes any batch", "release/guard.py",
        "if not is_fine or (len(ids) != len(drawn) and not is_partial):", "if False:",
        ("tests/release/test_sampler.py", *LEDGER), "P4",
    ),
    Mutant(
        "steps beyond the plan are admitted", "release/ledger.py",
        "if step >= self._planned:", "if step > self._planned:", LEDGER, "P16",
    ),
    Mutant(
        "units that wrap around are counted once a run", "release/units.py",
        "own[2] += own[1] != step", "own[2] += 0", LEDGER, "P3",
    ),
    Mutant(
        "fields of a row may move into each other", "release/ledger_tables.py",
        'hasher.update(len(field).to_bytes(8, "little"))', "pass", VERIFY + LEDGER, "chain",
    ),
    Mutant(
        "noise of the counts left out of the moving clip", "release/threshold.py",
        "noisy = source.noisy(count, row=step, name=COUNT, scale=self.config.noise)",
        "noisy = count", ("tests/release/test_threshold.py", "tests/clipping/test_adaptive.py"),
        "P8",
    ),
    Mutant(
        "gradients keep all of the budget beside the counts", "release/threshold.py",
        "return gradient_multiplier(plan.noise_multiplier, bit_noise=self.config.noise * ratio)",
        "return plan.noise_multiplier",
        ("tests/release/test_threshold.py", "tests/clipping/test_adaptive.py"), "P6",
    ),
    Mutant(
        "NOT PRIVATE disappears from a statement", "release/facts.py",
        'if facts.get("test_key") == "yes":', "if False:",
        ("tests/release/test_verify.py", "tests/convex"), "G11",
    ),
    Mutant(
        "a fork that costs nothing", "release/spending.py",
        "mu = gaussian_sum(mus)", "mu = mus[-1]", ("tests/release/test_spending.py",), "forks",
    ),
    Mutant(
        "the sampler draws the same batch at every step", "release/sampler.py",
        'nonce = (0).to_bytes(8, "little") + step.to_bytes(8, "little")',
        'nonce = (0).to_bytes(16, "little")', ("tests/release/test_sampler.py",), "P4",
    ),
)  # fmt: skip

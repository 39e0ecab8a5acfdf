"""The one way out for a noisy number: keys, guard, ledger, digests, run folder, verification."""

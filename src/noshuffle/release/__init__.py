"""The one way out for a noisy number: tickets, units, log, secret, run folder, verification."""

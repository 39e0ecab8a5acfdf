"""One private step over many ranks: who brings what, exact sums, one ledger, places to write to."""

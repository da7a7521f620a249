"""Load client, sweep plan, interleaving, correctness gates and the result store."""

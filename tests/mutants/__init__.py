"""Seeded faults of the protocol; ``python -m tests.mutants`` plants each, and the suite must find it."""

"""Proofs: digests of what was delivered, and live tensors against a fresh load of the same checkpoint."""

"""Versions, fences, leases, pins and commits: pure state machines. No I/O, no threads; time is passed in."""

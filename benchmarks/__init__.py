"""Measurements of the library, each a module to run."""

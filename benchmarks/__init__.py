"""Benchmarks of kernels and layers; run from the repository's root, as in `python -m benchmarks.router`."""

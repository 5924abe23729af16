"""Small, random-weight exports of real Mixture-of-Experts architectures: fixtures for tests, demo and benchmarks."""

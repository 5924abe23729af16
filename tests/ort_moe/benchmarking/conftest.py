"""A benchmark that several tests look at."""

from __future__ import annotations

import pytest

from ort_moe.benchmarking import Benchmark, bench
from ort_moe.running.session import ON_CPU
from tests.ort_moe.benchmarking.models import EXPORT


@pytest.fixture(scope="session")
def benchmark() -> Benchmark:
    """Of an exported block: as given, contrib, ours, and two formats, of which one does not fit its hidden size."""
    return bench(EXPORT, providers=ON_CPU, tokens=(1, 3), steps=2, weights=("keep", "fp8", "int4"))

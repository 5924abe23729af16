"""Settings of the whole suite, and what several parts of it use."""

from __future__ import annotations

import pytest
from hypothesis import settings

# A shared machine may stall any example; properties are about results, not time.
settings.register_profile("ort-moe", deadline=None)
settings.load_profile("ort-moe")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are measured without the seconds that a process for each takes to start."""
    from ort_moe.benchmarking import comparison
    from ort_moe.benchmarking.measurement import measure

    monkeypatch.setattr(comparison, "measure_apart", measure)

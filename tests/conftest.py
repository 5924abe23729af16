"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# A shared machine may stall any example; properties are about results, not time.
settings.register_profile("ort-moe", deadline=None)
settings.load_profile("ort-moe")

"""The tests here need torch, which takes seconds to import and may not be installed."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves the modules alone where their group is not wanted."""
    return True if "not export" in config.option.markexpr and collection_path.suffix == ".py" else None

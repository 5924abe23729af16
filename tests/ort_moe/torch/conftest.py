"""The tests here need torch, which takes seconds to import and may not be installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves the modules alone where their group is not asked for: refused by name, or torch is not there."""
    marks = config.option.markexpr
    asked = "export" in marks and "not export" not in marks
    here = importlib.util.find_spec("torch") is not None and "not export" not in marks
    return None if asked or here else True

"""A model to read and to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ort_moe.tiny_models import original, save


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    return save(original(), folder / "model.onnx", data="weights.bin")

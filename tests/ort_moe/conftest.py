"""Installations as users have them, such as with two wheels, and model folders of onnxruntime-genai."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SetWheels = Callable[..., None]


@pytest.fixture
def no_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no ONNX Runtime were installed."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    _set_wheels(monkeypatch)


@pytest.fixture
def set_wheels(monkeypatch: pytest.MonkeyPatch) -> SetWheels:
    """Sets the versions of the wheels that seem installed, by name."""
    return lambda **versions: _set_wheels(monkeypatch, **versions)


@pytest.fixture(scope="module")
def genai_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds model folders of onnxruntime-genai, as `tests.genai_models.build` does, each once."""
    from tests.genai_models import build

    root = tmp_path_factory.mktemp("genai")
    built: dict[str, Path] = {}

    def folder(architecture: str, precision: str, **options: Any) -> Path:
        key = "_".join([architecture, precision, *options.values()])
        if key not in built:
            built[key] = build(architecture, precision, root / key, **options)
        return built[key]

    return folder


def _set_wheels(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    given = {name.replace("_", "-"): version for name, version in versions.items()}
    real = importlib.metadata.version

    def version(name: str) -> str:
        if not name.startswith("onnxruntime"):
            return real(name)
        if name not in given:
            raise importlib.metadata.PackageNotFoundError(name)
        return given[name]

    monkeypatch.setattr(importlib.metadata, "version", version)

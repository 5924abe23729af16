"""Installations as users have them: without ONNX Runtime, with two wheels, with an old one."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable

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

"""The package's front: everything public is there, and nothing heavy is imported before it is used."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import ort_moe


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys; before = {*sys.modules}; import ort_moe; print(*{*sys.modules} - before)"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    heavy = {"numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "rich", "typer"}
    assert "ort_moe" in result.stdout.split()
    assert not heavy & set(result.stdout.split())


def test_everything_public_is_there() -> None:
    assert set(ort_moe.__all__) <= set(dir(ort_moe))
    for name in ort_moe.__all__:
        value = getattr(ort_moe, name)
        assert callable(value)
        assert not isinstance(value, ModuleType)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ort_moe' has no attribute 'optimise'"):
        ort_moe.optimise  # type: ignore[attr-defined]  # noqa: B018

"""The native library: found, loaded, and told apart from what is none."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest

import ort_moe
from ort_moe.errors import EnvironmentUnfitError
from ort_moe.installation import library


def test_the_installed_library_is_found() -> None:
    assert library.library_path().is_file()
    assert ort_moe.library_path() == library.library_path()


def test_the_environment_overrides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    other.touch()
    monkeypatch.setenv("ORT_MOE_LIBRARY", str(other))
    assert library.library_path() == other


def test_an_override_without_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ORT_MOE_LIBRARY", str(tmp_path / "none.so"))
    with pytest.raises(EnvironmentUnfitError, match=r"ORT_MOE_LIBRARY must name .*, but there is no file .*none\.so"):
        library.library_path()


def test_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ORT_MOE_LIBRARY", raising=False)
    monkeypatch.setattr(ort_moe, "__path__", [str(tmp_path)])
    with pytest.raises(EnvironmentUnfitError, match=r"libort_moe\.so is not in .*: install ort-moe from a wheel for "):
        library.library_path()


def test_a_library_of_another_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    foreign = tmp_path / "libort_moe.so"
    foreign.write_bytes(b"\xcf\xfa\xed\xfe" + bytes(60))  # the start of a macOS library
    monkeypatch.setenv("ORT_MOE_LIBRARY", str(foreign))
    with pytest.raises(EnvironmentUnfitError, match=r"cannot be loaded on .*: install ort-moe from a wheel for this"):
        library.register(onnxruntime.SessionOptions())
    with pytest.raises(EnvironmentUnfitError, match="cannot be loaded on"):
        library.build_info()


def test_a_library_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    import _ctypes

    monkeypatch.setenv("ORT_MOE_LIBRARY", _ctypes.__file__)
    with pytest.raises(EnvironmentUnfitError, match="is not the library of ort-moe: it lacks ort_moe_build_info"):
        library.describe_ops()

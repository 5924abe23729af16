"""Installations that cannot run fused models are told apart, in words that help."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import onnxruntime
import pytest

from ort_moe.errors import EnvironmentUnfitError
from ort_moe.installation.environment import installed_wheels, require_onnxruntime, runtime_message, version_tuple
from ort_moe.running.session import CPU, CUDA, require_providers
from ort_moe.verification import verify
from tests.ort_moe.conftest import SetWheels
from tests.ort_moe.tiny_models import original, save


def test_this_one_is_fit() -> None:
    assert require_onnxruntime() is onnxruntime


def test_none(no_onnxruntime: None) -> None:
    with pytest.raises(EnvironmentUnfitError, match=r"install ort-moe\[cpu\] or ort-moe\[gpu\]"):
        require_onnxruntime()


def test_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.26.2")
    with pytest.raises(EnvironmentUnfitError, match=r"1\.26\.2 is too old: 1\.27 or newer"):
        require_onnxruntime()


def test_left_behind_by_an_uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", types.ModuleType("onnxruntime"))
    with pytest.raises(EnvironmentUnfitError, match="has no version"):
        require_onnxruntime()


def test_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "onnxruntime":
                raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "onnxruntime")
    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
    with pytest.raises(EnvironmentUnfitError, match=r"cannot be imported: libcudart\.so\.13"):
        require_onnxruntime()


@pytest.mark.parametrize("names", [(CUDA, CPU), (CPU,)])
def test_cuda_libraries_of_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], names: tuple[str, ...]
) -> None:
    """They are loaded where CUDA is asked for, and nothing is printed between our own lines."""
    loads: list[bool] = []

    def preload() -> None:
        loads.append(True)
        print("Failed to load libcufft.so.12")

    monkeypatch.setattr(onnxruntime, "preload_dlls", preload)
    monkeypatch.setattr("ort_moe.running.session.build_info", lambda: {"cuda": {}})
    require_providers(names, (CUDA, CPU))
    assert len(loads) == (CUDA in names)
    assert not capsys.readouterr().out


def test_cuda_libraries_before_a_model_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loads: list[bool] = []
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: loads.append(True))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(onnxruntime, "InferenceSession", _on_the_cpu)
    save(original(), tmp_path / "model.onnx")
    with pytest.raises(EnvironmentUnfitError, match="CUDAExecutionProvider did not start"):
        verify(tmp_path / "model.onnx", tmp_path / "model.onnx", providers=[CUDA, CPU])
    assert loads


def _on_the_cpu(model: bytes, options: object, providers: object) -> object:
    return types.SimpleNamespace(get_providers=lambda: [CPU])


def test_wheels(set_wheels: SetWheels) -> None:
    set_wheels(onnxruntime_gpu="1.31.1", onnxruntime="1.32.0")
    assert installed_wheels() == {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}
    set_wheels()
    assert installed_wheels() == {}


@pytest.mark.parametrize(
    ("version", "expected"), [("1.27.0", (1, 27, 0)), ("1.31.1+cu13", (1, 31, 1)), ("1.28.0rc1", (1, 28))]
)
def test_version_tuple(version: str, expected: tuple[int, ...]) -> None:
    assert version_tuple(version) == expected


def test_runtime_message() -> None:
    error = RuntimeError(
        "[ONNXRuntimeError] : 1 : FAIL : /onnxruntime_src/onnxruntime/core/graph/model.cc:256 "
        "onnxruntime::Model::Model(onnx::ModelProto&&, const onnxruntime::PathString&) Unsupported IR version: 15\n"
    )
    assert runtime_message(error) == "Unsupported IR version: 15"
    assert runtime_message(RuntimeError("plain\n words")) == "plain words"

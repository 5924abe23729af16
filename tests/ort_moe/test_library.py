"""The Python side of the library: finding and loading it, sessions, and the package's lazy front."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import onnxruntime
import pytest

import ort_moe
import ort_moe.session  # the module must not take the function's place
from ort_moe import library
from ort_moe.errors import EnvironmentUnfitError, ModelError
from tests.router_models import router_model

session_module = sys.modules["ort_moe.session"]
MODEL = router_model({"k": 2, "score": "softmax", "normalize": 1}, logits_shape=("T", 4))


# The package


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


# Finding and loading the library


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


# Sessions


def test_a_session_runs(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(MODEL.SerializeToString())
    logits = np.array([[1.0, 3.0, 2.0, 0.0]], np.float32)
    for model in (path, str(path), path.read_bytes()):
        session = ort_moe.session(model, providers=["CPUExecutionProvider"])
        weights, indices = session.run(None, {"logits": logits})
        assert indices.tolist() == [[1, 2]]
        np.testing.assert_allclose(weights, [[0.7310586, 0.26894143]], rtol=1e-6)


def test_a_session_takes_options_that_have_the_ops() -> None:
    options = onnxruntime.SessionOptions()
    ort_moe.register(options)
    session = ort_moe.session(MODEL.SerializeToString(), options=options)
    assert session.get_providers() == ["CPUExecutionProvider"]


def test_a_provider_that_is_not_there() -> None:
    with pytest.raises(EnvironmentUnfitError, match=r"this ONNX Runtime has no NoSuchExecutionProvider, only .*CPU"):
        ort_moe.session(MODEL.SerializeToString(), providers=["NoSuchExecutionProvider"])


def test_a_provider_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime lists CUDA where its libraries are missing, and then falls back to the CPU."""
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr(session_module, "build_info", lambda: {"cuda": {}})
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *_, **__: _CpuSession())
    with pytest.raises(EnvironmentUnfitError, match="CUDAExecutionProvider did not start"):
        ort_moe.session(MODEL.SerializeToString())


class _CpuSession:
    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]


def test_cuda_with_a_library_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr(session_module, "build_info", lambda: {"cuda": None})
    with pytest.raises(EnvironmentUnfitError, match="our library was built without CUDA"):
        ort_moe.session(MODEL.SerializeToString(), providers=[("CUDAExecutionProvider", {"device_id": 0})])


def test_both_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}
    monkeypatch.setattr(session_module, "installed_wheels", lambda: wheels)
    with pytest.raises(EnvironmentUnfitError, match=r"onnxruntime 1\.32\.0 and onnxruntime-gpu 1\.31\.1 are both"):
        ort_moe.session(MODEL.SerializeToString())


def test_an_old_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.26.0")
    with pytest.raises(EnvironmentUnfitError, match=r"ONNX Runtime 1\.26\.0 is too old"):
        ort_moe.session(MODEL.SerializeToString())


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no model .*none\.onnx"):
        ort_moe.session(tmp_path / "none.onnx")


def test_a_model_that_onnxruntime_refuses() -> None:
    model = router_model({"k": 9, "score": "softmax"}, logits_shape=(1, 4))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(
        ModelError, match=r"does not take the model: .*node 'router': attribute 'k' must be at most"
    ) as e:
        ort_moe.session(model.SerializeToString(), options=options)
    assert "[ONNXRuntimeError]" not in str(e.value)

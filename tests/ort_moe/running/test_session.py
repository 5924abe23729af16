"""Sessions have our ops, and run where they were told to or say why not."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

import ort_moe
from ort_moe.errors import EnvironmentUnfitError, ModelError
from tests.router_models import router_model

MODEL = router_model({"k": 2, "score": "softmax", "normalize": 1}, logits_shape=("T", 4))


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


@pytest.mark.parametrize(
    "providers",
    [
        "CPUExecutionProvider",
        ("CPUExecutionProvider", {"device_id": 0}),
        [["CPUExecutionProvider", {}]],
        [("CPUExecutionProvider",)],
        [None],
        3,
    ],
    ids=repr,
)
def test_what_is_no_list_of_providers(providers: Any, tmp_path: Path) -> None:
    model = tmp_path / "model.onnx"
    model.write_bytes(MODEL.SerializeToString())
    sentence = (
        "providers are a list of names, or of pairs of a name and options, such as ['CPUExecutionProvider'], but "
        f"{providers!r} came"
    )
    for call in (ort_moe.session, partial(ort_moe.verify, model), ort_moe.bench):
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            call(model, providers=providers)


def test_a_provider_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime lists CUDA where its libraries are missing, and then falls back to the CPU."""
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr("ort_moe.running.session.build_info", lambda: {"cuda": {}})
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
    monkeypatch.setattr("ort_moe.running.session.build_info", lambda: {"cuda": None})
    with pytest.raises(EnvironmentUnfitError, match="our library was built without CUDA"):
        ort_moe.session(MODEL.SerializeToString(), providers=[("CUDAExecutionProvider", {"device_id": 0})])


def test_both_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}
    monkeypatch.setattr("ort_moe.running.session.installed_wheels", lambda: wheels)
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

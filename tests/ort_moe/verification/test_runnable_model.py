"""Sessions run where they were asked to, in full precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ort_moe.errors import EnvironmentUnfitError
from ort_moe.verification import runnable_model, verify
from ort_moe.verification.runnable_model import RunnableModel
from tests.ort_moe.tiny_models import fused, original, save

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """As if this ONNX Runtime had CUDA, on the CPU; the providers that sessions were asked to run on."""
    real, found = onnxruntime.InferenceSession, []

    class Session:
        def __init__(self, model: bytes, options: Any, providers: Any) -> None:
            found.append(list(providers))
            self._session = real(model, options, providers=[CPU])
            self._providers = [each if isinstance(each, str) else each[0] for each in providers]

        def get_providers(self) -> list[str]:
            return self._providers

        def __getattr__(self, name: str) -> Any:
            return getattr(self._session, name)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU])
    return found


def pair(tmp_path: Path) -> tuple[Path, Path]:
    return save(original(), tmp_path / "reference.onnx"), save(fused(), tmp_path / "optimized.onnx")


def test_tf32_is_off(tmp_path: Path, asked: list[Any]) -> None:
    verification = verify(*pair(tmp_path), providers=[CUDA, CPU])
    assert verification.passed
    assert verification.notes[0] == "on CUDA, CPU"
    assert [(CUDA, {"use_tf32": "0"}), (CPU, {})] in asked


def test_given_options_stay(tmp_path: Path, asked: list[Any]) -> None:
    verify(*pair(tmp_path), providers=[(CUDA, {"device_id": "1", "use_tf32": "1"}), CPU])
    assert [(CUDA, {"use_tf32": "1", "device_id": "1"}), (CPU, {})] in asked


def test_a_provider_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU])
    with pytest.raises(EnvironmentUnfitError, match=f"this ONNX Runtime has no {CUDA}, only {CPU}"):
        verify(*pair(tmp_path), providers=[CUDA, CPU])


def test_a_provider_that_does_not_start(tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda self: [CPU])
    with pytest.raises(EnvironmentUnfitError, match=f"{CUDA} did not start, .* on {CPU}: 'ort-moe doctor'"):
        verify(*pair(tmp_path), providers=[CUDA, CPU])


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_memory_is_spared_on_the_cpu_alone(tmp_path: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runnable_model, "_LARGE", 0)
    reference = save(original(dtype), tmp_path / "reference.onnx")
    optimized = save(fused(dtype), tmp_path / "optimized.onnx")
    assert verify(reference, optimized).passed
    for providers, sparing in (([CPU], True), ([CUDA, CPU], False)):
        with RunnableModel(reference, providers) as model:
            assert model.is_sparing == sparing

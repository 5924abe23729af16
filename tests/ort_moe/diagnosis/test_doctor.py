"""The doctor finds what is wrong, and says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from ort_moe.diagnosis.doctor import Diagnosis, diagnose
from ort_moe.diagnosis.smoke import smoke
from ort_moe.ops import OPS
from ort_moe.reference.fused_experts import fused_experts
from tests.ort_moe.conftest import SetWheels

CUDA = "CUDAExecutionProvider"


def _finding(diagnosis: Diagnosis, subject: str) -> tuple[str, str]:
    return next((e.status, e.finding) for e in diagnosis.examinations if e.subject == subject)


def test_fit_here() -> None:
    diagnosis = diagnose()
    assert diagnosis.fit, str(diagnosis)
    for op_name in OPS:
        assert _finding(diagnosis, f"{op_name} on CPU") == ("ok", "agrees with the reference")
    assert str(diagnosis).splitlines()[-1] == "fit"


def test_document() -> None:
    document = diagnose().to_dict()
    assert json.loads(json.dumps(document)) == document
    assert set(document) == {"schema", "fit", "examinations"}
    assert set(document["examinations"][0]) == {"subject", "status", "finding"}


def test_both_wheels(set_wheels: SetWheels) -> None:
    set_wheels(onnxruntime="1.32.0", onnxruntime_gpu="1.31.1")
    diagnosis = diagnose()
    assert not diagnosis.fit
    status, finding = _finding(diagnosis, "wheels")
    assert status == "unfit"
    assert "onnxruntime 1.32.0 and onnxruntime-gpu 1.31.1 are installed" in finding
    assert "uninstall both, then install one" in finding
    assert str(diagnosis).splitlines()[-1] == "unfit: wheels"


def test_no_runtime(no_onnxruntime: None) -> None:
    diagnosis = diagnose()
    assert not diagnosis.fit
    assert _finding(diagnosis, "ONNX Runtime")[0] == "unfit"


def test_old_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", "1.20.0")
    assert "1.20.0 is too old" in _finding(diagnose(), "ONNX Runtime")[1]


def test_library_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_MOE_LIBRARY", str(tmp_path / "absent.so"))
    diagnosis = diagnose()
    assert _finding(diagnosis, "library")[0] == "unfit"
    assert not any(e.subject.startswith("FusedRouter") for e in diagnosis.examinations)


def test_library_for_another_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = tmp_path / "libort_moe.so"
    foreign.write_bytes(b"MZ" + bytes(100))
    monkeypatch.setenv("ORT_MOE_LIBRARY", str(foreign))
    status, finding = _finding(diagnose(), "library")
    assert status == "unfit"
    assert str(foreign) in finding


def test_operator_that_answers_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(logits: np.ndarray, *_: object, **attributes: int) -> tuple[np.ndarray, np.ndarray]:
        shape = (len(logits), attributes["k"])
        return np.zeros(shape, np.float32), np.zeros(shape, np.int32)

    monkeypatch.setattr("ort_moe.reference.fused_router.fused_router", wrong)
    assert smoke("FusedRouter") == "it chooses other experts than the reference"
    assert _finding(diagnose(), "FusedRouter on CPU")[0] == "unfit"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_experts_that_answer_wrong_in_one_type(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Types have kernels of their own."""

    def wrong(x: np.ndarray, *arguments: Any, **attributes: Any) -> np.ndarray:
        return fused_experts(x, *arguments, **attributes) * (1.01 if x.dtype == dtype else 1.0)

    assert smoke("FusedExperts") is None
    monkeypatch.setattr("ort_moe.reference.fused_experts.fused_experts", wrong)
    assert (smoke("FusedExperts") or "").startswith(f"its result in {dtype} differs from the reference by 9.")


@pytest.mark.parametrize(
    ("driver", "silent", "status", "words"),
    [
        (None, None, "unfit", "no NVIDIA driver"),
        ((12, 8), None, "unfit", "the driver knows CUDA 12.8, onnxruntime-gpu needs CUDA 13"),
        ((13, 0), "its CUDA libraries do not load", "unfit", "a session that asks for CUDA runs on the CPU"),
        ((13, 0), None, "ok", "driver for CUDA 13.0"),
    ],
)
def test_cuda(
    monkeypatch: pytest.MonkeyPatch, driver: tuple[int, int] | None, silent: str | None, status: str, words: str
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, "CPUExecutionProvider"])
    monkeypatch.setattr("ort_moe.diagnosis.doctor._driver_version", lambda: driver)
    monkeypatch.setattr("ort_moe.diagnosis.doctor._silently_on_cpu", lambda: silent)
    monkeypatch.setattr("ort_moe.diagnosis.smoke.smoke", lambda *_: None)
    found = _finding(diagnose(), "CUDA")
    assert found[0] == status
    assert words in found[1]


def test_gpu_without_a_gpu_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr("ort_moe.diagnosis.doctor._driver_version", lambda: (13, 0))
    status, finding = _finding(diagnose(), "CUDA")
    assert status == "note"
    assert "install ort-moe[gpu] in place of ort-moe[cpu]" in finding


def test_library_without_cuda_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"version": "0", "cuda": None, "ort_api_version": 21, "compiler": "c"}
    monkeypatch.setattr("ort_moe.installation.library.build_info", lambda: info)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, "CPUExecutionProvider"])
    monkeypatch.setattr("ort_moe.diagnosis.doctor._driver_version", lambda: (13, 0))
    monkeypatch.setattr("ort_moe.diagnosis.doctor._silently_on_cpu", lambda: None)
    status, finding = _finding(diagnose(), "library")
    assert status == "unfit"
    assert "is built without CUDA" in finding

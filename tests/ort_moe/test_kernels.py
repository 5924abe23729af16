"""Direct calls of the CUDA kernels, as far as they can be refused without a device."""

from __future__ import annotations

import _ctypes
from pathlib import Path
from typing import Any

import pytest

from ort_moe import kernels
from ort_moe.kernels import calls, training
from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.ops.router_config import RouterConfig
from ort_moe.ops.training_config import RouterScoresConfig

CONFIG = RouterConfig.from_attributes({"k": 2, "score": "softmax"})
CALL: dict[str, Any] = {"rows": 1, "experts": 8, "logits": 0, "weights": 0, "indices": 0}


def test_unknown_type() -> None:
    with pytest.raises(ValueError, match="dtype must be one of float, float16, bfloat16, but is 'double'"):
        kernels.fused_router(CONFIG, dtype="double", **CALL)


@pytest.mark.parametrize("size", ["hidden", "inner", "experts", "k"])
def test_experts_of_nothing(size: str) -> None:
    """Refused before the library is asked, which divides by these sizes."""
    config = ExpertsConfig.from_attributes({"activation": "relu", "gated": 0})
    sizes = {"tokens": 0, "hidden": 64, "inner": 64, "experts": 1, "k": 1} | {size: 0}
    with pytest.raises(ValueError, match=f"{size} must be at least 1, but is 0"):
        kernels.fused_experts_scratch_bytes(config, **sizes, dtype="float16")


def test_library_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORT_MOE_LIBRARY", str(Path(_ctypes.__file__)))
    calls._function.cache_clear()
    config = RouterScoresConfig.from_attributes({"k": 2, "score": "softmax"})
    call: dict[str, Any] = {"rows": 1, "experts": 8, "logits": 0, "scores": 0, "routing_map": 0}
    with pytest.raises(RuntimeError, match="is of another version: it has no ort_moe_run_router_scores"):
        training.router_scores(config, dtype="float", cpu_threads=1, **call)


def test_library_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any shared object that lacks the launcher stands for a library built for the CPU."""
    monkeypatch.setenv("ORT_MOE_LIBRARY", str(Path(_ctypes.__file__)))
    calls._function.cache_clear()
    with pytest.raises(RuntimeError, match="was built without CUDA kernels: it has no ort_moe_launch_fused_router"):
        kernels.fused_router(CONFIG, dtype="float", **CALL)

"""A fused node by itself."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

import models.fixtures
from ort_moe.optimization.optimize import optimize
from ort_moe.verification import verify


def test_constants_in_another_file(tmp_path: Path) -> None:
    """The router's bias of 64 bytes, too, but not the shapes, which ONNX Runtime wants in the model."""
    source, optimized = tmp_path / "model.onnx", tmp_path / "optimized.onnx"
    model = ir.load(models.fixtures.get("deepseek_v3_block_dynamo_fp32").path)
    ir.save(model, source, external_data="model.data", size_threshold_bytes=60)
    optimize(source, optimized, verify=False)
    verification = verify(source, optimized)
    assert [(site.what, site.status) for site in verification.sites] == [
        ("router", "passed"),
        ("layer of experts", "passed"),
    ]

"""Exports that an optimizer has been over already: the same routers, and the same answers, as before it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import onnxscript.optimizer
import pytest

import models.fixtures
from models.fixtures import Fixture
from ort_moe.ops import AttributeValue
from ort_moe.rewrites import Site, rewrite
from ort_moe.verification.runnable_model import RunnableModel

NAMES = (
    "deepseek_v2_block_legacy_fp32",
    "deepseek_v3_block_legacy_fp32",
    "deepseek_v3_block_transformers_fp32",
    "deepseek_v4_block_dynamo_fp16",
    "laguna_block_legacy_fp32",
    "llama4_text_block_legacy_fp32",
    "mixtral_block_dynamo_fp16",
    "mixtral_causal_lm_dynamo_fp32",
    "mixtral_block_transformers_grouped_fp32",
    "gpt_oss_block_dynamo_fp32",
)
"""Those whose graphs the optimizers change in the router, or around it."""


def onnxscript_optimizer(source: Path, target: Path) -> None:
    model = ir.load(source)
    onnxscript.optimizer.optimize(model)
    ir.save(model, target)


def onnxruntime_level(level: onnxruntime.GraphOptimizationLevel) -> Callable[[Path, Path], None]:
    def optimize(source: Path, target: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # it warns that the result is for this machine
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(target)
        onnxruntime.InferenceSession(source, options, ["CPUExecutionProvider"])

    return optimize


OPTIMIZERS: dict[str, Callable[[Path, Path], None]] = {
    "onnxscript": onnxscript_optimizer,
    "basic": onnxruntime_level(onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC),
    "extended": onnxruntime_level(onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_optimised_export(name: str, optimizer: str, tmp_path: Path) -> None:
    fixture: Fixture = models.fixtures.get(name)
    optimized, rewritten = tmp_path / "optimized.onnx", tmp_path / "rewritten.onnx"
    OPTIMIZERS[optimizer](fixture.path, optimized)
    expected = [_router(site) for site in rewrite(ir.load(fixture.path)).sites if site.attributes is not None]
    model = ir.load(optimized)
    result = rewrite(model)
    sites = [site for site in result.sites if site.experts is not None]
    assert [site.status for site in sites] == ["whole"] * fixture.layers, sites
    # On the CPU, ONNX Runtime computes in float32 what an export has in half precision.
    is_as_exported = optimizer == "onnxscript" or fixture.precision == "fp32"
    experts = [each.status for each in result.experts]
    assert experts == ["whole" if is_as_exported else "left"] * fixture.layers, result.experts
    assert [_router(site) for site in sites] == expected
    ir.save(model, rewritten)
    feeds = fixture.sample_inputs(seed=2)
    with RunnableModel(optimized) as was, RunnableModel(rewritten) as now:
        for with_library in (False, True):
            ours = now.session(with_library=with_library)(feeds)
            for value, reference in was.session(with_library=False)(feeds).items():
                atol = (1e-5 if fixture.precision == "fp32" else 4e-3) * np.abs(reference.astype(np.float64)).max()
                np.testing.assert_allclose(ours[value].astype(np.float64), reference, rtol=0, atol=atol, err_msg=value)


def _router(site: Site) -> dict[str, AttributeValue]:
    """The router's configuration, without an epsilon so small that onnxscript drops it."""
    assert site.attributes is not None
    eps = site.attributes["normalize_eps"]
    return {**site.attributes, "normalize_eps": 0.0 if isinstance(eps, float) and eps < 1e-15 else eps}

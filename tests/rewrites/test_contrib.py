"""What ONNX Runtime's optimizer fused with a router's linear layer is taken apart, and nothing else."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import DTYPES, EXPERTS, HIDDEN, assert_fuses, assert_same, block

BIAS = np.linspace(-1, 1, EXPERTS, dtype=np.float32)
GATE = np.random.default_rng(2).standard_normal((HIDDEN, EXPERTS)).astype(np.float32)


def with_contrib(text: str, constants: dict[str, Any], **options: Any) -> ir.Model:
    return block(text, constants, imports={"com.microsoft": 1}, **options)


def test_fused_gemm() -> None:
    text = """
        scores = com.microsoft.FusedGemm <activation = "Sigmoid", transB = 1, alpha = 0.5> (x, turned, bias)
        weights, ids = TopK (scores, k)"""
    build = partial(with_contrib, text, {"turned": np.ascontiguousarray(GATE.T), "bias": BIAS})
    assert_fuses(build, {"score": "sigmoid"}, absorbed=("sigmoid",))
    model = build()
    rewrite(model)
    assert {"alpha", "transB"} == set(model.graph[0].attributes)


@pytest.mark.parametrize("turned", [0, 1])
def test_fused_matmul(turned: int) -> None:
    text = f"""
        third = com.microsoft.FusedMatMul <alpha = 0.25, transB = {turned}> (x, matrix)
        capped = Tanh (third)
        scores = Mul (capped, four)
        weights, ids = TopK (scores, k)"""
    matrix = np.ascontiguousarray(GATE.T) if turned else GATE
    assert_fuses(partial(with_contrib, text, {"matrix": matrix, "four": 4.0}), {"softcap": 4.0}, absorbed=("softcap",))


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("turned", [0, 1])
def test_fused_matmul_with_a_factor_of_its_type(turned: int, dtype: str) -> None:
    text = f"""
        third = com.microsoft.FusedMatMul <alpha = 0.25, transB = {turned}> (x, matrix)
        scores = Softmax (third)
        weights, ids = TopK (scores, k)"""
    matrix = (np.ascontiguousarray(GATE.T) if turned else GATE).astype(DTYPES[dtype])
    build = partial(with_contrib, text, {"matrix": matrix}, dtype=dtype)
    model = build()
    (site,) = rewrite(model).sites
    assert site.status == "whole"
    assert_same(build(), model, rtol=1e-5 if dtype == "float" else 1e-2)


def test_fused_layers_elsewhere_stay() -> None:
    text = """
        scores = Softmax (logits)
        weights, ids = TopK (scores, k)
        before = com.microsoft.FusedGemm <activation = "Relu"> (x, square, zero)
        after = com.microsoft.QuickGelu <alpha = 1.0> (before)"""
    constants = {"square": np.eye(HIDDEN, dtype=np.float32), "zero": np.zeros(HIDDEN, np.float32)}
    build = partial(with_contrib, text, constants, outputs=f", float[T, {HIDDEN}] after")
    model = build()
    (site,) = rewrite(model).sites
    assert site.status == "whole"
    assert {"FusedGemm", "QuickGelu"} <= {node.op_type for node in model.graph}
    assert_same(build(), model)


def test_what_cannot_be_taken_apart_stays() -> None:
    text = """
        fused = com.microsoft.FusedGemm <activation = "LeakyRelu", activation_alpha = 0.1> (x, gate2, bias)
        raw, ids = TopK (fused, k)
        weights = Softmax (raw)"""
    build = partial(with_contrib, text, {"gate2": GATE, "bias": BIAS})
    model = build()
    (site,) = rewrite(model).sites
    assert (site.status, site.absorbed) == ("left", ())
    assert site.findings[0].reason.slug == "expert-count-unknown"
    assert_same(build(), model)
    turned = "fused = com.microsoft.FusedMatMul <transA = 1> (x, gate2)\n weights, ids = TopK (fused, k)"
    model = with_contrib(turned, {"gate2": GATE})
    rewrite(model)
    assert "FusedMatMul" in {node.op_type for node in model.graph}


def test_shapes_pass_through_contrib_nodes() -> None:
    """A norm that ONNX Runtime alone knows stands before the router."""
    text = """
        h = com.microsoft.QuickGelu <alpha = 1.0> (x)
        inner = MatMul (h, gate2)
        scores = Sigmoid (inner)
        weights, ids = TopK <axis = 1> (scores, k)"""
    assert_fuses(partial(with_contrib, text, {"gate2": GATE}), {"score": "sigmoid"}, absorbed=("sigmoid",))

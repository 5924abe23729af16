"""The portable bodies compute what the op's emulation does, in plain ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import assume, given, settings

from ort_moe.installation.environment import version_tuple
from ort_moe.ops import FUSED_ROUTER
from ort_moe.rewrites.functions import attach_functions, drop_unread_functions
from ort_moe.rewrites.router_body import build_function
from ort_moe.rewrites.router_node import Router
from tests.op_models import op_model, run_session
from tests.rewrites.blocks import cpu_session
from tests.router_cases import RouterCase, router_cases
from tests.router_models import case_model, run_router
from tests.shared_gate_cases import SharedGateCase, shared_gate_cases

RTOL = 2e-5

TOPK_TAKES_NO_ROWS = version_tuple(onnxruntime.__version__) >= (1, 31)
"""Older CPU kernels of the standard TopK divide by zero there and end the process, in any model."""


def portable_session(case: RouterCase) -> Any:
    """A session of the case's one node and its function, in which our library is not registered."""
    model = ir.from_proto(case_model(case, symbolic=True))
    assert attach_functions(model) == 1
    return cpu_session(model, with_library=False)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(router_cases(max_experts=64, max_tokens=4, textures=("normal", "ties", "zeros")))
def test_body_agrees_with_the_emulation(case: RouterCase) -> None:
    assume(TOPK_TAKES_NO_ROWS or 0 not in case.shape)
    weights, indices = case.emulate()
    largest = np.abs(weights).max(initial=0.0)
    assume(np.isfinite(weights).all() and largest < 1e3)  # else a quotient by a sum that cancels
    body_weights, body_indices = run_router(portable_session(case), case.logits)
    np.testing.assert_array_equal(body_indices, indices)
    np.testing.assert_allclose(body_weights, weights, rtol=0, atol=RTOL * max(largest, 1e-30))
    assert body_weights.dtype == np.float32
    assert body_indices.dtype == np.int32


@pytest.mark.parametrize("onnx_type", ["float", "float16", "bfloat16"])
def test_equal_keys_go_to_the_lower_index(onnx_type: str) -> None:
    attributes = FUSED_ROUTER.complete({"k": 3, "score": "sigmoid", "num_groups": 4, "topk_groups": 2})
    case = RouterCase(attributes, (2, 8), onnx_type, texture="constant")
    _, indices = run_router(portable_session(case), case.logits)
    assert indices.tolist() == [[0, 1, 2]] * 2


def test_sparse_mixer_body() -> None:
    attributes = FUSED_ROUTER.complete({"k": 2, "score": "sparse_mixer", "mixer_threshold": 0.5, "normalize": 0})
    case = RouterCase(attributes, (64, 16))
    weights, indices = case.emulate()
    body_weights, body_indices = run_router(portable_session(case), case.logits)
    np.testing.assert_array_equal(body_indices, indices)
    np.testing.assert_allclose(body_weights, weights, rtol=1e-5)


def test_every_node_of_a_body_is_used() -> None:
    for score in ("softmax", "sigmoid", "sqrtsoftplus", "none"):
        for normalize in (0, 1):
            for after in (0, 1):
                given = {"k": 2, "score": score, "normalize": normalize, "score_after_topk": after}
                model = ir.from_proto(case_model(RouterCase(FUSED_ROUTER.complete(given), (3, 8))))
                function = build_function(Router.read(model.graph[0]), 20)
                for node in function.all_nodes():
                    for output in node.outputs:
                        used = output.uses() or output in function.outputs
                        assert used or (node.op_type == "TopK" and output is node.outputs[0]), (given, node)


def test_a_function_names_the_ops_attributes_and_inputs() -> None:
    case = RouterCase(FUSED_ROUTER.complete({"k": 2, "score": "softmax"}), (3, 8), has_expert_scale=True)
    function = build_function(Router.read(ir.from_proto(case_model(case)).graph[0]), 20)
    assert list(function.attributes) == sorted(case.attributes)
    assert [value.name for value in function.inputs] == ["logits", "selection_bias", "expert_scale"]
    assert [value.name for value in function.outputs] == ["weights", "indices"]
    assert function.overload.startswith("softmax_top2_")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(shared_gate_cases(max_experts=40, textures=("normal", "ties", "zeros"), hidden_textures=("normal", "zeros")))
def test_shared_gate_body_agrees_with_the_emulation(case: SharedGateCase) -> None:
    assume(TOPK_TAKES_NO_ROWS or 0 not in case.router.shape)
    weights, indices = case.emulate()
    largest = np.abs(weights).max(initial=0.0)
    assume(np.isfinite(weights).all() and largest < 1e3)
    model = ir.from_proto(op_model("SharedGateRouter", case.feeds, case.attributes))
    assert attach_functions(model) == 1
    got = run_session(cpu_session(model, with_library=False), case.feeds)
    np.testing.assert_array_equal(got["indices"], indices)
    np.testing.assert_allclose(got["weights"], weights, rtol=0, atol=RTOL * max(largest, 1e-30))


def test_group_mask_of_an_unknown_number_of_experts() -> None:
    attributes = FUSED_ROUTER.complete({"k": 2, "score": "sigmoid", "num_groups": 4, "topk_groups": 2})
    case = RouterCase(attributes, (3, 8))
    model = ir.from_proto(case_model(case))
    model.graph.inputs[0].shape = ir.Shape([3, "E"])
    attach_functions(model)
    session = cpu_session(model, with_library=False)
    weights, indices = case.emulate()
    body_weights, body_indices = run_router(session, case.logits)
    np.testing.assert_array_equal(body_indices, indices)
    np.testing.assert_allclose(body_weights, weights, rtol=RTOL)


def test_bodies_are_dropped_with_the_last_node_that_has_them() -> None:
    """Nodes in other functions have them, too, and the domain has operators without a body."""
    model = ir.from_proto(
        onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["" : 20, "ort_moe" : 1, "own" : 1]>
        g (float[T, 4] x) => (float[T, 4] y, float[T, 4] z) { y = own.router (x)  z = ort_moe.PermuteTokens (x) }
        <domain: "own", opset_import: ["ort_moe" : 1]>
        router (x) => (y) { y = ort_moe.FusedRouter (x) }
        <domain: "ort_moe", opset_import: ["" : 20]>
        FusedRouter (x) => (y) { y = Identity (x) }
        <domain: "ort_moe", opset_import: ["" : 20]>
        FusedExperts (x) => (y) { y = Identity (x) }
        """)
    )
    drop_unread_functions(model)
    assert sorted(key[1] for key in model.functions) == ["FusedRouter", "router"]
    assert model.graph.opset_imports["ort_moe"] == 1
    model.graph.outputs.pop()
    model.graph.remove(model.graph[1])
    drop_unread_functions(model)
    assert "ort_moe" not in model.graph.opset_imports

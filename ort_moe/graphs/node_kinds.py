"""Which nodes hold routers and experts: ours, those with their inputs by name, and ONNX Runtime's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ort_moe.ops import DOMAIN, FUSED_EXPERTS, FUSED_ROUTER, SHARED_GATE_ROUTER

if TYPE_CHECKING:
    import onnx_ir as ir

CONTRIB = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""

CONTRIB_MOE = ("MoE", "QMoE")
"""Those that hold a router and its experts."""


def is_router(node: ir.Node | None) -> bool:
    """Whether the node is a FusedRouter."""
    return node is not None and node.domain == DOMAIN and node.op_type == FUSED_ROUTER.name


def is_shared_gate_router(node: ir.Node | None) -> bool:
    """Whether the node is a SharedGateRouter."""
    return node is not None and node.domain == DOMAIN and node.op_type == SHARED_GATE_ROUTER.name


def is_experts(node: ir.Node | None) -> bool:
    """Whether the node is a FusedExperts."""
    return node is not None and node.domain == DOMAIN and node.op_type == FUSED_EXPERTS.name


def experts_inputs(node: ir.Node) -> dict[str, ir.Value]:
    """The inputs that a FusedExperts has, in order, by their names in the op table."""
    named = zip(FUSED_EXPERTS.inputs, node.inputs, strict=False)
    return {tensor.name: value for tensor, value in named if value is not None}


def is_contrib_moe(node: ir.Node | None) -> bool:
    """Whether the node is a contrib op that holds a router and its experts."""
    return node is not None and node.domain == CONTRIB and node.op_type in CONTRIB_MOE

"""Bring a graph into the one form that the rules know, with onnx_ir's passes alone.

Constants become initializers, types and shapes are inferred where the file lacks them, and identities, repeated
and unused nodes go.
"""

from __future__ import annotations

import logging

import onnx_ir as ir
from onnx_ir.passes import common

_INFERENCE_LOGGER = logging.getLogger("onnx_ir.passes.common.shape_inference")


def canonicalize(model: ir.Model) -> tuple[bool, str | None]:
    """Canonicalise in place.

    Returns:
        Whether constants were lifted or nodes removed, and what shape inference complained of, if it failed.
    """
    _spell_standard_domain(model)
    for node in model.graph:
        if not node.name:  # findings and the report speak of nodes by name
            node.name = f"{node.op_type}_{node.outputs[0].name}"
    lift = common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)
    modified = lift(model).modified
    complaint = infer_shapes(model) if _lacks_types(model.graph) else None
    return clean_up(model) or modified, complaint


def _spell_standard_domain(model: ir.Model) -> None:
    """Spell the standard domain as the empty string, its other name."""
    imports = model.graph.opset_imports
    if "ai.onnx" in imports:
        version = imports.pop("ai.onnx")
        imports.setdefault("", version)
    for node in model.graph.all_nodes():
        if node.domain == "ai.onnx":
            node.domain = ""


def clean_up(model: ir.Model) -> bool:
    """Sort, then drop identities, repeated and unused nodes; True if that changed more than the order."""
    # Rules with several outputs insert nodes behind their first consumers, and the unused pass needs the order. Unused
    # nodes go first: a repeated expression takes the name of its first copy, which must be one that is in use.
    model.graph.sort()
    modified = False
    for graph_pass in (
        common.RemoveUnusedNodesPass(),
        common.IdentityEliminationPass(),
        common.CommonSubexpressionEliminationPass(),
    ):
        modified = graph_pass(model).modified or modified
    return modified


def infer_shapes(model: ir.Model) -> str | None:
    """Infer types and shapes in place; return the complaint where inference failed and left the model as it was."""
    # The pass logs the exception with its traceback and goes on: keep both from the user, and tell the cause instead.
    complaints: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info:
            complaints.append(" ".join(str(record.exc_info[1]).split()))
        return False

    _INFERENCE_LOGGER.addFilter(keep)
    try:
        common.ShapeInferencePass(check_type=False, strict_mode=False)(model)
    finally:
        _INFERENCE_LOGGER.removeFilter(keep)
    return complaints[0] if complaints else None


def _lacks_types(graph: ir.Graph) -> bool:
    """Whether some value that is read has no type or shape yet."""
    return any(
        output.uses() and (output.dtype is None or output.shape is None) for node in graph for output in node.outputs
    )

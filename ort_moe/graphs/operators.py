"""Kinds of standard operators, how many nodes of each operator a model has, and attributes of unchecked nodes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "MatMulNBits", "MatMulInteger"})
"""Products of matrices: what an expert, or a linear layer, is made of."""

RESHAPING = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity"})
"""Ops that hand on their first input's elements in their order, so that the output may lie where the input does."""


def integer_attribute(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute of a node that nothing has checked; the default, too, where it is of another kind."""
    attribute = node.attributes.get(name)
    return attribute.value if attribute is not None and isinstance(attribute.value, int) else default


def count_operators(model: ir.Model) -> Counter[str]:
    """Number of nodes by operator, as `Softmax` or `com.microsoft::MoE`, in the graph and its subgraphs."""
    return Counter(
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in model.graph.all_nodes()
    )

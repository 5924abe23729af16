"""How many nodes of each operator a model has."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def count_operators(model: ir.Model) -> Counter[str]:
    """Number of nodes by operator, as `Softmax` or `com.microsoft::MoE`, in the graph and its subgraphs."""
    return Counter(
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in model.graph.all_nodes()
    )

"""How many tokens fit into memory, where a model copies the matrices of each choice of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ort_moe.graphs.expert_weights import copied_per_choice
from ort_moe.verification.sample_inputs import Shape

if TYPE_CHECKING:
    import onnx_ir as ir

MOST_COPIED = 64 << 20
"""Bytes of matrices in float32 up to which tokens are verified together; the runtime may hold them twice."""

_CHOICES = ("TopK", "ArgMax")


def copied_per_token(model: ir.Model) -> int:
    """Bytes of float32 that the layer with the largest matrices copies at a time for one token; 0: none does."""
    most = 0
    for node in model.graph.all_nodes():
        if node.op_type not in _CHOICES or node.domain:
            continue
        ids = node.outputs[-1]
        k = ids.shape[-1] if ids.shape is not None and ids.shape.rank() else _number(node)
        most = max(most, copied_per_choice(ids) * (k if isinstance(k, int) else 1))
    return most


def _number(node: ir.Node) -> int:
    """How many a TopK takes, where its output has no shape."""
    import onnx_ir as ir

    tensor = ir.convenience.get_const_tensor(node.inputs[1]) if node.op_type == "TopK" and node.inputs[1] else None
    return 1 if tensor is None else int(tensor.numpy().reshape(-1)[0])


def fitting(shapes: Sequence[Shape], per_token: int) -> list[Shape]:
    """The shapes with as many tokens as may be copied for at a time; none gets less than one for each sequence."""
    if not per_token:
        return list(shapes)
    most = max(1, MOST_COPIED // per_token)
    fewer = [
        replace(s, tokens=max(1 if s.tokens == 1 or s.batch > 1 else 2, min(s.tokens, most // s.batch))) for s in shapes
    ]
    return list(dict.fromkeys(fewer))

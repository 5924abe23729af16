"""How many tokens fit into memory, where a model copies the matrices of each choice of each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ort_moe.graphs.expert_weights import copied_per_choice
from ort_moe.graphs.node_kinds import experts_inputs, is_experts
from ort_moe.verification.packed_weights import config_of
from ort_moe.verification.sample_inputs import Shape
from ort_moe.verification.site import has_body

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


def copied_by_bodies(model: ir.Model) -> int:
    """Bytes of float32 that the function body of the widest FusedExperts copies at a time for one token.

    A body takes its choices one after another, and of each one layer's matrix and then the other's.
    """
    bodies = (node for node in model.graph.all_nodes() if is_experts(node) and has_body(node, model))
    return max((_of_a_choice(node) for node in bodies), default=0)


def _of_a_choice(node: ir.Node) -> int:
    """Bytes of float32 of the larger of an expert's two matrices; 0 where their sizes are not known."""
    shapes = [experts_inputs(node)[f"{layer}_weights"].shape for layer in ("fc1", "fc2")]
    sizes = [[n for n in shape[1:] if isinstance(n, int)] for shape in shapes if shape is not None]
    if any(len(size) != 2 for size in sizes):
        return 0
    return 4 * (2 if config_of(node).nibbles else 1) * max(map(prod, sizes), default=0)


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

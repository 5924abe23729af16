"""Take apart the contrib nodes that ONNX Runtime's optimizer makes of a router's linear layer and what is next to it.

    FusedGemm(a, b, c, activation) -> activation(Gemm(a, b, c))
    FusedMatMul(a, b, alpha, transB) -> MatMul(a, Transpose(b)) * alpha

Only those in front of a choice: ONNX Runtime would make the others again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

import numpy as np
import onnx_ir as ir

from ort_moe.graphs.node_kinds import CONTRIB
from ort_moe.rewrites.names import Names
from ort_moe.rewrites.values import integer, is_op

_ACTIVATIONS = ("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh")
"""Those without parameters."""
_MATRIX_PRODUCTS = ("MatMul", "Gemm")
_LOOK_BEHIND = 64


def split_fused_layers(model: ir.Model, op_types: Collection[str]) -> int:
    """Take apart, in place, the fused layers that a standard node of these types follows; the number taken apart."""
    fused = {
        node: None
        for choice in model.graph.all_nodes()
        if is_op(choice, *op_types)
        for node in _behind(choice)
        if node.domain == CONTRIB
    }
    names = Names(model.graph) if fused else None
    split = 0
    for node in fused:
        assert names is not None
        if node.op_type == "FusedGemm":
            split += _split_gemm(node, names)
        elif node.op_type == "FusedMatMul":
            split += _split_matmul(node, names)
    return split


def _behind(choice: ir.Node) -> Iterator[ir.Node]:
    """The nodes that make what a choice is made among, up to the linear layer, nearest first."""
    queue, seen = deque([choice.inputs[0]]), {choice.inputs[0]}
    while queue and len(seen) <= _LOOK_BEHIND:
        value = queue.popleft()
        node = None if value is None else value.producer()
        if node is None:
            continue
        yield node
        if node.domain == "" and node.op_type not in _MATRIX_PRODUCTS:
            fresh = [source for source in node.inputs if source not in seen]
            seen.update(fresh)
            queue.extend(fresh)


def _split_gemm(node: ir.Node, names: Names) -> bool:
    activation = node.attributes.get_string("activation", "")
    if activation not in _ACTIVATIONS:
        return False
    attributes = [value for name, value in node.attributes.items() if not name.startswith("activation")]
    gemm = ir.Node("", "Gemm", node.inputs, attributes, name=f"{node.name}_gemm")
    _replace(node, [gemm, ir.node(activation, gemm.outputs, name=node.name)], names)
    return True


def _split_matmul(node: ir.Node, names: Names) -> bool:
    """Where only a constant matrix is transposed, of a known type."""
    b, alpha = node.inputs[1], node.attributes.get_float("alpha", 1.0)
    if b is None or b.shape is None or len(b.shape) != 2 or b.dtype is None:
        return False
    if any(integer(node, name, 0) for name in ("transA", "transBatchA", "transBatchB")):
        return False
    new: list[ir.Node] = []
    dtype = b.dtype.numpy()
    if integer(node, "transB", 0):
        new.append(ir.node("Transpose", [b], {"perm": [1, 0]}, name=f"{node.name}_transpose"))
        b = new[0].outputs[0]
    new.append(ir.node("MatMul", [node.inputs[0], b], name=f"{node.name}_matmul"))
    if alpha != 1.0:
        graph, name = node.graph, names.unused(f"{node.name}_alpha")
        assert graph is not None
        tensor = ir.tensor(np.array(alpha, np.float32).astype(dtype), name=name)
        factor = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=ir.Shape([]))
        graph.register_initializer(factor)
        new.append(ir.node("Mul", [new[-1].outputs[0], factor], name=node.name))
    _replace(node, new, names)
    return True


def _replace(node: ir.Node, new: list[ir.Node], names: Names) -> None:
    assert node.graph is not None
    for value in (value for each in new for value in each.outputs):
        value.name = names.unused("val")
    ir.convenience.replace_nodes_and_values(node.graph, node, [node], new, node.outputs[:1], new[-1].outputs)

"""Infer types and shapes where a model lacks them, by ONNX's own inference.

It takes a serialised model: a copy is written that holds the nodes, the types that are known, and the values of small
constants alone, and only what was lacking is read back from the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import onnx_ir as ir

from ort_moe.graphs.node_kinds import CONTRIB

if TYPE_CHECKING:
    import onnx

_SHAPED_LIKE_INPUT = {
    ("", "SimplifiedLayerNormalization"),
    *(
        (CONTRIB, op_type)
        for op_type in (
            "BiasGelu", "BiasSoftmax", "FastGelu", "Gelu", "QuickGelu", "RotaryEmbedding", "SkipLayerNormalization",
            "SkipSimplifiedLayerNormalization",
        )
    ),
}  # fmt: skip
"""Operators of ONNX Runtime alone whose first output has the type and shape of their first input."""

_FOLLOWS_SHAPES = 15
"""Oldest standard operator set whose inference follows what Shape returns; otherwise 13 and 14 are inferred alike."""

_SMALL = 1024
"""Bytes up to which the values of a constant are told: they may be a shape, axes, or the like."""


def lacks_types(graph: ir.Graph) -> bool:
    """Whether some value that is read has no type or shape yet, or a dimension without a length and a name."""
    return any(output.uses() and not _is_known(output) for node in graph.all_nodes() for output in node.outputs)


def infer_shapes(model: ir.Model) -> str | None:
    """Infer types and shapes in place; return the complaint where inference failed and left the model as it was."""
    import onnx

    try:
        proto = onnx.ModelProto()
        proto.ir_version = model.ir_version
        for domain, version in model.graph.opset_imports.items():
            least = 0 if domain else _FOLLOWS_SHAPES
            proto.opset_import.add(domain=domain, version=max(version, least))
        proto.functions.extend(ir.to_proto(function) for function in model.functions.values())
        _write_graph(model.graph, proto.graph)
        inferred = onnx.shape_inference.infer_shapes(proto, check_type=False, strict_mode=False, data_prop=True)
    except Exception as error:  # of many kinds, from either side
        return " ".join(str(error).split())
    _read_graph(model.graph, inferred.graph)
    return None


def _write_graph(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    proto.name = graph.name or "graph"
    for value in graph.inputs:
        _write_value(value, proto.input.add())
    for value in graph.outputs:
        _write_value(value, proto.output.add())
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is None or value.is_graph_input():
            continue
        if tensor.nbytes <= _SMALL and tensor.dtype != ir.DataType.STRING:
            initializer = proto.initializer.add()
            ir.serde.serialize_tensor_into(initializer, tensor)
            initializer.name = value.name or ""
        else:
            value.type, value.shape = (
                value.type or ir.TensorType(tensor.dtype),
                value.shape or ir.Shape(tensor.shape.numpy()),
            )
            _write_value(value, proto.value_info.add())
    for node in graph:
        if (node.domain, node.op_type) == (CONTRIB, "MatMulNBits") and "N" in node.attributes:
            _write_product(node, proto)
        else:
            _write_node(node, proto.node.add())
        for value in node.outputs:
            if value.type is not None and not value.is_graph_output():
                _write_value(value, proto.value_info.add())


def _write_node(node: ir.Node, proto: onnx.NodeProto) -> None:
    is_known = (node.domain, node.op_type) not in _SHAPED_LIKE_INPUT
    proto.op_type, proto.domain = (node.op_type, node.domain) if is_known else ("Identity", "")
    proto.overload = node.overload
    values = node.inputs if is_known else node.inputs[:1]
    proto.input.extend("" if value is None else value.name or "" for value in values)
    proto.output.extend(value.name or "" for value in (node.outputs if is_known else node.outputs[:1]))
    for name, attribute in node.attributes.items() if is_known else ():
        if attribute.type == ir.AttributeType.GRAPH:
            _write_graph(attribute.as_graph(), proto.attribute.add(name=name, type=attribute.type).g)
        else:
            ir.serde.serialize_attribute_into(proto.attribute.add(), attribute)


def _write_product(node: ir.Node, proto: onnx.GraphProto) -> None:
    """MatMulNBits of rows with codes, as the product with the matrix (K, N) that they stand for."""
    rows, scales = node.inputs[0], node.inputs[2]
    size = [node.attributes.get_int(name) for name in ("K", "N")]
    matrix = ir.Value(
        name=f"{node.outputs[0].name}.matrix", shape=ir.Shape(size), type=None if scales is None else scales.type
    )
    _write_value(matrix, proto.value_info.add())
    product = proto.node.add(op_type="MatMul")
    product.input.extend(["" if rows is None else rows.name or "", matrix.name or ""])
    product.output.append(node.outputs[0].name or "")


def _write_value(value: ir.Value, proto: onnx.ValueInfoProto) -> None:
    proto.name = value.name or ""
    if value.type is not None:
        ir.serde.serialize_type_into(proto.type, value.type)
        if value.shape is not None:
            ir.serde.serialize_shape_into(proto.type, value.shape)


def _read_graph(graph: ir.Graph, proto: onnx.GraphProto) -> None:
    lacking = {value.name: value for node in graph for value in node.outputs if not _is_known(value)}
    for told in _values(proto) if lacking else ():
        value = lacking.get(told.name)
        if value is None:
            continue
        value.type = value.type or ir.serde.deserialize_type_proto_for_type(told.type)
        shape = ir.serde.deserialize_type_proto_for_shape(told.type)
        value.shape = value.shape if shape is None else shape
    for node, node_proto in zip(graph, proto.node, strict=True):
        for attribute in node_proto.attribute:
            if attribute.type == ir.AttributeType.GRAPH:
                _read_graph(node.attributes[attribute.name].as_graph(), attribute.g)


def _values(proto: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from proto.value_info
    yield from proto.output


def _is_known(value: ir.Value) -> bool:
    return value.dtype is not None and value.shape is not None and not any(map(_is_unknown, value.shape))


def _is_unknown(length: int | ir.SymbolicDim) -> bool:
    return isinstance(length, ir.SymbolicDim) and length.value is None

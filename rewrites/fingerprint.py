"""Tell whether a graph still computes the same expression, however its nodes are named and ordered."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import onnx_ir as ir

_SMALL = 64
"""Elements up to which a constant is compared by its content; a larger one by its name."""


def fingerprint(graph: ir.Graph) -> bytes:
    """A digest of the expressions that the graph's outputs stand for; the nodes must be sorted."""
    return _digest_graph(graph, {None: b"none"})


def _digest_graph(graph: ir.Graph, digests: dict[ir.Value | None, bytes]) -> bytes:
    """The digest of a graph or a body, and in `digests` those of its values; those around a body must be there."""

    def digest(value: ir.Value | None) -> bytes:
        if value not in digests:
            assert value is not None
            digests[value] = _leaf(value)
        return digests[value]

    for node in graph:
        attributes = [(name, _describe(node.attributes[name], digests)) for name in sorted(node.attributes)]
        head = repr((node.domain, node.op_type, attributes)).encode()
        own = _hash((head, *(digest(value) for value in node.inputs)))
        for index, output in enumerate(node.outputs):
            digests[output] = _hash((own, str(index).encode()))
    return _hash(part for value in graph.outputs for part in ((value.name or "").encode(), digest(value)))


def _leaf(value: ir.Value) -> bytes:
    tensor = value.const_value
    if tensor is None or value.is_graph_input() or not _is_small(tensor):
        return _hash((b"named", (value.name or "").encode()))
    return _hash((b"constant", repr((tensor.dtype, tuple(tensor.shape))).encode(), tensor.tobytes()))


def _describe(attribute: ir.Attr, digests: dict[ir.Value | None, bytes]) -> str:
    if attribute.type == ir.AttributeType.GRAPH:
        return _digest_graph(attribute.as_graph(), digests).hex()
    if attribute.type == ir.AttributeType.GRAPHS:
        return repr([_digest_graph(body, digests).hex() for body in attribute.as_graphs()])
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return hashlib.sha256(tensor.tobytes()).hexdigest() if _is_small(tensor) else str(id(tensor))
    if attribute.type == ir.AttributeType.INT:
        return repr(int(attribute.value))  # a cast's type may be a member of an enumeration
    return repr(attribute.value)


def _is_small(tensor: ir.TensorProtocol) -> bool:
    return tensor.size <= _SMALL and tensor.dtype != ir.DataType.STRING and not isinstance(tensor, ir.ExternalTensor)


def _hash(parts: Iterable[bytes]) -> bytes:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(4, "little"))
        total.update(part)
    return total.digest()

"""The nodes around a router as text: what a report of a router that was not fused whole must hold, and no weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import onnx_ir as ir

from ort_moe.rewrites.values import constant, is_op, rank

_MOST_NODES = 48
"""Nodes shown; the largest router seen, with a group mask, has 30."""
_INLINE = 8
"""Elements up to which a constant is written out."""
_BARRIERS = frozenset({"MatMul", "Gemm", "Einsum", "MatMulNBits", "MatMulInteger", "Conv", "ReduceMean"})
"""Ops behind which another part of the model begins: they are shown, and what is beyond them is not."""


def surroundings(node: ir.Node) -> tuple[str, ...]:
    """The nodes next to this one up to the next matrix products, each a line in the manner of ONNX's text form.

    Small constants are written out, all others by type and name.
    """
    found = _near(node)
    return tuple(_line(each) for each in _in_order(found))


def _near(node: ir.Node) -> list[ir.Node]:
    """The nodes around this one, nearest first."""
    found, queue = {node: None}, deque([node])
    while queue and len(found) < _MOST_NODES:
        current = queue.popleft()
        if current is not node and _is_barrier(current):
            continue
        for neighbour in _neighbours(current):
            if neighbour not in found and len(found) < _MOST_NODES:
                found[neighbour] = None
                queue.append(neighbour)
    return list(found)


def _is_barrier(node: ir.Node) -> bool:
    if node.op_type in _BARRIERS or node.op_type.endswith("Normalization"):
        return True
    return is_op(node, "Gather", "GatherND") and (rank(node.inputs[0]) or 0) >= 3


def _neighbours(node: ir.Node) -> Iterator[ir.Node]:
    for value in node.inputs:
        producer = None if value is None else value.producer()
        if producer is not None and producer.graph is node.graph and constant(value, _INLINE) is None:
            yield producer
    for value in node.outputs:
        yield from (user for user, _ in value.uses() if user.graph is node.graph)


def _in_order(nodes: list[ir.Node]) -> list[ir.Node]:
    """The nodes, each behind those that make its inputs."""
    ordered: dict[ir.Node, None] = {}
    wanted = set(nodes)

    def visit(node: ir.Node) -> None:
        if node in ordered or node not in wanted:
            return
        wanted.discard(node)
        for value in node.inputs:
            if value is not None and (producer := value.producer()) is not None:
                visit(producer)
        ordered[node] = None

    for node in nodes:
        visit(node)
    return list(ordered)


def _line(node: ir.Node) -> str:
    outputs = ", ".join(_typed(value) for value in node.outputs)
    inputs = ", ".join("" if value is None else _operand(value) for value in node.inputs)
    attributes = ", ".join(f"{a.name} = {_attribute(a)}" for a in node.attributes.values())
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"[{node.name}] {outputs} = {operator} {f'<{attributes}> ' if attributes else ''}({inputs})"


def _operand(value: ir.Value) -> str:
    array = constant(value, _INLINE)
    if array is not None:
        return f"{_type(value)} {{{', '.join(map(str, array.reshape(-1).tolist()))}}}"
    return _typed(value) if value.producer() is None else value.name or ""


def _typed(value: ir.Value) -> str:
    return f"{_type(value)} {value.name}".strip()


def _type(value: ir.Value) -> str:
    dtype = "" if value.dtype is None else value.dtype.name.lower()
    if value.shape is None:
        return dtype
    return f"{dtype}[{', '.join('?' if str(size) == 'None' else str(size) for size in value.shape)}]"


def _attribute(attribute: ir.Attr) -> str:
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return "..."
    if attribute.type == ir.AttributeType.TENSOR:
        tensor = attribute.as_tensor()
        return str(tensor.numpy().tolist()) if tensor.size <= _INLINE else f"{tensor.dtype.name.lower()}{tensor.shape}"
    return str(list(attribute.value) if isinstance(attribute.value, tuple) else attribute.value)

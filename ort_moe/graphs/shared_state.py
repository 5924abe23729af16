"""State that a decode graph carries from step to step: pairs of an input and an output, and which may share memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from ort_moe.graphs.operators import RESHAPING

if TYPE_CHECKING:
    import onnx_ir as ir

_MAY_DO_NOTHING = {"Cast", "CastLike", "Dropout", "Expand", "Pad", "Slice", "Tile", "Transpose"}
_MAY_DO_NOTHING_WITH_A_CONSTANT = {"Add", "Div", "Mul", "Pow", "Sub"}
_DO_NOTHING_ALONE = {"Concat", "Max", "Mean", "Min", "Sum"}
"""Nodes that change nothing, such as a Cast to the same type, ONNX Runtime leaves out: then their readers read their
input. Which they are depends on types, shapes and constants; all are taken for such."""

_ELEMENT_BY_ELEMENT = {
    *("Abs", "Add", "And", "Clip", "Div", "Exp", "Mod", "Mul", "Neg", "Not", "Or", "Pow", "Relu"),
    *("Sigmoid", "Sub", "Tanh", "Where", "Xor"),
}
"""Each element of the output follows from the inputs' at its place, so that it may be written over them.

Not those of any number of inputs, whose first result is written before the last input is read.
"""

_INTO_FIRST_INPUT = {"ScatterElements", "ScatterND", "TensorScatter"}
"""They write some elements; the others they copy from their first input, if it lies elsewhere."""

_SHARING_ATTENTION = {"DecoderMaskedMultiHeadAttention", "GroupQueryAttention"}
"""Operators of com.microsoft whose past and present may share a buffer."""


def pairs_by_name(inputs: Collection[str], outputs: Collection[str]) -> dict[str, str]:
    """Inputs `past...` and the outputs `present...` of the same name, such as `past_key_values.0.key` and
    `present.0.key`.
    """
    pairs = {}
    for name in inputs:
        rest = name.removeprefix("past")
        candidates = (f"present{rest}", f"present{rest.removeprefix('_key_values')}")
        if rest != name and (found := next((c for c in candidates if c in outputs), None)) is not None:
            pairs[name] = found
    return pairs


def fixed_state(model: ir.Model) -> dict[str, str]:
    """The pairs by name of which both are of one type and one fixed shape, as what is carried from step to step is."""
    inputs, outputs = ({value.name or "": value for value in of} for of in (model.graph.inputs, model.graph.outputs))
    return {
        past: present
        for past, present in pairs_by_name(inputs, outputs).items()
        if inputs[past].dtype == outputs[present].dtype
        and (shape := inputs[past].shape) is not None
        and shape.is_static()
        and shape == outputs[present].shape
    }


def cache_lengths(model: ir.Model) -> dict[str, int]:
    """Tokens that key-value caches hold, by input: of the fixed state, what is (batch, heads, tokens, head size)."""
    shapes = {value.name or "": value.shape for value in model.graph.inputs}
    of_state = {past: shape for past in fixed_state(model) if (shape := shapes[past]) is not None}
    return {past: shape.numpy()[2] for past, shape in of_state.items() if shape.rank() == 4}


def copied_state(model: ir.Model | None, state: Mapping[str, str]) -> dict[str, str]:
    """Of state, output by input, what cannot share a buffer: why not, in words, by input.

    Args:
        model: Whose state it is; None: it cannot be read, and nothing shares a buffer.
        state: What an output hands to an input.
    """
    found = {}
    for past, present in state.items():
        why = "the model's file cannot be read" if model is None else cannot_share(model, past, present)
        if why is not None:
            found[past] = why
    return found


def cannot_share(model: ir.Model, past: str, present: str) -> str | None:
    """Why an input and an output may not share a buffer, in words; None where they may.

    They may where nothing reads the input after the output is written, in whatever order nodes run: where every node
    that reads the input comes before the one that writes the output, or is that one and puts each element at its place.
    """
    graph = model.graph
    before = next((value for value in graph.inputs if value.name == past), None)
    after = next((value for value in graph.outputs if value.name == present), None)
    if before is None or after is None:
        return "the model's file does not have them"
    if after.producer() is None:
        return None if after is before else f"'{present}' is not computed"
    for writer in _writers(after):
        if (why := _too_late(before, writer, model, past, present)) is not None:
            return why
    return None


def _too_late(before: ir.Value, writer: ir.Node, model: ir.Model, past: str, present: str) -> str | None:
    """`cannot_share` where one node writes the output."""
    graph = model.graph
    others = []
    for reader, position in _readers(before, graph, writer):
        if reader is not writer:
            others.append(reader)
        elif not _in_place(writer, position):
            return f"{_told(writer)} does not compute '{present}' in place"
    earlier = _ancestors(writer) if others else set()
    for reader in others:
        if reader not in earlier or reader.op_identifier() in model.functions:  # of which any part may run late
            return f"{_told(reader)} may read '{past}' after '{present}' is written"
    return None


def _may_vanish(node: ir.Node, position: int) -> bool:
    """Whether what a node makes of an input may be that input itself, where it lies."""
    if node.domain not in ("", "ai.onnx"):
        return False
    others = [value for n, value in enumerate(node.inputs) if n != position]
    return (
        (node.op_type in RESHAPING | _MAY_DO_NOTHING and position == 0)
        or (node.op_type in _MAY_DO_NOTHING_WITH_A_CONSTANT and all(map(_is_constant, others)))
        or (node.op_type in _DO_NOTHING_ALONE and not others)
    )


def _is_constant(value: ir.Value | None) -> bool:
    if value is None:
        return True
    producer = value.producer()
    return value.is_initializer() or (producer is not None and producer.op_type in ("Constant", "ConstantOfShape"))


def _writers(value: ir.Value) -> Iterator[ir.Node]:
    """The nodes that may write a value: its producer, and those before it where it may do nothing."""
    writer = value.producer()
    if writer is None:
        return
    if writer.op_type not in RESHAPING:
        yield writer
    for position, operand in enumerate(writer.inputs):
        if operand is not None and _may_vanish(writer, position):
            yield from _writers(operand)


def _in_place(node: ir.Node, position: int) -> bool:
    if node.domain == "com.microsoft":
        return node.op_type in _SHARING_ATTENTION
    if node.domain not in ("", "ai.onnx"):
        return False
    return node.op_type in _ELEMENT_BY_ELEMENT or (node.op_type in _INTO_FIRST_INPUT and position == 0)


def _readers(value: ir.Value, graph: ir.Graph, writer: ir.Node) -> Iterator[tuple[ir.Node, int]]:
    """The nodes of the graph that read a value and at which input, also in subgraphs and behind what may do nothing.

    Not behind `writer`: what it makes is the output.
    """
    stack = [value]
    while stack:
        for use in stack.pop().uses():
            if use.node.graph is not graph:
                yield _owner(use.node, graph), -1
                continue
            if use.node is not writer and _may_vanish(use.node, use.idx):
                stack.append(use.node.outputs[0])
            yield use.node, use.idx


def _owner(inner: ir.Node, graph: ir.Graph) -> ir.Node:
    """The node of the graph in whose subgraphs a node is."""
    for node in graph:
        if any(inner is other for attribute in node.attributes.values() for other in _inside(attribute)):
            return node
    return inner


def _ancestors(node: ir.Node) -> set[ir.Node]:
    """All nodes that run before a node, in whatever order."""
    found: set[ir.Node] = set()
    stack = [node]
    while stack:
        top = stack.pop()
        inner = [user for attribute in top.attributes.values() for user in _inside(attribute)]
        for value in [v for n in (top, *inner) for v in n.inputs]:
            producer = None if value is None else value.producer()
            if producer is not None and producer not in found:
                found.add(producer)
                stack.append(producer)
    return found


def _inside(attribute: ir.Attr) -> Iterator[ir.Node]:
    import onnx_ir as ir

    if attribute.type == ir.AttributeType.GRAPH:
        yield from attribute.as_graph().all_nodes()
    elif attribute.type == ir.AttributeType.GRAPHS:
        for graph in attribute.as_graphs():
            yield from graph.all_nodes()


def _told(node: ir.Node) -> str:
    return f"{node.op_type} '{node.name}'"

"""The FusedExperts node: built in the place of a block that was read, under the names that were there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from ort_moe.files.streamed_tensor import StreamedTensor
from ort_moe.graphs.node_kinds import is_experts
from ort_moe.ops import DOMAIN, FUSED_EXPERTS, VERSION, AttributeValue
from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.rewrites.experts.block import ExpertsBlock
from ort_moe.rewrites.experts.constants import Constant, require_unread
from ort_moe.rewrites.names import Names, new_constant, take_over
from ort_moe.rewrites.router_node import is_router
from ort_moe.rewrites.rule import Refusal, reader_name
from ort_moe.rewrites.tidy import discard
from ort_moe.rewrites.values import INDICES, consumers, dim, is_op, label, rank, through_casts

FORM = f"{DOMAIN}.form"
"""Key in a node's `metadata_props`: the rule that made it. It stays in the optimised model."""


def require_alone(block: ExpertsBlock) -> None:
    """Refuse where another node reads a value of the block.

    Raises:
        Refusal: One does.
    """
    dying = _dying([block])
    for product in (*block.fc1.products, *block.fc2.products):
        if product not in dying:
            readers = _outsiders(product, dying, block)
            told = ", ".join(map(reader_name, readers))
            raise Refusal(f"what {label(product)} makes is also read by {told}", "read-by-others", readers)


def require_own_weights(block: ExpertsBlock, blocks: Sequence[ExpertsBlock]) -> None:
    """Refuse where weights would have to be copied that anything but these blocks reads as they are.

    Args:
        block: One of them.
        blocks: All of which one copy will do.

    Raises:
        Refusal: Something does.
    """
    parts = [part for layer in (block.fc1, block.fc2) for part in layer.weights.parts.values()]
    copied = [part for part in parts if part.value is None]
    dying = _dying(blocks) if copied else set()
    for data in copied:
        require_unread(data.values, dying)


def require_valid(block: ExpertsBlock) -> None:
    """Refuse attributes that FusedExperts has not, such as a slope that is no number, and mixed types.

    Raises:
        Refusal: It has not.
    """
    if not _is_aligned(block) and (rank(block.y) != 2 or block.residual is not None):
        raise Refusal(f"the rows '{block.x.name}' and '{block.y.name}' have other axes", "experts-form")
    types = {block.x.dtype, block.y.dtype}
    for stack in (block.fc1.weights, block.fc1.bias, block.fc2.weights, block.fc2.bias):
        types.update(() if stack is None else (stack.dtype,))
    if len(types) > 1:
        raise Refusal(f"rows, weights and biases are of types {', '.join(sorted(map(str, types)))}", "experts-form")
    try:
        ExpertsConfig.from_attributes(_complete(block))
    except ValueError as error:
        raise Refusal(str(error), "experts-activation") from None


def _complete(block: ExpertsBlock) -> dict[str, AttributeValue]:
    return FUSED_EXPERTS.complete({"weight_format": "dense", "block_size": 0, **block.attributes})


def replace(block: ExpertsBlock, form: str, names: Names, copies: dict[Constant, ir.Value]) -> ir.Node:
    """Put a FusedExperts in the place of the block, in its graph.

    Args:
        block: Of which nothing is read elsewhere.
        form: Name of the rule that read it.
        names: Of the model.
        copies: The initializers that were made for blocks before, and are for this one.
    """
    ending = block.y.producer()
    assert ending is not None
    assert isinstance(ending.graph, ir.Graph)
    graph = ending.graph
    writer = Writer(graph, ending, names)
    x = block.x
    weights = writer.cast(block.weights, ir.DataType.FLOAT)
    indices = writer.cast(block.indices, ir.DataType.INT32)
    if not _is_aligned(block):
        k = dim(block.indices, -1)
        assert k is not None
        x = writer.rows(x, block.fc1.weights.depth)
        weights, indices = writer.rows(weights, k), writer.rows(indices, k)
    given = {"x": x, "weights": weights, "indices": indices}
    if block.residual is not None:
        given["residual"] = block.residual
    for name, layer in (("fc1", block.fc1), ("fc2", block.fc2)):
        for part, data in layer.weights.parts.items():
            given[f"{name}_{part}"] = _initializer(graph, data, names, copies)
        if layer.bias is not None:
            given[f"{name}_bias"] = _initializer(graph, layer.bias.data, names, copies)
    attributes = _complete(block)
    inputs = [given.get(tensor.name) for tensor in FUSED_EXPERTS.inputs]
    while inputs[-1] is None:
        inputs.pop()
    node = ir.node(
        FUSED_EXPERTS.name, inputs, dict(attributes), domain=DOMAIN, version=VERSION, name=ending.name or None
    )
    node.metadata_props[FORM] = form
    graph.insert_before(ending, node)
    y, old = node.outputs[0], block.y
    y.type, y.shape = old.type, old.shape
    if rank(x) == rank(old) and x.shape is not None and old.shape is not None:
        y.shape = ir.Shape([*x.shape[:-1], old.shape[-1]])  # a sum over choices does not tell the number of tokens
    take_over(old, y)
    casts = [_cast_names(value) for value in (block.weights, block.indices)]
    discard(ending)
    for value, taken in zip((block.weights, block.indices), casts, strict=True):
        _take_name(value, taken)
    return node


def _is_aligned(block: ExpertsBlock) -> bool:
    """Whether rows, weights, indices and results have their tokens in the same axes."""
    values = (block.x, block.weights, block.indices, block.y, block.residual or block.y)
    return len({rank(value) for value in values}) == 1


class Writer:
    """Inserts what a FusedExperts needs in front of it."""

    def __init__(self, graph: ir.Graph, before: ir.Node, names: Names) -> None:
        self._graph, self._before, self._names = graph, before, names

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """The value in this type."""
        if value.dtype == dtype:
            return value
        return self.insert("Cast", [value], {"to": dtype}, dtype, value.shape)

    def rows(self, value: ir.Value, width: int) -> ir.Value:
        """The value as a matrix of rows of this width."""
        if rank(value) == 2:
            return value
        shape = self.integers([-1, width], "rows_shape")
        return self.insert("Reshape", [value, shape], {}, value.dtype, ir.Shape([None, width]))

    def integers(self, numbers: list[int], base: str) -> ir.Value:
        """A new constant, named after `base`."""
        return new_constant(self._graph, self._names.unused(base), np.array(numbers, np.int64))

    def turned(self, value: ir.Value, shape: ir.Shape | None) -> ir.Value:
        """The value with its last two axes swapped."""
        axes = rank(value) or 2
        node = ir.node("Transpose", [value], {"perm": [*range(axes - 2), axes - 1, axes - 2]})
        (result,) = self.put(node)
        result.type, result.shape = value.type, shape
        return result

    def insert(
        self,
        op_type: str,
        inputs: list[ir.Value],
        attributes: dict[str, int],
        dtype: ir.DataType | None,
        shape: ir.Shape | None,
    ) -> ir.Value:
        """What a new standard operator makes, of this type and shape."""
        (result,) = self.put(ir.node(op_type, inputs, attributes))
        result.type, result.shape = None if dtype is None else ir.TensorType(dtype), shape
        return result

    def put(self, node: ir.Node, name: str = "") -> tuple[ir.Value, ...]:
        """What a new node makes, under new names; without a name of its own, it is named after that."""
        for value in node.outputs:
            value.name = self._names.unused("val")
        node.name = self._names.unused(name or f"{node.op_type}_{node.outputs[0].name}")
        self._graph.insert_before(self._before, node)
        return tuple(node.outputs)


def _initializer(graph: ir.Graph, data: Constant, names: Names, copies: dict[Constant, ir.Value]) -> ir.Value:
    """The numbers as FusedExperts takes them: as they lie, or a copy that is made when the model is written.

    It lies in the graph in which what it is made of lies, so that it can be read wherever that can.
    """
    if data.value is not None:
        return data.value
    if data in copies:
        return copies[data]
    values = data.values
    owners = {value.graph for value in values}
    graph = owner if len(owners) == 1 and isinstance(owner := owners.pop(), ir.Graph) else graph
    how = "joined" if len(values) > 1 else "transposed" if data.op == "transposed" else "rearranged"
    name, shape = names.unused(f"{values[0].name}_{how}"), ir.Shape(data.shape)
    streamed = StreamedTensor(data.numbers, data.dtype, shape, name)
    value = ir.Value(name=name, const_value=streamed, type=ir.TensorType(data.dtype), shape=shape)
    graph.register_initializer(value)
    if len(owners) <= 1:
        copies[data] = value
    return value


def _taken(block: ExpertsBlock) -> set[ir.Value | None]:
    return {block.x, block.weights, block.indices, block.residual}


def _dying(blocks: Sequence[ExpertsBlock]) -> set[ir.Node]:
    """The nodes that only serve to make what the blocks return of what they take."""
    taken = {value for block in blocks for value in _taken(block)}
    returned = {block.y for block in blocks}
    dying: set[ir.Node] = set()
    queue = deque(y.producer() for y in returned)
    while queue:
        node = queue.popleft()
        if node is None or node in dying:
            continue
        read = (value for value in node.outputs if value not in returned)
        if any(value.is_graph_output() or any(user not in dying for user in consumers(value)) for value in read):
            continue
        dying.add(node)
        queue.extend(value.producer() for value in node.inputs if value is not None and value not in taken)
    return dying


def _outsiders(product: ir.Node, dying: set[ir.Node], block: ExpertsBlock) -> list[ir.Node | ir.Value]:
    """What reads a value between a product and the end, and does not serve to make the end of what the block takes."""
    taken, y = _taken(block), block.y
    serving: set[ir.Node] = set()
    queue = deque([y.producer()])
    while queue:
        node = queue.popleft()
        if node is not None and node not in serving:
            serving.add(node)
            queue.extend(value.producer() for value in node.inputs if value is not None and value not in taken)
    found: dict[ir.Node | ir.Value, None] = {}
    ahead, seen = deque([product]), {product}
    while ahead:
        for value in ahead.popleft().outputs:
            if value is y:
                continue
            if value.is_graph_output():
                found[value] = None
            for user in consumers(value):
                if user not in serving:
                    found[user] = None
                elif user not in seen and user not in dying:
                    seen.add(user)
                    ahead.append(user)
    return list(found)


def read_routers(nodes: Iterable[ir.Node]) -> None:
    """Let FusedExperts read what a FusedRouter makes, where that has come to stand before casts back and forth."""
    place = FUSED_EXPERTS.input_index("indices")
    for node in nodes:
        indices = node.inputs[place]
        assert indices is not None
        source, cast = through_casts(indices, INDICES), indices.producer()
        if source is indices or source.dtype != indices.dtype or cast is None or not isinstance(node.graph, ir.Graph):
            continue
        kept = _cast_names(source)
        node.replace_input_with(place, source)
        discard(cast)
        _take_name(source, kept)


def _cast_names(value: ir.Value) -> str | None:
    """The name of what a router's output is cast to, if nothing but that is read of it."""
    if not is_router(value.producer()):
        return None
    users = [user for user in consumers(value) if not is_experts(user)]
    return users[0].outputs[0].name if len(users) == 1 and is_op(users[0], "Cast") else None


def _take_name(value: ir.Value, name: str | None) -> None:
    """Let a router's output have the name under which the original had it, if what had it is gone."""
    if name is None or value.is_graph_output() or any(not is_experts(user) for user in consumers(value)):
        return
    value.name = name

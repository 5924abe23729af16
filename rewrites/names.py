"""Names of values and nodes: new ones unlike any in a graph and its subgraphs, and old ones for what takes a place."""

from __future__ import annotations

import onnx_ir as ir

from ort_moe.rewrites.values import Array


class Names:
    """The names of values and nodes that are taken in a graph and everything in it.

    Args:
        graph: The outermost graph.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._taken: set[str | None] = set()
        self._next: dict[str, int] = {}
        for each in (graph, *graph.subgraphs()):
            self._taken.update(value.name for value in each.inputs)
            self._taken.update(each.initializers)
            self._taken.update(value.name for node in each for value in node.outputs)
            self._taken.update(node.name for node in each)  # some are named after values that have other names by now

    def unused(self, base: str) -> str:
        """`base`, or where that is taken, `base` with a number; taken from now on."""
        name, number = base, self._next.get(base, 1)
        while name in self._taken:
            name = f"{base}_{number}"
            number += 1
        self._next[base] = number
        self._taken.add(name)
        return name


def new_constant(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """A new initializer of the graph, by a name that is not taken."""
    value = ir.Value(
        name=name,
        const_value=ir.tensor(array, name=name),
        type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        shape=ir.Shape(array.shape),
    )
    graph.register_initializer(value)
    return value


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Let all that reads `old`, outputs of its graph too, read `new` by the name of `old`, which has none any more."""
    kept = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = None
    new.name = kept

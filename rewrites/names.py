"""Names for new values and nodes: unlike any in the graph, and any in its subgraphs, which see those around them."""

from __future__ import annotations

import onnx_ir as ir


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

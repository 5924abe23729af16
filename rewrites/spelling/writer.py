"""Writes the nodes of another spelling in front of the node they replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites.names import Names, new_constant
from ort_moe.rewrites.values import Array, constant


class Writer:
    """Inserts nodes before one node.

    Attributes:
        node: The node to be replaced.
        after_choice: Whether it works on what a TopK of a router has chosen.
        written: The nodes inserted, in their order.
    """

    def __init__(self, node: ir.Node, after_choice: bool, names: Names) -> None:
        self.node = node
        self.after_choice = after_choice
        self.written: list[ir.Node] = []
        self._names = names

    def op(
        self, op_type: str, *inputs: ir.Value | Array, like: ir.Value, shape: ir.Shape | None = None, **attributes: Any
    ) -> ir.Value:
        """Insert a node of one output, of the type and the shape (or the given shape) of `like`."""
        (result,) = self.ops(op_type, *inputs, like=[like], **attributes)
        result.shape = shape or result.shape
        return result

    def ops(self, op_type: str, *inputs: ir.Value | Array, like: list[ir.Value], **attributes: Any) -> list[ir.Value]:
        """Insert a node with an output for each of `like`; arrays become initializers."""
        graph = self.node.graph
        assert graph is not None
        values = [self._initializer(each) if isinstance(each, np.ndarray) else each for each in inputs]
        node = ir.node(op_type, values, attributes, num_outputs=len(like))
        for output, model in zip(node.outputs, like, strict=True):
            output.name = self._names.unused("val")
            output.type, output.shape = model.type, model.shape
        node.name = f"{self.node.name}_{node.outputs[0].name}"
        graph.insert_before(self.node, node)
        self.written.append(node)
        return list(node.outputs)

    def _initializer(self, array: Array) -> ir.Value:
        graph = self.node.graph
        assert isinstance(graph, ir.Graph)
        return new_constant(graph, self._names.unused("constant"), array)


Spelling = Callable[[ir.Node, Writer], ir.Value | list[ir.Value] | None]
"""Reads a node and returns what takes the place of its outputs (its first one, or all); None: it is spelt so already.

The docstring is the identity. It must not write before it is sure.
"""


def number(of: float, like: ir.Value) -> Array:
    """A number in the type of a value, without dimensions."""
    assert like.dtype is not None
    return np.array(of, like.dtype.numpy())


def wide(value: ir.Value | None) -> Array | None:
    """A constant's elements in float64."""
    array = constant(value)
    return None if array is None else array.astype(np.float64)

"""Large graphs of nothing but nodes, to time the rewriter with: their tensors hold a handful of numbers.

Values carry no types but for the graph's inputs and outputs, as in legacy exports: the rewriter has to infer them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

HIDDEN, K, OPSET = 4, 2, 20


class _Writer:
    """Writes nodes to a graph; a constant is an initializer, made once for each content."""

    def __init__(self) -> None:
        self.tape = ir.tape.Tape()
        self.constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}
        self.x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["T", HIDDEN]))

    def op(self, op_type: str, *inputs: Any, **attributes: Any) -> ir.Value:
        return self.tape.op(op_type, [self.value(each) for each in inputs], attributes)

    def value(self, given: Any) -> ir.Value:
        if isinstance(given, ir.Value):
            return given
        array = np.asarray(given, None if not isinstance(given, float) else np.float32)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.constants:
            name = f"constant_{len(self.constants)}"
            self.constants[key] = ir.Value(
                name=name,
                const_value=ir.tensor(array, name=name),
                type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
                shape=ir.Shape(array.shape),
            )
        return self.constants[key]

    def model(self, y: ir.Value) -> ir.Model:
        y.name, y.type, y.shape = "y", self.x.type, self.x.shape
        for number, node in enumerate(self.tape.nodes):
            node.name = f"{node.op_type}_{number}"
            for output in node.outputs:
                output.name = output.name or f"v_{number}_{output.index()}"
        graph = ir.Graph(
            [self.x], [y], nodes=self.tape.nodes, initializers=[*self.constants.values()], opset_imports={"": OPSET}
        )
        return ir.Model(graph, ir_version=10)

    def router(self, x: ir.Value, layer: int, experts: int) -> tuple[ir.Value, ir.Value]:
        """Sigmoid and bias for the choice, gathered, normalised and scaled weights: most rules have work to do."""
        gate = np.full((HIDDEN, experts), 1.0 + layer, np.float32)
        scores = self.op("Sigmoid", self.op("MatMul", x, gate))
        keys = self.op("Add", scores, np.arange(experts, dtype=np.float32))
        _, ids = self.tape.op_multi_out(
            "TopK", [keys, self.value(np.array([K]))], {"axis": -1, "sorted": 0}, num_outputs=2
        )
        raw = self.op("GatherElements", scores, ids, axis=1)
        total = self.op("ReduceSum", raw, np.array([-1]), keepdims=1)
        return self.op("Mul", self.op("Div", raw, self.op("Add", total, 1e-20)), 2.5), ids


def many_routers(routers: int, nodes: int) -> ir.Model:
    """A model of `routers` layers, each a router, gathered experts and as many other nodes as make about `nodes`."""
    writer, experts = _Writer(), 8
    x, filler = writer.x, nodes // routers - 16
    stack = np.ones((experts, HIDDEN, HIDDEN), np.float32)
    for layer in range(routers):
        weights, ids = writer.router(x, layer, experts)
        chosen = writer.op("GatherND", stack, writer.op("Unsqueeze", ids, np.array([-1])))
        outputs = writer.op("MatMul", writer.op("Unsqueeze", x, np.array([1, 2])), chosen)
        column = writer.op("Unsqueeze", weights, np.array([-1]))
        weighted = writer.op("Mul", writer.op("Squeeze", outputs, np.array([2])), column)
        x = _dense(writer, writer.op("ReduceSum", weighted, np.array([1]), keepdims=0), filler)
    return writer.model(x)


def unrolled(layers: int, experts: int) -> ir.Model:
    """A model that computes every expert for every token and masks: ten nodes an expert."""
    writer = _Writer()
    x = writer.x
    for layer in range(layers):
        weights, ids = writer.router(x, layer, experts)
        total = x
        for expert in range(experts):
            hit = writer.op("Cast", writer.op("Equal", ids, np.array(expert)), to=ir.DataType.FLOAT)
            weight = writer.op("ReduceSum", writer.op("Mul", hit, weights), np.array([-1]), keepdims=1)
            number = 1.0 + layer * experts + expert
            up = writer.op("MatMul", x, np.full((HIDDEN, HIDDEN), number, np.float32))
            activated = writer.op("Mul", up, writer.op("Sigmoid", up))
            down = writer.op("MatMul", activated, np.full((HIDDEN, HIDDEN), -number, np.float32))
            total = writer.op("Add", total, writer.op("Mul", down, weight))
        x = total
    return writer.model(x)


def dense(nodes: int) -> ir.Model:
    """A model of `nodes` nodes without any router."""
    writer = _Writer()
    return writer.model(_dense(writer, writer.x, nodes))


def _dense(writer: _Writer, x: ir.Value, nodes: int) -> ir.Value:
    """`nodes` nodes of the kinds that surround a router, the same on either side: rules are tried on most of them."""
    kinds = ("MatMul", "Sigmoid", "Mul", "Softmax", "Add", "Cast", "Div", "ReduceSum")
    gate = np.full((HIDDEN, HIDDEN), 0.5, np.float32)
    y = x
    for number in range(nodes):
        match kinds[number % len(kinds)]:
            case "MatMul":
                y = writer.op("MatMul", y, gate)
            case "Cast":
                y = writer.op("Cast", y, to=ir.DataType.FLOAT)
            case "ReduceSum":
                y = writer.op("Add", writer.op("ReduceSum", y, np.array([-1]), keepdims=1), x)
            case "Softmax" | "Sigmoid" as score:
                y = writer.op(score, y)
            case arithmetic:
                y = writer.op(arithmetic, y, float(1 + number % 7))
    return y

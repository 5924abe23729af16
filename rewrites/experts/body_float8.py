"""The portable body of a FusedExperts with weights in float8, which no standard operator can gather.

A Scan over the experts hands them out one by one, and an If unpacks and multiplies those that a token has chosen: one
expert is in memory at a time, whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir

from ort_moe.rewrites.experts.body_steps import Body


class Float8Body(Body):
    """Writes the steps of one configuration to a tape."""

    def write(self, given: Mapping[str, ir.Value]) -> ir.Value:
        # As matrices: ONNX Runtime must know how many axes there are of what a Scan returns.
        hidden = self._sizes["fc1"][1]
        x = self._op("Reshape", self._wide(given["x"]), self._ints(-1, hidden))
        weights, indices = (self._choices(given[name]) for name in ("weights", "indices"))
        nothing = self._op("ConstantOfShape", self._op("Shape", x), value=ir.tensor([0.0], ir.DataType.FLOAT))
        stacks = {name: value for name, value in given.items() if name.startswith("fc")}
        state = {"sum": ir.DataType.FLOAT, "number": ir.DataType.INT32}
        types = {"weights": ir.DataType.FLOAT8E4M3FN, "scales": ir.DataType.FLOAT, "bias": self._dtype}
        typed = {**state, **{name: types[name.partition("_")[2]] for name in stacks}}
        inputs = {name: ir.Value(name=f"own_{name}", type=ir.TensorType(dtype)) for name, dtype in typed.items()}
        with self._nested("expert") as nodes:
            outputs = self._one_expert(inputs, x, weights, indices)
        body = ir.Graph([*inputs.values()], outputs, nodes=nodes(), name="expert")
        taken = [nothing, self._ints32(0), *stacks.values()]
        attributes: dict[str, Any] = {"body": body, "num_scan_inputs": len(stacks)}
        y, _ = self.tape.op_multi_out("Scan", taken, attributes, num_outputs=2)
        y = self._op("Reshape", y, self._op("Shape", given["x"]), allowzero=1)
        if "residual" in given:
            y = self._op("Add", y, self._wide(given["residual"]))
        return self._op("Cast", y, to=self._dtype)

    def _one_expert(
        self, own: Mapping[str, ir.Value], x: ir.Value, weights: ir.Value, indices: ir.Value
    ) -> list[ir.Value]:
        """The sum with what one expert adds, and the number of the next one."""
        hit = self._op("Equal", indices, own["number"])
        hits = self._op("ReduceSum", self._op("Cast", hit, to=ir.DataType.FLOAT), keepdims=0)
        branches: dict[str, ir.Graph] = {}
        with self._nested("chosen") as nodes:
            added = self._op("Add", own["sum"], self._rows(own, x, weights, hit))
        added.type, added.shape = ir.TensorType(ir.DataType.FLOAT), self._shape
        branches["then_branch"] = ir.Graph([], [added], nodes=nodes(), name="chosen")
        with self._nested("other") as nodes:
            kept = self._op("Identity", own["sum"])
        kept.type, kept.shape = ir.TensorType(ir.DataType.FLOAT), self._shape
        branches["else_branch"] = ir.Graph([], [kept], nodes=nodes(), name="other")
        is_chosen = self._op("Greater", hits, self.tape.op("Constant", [], {"value_float": 0.0}))
        outputs = [self.tape.op("If", [is_chosen], branches), self._op("Add", own["number"], self._ints32(1))]
        outputs[0].type, outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), self._shape
        outputs[1].type, outputs[1].shape = ir.TensorType(ir.DataType.INT32), ir.Shape([1])
        return outputs

    @property
    def _shape(self) -> ir.Shape:
        """Of a row for each token."""
        return ir.Shape([None, self._sizes["fc1"][1]])

    def _choices(self, value: ir.Value) -> ir.Value:
        """(T, K) of (..., K)."""
        k = self._op("Gather", self._op("Shape", value), self._ints(-1), axis=0)
        return self._op("Reshape", value, self._op("Concat", self._ints(-1), k, axis=0))

    def _rows(self, own: Mapping[str, ir.Value], x: ir.Value, weights: ir.Value, hit: ir.Value) -> ir.Value:
        """What one expert adds to each token, (T, H)."""
        product = self._op("MatMul", x, self._matrix(own, "fc1"))
        last = self._ints(-1)
        if self._config.weight_on == "input":
            # Equal ids of a token are separate choices, of other weights.
            product = self._op(
                "Mul", self._op("Unsqueeze", product, self._ints(-2)), self._op("Unsqueeze", weights, last)
            )
        rows = self._narrow(self._activated(self._wide(self._biased(product, own, "fc1"))))
        rows = self._wide(self._biased(self._op("MatMul", self._wide(rows), self._matrix(own, "fc2")), own, "fc2"))
        # Rows that are left out are not multiplied with 0, which leaves NaN as it is.
        if self._config.weight_on == "input":
            chosen = self._op("Where", self._op("Unsqueeze", hit, last), rows, self._float(0.0))
            return self._op("ReduceSum", chosen, self._ints(-2), keepdims=0)
        share = self._op("ReduceSum", self._op("Where", hit, weights, self._float(0.0)), last, keepdims=1)
        count = self._op("ReduceSum", self._op("Cast", hit, to=ir.DataType.FLOAT), last, keepdims=1)
        is_row = self._op("Greater", count, self._float(0.0))
        return self._op("Where", is_row, self._op("Mul", rows, share), self._float(0.0))

    def _biased(self, product: ir.Value, own: Mapping[str, ir.Value], layer: str) -> ir.Value:
        bias = own.get(f"{layer}_bias")
        return self._narrow(product if bias is None else self._op("Add", product, self._wide(bias)))

    def _matrix(self, own: Mapping[str, ir.Value], layer: str) -> ir.Value:
        """One expert's weights as they are multiplied, (D, N)."""
        (rows, depth), b = self._sizes[layer], self._config.block_size
        blocks = -(-rows // b), -(-depth // b)
        scales = self._op("Unsqueeze", own[f"{layer}_scales"], self._ints(1, 3))
        scales = self._op("Expand", scales, self._ints(blocks[0], b, blocks[1], b))
        scales = self._op("Reshape", scales, self._ints(blocks[0] * b, blocks[1] * b))
        scales = self._op("Slice", scales, self._ints(0, 0), self._ints(rows, depth), self._ints(0, 1))
        weights = self._op("Cast", own[f"{layer}_weights"], to=ir.DataType.FLOAT)
        return self._op("Transpose", self._op("Mul", weights, scales), perm=[1, 0])

    @contextmanager
    def _nested(self, name: str) -> Iterator[_Nodes]:
        """Writes to a tape of its own: the nodes of a graph in the function, by names that are in no other."""
        outer, self.tape = self.tape, ir.tape.Tape()
        tape = self.tape
        try:
            yield _Nodes(tape, name)
        finally:
            self.tape = outer


class _Nodes:
    """The nodes of a nested graph, once all are written."""

    def __init__(self, tape: ir.tape.Tape, name: str) -> None:
        self._tape, self._name = tape, name

    def __call__(self) -> list[ir.Node]:
        nodes = list(self._tape.nodes)
        for place, value in enumerate(value for node in nodes for value in node.outputs):
            value.name = f"{self._name}_{place}"
        return nodes

"""The steps of a FusedExperts in standard operators, but for where its matrices come from."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.rewrites.body_writer import BodyWriter
from ort_moe.rewrites.experts.body_weights import Matrices


class Body(BodyWriter):
    """Writes the steps of one configuration to a tape.

    K stands before the last axis: (..., K, N) are the rows of a token's choices.
    """

    def __init__(
        self, config: ExpertsConfig, dtype: ir.DataType, experts: int, sizes: Mapping[str, tuple[int, int]]
    ) -> None:
        super().__init__(ir.tape.Tape())
        self._sizes = sizes
        self._config = config
        self._dtype = dtype
        self._experts = experts

    def write(self, given: Mapping[str, ir.Value]) -> ir.Value:
        config, indices = self._config, given["indices"]
        inside = self._op("And", self._not_below_zero(indices), self._op("Less", indices, self._ints32(self._experts)))
        ids = self._op("Where", inside, indices, self._ints32(0))
        on_input = config.weight_on == "input"
        weights = self._op("Unsqueeze", given["weights"], self._ints(-1)) if on_input else None
        # (..., H) -> (..., 1, H, 1), which meets (..., K, N, H).
        x = self._op("Unsqueeze", self._wide(given["x"]), self._ints(-3, -1))
        rows = self._layer("fc1", given, x, ids, weights)
        rows = self._narrow(self._activated(self._wide(rows)))
        rows = self._op("Unsqueeze", self._wide(rows), self._ints(-1))
        rows = self._wide(self._layer("fc2", given, rows, ids, None))
        # Rows that are left out are not multiplied with 0, which leaves NaN as it is. The sum is a product of matrices:
        # along an axis from the end, ONNX Runtime 1.28 and older do not reduce what is empty.
        rows = self._op("Where", self._op("Unsqueeze", inside, self._ints(-1)), rows, self._float(0.0))
        mix = self._float(1.0) if on_input else given["weights"]
        mix = self._op("Unsqueeze", self._op("Where", inside, mix, self._float(0.0)), self._ints(-2))
        y = self._op("Squeeze", self._op("MatMul", mix, rows), self._ints(-2))
        if "residual" in given:
            y = self._op("Add", y, self._wide(given["residual"]))
        return self._op("Cast", y, to=self._dtype)

    def _layer(
        self, layer: str, given: Mapping[str, ir.Value], rows: ir.Value, ids: ir.Value, weights: ir.Value | None
    ) -> ir.Value:
        """(..., K or 1, D, 1) -> (..., K, N), rounded; `weights` (..., K, 1) multiply the product if they go there."""
        bias = given.get(f"{layer}_bias")
        if self._config.weight_format == "dense":
            matrices = self._wide(self._op("Gather", given[f"{layer}_weights"], ids, axis=0))
        else:
            matrices = Matrices(self.tape, self._config, given, layer, self._sizes[layer]).of(ids)
        product = self._op("Squeeze", self._op("MatMul", matrices, rows), self._ints(-1))
        if weights is not None:
            product = self._op("Mul", product, weights)
        if bias is not None:
            product = self._op("Add", product, self._wide(self._op("Gather", bias, ids, axis=0)))
        return self._narrow(product)

    def _activated(self, rows: ir.Value) -> ir.Value:
        config = self._config
        if not config.gated:
            return self._activation(rows)
        gate, value = self._halves(rows)
        if config.limit > 0.0:
            limit = self._float(config.limit)
            gate = self._op("Min", gate, limit)
            value = self._op("Max", self._op("Min", value, limit), self._float(-config.limit))
        if config.beta != 0.0:
            value = self._op("Add", value, self._float(config.beta))
        return self._op("Mul", self._activation(gate), value)

    def _halves(self, rows: ir.Value) -> tuple[ir.Value, ir.Value]:
        if self._config.gate_layout == "interleaved":
            last, end, step = self._ints(-1), self._ints(np.iinfo(np.int64).max), self._ints(2)
            return (
                self._op("Slice", rows, self._ints(0), end, last, step),
                self._op("Slice", rows, self._ints(1), end, last, step),
            )
        shape = self._op("Shape", rows)
        half = self._op("Div", self._op("Gather", shape, self._ints(-1), axis=0), self._ints(2))
        sizes = self._op("Concat", half, half, axis=0)
        gate, value = self.tape.op_multi_out("Split", [rows, sizes], {"axis": -1}, num_outputs=2)
        return gate, value

    def _activation(self, x: ir.Value) -> ir.Value:
        match self._config.activation:
            case "silu":
                alpha = self._config.alpha
                scaled = x if alpha == 1.0 else self._op("Mul", x, self._float(alpha))
                return self._op("Mul", x, self._op("Sigmoid", scaled))
            case "gelu":
                inner = self._op("Erf", self._op("Mul", x, self._float(math.sqrt(0.5))))
                return self._half_of(x, inner)
            case "gelu_tanh":
                cube = self._op("Mul", self._op("Mul", x, x), x)
                inner = self._op("Add", x, self._op("Mul", cube, self._float(0.044715)))
                return self._half_of(x, self._op("Tanh", self._op("Mul", inner, self._float(math.sqrt(2.0 / math.pi)))))
            case "relu":
                return self._op("Relu", x)
            case "relu2":
                positive = self._op("Relu", x)
                return self._op("Mul", positive, positive)
        return x

    def _half_of(self, x: ir.Value, inner: ir.Value) -> ir.Value:
        """x / 2 * (1 + inner)."""
        return self._op("Mul", self._op("Mul", x, self._float(0.5)), self._op("Add", inner, self._float(1.0)))

    def _not_below_zero(self, indices: ir.Value) -> ir.Value:
        return self._op("Not", self._op("Less", indices, self._ints32(0)))

    def _wide(self, value: ir.Value) -> ir.Value:
        return value if self._dtype == ir.DataType.FLOAT else self._op("Cast", value, to=ir.DataType.FLOAT)

    def _narrow(self, value: ir.Value) -> ir.Value:
        return value if self._dtype == ir.DataType.FLOAT else self._op("Cast", value, to=self._dtype)

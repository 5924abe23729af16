"""Writing the nodes of a portable body: what those of routers and of experts have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir


class BodyWriter:
    """Writes standard operators and constants to a tape.

    Args:
        tape: Of the body.
    """

    def __init__(self, tape: ir.tape.Tape) -> None:
        self.tape = tape

    def _op(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        return self.tape.op(op_type, list(inputs), attributes)

    def _constant(self, array: np.ndarray[Any, Any]) -> ir.Value:
        return self._op("Constant", value=ir.tensor(array))

    def _ints(self, *numbers: int) -> ir.Value:
        return self._constant(np.array(numbers, np.int64))

    def _ints32(self, number: int) -> ir.Value:
        return self._constant(np.array([number], np.int32))

    def _float(self, number: float) -> ir.Value:
        # One-dimensional: ONNX Runtime has refused rank-0 constants in inlined bodies.
        return self._constant(np.array([number], np.float32))

"""What is read of a graph."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
import pytest

from ort_moe.rewrites.values import filling


@pytest.mark.parametrize(
    ("number", "dtype", "expected"),
    [
        (np.float32(-3.4e38), ir.DataType.FLOAT16, -math.inf),
        (np.float32(-3.4e38), ir.DataType.BFLOAT16, -math.inf),
        (np.float32(0.5), ir.DataType.BOOL, 1.0),
        (np.float32(-1.5), ir.DataType.INT64, -1.0),
        (np.int64(2), ir.DataType.FLOAT, 2.0),
    ],
)
def test_what_a_tensor_is_full_of_is_cast_with_it(number: np.generic, dtype: ir.DataType, expected: float) -> None:
    array = np.array([number])
    constant = ir.Value(
        name="number", const_value=ir.tensor(array), type=ir.TensorType(ir.DataType.from_numpy(array.dtype))
    )
    shape = ir.Value(name="shape", type=ir.TensorType(ir.DataType.INT64))
    cast = ir.node("Cast", [ir.node("Expand", [constant, shape]).outputs[0]], {"to": dtype}).outputs[0]
    cast.dtype = dtype
    assert filling(cast) == expected

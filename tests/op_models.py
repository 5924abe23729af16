"""Models of one ort_moe node whose inputs are all fed, and running them on any execution provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from ort_moe.ops import DOMAIN, OPS, VERSION, AttributeValue

Array = npt.NDArray[Any]

# NumPy has no such types of its own: ONNX Runtime takes their bits.
_BY_BITS = {
    np.dtype(ml_dtypes.bfloat16): (TensorProto.BFLOAT16, np.uint16),
    np.dtype(ml_dtypes.float8_e4m3fn): (TensorProto.FLOAT8E4M3FN, np.uint8),
}


def element_type(dtype: np.dtype[Any]) -> int:
    """The ONNX element type of a NumPy type, ml_dtypes' among them."""
    if dtype in _BY_BITS:
        return _BY_BITS[dtype][0]
    return helper.np_dtype_to_tensor_dtype(dtype)


def op_model(
    op_name: str,
    feeds: Mapping[str, Array],
    attributes: Mapping[str, AttributeValue],
    *,
    outputs: Sequence[str] | None = None,
    symbolic: bool = False,
    complete: bool = True,
    name: str = "node",
) -> onnx.ModelProto:
    """A model of one node, without a function body.

    Args:
        op_name: The operator.
        feeds: Its inputs by their names in the op table; optional ones may be left out.
        attributes: The node's attributes.
        outputs: The outputs that the node has, and the model with it; None: the required ones.
        symbolic: Leave every dimension of the inputs open.
        complete: Add the neutral value of each attribute not given; False makes faulty nodes for tests of errors.
        name: The node's name.
    """
    op = OPS[op_name]
    if outputs is None:
        outputs = [tensor.name for tensor in op.outputs if not tensor.optional]
    node_inputs = [tensor.name if tensor.name in feeds else "" for tensor in op.inputs]
    node_outputs = [tensor.name if tensor.name in outputs else "" for tensor in op.outputs]
    for names in (node_inputs, node_outputs):
        while not names[-1]:
            names.pop()
    inputs = []
    for key, array in feeds.items():
        shape = [f"{key}_{axis}" for axis in range(array.ndim)] if symbolic else array.shape
        inputs.append(helper.make_tensor_value_info(key, element_type(array.dtype), shape))
    first = element_type(feeds[op.inputs[0].name].dtype)
    types = {t.name: first if len(t.types) > 1 else TensorProto.DataType.Value(t.types[0].upper()) for t in op.outputs}
    node = helper.make_node(op_name, node_inputs, node_outputs, name=name, domain=DOMAIN)
    for key, value in (op.complete(attributes) if complete else attributes).items():
        node.attribute.append(helper.make_attribute(key, value))
    graph = helper.make_graph(
        [node], "op", inputs, [helper.make_tensor_value_info(output, types[output], None) for output in outputs]
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def op_session(model: onnx.ModelProto, providers: Sequence[str] = ("CPUExecutionProvider",)) -> Any:
    """An ORT session of a model with our kernels."""
    import onnxruntime

    from ort_moe.installation.library import register

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors reach the test as exceptions
    register(options)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=list(providers))


def run_session(session: Any, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of a session by name, bfloat16 ones as ml_dtypes has them."""
    names = [output.name for output in session.get_outputs()]
    values = session.run_with_ort_values(names, {key: ort_value(array) for key, array in feeds.items()})
    result = {}
    for name, value in zip(names, values, strict=True):
        if value.data_type() == "tensor(bfloat16)":  # DLPack and numpy() do not know it: copy the bits
            result[name] = _bfloat16(value)
        else:
            result[name] = value.numpy()
    return result


def run_op(
    op_name: str,
    feeds: Mapping[str, Array],
    attributes: Mapping[str, AttributeValue],
    *,
    outputs: Sequence[str] | None = None,
    symbolic: bool = False,
    providers: Sequence[str] = ("CPUExecutionProvider",),
) -> dict[str, Array]:
    """Runs one op: its outputs by name."""
    model = op_model(op_name, feeds, attributes, outputs=outputs, symbolic=symbolic)
    return run_session(op_session(model, providers), feeds)


def ort_value(array: Array) -> Any:
    """An OrtValue on the CPU."""
    import onnxruntime

    array = np.ascontiguousarray(array)
    if array.dtype in _BY_BITS:
        onnx_type, bits = _BY_BITS[array.dtype]
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(bits), onnx_type)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def _bfloat16(value: Any) -> Array:
    import ctypes

    count = int(np.prod(value.shape(), dtype=np.int64))
    bits = np.zeros(count, np.uint16)
    if count:
        ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return bits.view(ml_dtypes.bfloat16).reshape(value.shape())


def assert_same_bits(got: Array, expected: Array) -> None:
    """Equal type, shape and bits, where every NaN is the same."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    same = got.view(unsigned) == expected.view(unsigned)
    if np.issubdtype(got.dtype, np.inexact) or got.dtype in _BY_BITS:
        same |= np.isnan(got) & np.isnan(expected)
    if not same.all():
        where = tuple(int(axis[0]) for axis in np.nonzero(~same))
        difference = f"{got[where]!r}, expected {expected[where]!r}"
        raise AssertionError(f"{int((~same).sum())} of {same.size} differ, first at {where}: {difference}")

"""A tensor whose memory stays where it is: sessions are bound to it once, and it is written and read between runs."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnxruntime


@dataclass(frozen=True)
class Device:
    """Where buffers lie: `cpu` or `cuda`, and the number of the device."""

    kind: str
    number: int = 0


_UNFIT = ("string", "int2", "int4", "uint2", "uint4", "float4e2m1")
"""Elements that have no bytes of their own, or none of a fixed number."""


class TensorType:
    """An element type as ONNX Runtime names it, `tensor(float16)`.

    Attributes:
        name: That name.
        number: ONNX's number of it.
        dtype: NumPy's, or ml_dtypes' type of it.
        native: Whether that is NumPy's own.
        storage: The type of NumPy's own that has its bits.

    Raises:
        ValueError: No array holds such elements.
    """

    def __init__(self, name: str) -> None:
        import onnx

        element = name.removeprefix("tensor(").removesuffix(")")
        if f"tensor({element})" != name or element in _UNFIT:
            raise ValueError(f"is a {name}, for which there are no fixed buffers")
        self.name = name
        self.number = int(onnx.TensorProto.DataType.Value(element.upper()))
        self.dtype: np.dtype[Any] = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(self.number))
        self.native = self.dtype.kind in "biufc"
        self.storage: np.dtype[Any] = self.dtype if self.native else np.dtype(f"u{self.dtype.itemsize}")


class FixedBuffer:
    """A tensor in memory of a device, zeros at first.

    Attributes:
        name: Of the input or output that it is first of all.
        shape: Its shape.
        type: Its element type.
        value: The OrtValue that owns the memory; types that NumPy lacks are unsigned integers in it.
    """

    def __init__(self, name: str, shape: Sequence[int], element: TensorType, device: Device) -> None:
        import onnxruntime

        self.name, self.shape, self.type, self._device = name, tuple(shape), element, device
        # An empty one has an address, too.
        zeros = np.zeros(self.shape if 0 not in self.shape else 1, element.storage)
        self.value = onnxruntime.OrtValue.ortvalue_from_numpy(zeros, device.kind, device.number)

    def bind(self, binder: Any, name: str) -> None:
        """Binds an input or output with `bind_input` or `bind_output` of an IOBinding."""
        address = self.value.data_ptr()
        binder(name, self._device.kind, self._device.number, self.type.number, list(self.shape), address)

    def read(self) -> npt.NDArray[Any]:
        """A copy of what is in it."""
        values = self.value.numpy()
        if self._device.kind == "cpu":
            values = values.copy()  # it is a view there
        if 0 in self.shape:
            values = values[:0].reshape(self.shape)
        return np.asarray(values.view(self.type.dtype))

    def fitting(self, values: Any) -> npt.NDArray[Any] | onnxruntime.OrtValue:
        """Values as `write` takes them.

        Args:
            values: An OrtValue on any device, or what NumPy makes an array of.

        Raises:
            ValueError: Their type or shape is another one; the message goes on after a name.
        """
        import onnxruntime

        if isinstance(values, onnxruntime.OrtValue):
            element = values.data_type()
            if not self.type.native and element == f"tensor({self.type.storage.name})":  # as this one's own value
                element = self.type.name
            self._check(values.shape(), element, {self.type.name})
            return values if self.type.native or values.data_type() != element else self._bits(values)
        array = np.asarray(values)
        self._check(array.shape, array.dtype.name, {self.type.dtype.name})
        native = array.astype(self.type.dtype, copy=False)  # but for the order of bytes it has that type
        return np.ascontiguousarray(native).view(self.type.storage).reshape(self.shape)

    def write(self, values: npt.NDArray[Any] | onnxruntime.OrtValue) -> None:
        """Copies into it what `fitting` returned."""
        if 0 not in self.shape:
            self.value.update_inplace(values)

    def copy_from(self, other: FixedBuffer) -> None:
        """Takes over what is in a buffer of the same shape and type on the same device."""
        if 0 not in self.shape:
            self.value.update_inplace(other.value)

    def clear(self) -> None:
        """Fills it with zeros."""
        self.write(np.zeros(self.shape, self.type.storage))

    def _bits(self, values: onnxruntime.OrtValue) -> npt.NDArray[Any]:
        """What is in an OrtValue whose type NumPy lacks: neither it nor DLPack give it out."""
        import onnxruntime

        host = onnxruntime.OrtValue.ortvalue_from_shape_and_type(list(self.shape), self.type.number, "cpu", 0)
        if 0 not in self.shape:
            host.update_inplace(values)
        size = math.prod(self.shape) * self.type.storage.itemsize
        data = ctypes.string_at(host.data_ptr(), size) if size else b""
        return np.frombuffer(data, self.type.storage).reshape(self.shape)

    def _check(self, shape: Sequence[int], dtype: str, allowed: set[str]) -> None:
        if dtype not in allowed:
            raise ValueError(f"must have type {self.type.dtype.name}, but has {dtype}")
        if tuple(shape) != self.shape:
            raise ValueError(f"must have shape {list(self.shape)}, but has {list(shape)}")


def fixed_shape(shape: Sequence[int | str | None] | None) -> tuple[int, ...]:
    """A shape of a session's input or output, if it is fixed.

    Raises:
        ValueError: It is not; the message says which dimension.
    """
    if shape is None:
        raise ValueError("has a shape of unknown rank")
    for axis, size in enumerate(shape):
        if not isinstance(size, int) or size < 0:
            raise ValueError(f"has no fixed size in dimension {axis}" + (f" ({size})" if isinstance(size, str) else ""))
    return tuple(size for size in shape if isinstance(size, int))

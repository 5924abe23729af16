"""Arrays in device memory, for tests that call the CUDA launchers by address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ort_moe import kernels
from ort_moe.reference.routing_maps import RoutingMaps

POISON = 0xC2
"""Every byte of an output before it is written: -97.63 as float32, a negative number as an integer."""


class DeviceArray:
    """An array's bits in device memory.

    Attributes:
        shape: Its shape.
        dtype: Its element type, ml_dtypes' among them.
    """

    def __init__(self, values: npt.NDArray[Any]) -> None:
        import onnxruntime

        self.shape, self.dtype = values.shape, values.dtype
        bits = _bits(values)
        self._value = onnxruntime.OrtValue.ortvalue_from_numpy(
            bits if bits.size else np.zeros(1, bits.dtype), "cuda", 0
        )

    @property
    def address(self) -> int:
        """Where it lies."""
        address: int = self._value.data_ptr()
        return address

    def read(self) -> npt.NDArray[Any]:
        """The values, once the device has written them."""
        bits = self._value.numpy()[: int(np.prod(self.shape, dtype=np.int64))]
        return np.asarray(bits.view(self.dtype).reshape(self.shape))

    def write(self, values: npt.NDArray[Any]) -> None:
        """Puts other values of the same shape and type in its place."""
        self._value.update_inplace(_bits(values))


def _bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(values).reshape(-1).view(np.dtype(f"u{values.dtype.itemsize}"))


def poisoned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
    """An output that nobody has written yet."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return DeviceArray(np.full(size, POISON, np.uint8).view(dtype).reshape(shape))


@dataclass(frozen=True)
class DeviceMaps:
    """The four routing maps in device memory."""

    arrays: tuple[DeviceArray, DeviceArray, DeviceArray, DeviceArray]

    @classmethod
    def poisoned(cls, rows: int, experts: int) -> DeviceMaps:
        """Maps of R expanded rows and E experts that nobody has written yet."""
        of_rows = [poisoned((rows,), np.int32) for _ in range(3)]
        return cls((*of_rows, poisoned((experts + 1,), np.int64)))

    @property
    def addresses(self) -> kernels.RoutingMaps:
        """Where they lie."""
        return kernels.RoutingMaps(*(array.address for array in self.arrays))

    def read(self) -> RoutingMaps:
        """The maps, once the device has written them."""
        return RoutingMaps(*(array.read() for array in self.arrays))

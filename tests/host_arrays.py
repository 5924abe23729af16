"""Arrays in host memory with the interface of tests/device_arrays.py, for launchers that run on either."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.device_arrays import POISON


class HostArray:
    """An array in host memory."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._values = values.copy() if values.size else np.zeros(1, values.dtype)  # an empty one has an address, too
        self._shape = values.shape

    @property
    def address(self) -> int:
        """Where it lies."""
        return self._values.ctypes.data

    def read(self) -> npt.NDArray[Any]:
        """The values."""
        return self._values[: int(np.prod(self._shape))].reshape(self._shape) if 0 in self._shape else self._values


def poisoned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> HostArray:
    """An output that nobody has written yet."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return HostArray(np.full(size, POISON, np.uint8).view(dtype).reshape(shape))

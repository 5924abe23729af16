"""A file that takes weights piece by piece, at places that are set aside for them."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

PAGE = 4096
"""Bytes to whose multiples tensors are aligned, so that they can be mapped."""


class WeightsFile:
    """A file of tensors; a context manager.

    Args:
        path: Where; nothing is kept of what is written to `os.devnull`.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._file = self._path.open("wb")
        self._end = 0

    def set_aside(self, dtype: npt.DTypeLike, shape: tuple[int, ...], name: str) -> ir.ExternalTensor:
        """Makes place for a tensor behind all others."""
        element = ir.DataType.from_numpy(np.dtype(dtype))
        length = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        tensor = ir.ExternalTensor(
            self._path.name, self._end, length, element, shape=ir.Shape(shape), name=name, base_dir=self._path.parent
        )
        self._end = -(-(self._end + length) // PAGE) * PAGE
        return tensor

    def write(self, tensor: ir.ExternalTensor, first: int, entries: npt.NDArray[Any]) -> None:
        """Writes some entries of a tensor's first axes, taken as one.

        Args:
            tensor: What `set_aside` returned.
            first: Number of the first entry.
            entries: Their elements.
        """
        data = np.ascontiguousarray(entries)
        width = data[0].nbytes if len(data) else 0
        self._file.seek((tensor.offset or 0) + first * width)
        self._file.write(data.view(np.dtype(f"<u{data.dtype.itemsize}")).tobytes())

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

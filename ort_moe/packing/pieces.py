"""Packing of a layer some rows of an expert at a time, in any format, with what that costs in accuracy.

The formats' own modules pack whole layers; rows are independent in all of them, but for the one global scale of an
expert of nvfp4, and squares of rows in fp8.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ort_moe.choices import BLOCK_SIZES, PACKED
from ort_moe.packing import checks, fp8, integers, mxfp4, nvfp4

Array = npt.NDArray[Any]

DEFAULT_BLOCKS: Mapping[str, int] = {"nvfp4": 16, "mxfp4": 32, "int4": 32, "int8": 128, "fp8": 128}
"""Weights that share a scale."""
_OF_FIXED_BLOCKS = ("nvfp4", "mxfp4")
"""Formats that have no other."""

_PIECE = 1 << 17
"""Weights packed at a time by each thread: some tens of bytes for each, which stay in its cache."""
_MOST_THREADS = 8


@dataclass(frozen=True)
class Packing:
    """How weights shall be packed.

    Attributes:
        weight_format: One of `PACKED`.
        block_size: Weights that share a scale.
        zero_points: Whether int4 and int8 have zero points.
    """

    weight_format: str
    block_size: int
    zero_points: bool = False

    @classmethod
    def of(cls, weight_format: str, block_size: int | None = None, *, zero_points: bool = False) -> Packing:
        """The packing of that name.

        Args:
            weight_format: One of `PACKED`.
            block_size: 16, 32, 64 or 128; None: as usual for the format.
            zero_points: Asymmetric int4 or int8.

        Raises:
            ValueError: The format is unknown, or has no such blocks or no zero points.
        """
        checks.check_word("weights", "format", weight_format, PACKED)
        return cls(weight_format, DEFAULT_BLOCKS[weight_format] if block_size is None else block_size, zero_points)

    def __post_init__(self) -> None:
        weight_format, block_size = self.weight_format, self.block_size
        checks.check_word("weights", "format", weight_format, PACKED)
        usual = DEFAULT_BLOCKS[weight_format]
        sizes = (usual,) if weight_format in _OF_FIXED_BLOCKS else BLOCK_SIZES
        if len(sizes) == 1 and not checks.is_one_of(block_size, sizes):
            got = checks.shown(block_size)
            raise ValueError(f"{weight_format}: the block size is always {usual}, but {got} was asked for")
        checks.check_block_size(weight_format, block_size, sizes)
        if self.zero_points and weight_format not in ("int4", "int8"):
            raise ValueError(f"{weight_format} has no zero points; int4 and int8 have")

    def __str__(self) -> str:
        if self.weight_format in _OF_FIXED_BLOCKS:
            return self.weight_format
        zeros = " with zero points" if self.zero_points else ""
        return f"{self.weight_format} in blocks of {self.block_size}{zeros}"

    @property
    def depth_multiple(self) -> int:
        """What D must be a multiple of."""
        return 1 if self.weight_format == "fp8" else self.block_size

    @property
    def attributes(self) -> dict[str, str | int]:
        """Of the FusedExperts."""
        is_fixed = self.weight_format in _OF_FIXED_BLOCKS
        return {"weight_format": self.weight_format, "block_size": 0 if is_fixed else self.block_size}

    def parts(
        self, experts: int, rows: int, depth: int, dtype: npt.DTypeLike
    ) -> dict[str, tuple[Any, tuple[int, ...]]]:
        """Type and shape of each part of a layer, by the end of its name in the op table.

        Args:
            experts: E.
            rows: N.
            depth: D.
            dtype: Of x.

        Raises:
            ValueError: `dtype` is none that x may have.
        """
        dtype = checks.dtype_of(self.weight_format, "dtype", dtype, checks.FLOATS)
        b, in_a_byte = self.block_size, 1 if self.weight_format in ("int8", "fp8") else 2
        codes = fp8.WEIGHT_DTYPE if self.weight_format == "fp8" else np.dtype(np.uint8)
        weights = (codes, (experts, rows, depth // in_a_byte))
        scales: dict[str, Any] = {"nvfp4": nvfp4.SCALE_DTYPE, "mxfp4": np.uint8, "fp8": np.float32}
        blocks = (
            (experts, -(-rows // b), -(-depth // b)) if self.weight_format == "fp8" else (experts, rows, depth // b)
        )
        found: dict[str, tuple[Any, tuple[int, ...]]] = {
            "weights": weights,
            "scales": (np.dtype(scales.get(self.weight_format, dtype)), blocks),
        }
        if self.weight_format == "nvfp4":
            found["global_scale"] = (np.dtype(np.float32), (experts,))
        if self.zero_points:
            found["zero_points"] = (np.dtype(np.uint8), (experts, rows, -(-(depth // b) // in_a_byte)))
        return found

    def pack(self, weights: Array, largest: float, dtype: npt.DTypeLike, name: str) -> tuple[dict[str, Array], Array]:
        """Packs some rows of one expert.

        Args:
            weights: (1, N, D).
            largest: The largest magnitude of all rows of the expert.
            dtype: Of x.
            name: What errors call them.

        Returns:
            The parts, (1, ...), and the weights that they stand for.

        Raises:
            ValueError: They are not finite, or their scales do not fit into `dtype`.
        """
        match self.weight_format:
            case "nvfp4":
                four = nvfp4.quantize(weights, name, largest=np.array([largest]))
                return four._asdict(), nvfp4.dequantize(four)
            case "mxfp4":
                mx = mxfp4.quantize(weights, name)
                return {"weights": mx.weights, "scales": mx.scales}, mxfp4.dequantize(mx)
            case "fp8":
                eight = fp8.quantize(weights, self.block_size, name)
                return {"weights": eight.weights, "scales": eight.scales}, fp8.dequantize(eight)
            case "int4" | "int8" as weight_format:
                codes = integers.quantize(
                    weights,
                    weight_format,
                    self.block_size,
                    symmetric=not self.zero_points,
                    scale_dtype=dtype,
                    name=name,
                )
                parts: dict[str, Array] = {"weights": codes.weights, "scales": codes.scales}
                if codes.zero_points is not None:
                    parts["zero_points"] = codes.zero_points
                return parts, integers.dequantize(codes)
        raise AssertionError(self.weight_format)


@dataclass
class PackingError:
    """What packing cost in accuracy, summed up piece by piece.

    Attributes:
        largest: Largest difference of a weight.
        of: Largest magnitude of a weight.
    """

    largest: float = 0.0
    of: float = 0.0
    _difference: float = field(default=0.0, repr=False)
    _weights: float = field(default=0.0, repr=False)

    @property
    def relative(self) -> float:
        """Norm of the differences, relative to that of the weights; 0 where all are 0."""
        return math.sqrt(self._difference / self._weights) if self._weights else 0.0

    def __iadd__(self, other: PackingError) -> PackingError:
        self.largest, self.of = max(self.largest, other.largest), max(self.of, other.of)
        self._difference += other._difference
        self._weights += other._weights
        return self

    def add(self, weights: Array, stood_for: Array) -> None:
        """Takes a piece into account."""
        if not weights.size:
            return
        wide = weights.astype(np.float32)
        difference = stood_for - wide
        self.largest = max(self.largest, float(difference.max()), -float(difference.min()))
        self.of = max(self.of, float(wide.max()), -float(wide.min()))
        self._difference += float(np.vdot(difference, difference))
        self._weights += float(np.vdot(wide, wide))


def rows_at_once(weights: int, depth: int, height: int) -> int:
    """How many rows hold no more than so many weights; no block of `height` rows is cut, and it is one at least.

    Args:
        weights: To be looked at together.
        depth: Weights of a row.
        height: Rows that share scales.
    """
    return max(height, weights // max(depth, 1) // height * height)


def pack_expert(
    packing: Packing,
    matrix: Array,
    dtype: npt.DTypeLike,
    name: str,
    expert: int,
    write: Callable[[str, int, Array], None],
) -> PackingError:
    """Packs the rows of one expert, some at a time.

    Args:
        packing: How.
        matrix: (N, D) float32, float16 or bfloat16.
        dtype: Of x.
        name: What errors call the weights of all experts.
        expert: Which it is, for errors.
        write: Takes the name of a part, the place of its first row in that part of the expert, and the rows.

    Raises:
        ValueError: The weights have another type or rank or are not finite, or their scales do not fit into `dtype`.
    """
    checks.check_array(packing.weight_format, f"'{name}'", matrix)
    if matrix.ndim != 2:
        raise ValueError(f"{packing.weight_format}: '{name}' must have shape (N, D), but has {matrix.shape}")
    _, rows, depth = checks.check_floats(packing.weight_format, name, matrix[None])
    least = packing.block_size if packing.weight_format == "fp8" else 1  # no square of fp8 is cut
    step = rows_at_once(_PIECE, depth, least)
    starts = range(0, rows, step)
    peaks = [float(np.abs(matrix[start : start + step]).max(initial=0)) for start in starts]
    largest = float(np.max(peaks, initial=0.0))  # NaN if one is
    checks.check_finite(packing.weight_format, name, expert, np.array(largest))

    def work(start: int) -> tuple[dict[str, Array], PackingError]:
        piece, error = matrix[start : start + step], PackingError()
        parts, stood_for = packing.pack(piece[None], largest, dtype, name)
        error.add(piece, stood_for[0])
        return parts, error

    total = PackingError()
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        for start, (parts, error) in zip(starts, pool.map(work, starts), strict=True):
            total += error
            for part, array in parts.items():
                first = start // packing.block_size if packing.weight_format == "fp8" and part == "scales" else start
                if part != "global_scale":
                    write(part, first, array[0])
                elif not start:
                    write(part, 0, array)
    return total

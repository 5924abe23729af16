"""The chosen experts' matrices in a portable body: gathered as they are stored, then made floats, in every format.

Only scales that no standard operator can gather, those in float8, are widened as a whole: to half precision, which
holds them exactly. There is no such way for weights in float8: `body_float8.py` has theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.packing import arrays
from ort_moe.rewrites.body_writer import BodyWriter
from ort_moe.rewrites.values import dim

_FLOAT8 = ("fp8", "nvfp4")
"""Formats with weights or scales in float8."""

_FLOAT8_OPSET = 19
"""Oldest standard operator set that knows it."""


def is_portable(weight_format: object, opset: int) -> bool:
    """Whether this version of the standard operators knows what weights of this format are made of."""
    return weight_format not in _FLOAT8 or opset >= _FLOAT8_OPSET


def stored_sizes(given: Mapping[str, ir.Value], layer: str) -> tuple[int, int] | None:
    """N and the last length of a layer's weights as they are stored; None where they are not fixed."""
    weights = given[f"{layer}_weights"]
    rows, width = dim(weights, 1), dim(weights, 2)
    return None if rows is None or width is None else (rows, width)


class Matrices(BodyWriter):
    """Writes the matrices of one layer in a packed format to a tape.

    Args:
        tape: Of the body.
        config: Of the node.
        given: Inputs of the body by their names in the op table.
        layer: `fc1` or `fc2`.
        sizes: N and the last length of its weights as they are stored.
    """

    def __init__(
        self,
        tape: ir.tape.Tape,
        config: ExpertsConfig,
        given: Mapping[str, ir.Value],
        layer: str,
        sizes: tuple[int, int],
    ) -> None:
        super().__init__(tape)
        self._config, self._given, self._layer = config, given, layer
        self._rows, width = sizes
        self._depth = width if config.weight_format == "int8" else 2 * width
        self._count = self._depth // config.scale_block

    def of(self, ids: ir.Value) -> ir.Value:
        """Float32 (..., K, N, D) of the experts `ids` (..., K)."""
        stored = self._gather("weights", ids)
        if self._config.weight_format in ("int4", "int8"):
            codes = self._wide(self._codes(stored, ids, self._depth))
            weights = self._op("Sub", self._in_blocks(codes, ids), self._zero_points(ids))
            scales = self._wide(self._gather("scales", ids))
        else:
            table = self._constant(arrays.E2M1)
            weights = self._in_blocks(self._op("Gather", table, self._codes(stored, ids, self._depth)), ids)
            scales = self._exponents(ids) if self._config.weight_format == "mxfp4" else self._float8(ids)
        weights = self._op("Mul", weights, self._op("Unsqueeze", scales, self._ints(-1)))
        matrices = self._shaped(weights, ids, self._rows, self._depth)
        if f"{self._layer}_global_scale" in self._given:
            of_expert = self._op("Unsqueeze", self._gather("global_scale", ids), self._ints(-1, -2))
            matrices = self._op("Mul", matrices, of_expert)
        return matrices

    def _codes(self, stored: ir.Value, ids: ir.Value, length: int) -> ir.Value:
        """Integers (..., K, N, length) of the bytes (..., K, N, .)."""
        whole = self._op("Cast", stored, to=ir.DataType.INT32)
        if self._config.weight_format == "int8":
            return whole
        sixteen = self._constant(np.array([16], np.int32))
        high = self._op("Div", whole, sixteen)
        low = self._op("Sub", whole, self._op("Mul", high, sixteen))
        last = self._ints(-1)
        pairs = self._op("Concat", self._op("Unsqueeze", low, last), self._op("Unsqueeze", high, last), axis=-1)
        codes = self._shaped(pairs, ids, self._rows, length + length % 2)
        if length % 2:
            codes = self._op("Slice", codes, self._ints(0), self._ints(length), last)
        return codes

    def _zero_points(self, ids: ir.Value) -> ir.Value:
        """(..., K, N, blocks, 1), or one number for all."""
        if f"{self._layer}_zero_points" not in self._given:
            return self._constant(np.array([8.0 if self._config.weight_format == "int4" else 128.0], np.float32))
        codes = self._codes(self._gather("zero_points", ids), ids, self._count)
        return self._op("Unsqueeze", self._wide(codes), self._ints(-1))

    def _exponents(self, ids: ir.Value) -> ir.Value:
        """The powers of two that e8m0 stands for."""
        powers = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
        codes = self._op("Cast", self._gather("scales", ids), to=ir.DataType.INT32)
        return self._op("Gather", self._constant(powers), codes)

    def _float8(self, ids: ir.Value) -> ir.Value:
        scales = self._op("Cast", self._given[f"{self._layer}_scales"], to=ir.DataType.FLOAT16)
        return self._wide(self._op("Gather", scales, ids, axis=0))

    def _in_blocks(self, values: ir.Value, ids: ir.Value) -> ir.Value:
        return self._shaped(values, ids, self._rows, self._count, self._config.scale_block)

    def _shaped(self, value: ir.Value, ids: ir.Value, *lengths: int) -> ir.Value:
        """The value in the shape (..., K, *lengths)."""
        shape = self._op("Concat", self._op("Shape", ids), self._ints(*lengths), axis=0)
        # Without tokens the shape has a 0, which stands for the length that is there: also 0.
        return self._op("Reshape", value, shape)

    def _gather(self, part: str, ids: ir.Value) -> ir.Value:
        return self._op("Gather", self._given[f"{self._layer}_{part}"], ids, axis=0)

    def _wide(self, value: ir.Value) -> ir.Value:
        return self._op("Cast", value, to=ir.DataType.FLOAT)

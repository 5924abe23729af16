"""One linear layer of one expert: MatMul, Gemm or MatMulNBits of rows with a constant matrix."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ort_moe.choices import BLOCK_SIZES
from ort_moe.graphs.node_kinds import CONTRIB
from ort_moe.rewrites.experts.constants import Constant, read_constant
from ort_moe.rewrites.experts.layer import Stack, read_matrices, read_vectors
from ort_moe.rewrites.rule import Refusal
from ort_moe.rewrites.values import integer, is_op, label, operands, rank

_BY_INT8 = 4
"""Accuracy level at which the CPU's MatMulNBits rounds the rows to int8, block by block."""


@dataclass(frozen=True)
class Linear:
    """A linear layer.

    Attributes:
        node: What multiplies.
        rows: What it multiplies.
        weights: The matrix, (1, N, D).
        bias: What it adds, (1, N), or None.
    """

    node: ir.Node
    rows: ir.Value
    weights: Stack
    bias: Stack | None


def read_linear(value: ir.Value | None) -> Linear | None:
    """The linear layer that makes a value; None where none does.

    Raises:
        Refusal: Its matrix is no constant, or packed in a way that FusedExperts has not.
    """
    node = None if value is None else value.producer()
    if node is not None and (node.domain, node.op_type) == (CONTRIB, "MatMulNBits"):
        return _read_packed(node)
    if node is None or not is_op(node, "MatMul", "Gemm") or rank(node.inputs[1]) != 2:
        return None
    is_gemm = node.op_type == "Gemm"
    if is_gemm and (
        integer(node, "transA", 0)
        or node.attributes.get_float("alpha", 1.0) != 1.0
        or node.attributes.get_float("beta", 1.0) != 1.0
    ):
        return None
    transposed = not (is_gemm and integer(node, "transB", 0))
    weights = read_matrices([node.inputs[1]], transposed=transposed)
    return Linear(node, operands(node)[0], weights, _bias(node, 2))


def _read_packed(node: ir.Node) -> Linear:
    """MatMulNBits(rows, codes (N, D / block, bytes), scales, zero points?, groups?, bias?)."""
    bits, block = integer(node, "bits", 4), integer(node, "block_size", 0)
    rows, depth = integer(node, "N", 0), integer(node, "K", 0)
    if bits not in (4, 8) or block not in BLOCK_SIZES or depth % block:
        told = f"{bits} bits in blocks of {block} along {depth} elements"
        raise Refusal(
            f"{label(node)} has weights of {told}, expected 4 or 8 in whole blocks of 16 to 128", "experts-form"
        )
    if integer(node, "accuracy_level", 0) == _BY_INT8:
        sentence = f"{label(node)} may round its rows to int8 (accuracy_level {_BY_INT8}), which FusedExperts does not"
        raise Refusal(sentence, "experts-form")
    given = (*node.inputs, None, None, None, None)
    if given[4] is not None:
        raise Refusal(f"{label(node)} permutes its blocks by '{given[4].name}'", "experts-form")
    blocks = depth // block
    codes = _part(node, given[1], (1, rows, depth * bits // 8), ir.DataType.UINT8)
    scales = _part(node, given[2], (1, rows, blocks), None if given[2] is None else given[2].dtype)
    zeros = None
    if given[3] is not None:
        zeros = _part(node, given[3], (1, rows, (blocks * bits + 7) // 8), ir.DataType.UINT8)
    return Linear(node, operands(node)[0], Stack(codes, bits, block, scales, zeros), _bias(node, 5))


def _part(node: ir.Node, value: ir.Value | None, shape: tuple[int, ...], dtype: ir.DataType | None) -> Constant:
    data = read_constant(value)
    size = 1
    for length in data.shape:
        size *= length
    if size != shape[1] * shape[2] or data.dtype != dtype:
        name = "" if value is None else value.name
        told = f"{data.dtype} {list(data.shape)}, expected {dtype} {list(shape[1:])}"
        raise Refusal(f"'{name}' of {label(node)} is {told}", "experts-form")
    return data.reshaped(shape)


def _bias(node: ir.Node, place: int) -> Stack | None:
    bias = node.inputs[place] if len(node.inputs) > place else None
    return None if bias is None else read_vectors([bias])

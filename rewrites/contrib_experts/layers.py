"""The layers of a contrib node: which of its inputs hold them, and what FusedExperts takes in their place.

N rows and D elements along the reduction: for com.microsoft::MoE the weights are (E, N, D), for QMoE in the formats of
`ort_moe.packing`. Two layouts of some formats have one shape, or one attribute has two meanings; what cannot be told
apart is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ort_moe.choices import BLOCK_SIZES
from ort_moe.packing import arrays
from ort_moe.rewrites.contrib_experts.sources import Source, cast, constant_source, rows_joined, viewed
from ort_moe.rewrites.rule import Refusal
from ort_moe.rewrites.values import FLOATS, Array, integer

_FLOAT8_SCALES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)

Parts = dict[str, Source]
"""One layer by the names of FusedExperts' inputs without the layer's: `weights`, `scales`, and so on."""


@dataclass(frozen=True)
class Given:
    """The inputs of one layer of the node; None where it has not that input.

    Attributes:
        name: `fc1`, `fc2` or `fc3`.
        weights: Codes or numbers.
        scales: Of blocks, or of rows.
        bias: Rows.
        zero_points: Of blocks, or of rows.
        global_scale: Of experts.
    """

    name: str
    weights: ir.Value | None
    scales: ir.Value | None = None
    bias: ir.Value | None = None
    zero_points: ir.Value | None = None
    global_scale: ir.Value | None = None


@dataclass(frozen=True)
class Storage:
    """How the weights of all layers are stored.

    Attributes:
        weight_format: As FusedExperts calls it.
        block_size: FusedExperts' attribute.
        read: Reads a layer of N rows and D elements along the reduction.
    """

    weight_format: str
    block_size: int
    read: Callable[[Given, int, int], Parts]


def read_dense(given: Given, rows: int, depth: int, dtype: ir.DataType) -> Parts:
    """A layer of com.microsoft::MoE.

    Raises:
        Refusal: It is no constant (E, N, D) of the type of x.
    """
    weights = _constant(given, "weights")
    if weights.shape[1:] != (rows, depth):
        told = f"the weights '{weights.base}' have shape {weights.shape}, expected (E, {rows}, {depth})"
        if weights.shape[1:] == (depth, rows):
            told += "; ONNX Runtime reads this older shape in another order than it says"
        raise Refusal(told, "contrib-layout")
    if weights.dtype != dtype:
        raise Refusal(f"the weights '{weights.base}' are {weights.dtype}, expected {dtype}", "contrib-form")
    return {"weights": weights}


def quant_type(node: ir.Node) -> str:
    """The attribute of a QMoE, `int` where it has none."""
    return node.attributes.get_string("quant_type", "int") or ""


def storage_of(node: ir.Node, layers: Sequence[Given], sizes: tuple[int, int, int], dtype: ir.DataType) -> Storage:
    """How the weights of a QMoE are stored.

    Args:
        node: Of that type.
        layers: Of the node, fc1 and fc2 first.
        sizes: N of fc1, H and I.
        dtype: Type of x.

    Raises:
        Refusal: FusedExperts has no such format, or the node does not tell which of two it is.
    """
    kind = quant_type(node)
    if any(layer.zero_points is not None for layer in layers) and kind != "int":
        raise Refusal(f"it has zero points with quant_type '{kind}'", "contrib-form")
    match kind:
        case "int":
            return _integers(node, sizes, dtype)
        case "nvfp4":
            along_depth = integer(node, "weights_prepacked", -1) == 1
            return Storage("nvfp4", 0, lambda given, n, d: _nvfp4(given, n, d, along_depth=along_depth))
        case "fp4":
            along_depth = _fp4_along_depth(layers, sizes)
            return Storage("mxfp4", 0, lambda given, n, d: _mxfp4(given, n, d, along_depth=along_depth))
        case "fp8":
            block = integer(node, "block_size", 0)
            if block > 0 and block not in BLOCK_SIZES:
                raise Refusal(f"its blocks are of {block}, expected 16, 32, 64 or 128", "contrib-form")
            # One scale for an expert counts for blocks of any size: whole ones, so that fc1 and fc3 can be joined.
            size = block or max((size for size in BLOCK_SIZES if sizes[2] % size == 0), default=max(BLOCK_SIZES))
            return Storage("fp8", size, lambda given, n, d: _fp8(given, n, d, size, of_blocks=block > 0))
    raise Refusal(f"its quant_type is '{kind}', expected int, fp4, nvfp4 or fp8", "contrib-form")


def joined(gate: Parts, value: Parts, storage: Storage) -> Parts:
    """One fc1 of the layers of gate and value, all rows of the gate first.

    Raises:
        Refusal: They cannot be one: their global scales differ, or a block would hold rows of both.
    """
    if set(gate) != set(value):
        raise Refusal(f"fc1 has {', '.join(gate)}, fc3 has {', '.join(value)}", "contrib-form")
    parts: Parts = {}
    for name, source in gate.items():
        other = value[name]
        if name == "global_scale":
            if any(source.entry(expert) != other.entry(expert) for expert in range(source.shape[0])):
                raise Refusal("the global scales of fc1 and fc3 differ", "contrib-form")
            parts[name] = source
            continue
        if source.dtype != other.dtype:
            raise Refusal(f"the {name} of fc1 are {source.dtype}, those of fc3 {other.dtype}", "contrib-form")
        parts[name] = rows_joined(source, other)
    if storage.weight_format == "fp8" and gate["weights"].shape[1] % storage.block_size:
        raise Refusal(f"fc1 and fc3 have no whole blocks of {storage.block_size} rows", "contrib-form")
    return parts


def read_bias(given: Given, experts: int, rows: int, dtype: ir.DataType) -> Parts:
    """The bias of a layer, if it has one.

    Raises:
        Refusal: It is no constant (E, N) of the type of x.
    """
    if given.bias is None:
        return {}
    bias = constant_source(given.bias, "the experts' bias")
    if bias.shape != (experts, rows) or bias.dtype != dtype:
        told = f"the bias '{bias.base}' is {bias.dtype} of shape {bias.shape}, expected {dtype} of ({experts}, {rows})"
        raise Refusal(told, "contrib-form")
    return {"bias": bias}


def _integers(node: ir.Node, sizes: tuple[int, int, int], dtype: ir.DataType) -> Storage:
    widths = {integer(node, "expert_weight_bits", 4)}
    widths |= {integer(node, f"fc{n}_expert_weight_bits", min(widths)) for n in (1, 2, 3)}
    if len(widths) != 1 or not widths <= {4, 8}:
        raise Refusal(
            f"its weights have {' and '.join(map(str, sorted(widths)))} bits, expected 4 or 8", "contrib-form"
        )
    weight_format = "int4" if widths == {4} else "int8"
    _, hidden, inner = sizes
    block = integer(node, "block_size", 0)
    if block <= 0:
        block = max((size for size in BLOCK_SIZES if hidden % size == 0 and inner % size == 0), default=0)
        if not block:
            sentence = f"its rows of {hidden} and {inner} weights are no multiples of the smallest block, 16"
            raise Refusal(sentence, "contrib-form")
    elif block not in BLOCK_SIZES:
        raise Refusal(f"its blocks are of {block}, expected 16, 32, 64 or 128", "contrib-form")
    return Storage(weight_format, block, lambda given, n, d: _integer_layer(given, n, d, weight_format, block, dtype))


def _integer_layer(given: Given, rows: int, depth: int, weight_format: str, block: int, dtype: ir.DataType) -> Parts:
    bits = 4 if weight_format == "int4" else 8
    if depth % block:
        raise Refusal(f"its rows of {depth} weights are no whole blocks of {block}", "contrib-form")
    count = depth // block
    weights, scales = _constant(given, "weights"), _constant(given, "scales")
    _require(weights, ir.DataType.UINT8, (rows, depth * bits // 8))
    if scales.dtype != dtype and not (dtype == ir.DataType.FLOAT and scales.dtype in FLOATS):
        sentence = f"the scales '{scales.base}' are {scales.dtype}, which {dtype} does not hold"
        raise Refusal(sentence, "contrib-form")
    scales = cast(scales, dtype)
    zeros = None if given.zero_points is None else _constant(given, "zero_points")
    if scales.shape[1:] == (rows,):
        # A scale for each row counts for each of its blocks.
        of_row = scales
        scales = Source(
            dtype, (of_row.shape[0], rows, count), lambda e: _repeated(of_row.entry(e), count), of_row.values
        )
        if zeros is not None:
            packed_rows = zeros
            _require(zeros, ir.DataType.UINT8, (-(-rows * bits // 8),))

            def entry(expert: int) -> Array:
                codes = packed_rows.entry(expert)
                if bits == 4:
                    codes = arrays.unpack_nibbles(codes)[:rows]
                repeated = _repeated(codes, count)
                return arrays.pack_nibbles(repeated) if bits == 4 else repeated

            shape = (packed_rows.shape[0], rows, -(-count * bits // 8))
            zeros = Source(ir.DataType.UINT8, shape, entry, packed_rows.values)
    _require(scales, dtype, (rows, count))
    parts = {"weights": weights, "scales": scales}
    if zeros is not None:
        _require(zeros, ir.DataType.UINT8, (rows, -(-count * bits // 8)))
        parts["zero_points"] = zeros
    return parts


def _nvfp4(given: Given, rows: int, depth: int, *, along_depth: bool) -> Parts:
    weights, scales = _constant(given, "weights"), _constant(given, "scales")
    _require(scales, ir.DataType.FLOAT8E4M3FN, (rows, depth // 16))
    if depth % 16 or rows % 2:
        raise Refusal(f"its layer of {rows} rows of {depth} is not of pairs of rows and blocks of 16", "contrib-form")
    _require(weights, ir.DataType.UINT8, (depth, rows // 2))
    packed = (weights.shape[0], rows, depth // 2)
    weights = viewed(weights, weights.dtype, packed) if along_depth else _packed_along_depth(weights)
    return {"weights": weights, "scales": scales, "global_scale": _global_scale(given)}


def _mxfp4(given: Given, rows: int, depth: int, *, along_depth: bool) -> Parts:
    weights, scales = _constant(given, "weights"), _constant(given, "scales")
    if depth % 32:
        raise Refusal(f"its rows of {depth} weights are no whole blocks of 32", "contrib-form")
    if scales.dtype == ir.DataType.FLOAT8E8M0:
        scales = viewed(scales, ir.DataType.UINT8, scales.shape)
    _require(scales, ir.DataType.UINT8, (rows, depth // 32))
    _require(weights, ir.DataType.UINT8, (rows, depth // 2) if along_depth else (depth, rows // 2))
    if not along_depth:
        weights = _packed_along_depth(weights)
    return {"weights": weights, "scales": scales, "global_scale": _global_scale(given)}


def _fp4_along_depth(layers: Sequence[Given], sizes: tuple[int, int, int]) -> bool:
    """Whether two neighbours along D share a byte, by the shapes of all layers: (E, N, D / 2), and not (E, D, N / 2).

    Raises:
        Refusal: No shape tells, or they contradict one another.
    """
    fc1_rows, hidden, inner = sizes
    wanted = {"fc1": (fc1_rows, hidden), "fc2": (hidden, inner), "fc3": (inner, hidden)}
    told: set[bool] = set()
    for layer in layers:
        rows, depth = wanted[layer.name]
        shape = _constant(layer, "weights").shape[1:]
        ways = {along for along, of in ((True, (rows, depth // 2)), (False, (depth, rows // 2))) if shape == of}
        if not ways:
            sentence = (
                f"the weights '{_constant(layer, 'weights').base}' of {rows} rows of {depth} are of shape {shape}"
            )
            raise Refusal(sentence, "contrib-form")
        told |= ways if len(ways) == 1 else set()
    if len(told) != 1:
        sentence = "the shapes of its weights fit bytes of two neighbours along either axis"
        raise Refusal(sentence, "contrib-layout")
    return told.pop()


def _fp8(given: Given, rows: int, depth: int, size: int, *, of_blocks: bool) -> Parts:
    weights = _constant(given, "weights")
    if weights.dtype == ir.DataType.UINT8:
        weights = viewed(weights, ir.DataType.FLOAT8E4M3FN, weights.shape)
    _require(weights, ir.DataType.FLOAT8E4M3FN, (rows, depth))
    blocks = (-(-rows // size), -(-depth // size))
    if of_blocks:
        scales = _constant(given, "scales")
        if scales.dtype not in _FLOAT8_SCALES:
            raise Refusal(f"the scales '{scales.base}' are {scales.dtype}, expected floats", "contrib-form")
        scales = cast(scales, ir.DataType.FLOAT)
        _require(scales, ir.DataType.FLOAT, blocks)
    else:
        of_expert = _global_scale(given)
        shape = (of_expert.shape[0], *blocks)
        scales = Source(of_expert.dtype, shape, lambda e: np.broadcast_to(of_expert.entry(e), blocks), of_expert.values)
    return {"weights": weights, "scales": scales}


def _global_scale(given: Given) -> Source:
    scale = _constant(given, "global_scale")
    _require(scale, ir.DataType.FLOAT, ())
    return scale


def _packed_along_depth(weights: Source) -> Source:
    """Bytes of two neighbours along N, (E, D, N / 2), as FusedExperts takes them."""
    experts, depth, half = weights.shape

    def entry(expert: int) -> Array:
        (packed,) = arrays.packed_along_the_other_axis(weights.entry(expert)[None])
        return np.asarray(packed)

    return Source(weights.dtype, (experts, 2 * half, depth // 2), entry, weights.values)


def _repeated(column: Array, count: int) -> Array:
    repeated: Array = np.repeat(column[:, None], count, axis=1)
    return repeated


def _constant(given: Given, part: str) -> Source:
    values: Mapping[str, ir.Value | None] = vars(given)
    value = values[part]
    what = f"the {part.replace('_', ' ')} of {given.name}"
    if value is None:
        raise Refusal(f"it lacks {what}", "contrib-form")
    return constant_source(value, what)


def _require(source: Source, dtype: ir.DataType, shape: tuple[int, ...]) -> None:
    if source.dtype != dtype or source.shape[1:] != shape:
        told = ", ".join(map(str, shape))
        sentence = f"'{source.base}' is {source.dtype} of shape {source.shape}, expected {dtype} of (E, {told})"
        raise Refusal(sentence, "contrib-form")

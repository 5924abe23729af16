"""Whether packed weights are those of the original: none is further from its own than rounding takes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ort_moe.graphs.node_kinds import experts_inputs
from ort_moe.verification.packed_reference import layer_of
from ort_moe.verification.tolerance import told

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import onnx_ir as ir

    from ort_moe.ops.experts_config import ExpertsConfig
    from ort_moe.reference.fused_experts import ExpertLayer

    Array = npt.NDArray[Any]
    Doubles = npt.NDArray[np.float64]

Weights = Mapping[str, "ir.TensorProtocol"]
"""The weights (E, N, D) of `fc1` and `fc2` before they were packed."""

LARGEST_ERROR = {"int8": 0.012, "fp8": 0.04, "int4": 0.08, "nvfp4": 0.18, "mxfp4": 0.21}
"""How far a weight may be from what its code stands for, relative to the largest magnitude of its block.

That is half the widest step between codes: 1/254 (int8), 1/28 (fp8), 1/14 (int4), 1/6 (nvfp4) and 1/5 (mxfp4), and what
scales and zero points that are rounded themselves add to it.
"""

_OF_HALF_SCALES = 1e-5
"""What float16 adds to it: integers' scales are no finer than its least number, and 255 steps may be off by half."""

_OF_PEAK = 4e-6
"""What nvfp4 adds, relative to the largest of the expert: the scales of small blocks are no finer than 2^-9."""

_LEAST = 1e-36
"""What is no error, for float32 is no finer."""

_MOST = 2.0**125
"""Largest magnitude of a block up to which this holds: beyond, codes are kept from what float32 does not reach."""

_PIECE = 1 << 20
"""Weights looked at together."""


def strays(node: ir.Node, weights: Weights, experts: Iterable[int]) -> str:
    """What is told of a weight that cannot come of packing the original's, in a clause; empty where there is none.

    Args:
        node: A FusedExperts whose weights were packed.
        weights: The original's.
        experts: Those to look at.
    """
    import numpy as np

    from ort_moe.files.streamed_tensor import entry_of, let_go

    config = config_of(node)
    most = LARGEST_ERROR[config.weight_format]
    clause = ""
    for layer, tensor in weights.items():
        for expert in experts if not clause else ():
            error = largest_error(config, layer_of(node, layer, expert), np.asarray(entry_of(tensor, expert)))
            if not error <= most:
                clause = (
                    f"its weights were packed to {config.weight_format}, which changes one of {layer} of expert "
                    f"{expert} by {error:.1e} of the largest of its block (allowed {told(most)})"
                )
                break
        let_go(tensor)
    return clause


def largest_error(config: ExpertsConfig, layer: ExpertLayer, weights: Array) -> float:
    """How far a weight is from what it stands for, at most, relative to the largest magnitude of its block.

    Args:
        config: Says how they are packed.
        layer: Of one expert, (1, N, ...).
        weights: (N, D) before they were packed.
    """
    import numpy as np

    from ort_moe.packing.pieces import rows_at_once
    from ort_moe.reference.fused_experts import dense_weights

    rows, depth = weights.shape
    height = config.block_size if config.weight_format == "fp8" else 1
    step = rows_at_once(_PIECE, depth, height)
    starts = range(0, rows, step)
    least = _LEAST
    if layer.scales is not None and layer.scales.dtype == np.float16:
        least += _OF_HALF_SCALES
    if config.weight_format == "nvfp4":
        least += _OF_PEAK * max(float(np.abs(weights[start : start + step]).max(initial=0)) for start in starts)
    worst = 0.0
    for start in starts:
        piece = weights[start : start + step].astype(np.float64)
        with np.errstate(all="ignore"):
            apart = np.abs(dense_weights(config, _rows_of(layer, start, step, height))[0] - piece)
        off = _of_blocks(np.nan_to_num(apart, nan=np.inf, posinf=np.inf), height, config.scale_block)
        largest = _of_blocks(np.abs(piece), height, config.scale_block)
        error = np.where(largest > _MOST, 0.0, np.maximum(off - least, 0.0))
        of_zeros = np.where(error > 0.0, np.inf, 0.0)
        relative = np.divide(error, largest, out=of_zeros, where=largest > 0.0)
        worst = max(worst, float(relative.max(initial=0.0)))
    return worst


def _rows_of(layer: ExpertLayer, start: int, step: int, height: int) -> ExpertLayer:
    """Some rows of a layer of one expert, of which `height` share scales."""
    scales, zeros = layer.scales, layer.zero_points
    return layer._replace(
        weights=layer.weights[:, start : start + step],
        scales=None if scales is None else scales[:, start // height : -(-(start + step) // height)],
        zero_points=None if zeros is None else zeros[:, start : start + step],
        bias=None,
    )


def _of_blocks(magnitudes: Doubles, height: int, width: int) -> Doubles:
    """The largest of each block of a matrix; the last ones may be cut."""
    import numpy as np

    for axis, size in enumerate((height, width)):
        magnitudes = np.maximum.reduceat(magnitudes, np.arange(0, magnitudes.shape[axis], size), axis=axis)
    return magnitudes


def config_of(node: ir.Node) -> ExpertsConfig:
    """The attributes of a FusedExperts."""
    from ort_moe.ops.experts_config import ExpertsConfig

    return ExpertsConfig.from_attributes({name: each.value for name, each in node.attributes.items()})


def fits(node: ir.Node, weights: Weights) -> bool:
    """Whether the weights are of the shapes that a FusedExperts has packed."""
    in_a_byte = 2 if config_of(node).nibbles else 1
    given = experts_inputs(node)
    for layer, tensor in weights.items():
        codes = given[f"{layer}_weights"].const_value
        if codes is None:
            return False
        *sizes, width = codes.shape.numpy()
        if tuple(tensor.shape.numpy()) != (*sizes, width * in_a_byte):
            return False
    return True

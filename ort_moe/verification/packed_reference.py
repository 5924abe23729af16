"""What a FusedExperts with packed weights stands for, in NumPy: the weights as they are meant, an expert at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ort_moe.graphs.node_kinds import experts_inputs, is_experts
from ort_moe.ops import CONVERTED_FROM

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import onnx_ir as ir

    from ort_moe.reference.fused_experts import ExpertLayer

FROM_ORIGINAL = {"int8": 0.1, "fp8": 0.3, "int4": 0.7, "nvfp4": 0.7, "mxfp4": 0.7}
"""How far packed experts may be from the original's, by norm, relative.

Weights that are normally distributed change by 0.6 % (int8), 2.6 % (fp8) and 8 to 12 % (four bits) of their norm, and
what a layer of experts returns by about twice as much; the rest is for small layers. Wrong experts, or nibbles in the
wrong order, change it by 1.4. A format has no bound for rows, which may be small where their terms cancel out; that of
weights is in `packed_weights`.
"""

END_TO_END = {"int8": 0.2, "fp8": 0.6, "int4": 1.2, "nvfp4": 1.2, "mxfp4": 1.2}
"""The same of the outputs of a model of many such layers, in which later routers choose otherwise; 1.4 is unrelated."""

_PARTS = ("weights", "scales", "global_scale", "zero_points", "bias")


def is_converted(node: ir.Node) -> bool:
    """Whether the weights of the node were packed when the model was optimised."""
    return is_experts(node) and CONVERTED_FROM in node.metadata_props


def packed_since(original: ir.Model, optimized: ir.Model) -> frozenset[ir.Node]:
    """The nodes of the optimised model whose weights were packed after the original was made.

    What the original has packed already must come out as it does there.
    """
    before = {node.name for node in original.graph.all_nodes() if is_converted(node)}
    return frozenset(node for node in optimized.graph.all_nodes() if is_converted(node) and node.name not in before)


def from_original(node: ir.Node) -> float:
    """How far what a converted node returns may be from the original's, by norm, relative."""
    return FROM_ORIGINAL[node.attributes["weight_format"].as_string()]


def meant(
    node: ir.Node, feeds: Mapping[str, Any], dense: Mapping[str, ir.TensorProtocol] | None = None
) -> npt.NDArray[np.float64]:
    """What the node should return for rows (T, H), weights (T, K) and indices (T, K).

    Only the weights of the experts that are chosen are read.

    Args:
        node: A FusedExperts.
        feeds: Its inputs that are no constants.
        dense: Weights (E, N, D) of `fc1` and `fc2` that it shall have in the place of its own.
    """
    import numpy as np

    from ort_moe.reference.fused_experts import fused_experts

    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    if dense is not None:
        attributes |= {"weight_format": "dense", "block_size": 0}
    x, weights, indices = feeds["x"], feeds["weights"], feeds["indices"]
    y = np.zeros(x.shape, np.float64)
    for expert in np.unique(indices):
        rows, places = np.nonzero(indices == expert)
        fc1, fc2 = (layer_of(node, name, int(expert)) for name in ("fc1", "fc2"))
        if dense is not None:
            fc1 = _with_weights(fc1, dense["fc1"], int(expert), x.dtype)
            fc2 = _with_weights(fc2, dense["fc2"], int(expert), x.dtype)
        share = weights[rows, places][:, None]
        zero = np.zeros(share.shape, np.int32)
        np.add.at(y, rows, fused_experts(x[rows], share, zero, fc1, fc2, **attributes))
    if "residual" in feeds:
        y += feeds["residual"].astype(np.float64)
    return y


def _with_weights(layer: ExpertLayer, tensor: ir.TensorProtocol, expert: int, dtype: np.dtype[Any]) -> ExpertLayer:
    """The layer with other weights, dense."""
    import numpy as np

    from ort_moe.files.streamed_tensor import entry_of

    weights = np.asarray(entry_of(tensor, expert))[None].astype(dtype)
    return layer._replace(weights=weights, scales=None, global_scale=None, zero_points=None)


def layer_of(node: ir.Node, name: str, expert: int) -> ExpertLayer:
    """One layer, `fc1` or `fc2`, of one expert of a FusedExperts, (1, N, ...)."""
    from ort_moe.files.streamed_tensor import entry_of
    from ort_moe.reference.fused_experts import ExpertLayer

    given = experts_inputs(node)
    parts = {}
    for part in _PARTS:
        value = given.get(f"{name}_{part}")
        if value is not None and value.const_value is not None:
            parts[part] = entry_of(value.const_value, expert)[None]
    return ExpertLayer(**parts)


def distance(got: Any, expected: Any) -> float:
    """Norm of the difference, relative to that of what was expected; 0 where both are 0.

    NaN equals NaN and infinities equal themselves; where only one of two is not finite, or the shapes differ, it is
    infinite.
    """
    import numpy as np

    if got.shape != expected.shape:
        return float("inf")
    a, b = got.astype(np.float64).reshape(-1), expected.astype(np.float64).reshape(-1)
    finite = np.isfinite(b)
    if not (np.isfinite(a) == finite).all() or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    norm = float(np.linalg.norm(b[finite]))
    difference = float(np.linalg.norm(a[finite] - b[finite]))
    return difference / norm if norm else float("inf") if difference else 0.0

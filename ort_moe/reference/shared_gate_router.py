"""SharedGateRouter in NumPy: FusedRouter's emulation, and the gates of shared experts beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ort_moe.ops import SHARED_GATE_ROUTER, AttributeValue
from ort_moe.reference import float_math
from ort_moe.reference.dtypes import check_activation, check_array
from ort_moe.reference.float_math import Float32Array
from ort_moe.reference.fused_router import IndexArray, fused_router

_OP = "SharedGateRouter"


def shared_gate_router(
    logits: npt.NDArray[Any],
    hidden: npt.NDArray[Any],
    gate_weight: npt.NDArray[Any],
    selection_bias: Float32Array | None = None,
    expert_scale: Float32Array | None = None,
    **attributes: AttributeValue,
) -> tuple[Float32Array, IndexArray]:
    """Routes and weighs shared experts, bit for bit as the kernels do (NaNs compare as NaN).

    Args:
        logits: (..., E) float32, float16 or bfloat16.
        hidden: (..., H) of the same type.
        gate_weight: (S, H) of the same type.
        selection_bias: (E) float32.
        expert_scale: (E) float32.
        **attributes: The op's attributes under their names in the op table; those left out are neutral.

    Returns:
        weights (..., K + S) float32 and indices (..., K + S) int32.

    Raises:
        ValueError: An argument is not what the op takes.
    """
    given = SHARED_GATE_ROUTER.read(attributes)
    dtype = check_activation(_OP, "logits", logits)
    scale, base = np.float32(given["shared_scale"]), int(given["shared_base"])
    if base < 0:
        raise ValueError(f"{_OP}: attribute 'shared_base' must be at least 0, but is {base}")
    size = hidden.shape[-1] if hidden.ndim else 0
    check_array(_OP, "hidden", hidden, dtype, (*logits.shape[:-1], size))
    shared = len(gate_weight) if gate_weight.ndim else 0
    check_array(_OP, "gate_weight", gate_weight, dtype, (shared, size))
    if shared < 1 or size < 1:
        raise ValueError(
            f"{_OP}: input 'gate_weight' must have a row for each shared expert, 1 or more, and of 1 element or more,"
            f" but has shape {gate_weight.shape}"
        )
    router = {name: value for name, value in attributes.items() if name not in ("shared_scale", "shared_base")}
    try:
        weights, indices = fused_router(logits, selection_bias, expert_scale, **router)
    except ValueError as error:
        raise ValueError(str(error).replace("FusedRouter", _OP, 1)) from None
    with np.errstate(all="ignore"):  # infinities and NaN follow IEEE 754
        rows = hidden.astype(np.float32)[..., None, :]
        gates = float_math.sigmoid(float_math.ordered_dot(rows, gate_weight.astype(np.float32))) * scale
    ids = np.broadcast_to(np.arange(base, base + shared, dtype=np.int32), gates.shape)
    return np.concatenate([weights, gates], axis=-1), np.concatenate([indices, ids], axis=-1)

"""FinalizeRouting in NumPy: the float32 emulation, whose bits every kernel returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ort_moe.reference.dtypes import check_activation, check_array
from ort_moe.reference.float_math import fma

_OP = "FinalizeRouting"


def finalize_routing(
    expert_output: npt.NDArray[Any],
    weights: npt.NDArray[np.float32],
    indices: npt.NDArray[np.int32],
    unpermuted_to_permuted: npt.NDArray[np.int32],
    bias: npt.NDArray[Any] | None = None,
    residual: npt.NDArray[Any] | None = None,
) -> npt.NDArray[Any]:
    """Sums each token's rows with its weights, bit for bit as the kernels do (NaNs compare as NaN).

    Args:
        expert_output: (R, H) float32, float16 or bfloat16, in permuted order.
        weights: (..., K) float32.
        indices: (..., K) int32.
        unpermuted_to_permuted: (R) int32, the row of each choice, number k * T + t; outside [0, R): none.
        bias: (E, H) of the type of the rows.
        residual: (..., H) of the type of the rows.

    Returns:
        (..., H) of the type of the rows.

    Raises:
        ValueError: An argument is not what the op takes.
    """
    dtype = check_activation(_OP, "expert_output", expert_output)
    if weights.ndim < 1:
        raise ValueError(f"{_OP}: input 'weights' must have rank 1 or more, but is a scalar")
    *leading, k = weights.shape
    tokens = int(np.prod(leading, dtype=np.int64))
    rows, hidden = tokens * k, expert_output.shape[-1] if expert_output.ndim else 0
    check_array(_OP, "expert_output", expert_output, dtype, (rows, hidden))
    check_array(_OP, "weights", weights, np.float32, weights.shape)
    check_array(_OP, "indices", indices, np.int32, weights.shape)
    check_array(_OP, "unpermuted_to_permuted", unpermuted_to_permuted, np.int32, (rows,))
    if bias is not None:
        check_array(_OP, "bias", bias, dtype, (len(bias) if bias.ndim else 0, hidden))
    if residual is not None:
        check_array(_OP, "residual", residual, dtype, (*leading, hidden))

    with np.errstate(all="ignore"):  # infinities and NaN follow IEEE 754
        total = np.zeros((tokens, hidden), np.float32)
        for j in range(k):
            row = unpermuted_to_permuted[j * tokens : (j + 1) * tokens]
            expert = indices.reshape(tokens, k)[:, j]
            has_row = (row >= 0) & (row < rows)
            if bias is not None:
                has_row &= (expert >= 0) & (expert < len(bias))
            value = expert_output[row[has_row]].astype(np.float32)
            if bias is not None:
                value = value + bias[expert[has_row]].astype(np.float32)
            weight = weights.reshape(tokens, k)[has_row, j, None]
            total[has_row] = fma(weight, value, total[has_row])
        if residual is not None:
            total = total + residual.reshape(tokens, hidden).astype(np.float32)
        return total.astype(dtype).reshape(*leading, hidden)

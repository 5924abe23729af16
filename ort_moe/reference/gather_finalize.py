"""GatherFinalize in NumPy: a gather of the rows in use, and FinalizeRouting of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ort_moe.reference.dtypes import check_activation, check_array
from ort_moe.reference.finalize_routing import finalize_routing

_OP = "GatherFinalize"


def gather_finalize(
    expert_output: npt.NDArray[Any],
    weights: npt.NDArray[np.float32],
    indices: npt.NDArray[np.int32],
    unpermuted_to_permuted: npt.NDArray[np.int32],
    expert_first_token_offset: npt.NDArray[np.int64],
    bias: npt.NDArray[Any] | None = None,
    residual: npt.NDArray[Any] | None = None,
    *,
    hidden_size: int,
    local_begin: int = 0,
    local_count: int,
) -> npt.NDArray[Any]:
    """Sums each token's rows with its weights, bit for bit as the kernels do (NaNs compare as NaN).

    Args:
        expert_output: (local_count, M, H_padded) float32, float16 or bfloat16.
        weights: (..., K) float32.
        indices: (..., K) int32.
        unpermuted_to_permuted: (R) int32, the permuted position of each choice, number k * T + t.
        expert_first_token_offset: (E + 1) int64.
        bias: (E, H) of the type of the rows.
        residual: (..., H) of the type of the rows.
        hidden_size: H.
        local_begin: The first local expert.
        local_count: How many there are.

    Returns:
        (..., H) of the type of the rows.

    Raises:
        ValueError: An argument is not what the op takes.
    """
    dtype = check_activation(_OP, "expert_output", expert_output)
    for name, value, least in (("hidden_size", hidden_size, 1), ("local_begin", local_begin, 0)):
        if value < least:
            raise ValueError(f"{_OP}: attribute '{name}' must be at least {least}, but is {value}")
    _, capacity, padded = expert_output.shape if expert_output.ndim == 3 else (0, 0, 0)
    check_array(_OP, "expert_output", expert_output, dtype, (local_count, capacity, padded))
    if local_count < 1 or hidden_size > padded:
        raise ValueError(
            f"{_OP}: input 'expert_output' must have an expert or more and rows of at least hidden_size = {hidden_size}"
            f" elements, but has shape {expert_output.shape}"
        )
    offset = expert_first_token_offset
    check_array(_OP, "expert_first_token_offset", offset, np.int64, offset.shape[:1] or (1,))
    experts = len(offset) - 1
    if local_begin + local_count > experts:
        raise ValueError(
            f"{_OP}: attributes 'local_begin' and 'local_count' must name experts below {experts}, but name those below"
            f" {local_begin + local_count}"
        )
    if weights.ndim < 1:
        raise ValueError(f"{_OP}: input 'weights' must have rank 1 or more, but is a scalar")
    rows = weights.size
    check_array(_OP, "indices", indices, np.int32, weights.shape)
    check_array(_OP, "unpermuted_to_permuted", unpermuted_to_permuted, np.int32, (rows,))
    if bias is not None:
        check_array(_OP, "bias", bias, dtype, (experts, hidden_size))

    expert = indices.reshape(-1, weights.shape[-1]).T.reshape(-1).astype(np.int64)  # in the order of expanded rows
    local = (expert >= local_begin) & (expert < local_begin + local_count)
    row = np.full(rows, -1, np.int64)
    row[local] = unpermuted_to_permuted[local] - offset[expert[local]]
    used = (row >= 0) & (row < capacity)
    gathered = np.zeros((rows, hidden_size), dtype)
    gathered[used] = expert_output[expert[used] - local_begin, row[used], :hidden_size]
    places = np.where(used, np.arange(rows), -1).astype(np.int32)
    return finalize_routing(gathered, weights, indices, places, bias, residual)

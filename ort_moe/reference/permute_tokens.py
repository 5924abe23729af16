"""PermuteTokens in NumPy: the rows and maps that every kernel returns, exactly."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ort_moe.reference.dtypes import check_activation, check_array
from ort_moe.reference.routing_maps import RoutingMaps, routing_maps

_OP = "PermuteTokens"


class PermutedTokens(NamedTuple):
    """The outputs of PermuteTokens.

    Attributes:
        permuted_x: (R, H), a row for each choice in permuted order; zero where there is no expert.
        maps: The routing maps of the choices.
    """

    permuted_x: npt.NDArray[Any]
    maps: RoutingMaps


def permute_tokens(x: npt.NDArray[Any], indices: npt.NDArray[np.int32], *, num_experts: int) -> PermutedTokens:
    """Copies each token's row to the places of its choices.

    Args:
        x: (..., H) float32, float16 or bfloat16.
        indices: (..., K) int32, any values; those outside [0, E) name no expert.
        num_experts: E.

    Raises:
        ValueError: An argument is not what the op takes.
    """
    dtype = check_activation(_OP, "x", x)
    if x.ndim < 1:
        raise ValueError(f"{_OP}: input 'x' must have rank 1 or more, but is a scalar")
    check_array(_OP, "indices", indices, np.int32, (*x.shape[:-1], indices.shape[-1] if indices.ndim else 0))
    if num_experts < 1:
        raise ValueError(f"{_OP}: attribute 'num_experts' must be at least 1, but is {num_experts}")
    maps = routing_maps(indices, num_experts)
    tokens, hidden = int(np.prod(x.shape[:-1], dtype=np.int64)), x.shape[-1]
    permuted = np.zeros((len(maps.permuted_to_unpermuted), hidden), dtype)
    used = maps.expert_first_token_offset[-1]
    permuted[:used] = x.reshape(tokens, hidden)[maps.permuted_to_unpermuted[:used] % max(tokens, 1)]
    return PermutedTokens(permuted, maps)

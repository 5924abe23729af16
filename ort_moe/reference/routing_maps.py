"""The maps between a router's choices and the rows of its experts, in NumPy: what every kernel builds, exactly."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class RoutingMaps(NamedTuple):
    """The maps of T tokens with K choices each among E experts; R = T * K expanded rows, number k * T + t.

    Attributes:
        permuted_to_unpermuted: (R) int32, the expanded row at each permuted position: expert ascending, then token,
            then k ascending; rows without an expert last.
        unpermuted_to_permuted: (R) int32, the permuted position of each expanded row, -1 where it has no expert.
        permuted_to_expert: (R) int32, the expert at each permuted position, E where there is none.
        expert_first_token_offset: (E + 1) int64, the first permuted position of each expert, and last the number of
            rows that have one.
    """

    permuted_to_unpermuted: npt.NDArray[np.int32]
    unpermuted_to_permuted: npt.NDArray[np.int32]
    permuted_to_expert: npt.NDArray[np.int32]
    expert_first_token_offset: npt.NDArray[np.int64]


def routing_maps(indices: npt.NDArray[np.int32], experts: int) -> RoutingMaps:
    """Builds the maps of choices.

    Args:
        indices: (..., K) int32, any values; those outside [0, E) name no expert.
        experts: E.
    """
    k = indices.shape[-1]
    tokens = int(np.prod(indices.shape[:-1], dtype=np.int64))
    choices = indices.reshape(tokens * k).astype(np.int64)
    choices = np.where((choices >= 0) & (choices < experts), choices, experts)
    by_expert = np.argsort(choices, kind="stable")  # choice number t * K + k: token ascending, then k
    chosen = choices[by_expert]
    unpermuted = by_expert % max(k, 1) * tokens + by_expert // max(k, 1)
    permuted = np.empty(len(choices), np.int32)
    permuted[unpermuted] = np.where(chosen < experts, np.arange(len(choices)), -1)
    offsets = np.searchsorted(chosen, np.arange(experts + 1), side="left")
    return RoutingMaps(unpermuted.astype(np.int32), permuted, chosen.astype(np.int32), offsets.astype(np.int64))

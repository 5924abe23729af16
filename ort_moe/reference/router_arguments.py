"""The checked arguments of a router's reference, rows flattened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ort_moe.ops import AttributeValue
from ort_moe.ops.router_config import RouterConfig
from ort_moe.reference.dtypes import check_activation, check_array


@dataclass(frozen=True)
class RouterArguments:
    """The arguments of a router, checked.

    Attributes:
        config: The attributes.
        logits: (T, E) float32, widened exactly.
        selection_bias: (E) float32, or None.
        expert_scale: (E) float32, or None.
        leading: The leading dimensions of the logits; their product is T.
    """

    config: RouterConfig
    logits: npt.NDArray[np.float32]
    selection_bias: npt.NDArray[np.float32] | None
    expert_scale: npt.NDArray[np.float32] | None
    leading: tuple[int, ...]


def check_router_arguments(
    logits: npt.NDArray[Any],
    selection_bias: npt.NDArray[np.float32] | None,
    expert_scale: npt.NDArray[np.float32] | None,
    attributes: Mapping[str, AttributeValue],
) -> RouterArguments:
    """Checks the arguments against the op's contract and widens the logits.

    Raises:
        ValueError: One of them is not what the op takes.
    """
    config = RouterConfig.from_attributes(attributes)
    check_activation("FusedRouter", "logits", logits)
    if logits.ndim < 1:
        raise ValueError("FusedRouter: input 'logits' must have rank 1 or more, but is a scalar")
    *leading, experts = logits.shape
    config.check(experts, selection_bias is not None)
    for name, vector in (("selection_bias", selection_bias), ("expert_scale", expert_scale)):
        if vector is not None:
            check_array("FusedRouter", name, vector, np.float32, (experts,))
    rows = logits.astype(np.float32).reshape(int(np.prod(leading, dtype=np.int64)), experts)
    return RouterArguments(config, rows, selection_bias, expert_scale, tuple(leading))

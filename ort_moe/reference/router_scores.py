"""RouterScores in NumPy: the float32 emulation, forward and backward, whose bits every kernel returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ort_moe.ops import AttributeValue
from ort_moe.ops.training_config import RouterScoresConfig
from ort_moe.reference.dtypes import check_activation, check_array
from ort_moe.reference.float_math import ordered_sum
from ort_moe.reference.router_probs import (
    BoolArray,
    normalized_gradient,
    router_probs,
    score_gradient,
    score_of,
    soft_capped,
)

_OP = "RouterScores"


class RouterScores(NamedTuple):
    """What a RouterScores returns.

    Attributes:
        scores: (..., E) of the type of the logits.
        routing_map: (..., E) bool.
    """

    scores: npt.NDArray[Any]
    routing_map: BoolArray


def router_scores(logits: npt.NDArray[Any], **attributes: AttributeValue) -> RouterScores:
    """Emulates the RouterScores kernels in float32, bit for bit (NaNs compare as NaN).

    Args:
        logits: (..., E) float32, float16 or bfloat16.
        **attributes: The op's attributes under their names in the op table; those left out are neutral.

    Raises:
        ValueError: An argument is not what the op takes.
    """
    config = _check(logits, attributes)
    routing_map = router_probs(logits, k=config.k, score=config.score, softcap=config.softcap).routing_map
    if not logits.size:
        return RouterScores(logits.copy(), routing_map)
    with np.errstate(all="ignore"):
        x, _ = soft_capped(logits.reshape(-1, logits.shape[-1]).astype(np.float32), config.softcap)
        v = score_of(config.score, x, np.ones(x.shape, np.bool_))
        if config.normalize:
            v = v / (ordered_sum(v)[:, None] + np.float32(config.normalize_eps))
        return RouterScores(v.astype(logits.dtype).reshape(logits.shape), routing_map)


def router_scores_grad(
    logits: npt.NDArray[Any], grad_scores: npt.NDArray[Any], **attributes: AttributeValue
) -> npt.NDArray[Any]:
    """Emulates the gradient of the logits in float32, bit for bit (NaNs compare as NaN, zeros as zero).

    The steps stand in custom_ops/kernels/training/router_scores.h.

    Args:
        logits: (..., E) float32, float16 or bfloat16.
        grad_scores: (..., E) of the type of the logits.
        **attributes: The op's attributes under their names in the op table; those left out are neutral.

    Returns:
        (..., E) of the type of the logits.

    Raises:
        ValueError: An argument is not what the op takes.
    """
    config = _check(logits, attributes)
    check_array(_OP, "grad_scores", grad_scores, logits.dtype, logits.shape)
    if not logits.size:
        return logits.copy()
    with np.errstate(all="ignore"):
        rows = (-1, logits.shape[-1])
        x, slope = soft_capped(logits.reshape(rows).astype(np.float32), config.softcap)
        g = grad_scores.reshape(rows).astype(np.float32)
        v = score_of(config.score, x, np.ones(x.shape, np.bool_))
        if config.normalize:
            g = normalized_gradient(v, g, ordered_sum(v)[:, None] + np.float32(config.normalize_eps))
        grad = score_gradient(config.score, x, v, g, v)
        grad = grad if slope is None else grad * slope
        return grad.astype(logits.dtype).reshape(logits.shape)


def _check(logits: npt.NDArray[Any], attributes: dict[str, AttributeValue]) -> RouterScoresConfig:
    config = RouterScoresConfig.from_attributes(attributes)
    check_activation(_OP, "logits", logits)
    if logits.ndim < 1:
        raise ValueError(f"{_OP}: input 'logits' must have rank 1 or more, but is a scalar")
    config.check(logits.shape[-1])
    return config

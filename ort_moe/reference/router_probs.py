"""RouterProbs in NumPy: the float32 emulation, forward and backward, whose bits every kernel returns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ort_moe.ops import AttributeValue
from ort_moe.ops.router_config import RouterConfig
from ort_moe.ops.training_config import check_router_probs, router_probs_config
from ort_moe.reference import float_math
from ort_moe.reference.dtypes import check_activation, check_array
from ort_moe.reference.float_math import Float32Array, ordered_sum
from ort_moe.reference.fused_router import fused_router

BoolArray = npt.NDArray[np.bool_]
_OP = "RouterProbs"


class RouterProbs(NamedTuple):
    """What a RouterProbs returns.

    Attributes:
        probs: (..., E) of the type of the logits.
        routing_map: (..., E) bool.
        indices: (..., K) int32, in rank order.
    """

    probs: npt.NDArray[Any]
    routing_map: BoolArray
    indices: npt.NDArray[np.int32]


def router_probs(
    logits: npt.NDArray[Any],
    selection_bias: Float32Array | None = None,
    expert_scale: Float32Array | None = None,
    **attributes: AttributeValue,
) -> RouterProbs:
    """Emulates the RouterProbs kernels in float32, bit for bit (NaNs compare as NaN).

    Args:
        logits: (..., E) float32, float16 or bfloat16.
        selection_bias: (E) float32.
        expert_scale: (E) float32.
        **attributes: The op's attributes under their names in the op table; those left out are neutral.

    Raises:
        ValueError: An argument is not what the op takes.
    """
    _check(logits, selection_bias, attributes)
    weights, indices = fused_router(logits, selection_bias, expert_scale, **attributes)
    probs, routing_map = np.zeros(logits.shape, logits.dtype), np.zeros(logits.shape, np.bool_)
    with np.errstate(over="ignore"):  # beyond float16
        np.put_along_axis(probs, indices.astype(np.intp), weights.astype(logits.dtype), axis=-1)
    np.put_along_axis(routing_map, indices.astype(np.intp), True, axis=-1)
    return RouterProbs(probs, routing_map, indices)


def bitmap(routing_map: BoolArray) -> npt.NDArray[np.uint8]:
    """A map (..., E) as bits, (..., ceil(E / 8))."""
    return np.packbits(routing_map, axis=-1, bitorder="little")


def router_probs_grad(
    logits: npt.NDArray[Any],
    routing_map: BoolArray,
    grad_probs: npt.NDArray[Any],
    expert_scale: Float32Array | None = None,
    **attributes: AttributeValue,
) -> npt.NDArray[Any]:
    """Emulates the gradient of the logits in float32, bit for bit (NaNs compare as NaN, zeros as zero).

    The steps stand in custom_ops/kernels/training/router_probs.h.

    Args:
        logits: (..., E) float32, float16 or bfloat16.
        routing_map: (..., E) bool.
        grad_probs: (..., E) of the type of the logits; not looked at where the map is False.
        expert_scale: (E) float32.
        **attributes: The op's attributes under their names in the op table; those left out are neutral.

    Returns:
        (..., E) of the type of the logits.

    Raises:
        ValueError: An argument is not what the op takes.
    """
    config = _check(logits, None, attributes)
    check_array(_OP, "routing_map", routing_map, np.bool_, logits.shape)
    check_array(_OP, "grad_probs", grad_probs, logits.dtype, logits.shape)
    if expert_scale is not None:
        check_array(_OP, "expert_scale", expert_scale, np.float32, logits.shape[-1:])
    rows = (-1, logits.shape[-1])
    if not logits.size:
        return np.zeros(logits.shape, logits.dtype)
    with np.errstate(all="ignore"):
        chosen = routing_map.reshape(rows)
        g = np.where(chosen, grad_probs.reshape(rows).astype(np.float32), np.float32(0.0))
        if expert_scale is not None:
            g = np.where(chosen, g * expert_scale, np.float32(0.0))
        g = np.where(chosen, g * np.float32(config.scale), np.float32(0.0))
        grad = _gradient(config, logits.reshape(rows).astype(np.float32), chosen, g)
        return grad.astype(logits.dtype).reshape(logits.shape)


def _gradient(config: RouterConfig, logits: Float32Array, chosen: BoolArray, g: Float32Array) -> Float32Array:
    """The gradient in float32, from that of the scores' weights before scale and expert_scale."""
    x, slope = soft_capped(logits, config.softcap)
    full = config.score == "softmax" and not config.score_after_topk and not config.chosen_softmax
    v = score_of(config.score, x, np.ones_like(chosen) if full else chosen)
    if config.normalize and not config.chosen_softmax:
        on_chosen = np.where(chosen, v, np.float32(0.0))
        divisor = ordered_sum(on_chosen)[:, None] + np.float32(config.normalize_eps)
        least = np.float32(config.normalize_min)
        floored = divisor < least
        through_sum = normalized_gradient(on_chosen, g, divisor)
        g = np.where(chosen, np.where(floored, g * (np.float32(1.0) / least), through_sum), np.float32(0.0))
    grad = score_gradient(config.score, x, v, g, np.where(chosen, v, np.float32(0.0)))
    if slope is not None:
        grad = grad * slope
    return np.where(chosen | full, grad, np.float32(0.0))


def soft_capped(logits: Float32Array, softcap: float) -> tuple[Float32Array, Float32Array | None]:
    """The logits after the soft cap, and its slope; None: there is none."""
    if softcap <= 0.0:
        return logits, None
    cap = np.float32(softcap)
    t = float_math.tanh(logits / cap)
    return cap * t, np.float32(1.0) - t * t


def score_of(score: str, x: Float32Array, taking_part: BoolArray) -> Float32Array:
    """FusedRouter's score of every expert, (T, E); a softmax over those that take part, zero elsewhere."""
    if score == "softmax":
        largest = np.fmax.reduce(np.where(taking_part, x, np.float32(-np.inf)), axis=-1)
        terms = np.where(taking_part, float_math.exp(x - largest[:, None]), np.float32(0.0))
        return np.where(taking_part, terms / ordered_sum(terms)[:, None], np.float32(0.0))
    if score == "sigmoid":
        return float_math.sigmoid(x)
    return float_math.sqrt_softplus(x) if score == "sqrtsoftplus" else x


def normalized_gradient(v: Float32Array, g: Float32Array, divisor: Float32Array) -> Float32Array:
    """The gradient of v from that of v / divisor, where the divisor is their sum and a constant, (T, 1)."""
    share = ordered_sum(g * v)[:, None] / divisor
    return np.asarray((g - share) * (np.float32(1.0) / divisor))


def score_gradient(
    score: str, x: Float32Array, v: Float32Array, g: Float32Array, weighed: Float32Array
) -> Float32Array:
    """The gradient of x from that of its score v.

    Args:
        score: The score.
        x: (T, E).
        v: (T, E).
        g: (T, E), zero where there is none.
        weighed: v where g is not zero by the map, else zero: what the sum of a softmax goes over.
    """
    if score == "softmax":
        return v * (g - ordered_sum(g * weighed)[:, None])
    if score == "sigmoid":
        return g * (v * (np.float32(1.0) - v))
    if score == "sqrtsoftplus":
        return g * np.where(x < np.float32(-64.0), v * np.float32(0.5), float_math.sigmoid(x) / (v + v))
    return g


def _check(
    logits: npt.NDArray[Any], selection_bias: Float32Array | None, attributes: dict[str, AttributeValue]
) -> RouterConfig:
    config = router_probs_config(attributes)
    check_activation(_OP, "logits", logits)
    if logits.ndim < 1:
        raise ValueError(f"{_OP}: input 'logits' must have rank 1 or more, but is a scalar")
    check_router_probs(config, logits.shape[-1], selection_bias is not None)
    return config

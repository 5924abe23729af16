"""FusedRouter in NumPy: the float32 emulation, whose bits every kernel returns, and a plain float64 reference.

The two share the checks of their arguments and nothing else; the contract is the op table's (docs/ops.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ort_moe.ops import AttributeValue
from ort_moe.ops.router_config import RouterConfig
from ort_moe.reference import float_math
from ort_moe.reference.float_math import Float32Array, ordered_key, ordered_sum
from ort_moe.reference.router_arguments import RouterArguments, check_router_arguments

Float64Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int32]


# --- The float32 emulation: (T, E) arrays, all rows at once. ---


def fused_router(
    logits: npt.NDArray[Any],
    selection_bias: Float32Array | None = None,
    expert_scale: Float32Array | None = None,
    **attributes: AttributeValue,
) -> tuple[Float32Array, IndexArray]:
    """Emulates the FusedRouter kernels in float32, bit for bit (NaNs compare as NaN).

    Args:
        logits: (..., E) float32, float16 or bfloat16.
        selection_bias: (E) float32.
        expert_scale: (E) float32.
        **attributes: The op's attributes under their names in the op table; those left out are neutral.

    Returns:
        weights (..., K) float32 and indices (..., K) int32, in rank order.

    Raises:
        ValueError: An argument is not what the op takes.
    """
    arguments = check_router_arguments(logits, selection_bias, expert_scale, attributes)
    with np.errstate(all="ignore"):  # infinities and NaN follow IEEE 754
        weights, indices = _route(arguments)
    shape = (*arguments.leading, arguments.config.k)
    return weights.reshape(shape), indices.astype(np.int32).reshape(shape)


def _route(arguments: RouterArguments) -> tuple[Float32Array, npt.NDArray[np.intp]]:
    config = arguments.config
    x = arguments.logits
    if config.softcap > 0.0:
        cap = np.float32(config.softcap)
        x = cap * float_math.tanh(x / cap)

    keys = x if config.ranks_logits(arguments.selection_bias is not None) else _score(config, x)
    if arguments.selection_bias is not None:
        keys = keys + arguments.selection_bias
    if config.has_groups:
        keys = _mask_groups(config, keys)
    indices = _best(keys, config.k)

    if config.score == "sparse_mixer":
        weights = _sparse_mixer_weights(config, x, indices)
    elif config.score_after_topk:
        source = x if config.weights_from == "scores" else keys
        weights = _score_chosen(config, source, indices)
    elif config.chosen_softmax:
        weights = _softmax_chosen(x, indices)
    else:
        source = _score(config, x) if config.weights_from == "scores" else keys
        weights = np.take_along_axis(source, indices, axis=-1)

    if config.normalize and not config.chosen_softmax:
        divisor = _sum_chosen(weights, indices, x.shape[-1]) + np.float32(config.normalize_eps)
        least = np.float32(config.normalize_min)
        divisor = np.where(divisor < least, least, divisor)
        weights = weights / divisor[:, None]
    weights = weights * np.float32(config.scale)
    if arguments.expert_scale is not None:
        weights = weights * arguments.expert_scale[indices]
    has_nan = np.isnan(arguments.logits).any(axis=-1, keepdims=True)
    return np.where(has_nan, np.float32(np.nan), weights), indices


_ELEMENTWISE: dict[str, Callable[[Float32Array], Float32Array]] = {
    "sigmoid": float_math.sigmoid,
    "sqrtsoftplus": float_math.sqrt_softplus,
    "none": lambda x: x,
}


def _score(config: RouterConfig, x: Float32Array) -> Float32Array:
    """The score of every expert, (T, E)."""
    if config.score == "softmax":
        terms = float_math.exp(x - np.fmax.reduce(x, axis=-1)[:, None])
        return terms / ordered_sum(terms)[:, None]
    return _ELEMENTWISE[config.score](x)


def _score_chosen(config: RouterConfig, source: Float32Array, indices: npt.NDArray[np.intp]) -> Float32Array:
    """The score over the chosen alone, (T, K)."""
    if config.score == "softmax":
        return _softmax_chosen(source, indices)
    return _ELEMENTWISE[config.score](np.take_along_axis(source, indices, axis=-1))


def _softmax_chosen(source: Float32Array, indices: npt.NDArray[np.intp]) -> Float32Array:
    chosen = np.take_along_axis(source, indices, axis=-1)
    terms = float_math.exp(chosen - np.fmax.reduce(chosen, axis=-1)[:, None])
    return terms / _sum_chosen(terms, indices, source.shape[-1])[:, None]


def _sum_chosen(values: Float32Array, indices: npt.NDArray[np.intp], experts: int) -> Float32Array:
    """Sums the values of the chosen at their places among the experts, the others +0: (T, K) to (T)."""
    placed = np.zeros((values.shape[0], experts), np.float32)
    np.put_along_axis(placed, indices, values, axis=-1)
    return ordered_sum(placed)


def _best(keys: Float32Array, count: int) -> npt.NDArray[np.intp]:
    """Indices of the `count` best keys of each row, best first; equal keys: the lower index."""
    return np.argsort(~ordered_key(keys), axis=-1, kind="stable")[..., :count]


def _mask_groups(config: RouterConfig, keys: Float32Array) -> Float32Array:
    """Keys with those outside the best groups replaced by the fill."""
    rows, experts = keys.shape
    by_group = keys.reshape(rows, config.num_groups, experts // config.num_groups)
    best = _best(by_group, config.group_score_top)
    values = np.take_along_axis(by_group, best, axis=-1)
    group_scores = np.empty((rows, config.num_groups), np.float32)
    for group in range(config.num_groups):
        members = group * by_group.shape[-1] + best[:, group]
        group_scores[:, group] = _sum_chosen(values[:, group], members, experts)
    kept = np.zeros((rows, config.num_groups, 1), np.bool_)
    np.put_along_axis(kept[..., 0], _best(group_scores, config.topk_groups), True, axis=-1)
    return np.where(kept, by_group, np.float32(config.group_fill)).reshape(rows, experts)


def _sparse_mixer_weights(config: RouterConfig, x: Float32Array, indices: npt.NDArray[np.intp]) -> Float32Array:
    """The weight of each of the two choices: its softmax over the experts that share with it."""
    size = np.abs(x)
    taken = np.zeros(x.shape, np.bool_)
    weights = []
    for choice in (indices[:, :1], indices[:, 1:]):
        best = np.take_along_axis(x, choice, axis=-1)
        distance = (best - x) / np.where(size < best, best, size)
        apart = taken | (distance > np.float32(config.mixer_threshold))  # NaN shares
        terms = np.where(apart, np.float32(0.0), float_math.exp(x - best))
        weights.append(np.take_along_axis(terms, choice, axis=-1) / ordered_sum(terms)[:, None])
        np.put_along_axis(taken, choice, True, axis=-1)
    return np.concatenate(weights, axis=-1)


# --- The float64 reference: one row at a time, as the contract reads. ---


def fused_router_float64(
    logits: npt.NDArray[Any],
    selection_bias: Float32Array | None = None,
    expert_scale: Float32Array | None = None,
    **attributes: AttributeValue,
) -> tuple[Float64Array, IndexArray]:
    """Computes FusedRouter in float64.

    Indices equal the kernels' wherever keys are further apart than the rounding of float32.

    Args:
        logits: (..., E) float32, float16 or bfloat16.
        selection_bias: (E) float32.
        expert_scale: (E) float32.
        **attributes: The op's attributes under their names in the op table; those left out are neutral.

    Returns:
        weights (..., K) float64 and indices (..., K) int32, in rank order.

    Raises:
        ValueError: An argument is not what the op takes.
    """
    arguments = check_router_arguments(logits, selection_bias, expert_scale, attributes)
    rows, k = len(arguments.logits), arguments.config.k
    weights = np.empty((rows, k), np.float64)
    indices = np.empty((rows, k), np.int32)
    with np.errstate(all="ignore"):
        for row, row_logits in enumerate(arguments.logits):
            x, keys = _row_keys(arguments, row_logits)
            indices[row] = _rank(keys)[:k]
            weights[row] = _row_weights(arguments, x, keys, indices[row])
    return weights.reshape(*arguments.leading, k), indices.reshape(*arguments.leading, k)


def router_keys_float64(
    logits: npt.NDArray[Any], selection_bias: Float32Array | None = None, **attributes: AttributeValue
) -> Float64Array:
    """The keys that rank the experts, group mask applied, in float64: (..., E), to tell how close a choice was.

    Raises:
        ValueError: An argument is not what the op takes.
    """
    arguments = check_router_arguments(logits, selection_bias, None, attributes)
    with np.errstate(all="ignore"):
        keys = [_row_keys(arguments, row)[1] for row in arguments.logits]
    return np.array(keys, np.float64).reshape(logits.shape)


def _row_keys(arguments: RouterArguments, logits: Float32Array) -> tuple[Float64Array, Float64Array]:
    """One row's logits after the soft cap, and its keys after bias and group mask."""
    config = arguments.config
    x = logits.astype(np.float64)
    if config.softcap > 0.0:
        x = config.softcap * np.tanh(x / config.softcap)
    keys = x.copy() if config.ranks_logits(arguments.selection_bias is not None) else _row_score(config.score, x)
    if arguments.selection_bias is not None:
        keys += arguments.selection_bias
    if config.has_groups:
        groups = np.split(np.arange(len(keys)), config.num_groups)
        best = [[group[i] for i in _rank(keys[group])[: config.group_score_top]] for group in groups]
        group_scores = np.array([keys[members].sum() for members in best])
        for group in _rank(group_scores)[config.topk_groups :]:
            keys[groups[group]] = config.group_fill
    return x, keys


def _row_weights(
    arguments: RouterArguments, x: Float64Array, keys: Float64Array, chosen: IndexArray
) -> Float64Array | float:
    """The weights of one row's chosen experts."""
    config = arguments.config
    if np.isnan(x).any():
        return math.nan
    source = x if config.weights_from == "scores" else keys
    if config.score == "sparse_mixer":
        first, second = chosen
        rest = np.delete(x, first)
        weights = np.array([_share(x, x[first], config), _share(rest, x[second], config)])
    elif config.score_after_topk or config.chosen_softmax:
        weights = _row_score(config.score, source[chosen])
    elif config.weights_from == "scores":
        weights = _row_score(config.score, x)[chosen]
    else:
        weights = keys[chosen]
    if config.normalize and not config.chosen_softmax:
        weights = weights / np.maximum(weights.sum() + config.normalize_eps, config.normalize_min)
    weights = weights * config.scale
    if arguments.expert_scale is not None:
        weights = weights * arguments.expert_scale[chosen]
    return weights


def _row_score(score: str, x: Float64Array) -> Float64Array:
    if score == "softmax":
        terms = np.exp(x - x.max())
        return np.asarray(terms / terms.sum())
    if score == "sigmoid":
        return np.exp(-np.logaddexp(0.0, -x))
    if score == "sqrtsoftplus":
        return np.sqrt(np.where(x > 20.0, x, np.logaddexp(0.0, x)))
    return x


def _share(x: Float64Array, best: float, config: RouterConfig) -> float:
    """The softmax weight of the best among the experts that lie within the threshold of it."""
    apart = (best - x) / np.maximum(np.abs(x), best) > config.mixer_threshold
    return float(1.0 / np.exp(x[~apart] - best).sum())


def _rank(keys: Float64Array) -> list[int]:
    """All indices, best key first: +inf > finite > -inf > NaN; equal keys: the lower index."""

    def order(i: int) -> tuple[bool, float, int]:
        return (True, 0.0, i) if math.isnan(keys[i]) else (False, -keys[i], i)

    return sorted(range(len(keys)), key=order)

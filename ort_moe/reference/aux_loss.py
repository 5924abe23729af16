"""AuxLoss in NumPy: the float32 emulation, forward and backward, whose bits every kernel returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ort_moe.ops import AttributeValue
from ort_moe.ops.training_config import AuxLossConfig
from ort_moe.reference.dtypes import check_activation
from ort_moe.reference.float_math import Float32Array, ordered_sum

_OP = "AuxLoss"
_COUNT_DTYPES = (np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32))

ROW_LANES = 512
"""Independent sums of rows in a column: row t goes into number t mod 512."""

PARTS = 128
"""Parts of the loss, each of four row lanes and all experts."""


def aux_loss(
    probs: npt.NDArray[Any],
    tokens_per_expert: npt.NDArray[Any],
    total: npt.NDArray[Any] | None = None,
    **attributes: AttributeValue,
) -> np.float32:
    """Emulates the AuxLoss kernels in float32, bit for bit (NaNs compare as NaN).

    Args:
        probs: (..., E) float32, float16 or bfloat16.
        tokens_per_expert: (E) int32, int64 or float32.
        total: A scalar of such a type, or of shape (1).
        **attributes: The op's attributes under their names in the op table; those left out are neutral.

    Raises:
        ValueError: An argument is not what the op takes.
    """
    config = _check(probs.shape, tokens_per_expert, total, attributes)
    check_activation(_OP, "probs", probs)
    experts = probs.shape[-1]
    rows = probs.reshape(-1, experts) if probs.size else probs.reshape(0, experts)
    if not len(rows):
        return np.float32(0.0)
    with np.errstate(all="ignore"):
        lanes = np.zeros((ROW_LANES, experts), np.float32)
        for first in range(0, len(rows), ROW_LANES):
            some = rows[first : first + ROW_LANES].astype(np.float32)
            lanes[: len(some)] += some
        columns = (lanes[:128] + lanes[256:384]) + (lanes[128:256] + lanes[384:])
        parts = ordered_sum(columns * tokens_per_expert.astype(np.float32))
        width = PARTS
        while width > 1:
            width //= 2
            parts = parts[:width] + parts[width : 2 * width]
        return np.float32(_factor(config, experts, len(rows), total) * parts[0])


def aux_loss_grad(
    shape: tuple[int, ...],
    dtype: npt.DTypeLike,
    tokens_per_expert: npt.NDArray[Any],
    grad_loss: np.float32,
    total: npt.NDArray[Any] | None = None,
    **attributes: AttributeValue,
) -> npt.NDArray[Any]:
    """Emulates the gradient of probs in float32, bit for bit (NaNs compare as NaN).

    Args:
        shape: That of probs, (..., E).
        dtype: That of probs.
        tokens_per_expert: (E) int32, int64 or float32.
        grad_loss: The gradient of the loss.
        total: A scalar of such a type, or of shape (1).
        **attributes: The op's attributes under their names in the op table; those left out are neutral.

    Returns:
        (..., E) of the type of probs.

    Raises:
        ValueError: An argument is not what the op takes.
    """
    config = _check(shape, tokens_per_expert, total, attributes)
    with np.errstate(all="ignore"):
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        slopes: Float32Array = _factor(config, shape[-1], rows, total) * tokens_per_expert.astype(np.float32)
        return np.broadcast_to((slopes * np.float32(grad_loss)).astype(dtype), shape).copy()


def _factor(config: AuxLossConfig, experts: int, rows: int, total: npt.NDArray[Any] | None) -> np.float32:
    """C: what the sum over the experts is multiplied by."""
    tokens = np.float64(config.total_tokens or rows) if total is None else np.float64(total.reshape(()))
    if tokens == 0.0:
        return np.float32(0.0)
    return np.float32((np.float64(experts) * np.float64(config.coeff)) / ((np.float64(config.k) * tokens) * tokens))


def _check(
    shape: tuple[int, ...],
    tokens_per_expert: npt.NDArray[Any],
    total: npt.NDArray[Any] | None,
    attributes: dict[str, AttributeValue],
) -> AuxLossConfig:
    config = AuxLossConfig.from_attributes(attributes)
    if not shape:
        raise ValueError(f"{_OP}: input 'probs' must have rank 1 or more, but is a scalar")
    config.check(shape[-1])
    for name, counts, allowed in (
        ("tokens_per_expert", tokens_per_expert, (shape[-1:],)),
        ("total", total, ((), (1,))),
    ):
        if counts is None:
            continue
        if counts.dtype not in _COUNT_DTYPES:
            raise ValueError(f"{_OP}: input '{name}' must be int32, int64 or float32, but is {counts.dtype}")
        if counts.shape not in allowed:
            raise ValueError(f"{_OP}: input '{name}' must have shape {list(allowed[0])}, but has {list(counts.shape)}")
    return config

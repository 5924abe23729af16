"""What the references check of an array: its element type and its shape."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

ACTIVATION_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
"""What logits and activations may be, in the order of the op table."""


def check_activation(op: str, name: str, array: npt.NDArray[Any]) -> np.dtype[Any]:
    """The element type of an activation.

    Raises:
        ValueError: It is none of the three.
    """
    if array.dtype not in ACTIVATION_DTYPES:
        raise ValueError(f"{op}: input '{name}' must be float32, float16 or bfloat16, but is {array.dtype}")
    return array.dtype


def check_array(op: str, name: str, array: npt.NDArray[Any], dtype: npt.DTypeLike, shape: tuple[int, ...]) -> None:
    """Checks an input against what it must be.

    Raises:
        ValueError: It has another type or shape.
    """
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise ValueError(
            f"{op}: input '{name}' must be {np.dtype(dtype)} of shape {shape}, "
            f"but is {array.dtype} of shape {array.shape}"
        )

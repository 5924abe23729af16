"""What the packing of every format checks of its arguments, and how its errors put it."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt

Layout = Literal["concat", "interleaved"]
"""Rows of a stacked layer: all rows of the first, then those of the next; or a row of each in turn."""

PackedAlong = Literal["K", "N"]
"""Which neighbours of a QMoE's e2m1 weights share a byte: along the reduction, D here, or rows."""

FLOATS = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16)))
"""What float weights, and scales of the type of x, may be."""

_PRODUCTS = (np.dtype(np.float32), np.dtype(np.float64))


def alternatives(items: Iterable[object]) -> str:
    """`a, b or c`."""
    *others, last = map(str, items)
    return f"{', '.join(others)} or {last}"


def check_word(weight_format: str, argument: str, value: object, choices: Any) -> None:
    """Checks that `value` is one of a Literal or of a sequence.

    A layout cannot be told from the shapes: taking an unknown word for one would give wrong weights in silence.

    Raises:
        ValueError: It is none of them.
    """
    words = choices if isinstance(choices, tuple) else get_args(choices)
    if not is_one_of(value, words):
        raise ValueError(
            f"{weight_format}: {argument} must be {alternatives(map(shown, words))}, but is {shown(value)}"
        )


def is_one_of(value: object, choices: Sequence[object]) -> bool:
    """Whether it is equal to one of them; an array, which is compared by its elements, is to none."""
    return (value is None or isinstance(value, (str, int, float, np.generic, np.dtype))) and value in choices


def check_block_size(weight_format: str, block_size: object, choices: Sequence[int]) -> None:
    """Checks how many weights share a scale.

    Raises:
        ValueError: It is none of the choices, or equal to one but no integer.
    """
    check_word(weight_format, "block_size", block_size, choices)
    if not isinstance(block_size, (int, np.integer)):
        raise ValueError(
            f"{weight_format}: block_size must be an integer, but is {block_size!r} of type {type(block_size).__name__}"
        )


def shown(value: object) -> str:
    """A value as a sentence has room for it."""
    if isinstance(value, (np.ndarray, np.generic)) and value.ndim:
        return f"an array of shape {value.shape}"
    return str(value) if isinstance(value, np.dtype) else reprlib.repr(value)


def check_array(weight_format: str, what: str, array: object) -> None:
    """Checks that an argument has a type and a shape.

    Args:
        weight_format: The format, for the error.
        what: The argument, as in `the scales of 'weights'`.
        array: The argument.

    Raises:
        ValueError: It is a list or anything else that is no array of NumPy's, or has a mask, which would be lost.
    """
    if not isinstance(array, (np.ndarray, np.generic)):
        raise ValueError(f"{weight_format}: {what} must be a NumPy array, but came as {type(array).__name__}")
    if isinstance(array, (np.ma.MaskedArray, np.matrix)):
        raise ValueError(f"{weight_format}: {what} must be a plain NumPy array, but came as {type(array).__name__}")


def check_floats(weight_format: str, name: str, weights: npt.NDArray[Any]) -> tuple[int, int, int]:
    """The shape (E, N, D) of float weights.

    Raises:
        ValueError: They are no floats, or of another rank.
    """
    check_array(weight_format, f"'{name}'", weights)
    if weights.dtype not in FLOATS:
        raise ValueError(f"{weight_format}: '{name}' must be {alternatives(FLOATS)}, but is {weights.dtype}")
    if weights.ndim != 3:
        raise ValueError(f"{weight_format}: '{name}' must have shape (E, N, D), but has {weights.shape}")
    experts, rows, depth = weights.shape
    return experts, rows, depth


def check_depth(weight_format: str, name: str, depth: int, block: int) -> None:
    """Checks that D is a whole number of blocks.

    Raises:
        ValueError: It is not.
    """
    if depth % block:
        raise ValueError(
            f"{weight_format}: the last dimension of '{name}' must be a multiple of {block}, but is {depth}"
        )


def check_finite(weight_format: str, name: str, expert: int, weights: npt.NDArray[Any]) -> None:
    """Checks the weights of one expert.

    Raises:
        ValueError: One is infinite or NaN.
    """
    if not np.isfinite(weights).all():
        raise ValueError(f"{weight_format}: '{name}' must be finite, but expert {expert} is not")


def dtype_of(weight_format: str, argument: str, dtype: object, choices: tuple[np.dtype[Any], ...]) -> np.dtype[Any]:
    """The type that an argument names.

    Raises:
        ValueError: It names none, or none of the choices.
    """
    try:
        found: np.dtype[Any] = np.dtype(dtype)  # type: ignore[call-overload]
    except (TypeError, ValueError, SyntaxError):  # NumPy's, of what names no type; the last of text with brackets
        raise ValueError(
            f"{weight_format}: {argument} must be {alternatives(choices)}, but is {shown(dtype)}"
        ) from None
    check_word(weight_format, argument, found, choices)
    return found


def check_product(weight_format: str, dtype: npt.DTypeLike) -> None:
    """Checks what weights are to be dequantized to.

    Raises:
        ValueError: It is neither float32 nor float64.
    """
    dtype_of(weight_format, "dtype", dtype, _PRODUCTS)


def check_kind(weight_format: str, layer: object, kind: type[Any]) -> None:
    """Checks that a layer is of the format.

    Raises:
        ValueError: It is of another, or no layer.
    """
    if not isinstance(layer, kind):
        raise ValueError(
            f"{weight_format}: a layer must be of type {kind.__name__}, but came as {type(layer).__name__}"
        )


def check_layers(weight_format: str, layers: object, kind: type[Any]) -> None:
    """Checks that layers to be stacked are a sequence of at least one, each of the format.

    Raises:
        ValueError: They are not.
    """
    if not isinstance(layers, Sequence):
        raise ValueError(
            f"{weight_format}: layers to be stacked must be a sequence, but came as {type(layers).__name__}"
        )
    if not layers:
        raise ValueError(f"{weight_format}: there must be a layer to be stacked, but there is none")
    for layer in layers:
        check_kind(weight_format, layer, kind)


def check_part(
    weight_format: str,
    what: str,
    array: npt.NDArray[Any],
    dtype: npt.DTypeLike,
    shape: tuple[int, ...],
    letters: str,
    beside: str,
) -> None:
    """Checks one part of a layer.

    Args:
        weight_format: The format, for the error.
        what: The part, as in `the scales of 'weights'`.
        array: The part.
        dtype: What it must be.
        shape: What it must have.
        letters: The shape in the letters of the docs.
        beside: The part that says so and may as well be the wrong one, as in `scales of shape (4, 32, 2)`.

    Raises:
        ValueError: It has another type or shape.
    """
    check_array(weight_format, what, array)
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise ValueError(
            f"{weight_format}: {what} must be {np.dtype(dtype)} of shape {letters} = {shape} to go with {beside}, but "
            f"came as {array.dtype} of shape {array.shape}"
        )


def check_block_scales(
    weight_format: str, name: str, scales: npt.NDArray[Any], dtype: npt.DTypeLike, block: int
) -> tuple[int, int, int]:
    """The shape (E, N, D / block) of the scales of e2m1 weights.

    Raises:
        ValueError: They are of another type or rank.
    """
    check_array(weight_format, f"the scales of '{name}'", scales)
    if scales.dtype != dtype or scales.ndim != 3:
        raise ValueError(
            f"{weight_format}: the scales of '{name}' must be {np.dtype(dtype)} of shape (E, N, D / {block}), but are "
            f"{scales.dtype} of shape {scales.shape}"
        )
    experts, rows, blocks = scales.shape
    return experts, rows, blocks


def check_e2m1_layer(
    weight_format: str,
    name: str,
    parts: tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]],
    dtype: npt.DTypeLike,
    block: int,
) -> None:
    """Checks weights, scales of `dtype` for `block` weights each, and global scales, which all e2m1 formats have.

    Raises:
        ValueError: A part's type or shape is another; the sentence names it.
    """
    weights, scales, global_scale = parts
    experts, rows, blocks = check_block_scales(weight_format, name, scales, dtype, block)
    shape, beside = (experts, rows, blocks * block // 2), f"scales of shape {scales.shape}"
    check_part(weight_format, f"'{name}'", weights, np.uint8, shape, "(E, N, D / 2)", beside)
    what = f"the global scale of '{name}'"
    check_part(weight_format, what, global_scale, np.float32, (experts,), "(E)", beside)


def check_declared(
    weight_format: str, name: str, weights: npt.NDArray[Any], scales: tuple[int, int, int], block: int
) -> None:
    """Checks e2m1 weights of a QMoE that are of the shape (E, D, N / 2), beside checked scales (E, N, D / block).

    Raises:
        ValueError: They are of another type or shape, or N is odd.
    """
    check_array(weight_format, f"'{name}'", weights)
    experts, rows, blocks = scales
    declared = (experts, blocks * block, rows // 2)
    if weights.dtype != np.uint8 or weights.shape != declared or rows % 2:
        raise ValueError(
            f"{weight_format}: '{name}' of a QMoE must be uint8 of shape (E, D, N / 2) = {declared} to go with scales "
            f"of shape {scales}, but is {weights.dtype} of shape {weights.shape}"
        )


def check_pairs_of_rows(weight_format: str, rows: int) -> None:
    """Checks that rows can share bytes.

    Raises:
        ValueError: Their number is odd.
    """
    if rows % 2:
        raise ValueError(f"{weight_format}: a QMoE packs pairs of rows, so N must be even, but is {rows}")


def check_stackable(weight_format: str, shapes: Sequence[tuple[int, ...]], layout: str) -> None:
    """Checks the layers that are to become one.

    Raises:
        ValueError: Their shapes differ, or `layout` is neither word.
    """
    check_word(weight_format, "layout", layout, Layout)
    for shape in shapes:
        if shape != shapes[0]:
            raise ValueError(
                f"{weight_format}: layers to be stacked must have one shape, but have {shapes[0]} and {shape}"
            )


def check_one_global_scale(weight_format: str, scales: Sequence[npt.NDArray[np.float32]], remedy: str) -> None:
    """Checks that the global scales of layers to be stacked are the same.

    Args:
        weight_format: The format, for the error.
        scales: Of each layer, (E).
        remedy: What to do where they are not, a clause.

    Raises:
        ValueError: They differ, where NaN does not from itself: one of the layers would have to be rounded anew.
    """
    for scale in scales:
        different = (scale != scales[0]) & ~(np.isnan(scale) & np.isnan(scales[0]))
        if different.any():
            expert = int(np.argmax(different))
            raise ValueError(
                f"{weight_format}: layers to be stacked must have one global scale for an expert, but expert {expert} "
                f"has {scales[0][expert]} and {scale[expert]}: {remedy}"
            )

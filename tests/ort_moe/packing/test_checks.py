"""What the packing of every format refuses in one way."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ort_moe.packing import fp8, integers, mxfp4, nvfp4
from ort_moe.packing.pieces import Packing, pack_expert
from tests.ort_moe.packing.weights import random_weights

FORMATS: tuple[Any, ...] = (nvfp4, mxfp4, integers, fp8)
WEIGHTS = random_weights((2, 32, 64))
NV, MX = nvfp4.quantize(WEIGHTS), mxfp4.quantize(WEIGHTS)
INT, EIGHT = integers.quantize(WEIGHTS, "int4", 32, symmetric=False), fp8.quantize(WEIGHTS, 32)
ROW_ZEROS = np.zeros((2, 16), np.uint8)

CALLS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (nvfp4.quantize, (WEIGHTS,)),
    (nvfp4.from_modelopt, NV[:2]),
    (nvfp4.from_qmoe, (*nvfp4.to_qmoe(NV, "N"), "N")),
    (mxfp4.quantize, (WEIGHTS,)),
    (mxfp4.from_blocks, (MX.weights.reshape(2, 32, 2, 16), MX.scales)),
    (mxfp4.from_qmoe, (*mxfp4.to_qmoe(MX, "N"), "N")),
    (mxfp4.from_qmoe, (*mxfp4.to_qmoe(MX, "K"), "K")),
    (integers.quantize, (WEIGHTS, "int4", 32)),
    (integers.from_qmoe, (*integers.to_qmoe(INT), "int4", 32)),
    (integers.from_qmoe, (INT.weights, INT.scales[..., 0], ROW_ZEROS, "int4", 32)),
    (fp8.quantize, (WEIGHTS, 32)),
    (fp8.from_checkpoint, (*EIGHT[:2], 32)),
    (fp8.from_qmoe, tuple(EIGHT)),
]
"""Every function of the formats that takes arrays."""

LAYERS: list[Any] = [NV, MX, INT, EIGHT]
TAKE_LAYERS = ("dequantize", "to_qmoe", "stack_rows", "check")


def test_every_function_is_looked_at() -> None:
    taken = {function for function, _ in CALLS} | {getattr(each, name) for each in FORMATS for name in TAKE_LAYERS}
    for each in FORMATS:
        functions = {f for _, f in inspect.getmembers(each, inspect.isfunction) if f.__module__ == each.__name__}
        assert {f for f in functions if not f.__name__.startswith("_")} <= taken


@pytest.mark.parametrize(("function", "arguments"), CALLS)
def test_a_list_is_no_array(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    more = (NV.global_scale,) if function is nvfp4.from_modelopt else ()  # that may be a plain number
    function(*arguments, *more)
    for place, argument in enumerate(arguments):
        if isinstance(argument, np.ndarray):
            wrong = (*arguments[:place], argument.tolist(), *arguments[place + 1 :], *more)
            with pytest.raises(
                ValueError, match=r"^\w+: (the [a-z ]+ of )?'weights' must be a NumPy array, but came as list$"
            ):
                function(*wrong)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_is_of_arrays(layer: Any) -> None:
    module = inspect.getmodule(type(layer))
    for part in layer._fields:
        if isinstance(getattr(layer, part), np.ndarray):
            wrong = layer._replace(**{part: getattr(layer, part).tolist()})
            with pytest.raises(ValueError, match=r"'weights' must be a NumPy array, but came as list$"):
                module.check(wrong)  # type: ignore[union-attr]


def test_pieces_are_of_arrays() -> None:
    with pytest.raises(ValueError, match=r"^int8: 'fc1' must be a NumPy array, but came as list$"):
        pack_expert(Packing.of("int8"), [[1.0]], np.float32, "fc1", 0, lambda *_: None)  # type: ignore[arg-type]


def test_a_number_of_numpys_is_an_array() -> None:
    """As it comes out of an array by an index."""
    one = nvfp4.from_modelopt(NV.weights[0], NV.scales[0], NV.global_scale[0])
    np.testing.assert_array_equal(one.global_scale, NV.global_scale[:1])
    same = fp8.from_checkpoint(EIGHT.weights, ml_dtypes.bfloat16(0.5), 32)  # type: ignore[arg-type]
    assert (same.scales == 0.5).all()

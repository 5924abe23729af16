"""What the packing of every format refuses in one way."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ort_moe.choices import PACKED
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
    (nvfp4.from_modelopt, tuple(NV)),
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
    function(*arguments)
    for place, argument in enumerate(arguments):
        if isinstance(argument, np.ndarray):
            wrong = (*arguments[:place], argument.tolist(), *arguments[place + 1 :])
            with pytest.raises(
                ValueError, match=r"^\w+: (the [a-z ]+ of )?'weights' must be a NumPy array, but came as list$"
            ):
                function(*wrong)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize(("function", "arguments"), CALLS)
def test_what_masks_or_multiplies_otherwise_is_no_plain_array(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """A mask would be lost, or be met by an error of NumPy's."""
    for place, argument in enumerate(arguments):
        if isinstance(argument, np.ndarray):
            for other in (np.ma.MaskedArray(argument), np.asmatrix(np.zeros((2, 2), argument.dtype))):
                kind = type(other).__name__
                with pytest.raises(ValueError, match=rf"'weights' must be a plain NumPy array, but came as {kind}$"):
                    function(*arguments[:place], other, *arguments[place + 1 :])


@pytest.mark.parametrize(("function", "arguments"), CALLS)
def test_an_array_is_no_word_and_no_block_size(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Compared, it gives an array, of which NumPy knows no truth."""
    for place, argument in enumerate(arguments):
        if not isinstance(argument, np.ndarray):
            for other, shown in ((np.array([argument] * 2), r"an array of shape \(2,\)"), (None, "None")):
                with pytest.raises(ValueError, match=rf"^\w+: \w+ must be .* or .*, but is {shown}$"):
                    function(*arguments[:place], other, *arguments[place + 1 :])


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_is_of_arrays(layer: Any) -> None:
    module = inspect.getmodule(type(layer))
    for part in layer._fields:
        if isinstance(getattr(layer, part), np.ndarray):
            wrong = layer._replace(**{part: getattr(layer, part).tolist()})
            with pytest.raises(ValueError, match=r"'weights' must be a NumPy array, but came as list$"):
                module.check(wrong)  # type: ignore[union-attr]


@pytest.mark.parametrize("other", [*LAYERS, None, NV.weights], ids=lambda other: type(other).__name__)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_a_layer_of_another_format_is_refused(layer: Any, other: Any) -> None:
    module: Any = inspect.getmodule(type(layer))
    if isinstance(other, type(layer)):
        return
    sentence = rf"^\w+: a layer must be of type {type(layer).__name__}, but came as {type(other).__name__}$"
    along = ("K",) if module in (nvfp4, mxfp4) else ()
    for call in (
        lambda: module.check(other),
        lambda: module.dequantize(other),
        lambda: module.to_qmoe(other, *along),
        lambda: module.stack_rows([layer, other]),
        lambda: module.stack_rows([other]),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_layers_to_be_stacked_are_a_sequence(layer: Any) -> None:
    module: Any = inspect.getmodule(type(layer))
    for wrong, sentence in (
        (None, "layers to be stacked must be a sequence, but came as NoneType"),
        (iter([layer]), "layers to be stacked must be a sequence, but came as list_iterator"),
        (layer, f"a layer must be of type {type(layer).__name__}, but came as ndarray"),
        ([], "there must be a layer to be stacked, but there is none"),
    ):
        with pytest.raises(ValueError, match=rf"^\w+: {sentence}$"):
            module.stack_rows(wrong)


@pytest.mark.parametrize("text", ["foo", "f4, (", [("a", "f4"), ("a", "f4")], 5])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_what_names_no_type_is_refused(layer: Any, text: Any) -> None:
    """NumPy raises errors of three kinds for it."""
    module: Any = inspect.getmodule(type(layer))
    shown = re.escape(repr(text))
    with pytest.raises(ValueError, match=rf"^\w+: dtype must be float32 or float64, but is {shown}$"):
        module.dequantize(layer, text)
    floats = "must be float32, float16 or bfloat16, but is"
    with pytest.raises(ValueError, match=rf"^int4: scale_dtype {floats} {shown}$"):
        integers.quantize(WEIGHTS, "int4", 32, scale_dtype=text)
    with pytest.raises(ValueError, match=rf"^int4: dtype {floats} {shown}$"):
        Packing.of("int4").parts(2, 32, 64, text)


@pytest.mark.parametrize("layer", [NV, MX], ids=lambda layer: type(layer).__name__)
def test_a_global_scale_of_nan_is_equal_to_itself(layer: Any) -> None:
    """It differed from itself: expert 0 had nan and nan."""
    module: Any = inspect.getmodule(type(layer))
    broken, other = (
        layer._replace(global_scale=np.array(scale, np.float32)) for scale in ((np.nan, 1.0), (np.nan, 2.0))
    )
    np.testing.assert_array_equal(module.stack_rows([broken, broken]).global_scale, broken.global_scale)
    with pytest.raises(ValueError, match=r"expert 1 has 1\.0 and 2\.0: "):
        module.stack_rows([broken, other])
    with pytest.raises(ValueError, match=r"expert 1 has 1\.0 and nan: "):
        module.stack_rows([broken, broken._replace(global_scale=np.full(2, np.nan, np.float32))])


@pytest.mark.parametrize(
    ("matrix", "sentence"),
    [
        (np.ma.MaskedArray(WEIGHTS[0]), "must be a plain NumPy array, but came as MaskedArray"),
        (WEIGHTS, r"must have shape \(N, D\), but has \(2, 32, 64\)"),
        (WEIGHTS[0, 0], r"must have shape \(N, D\), but has \(64,\)"),
        (WEIGHTS[0].astype(str), r"must be float32, float16 or bfloat16, but is <U\d+"),
        (WEIGHTS[0].astype(np.float64), "must be float32, float16 or bfloat16, but is float64"),
    ],
)
@pytest.mark.parametrize("weight_format", PACKED)
def test_pieces_are_of_a_float_matrix(weight_format: str, matrix: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{weight_format}: 'fc1' {sentence}$"):
        pack_expert(Packing.of(weight_format), matrix, np.float32, "fc1", 0, lambda *_: None)


def test_pieces_are_of_arrays() -> None:
    with pytest.raises(ValueError, match=r"^int8: 'fc1' must be a NumPy array, but came as list$"):
        pack_expert(Packing.of("int8"), [[1.0]], np.float32, "fc1", 0, lambda *_: None)  # type: ignore[arg-type]


def test_a_number_of_numpys_is_an_array() -> None:
    """As it comes out of an array by an index."""
    one = nvfp4.from_modelopt(NV.weights[0], NV.scales[0], NV.global_scale[0])
    np.testing.assert_array_equal(one.global_scale, NV.global_scale[:1])
    same = fp8.from_checkpoint(EIGHT.weights, ml_dtypes.bfloat16(0.5), 32)  # type: ignore[arg-type]
    assert (same.scales == 0.5).all()

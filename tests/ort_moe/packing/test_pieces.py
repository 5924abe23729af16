"""Packing some rows at a time gives what packing all at once gives, and tells what it cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ort_moe.packing import fp8, integers, mxfp4, nvfp4, pieces
from ort_moe.packing.pieces import Packing, PackingError, pack_expert

PACKINGS = [
    *(Packing.of(name) for name in ("nvfp4", "mxfp4", "fp8")),
    Packing.of("fp8", 16),
    Packing.of("int4", 16),
    Packing.of("int4", zero_points=True),
    Packing.of("int8", 64),
    Packing.of("int8", 32, zero_points=True),
]
ROWS, DEPTH = 300, 192


def whole(packing: Packing, weights: Any) -> tuple[dict[str, Any], Any]:
    """Parts and meaning of a layer that is packed at once."""
    match packing.weight_format:
        case "nvfp4":
            layer: Any = nvfp4.quantize(weights)
            return layer._asdict(), nvfp4.dequantize(layer)
        case "mxfp4":
            layer = mxfp4.quantize(weights)
            return layer._asdict(), mxfp4.dequantize(layer)
        case "fp8":
            layer = fp8.quantize(weights, packing.block_size)
            return layer._asdict(), fp8.dequantize(layer)
    layer = integers.quantize(
        weights,
        packing.weight_format,
        packing.block_size,
        symmetric=not packing.zero_points,  # type: ignore[arg-type]
    )
    return layer._asdict(), integers.dequantize(layer)


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_pieces_make_the_whole(packing: Packing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_PIECE", 128 * DEPTH)  # three pieces, the last one of fewer rows
    weights = np.random.default_rng(1).standard_normal((2, ROWS, DEPTH), dtype=np.float32).astype(np.float16)
    weights[0, 280] *= 30  # the largest weight is in the last piece
    depth = DEPTH // packing.depth_multiple * packing.depth_multiple
    weights = weights[:, :, :depth]
    places = {name: np.zeros(shape, kind) for name, (kind, shape) in packing.parts(2, ROWS, depth, np.float16).items()}
    error = PackingError()
    for expert in range(2):

        def write(part: str, first: int, entries: Any, expert: int = expert) -> None:
            if part == "global_scale":
                places[part][expert] = entries[0]
            else:
                places[part][expert, first : first + len(entries)] = entries

        error += pack_expert(packing, weights[expert], np.float16, "w", expert, write)
    expected, meant = whole(packing, weights)
    for name, place in places.items():
        np.testing.assert_array_equal(place.view(np.uint8), np.ascontiguousarray(expected[name]).view(np.uint8), name)
    difference, wide = meant.astype(np.float64) - weights, weights.astype(np.float64)
    assert error.largest == pytest.approx(np.abs(difference).max(), rel=1e-6)
    assert error.of == np.abs(wide).max()
    assert error.relative == pytest.approx(np.linalg.norm(difference) / np.linalg.norm(wide), rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("int3",), {}, "weights: format must be 'nvfp4', 'mxfp4', 'int4', 'int8' or 'fp8', but is 'int3'"),
        (("int4", 48), {}, "int4: block_size must be 16, 32, 64 or 128, but is 48"),
        (("int4", 32.0), {}, r"int4: block_size must be an integer, but is 32\.0 of type float"),
        (("int4", np.array([32, 16])), {}, r"int4: block_size must be .*, but is an array of shape \(2,\)"),
        (("nvfp4", 32), {}, "nvfp4: the block size is always 16, but 32 was asked for"),
        (("fp8",), {"zero_points": True}, "fp8 has no zero points; int4 and int8 have"),
    ],
)
def test_what_there_is_not(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Packing.of(*arguments, **options)
    if len(arguments) == 2:
        with pytest.raises(ValueError, match=message):
            Packing(*arguments, **options)


def test_in_words() -> None:
    assert [str(packing) for packing in PACKINGS] == [
        *("nvfp4", "mxfp4", "fp8 in blocks of 128", "fp8 in blocks of 16", "int4 in blocks of 16"),
        *("int4 in blocks of 32 with zero points", "int8 in blocks of 64", "int8 in blocks of 32 with zero points"),
    ]

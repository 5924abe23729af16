"""Layers of FusedExperts with every code and with scales at their limits: weights that a kernel must give exactly."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ort_moe.packing.arrays import pack_nibbles
from ort_moe.reference.fused_experts import ExpertLayer, dense_weights
from tests.experts_cases import VARIANTS, ExpertsCase


def every_code(variant: str) -> tuple[ExpertsCase, npt.NDArray[np.float32]]:
    """Unit vectors through one expert whose second layer is the unit matrix: y is the first layer, transposed.

    Args:
        variant: Of VARIANTS.

    Returns:
        The call, with x of float32, and its exact result.
    """
    size = 160
    attributes: dict[str, Any] = {"activation": "identity", "gated": 0}
    case = ExpertsCase((size,), 1, 1, size, size, "float", **VARIANTS[variant], attributes=attributes)
    rng = np.random.default_rng(0)
    feeds = case.feeds
    feeds["x"], feeds["weights"] = np.eye(size, dtype=np.float32), np.ones((size, 1), np.float32)
    block = case.config.scale_block
    if case.weight_format in ("int4", "int8", "fp8"):  # from subnormal scales up
        scales = np.array([2.0**-140, 2.0**-126, 0.0, 0.3, -0.3, 1e30], np.float32)
        feeds["fc1_scales"] = rng.choice(scales, feeds["fc1_scales"].shape)
    match case.weight_format:
        case "dense":
            feeds["fc2_weights"] = np.eye(size, dtype=np.float32)[None]
        case "int4" | "int8":
            for name in ("fc1_weights", "fc1_zero_points"):
                if name in feeds:
                    feeds[name] = rng.integers(0, 256, feeds[name].shape, np.uint8)
            unit = np.eye(size, dtype=np.float32)
            feeds["fc2_scales"] = np.ones_like(feeds["fc2_scales"])
            zero = 8 if case.weight_format == "int4" else 128
            codes = (unit + zero).astype(np.uint8)
            feeds["fc2_weights"] = (codes if zero == 128 else pack_nibbles(codes))[None]
            if "fc2_zero_points" in feeds:
                feeds["fc2_zero_points"] = np.full_like(feeds["fc2_zero_points"], 0x88 if zero == 8 else zero)
        case "fp8":
            values = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])  # but NaN
            feeds["fc1_weights"] = rng.choice(values, (1, size, size)).view(ml_dtypes.float8_e4m3fn)
            feeds["fc2_weights"] = np.eye(size, dtype=np.float32)[None].astype(ml_dtypes.float8_e4m3fn)
            feeds["fc2_scales"] = np.ones_like(feeds["fc2_scales"])
        case "nvfp4" | "mxfp4":
            feeds["fc1_weights"] = rng.integers(0, 256, (1, size, size // 2), np.uint8)
            feeds["fc2_weights"] = pack_nibbles(2 * np.eye(size, dtype=np.uint8))[None]
            for layer in ("fc1", "fc2"):
                feeds[f"{layer}_global_scale"] = np.ones(1, np.float32)
            blocks = (1, size, size // block)
            if case.weight_format == "nvfp4":
                bits = rng.choice(np.arange(0x7F, dtype=np.uint8), blocks)  # from 0 and subnormal ones to 448
                feeds["fc1_scales"] = bits.view(ml_dtypes.float8_e4m3fn)
                feeds["fc2_scales"] = np.ones(blocks, ml_dtypes.float8_e4m3fn)
            else:
                feeds["fc1_scales"] = rng.integers(0, 253, blocks, np.uint8)  # above, codes may stand for infinity
                feeds["fc1_scales"][0, :3] = np.array([[0], [1], [252]])
                feeds["fc2_scales"] = np.full(blocks, 127, np.uint8)
    layer = ExpertLayer(**{part: feeds.get(f"fc1_{part}") for part in ExpertLayer._fields})
    return case, dense_weights(case.config, layer)[0].T.astype(np.float32)


PACKED = (("nvfp4", 16), ("mxfp4", 32), *((name, size) for name in ("int4", "int8", "fp8") for size in (32, 64)))
"""Packed formats, each with the sizes of its blocks that nan_rows is about."""


def nan_rows(
    weight_format: str, tokens: int, block_size: int, onnx_type: str, *, k: int = 2
) -> tuple[ExpertsCase, dict[str, Any], npt.NDArray[np.bool_]]:
    """A call, its inputs where every other row of the second layer's scales is NaN, and which columns of y these are.

    Rows end within what a kernel may read at once: 128 weights, and of half of them, a word of scales.
    """
    case = ExpertsCase((tokens,), 10, k, 640, 192, onnx_type, weight_format, block_size=block_size)
    scales = case.feeds["fc2_scales"].copy()
    scales[:, 1::2] = 255 if weight_format == "mxfp4" else np.nan
    of_scales = np.arange(case.hidden) * scales.shape[1] // case.hidden
    return case, case.feeds | {"fc2_scales": scales}, of_scales % 2 == 1


def unchosen_nan(
    weight_format: str, onnx_type: str = "float16", *, experts: int = 4, size: int = 32
) -> tuple[ExpertsCase, dict[str, Any], dict[str, Any]]:
    """A call whose tokens all go to one expert, and its inputs where the scales of the others, and of all, are NaN."""
    case = ExpertsCase((6,), experts, 2, size, size, onnx_type, weight_format, choices="one_expert")
    scales = case.feeds["fc1_scales"]
    nan = np.full_like(scales, 255 if weight_format == "mxfp4" else np.nan)
    others = nan.copy()
    chosen = case.feeds["indices"].flat[0]
    others[chosen] = scales[chosen]
    return case, case.feeds | {"fc1_scales": others}, case.feeds | {"fc1_scales": nan}

"""Runs models on the CPU and compares what they return."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime

from ort_moe.installation import library

Array = np.ndarray[Any, np.dtype[Any]]

TOLERANCE = {"float32": 2e-6, "float16": 2e-3}
"""Largest difference by the largest magnitude."""


def run(model: onnx.ModelProto, feeds: dict[str, Array], *, with_library: bool = False) -> Array:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if with_library:
        library.register(options)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, feeds)
    return y


def difference(got: Array, expected: Array) -> float:
    assert got.shape == expected.shape
    return float(np.abs(got.astype(np.float64) - expected).max() / np.abs(expected).max())

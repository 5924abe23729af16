"""FusedExperts' float64 reference: against an experts' block as a framework writes it, and its refusals."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest

from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.packing import fp8, integers, mxfp4, nvfp4
from ort_moe.reference.fused_experts import ExpertLayer, activate, fused_experts

RNG = np.random.default_rng(0)
T, K, E, H, I = 5, 2, 4, 16, 32  # noqa: E741
X = RNG.normal(0.0, 1.0, (T, H)).astype(np.float32)
WEIGHTS = RNG.random((T, K)).astype(np.float32)
INDICES = RNG.integers(0, E, (T, K)).astype(np.int32)
FC1 = ExpertLayer(RNG.normal(0.0, 0.3, (E, 2 * I, H)).astype(np.float32), bias=np.ones((E, 2 * I), np.float32))
FC2 = ExpertLayer(RNG.normal(0.0, 0.3, (E, H, I)).astype(np.float32), bias=np.ones((E, H), np.float32))
INTEGER_FORMATS: tuple[tuple[Literal["int4", "int8"], bool], ...] = (("int4", False), ("int8", True))
SWIGLU: dict[str, Any] = {"activation": "silu", "gated": 1}


def test_swiglu_as_a_framework_writes_it() -> None:
    expected = np.zeros((T, H))
    for expert in range(E):
        token, rank = np.nonzero(expert == INDICES)
        fc1 = X[token].astype(np.float64) @ FC1.weights[expert].T.astype(np.float64) + 1.0
        gate, value = np.split(fc1, 2, axis=-1)
        out = (gate / (1 + np.exp(-gate)) * value) @ FC2.weights[expert].T.astype(np.float64) + 1.0
        np.add.at(expected, token, out * WEIGHTS[token, rank, None].astype(np.float64))
    got = fused_experts(X, WEIGHTS, INDICES, FC1, FC2, **SWIGLU)
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    residual = fused_experts(X, WEIGHTS, INDICES, FC1, FC2, X, **SWIGLU)
    np.testing.assert_allclose(residual, expected + X, rtol=1e-12)


@pytest.mark.parametrize("leading", [(), (2, 2), (0, 3)])
def test_leading_dimensions(leading: tuple[int, ...]) -> None:
    tokens = math.prod(leading)
    shaped = [array[:tokens].reshape(*leading, array.shape[-1]) for array in (X, WEIGHTS, INDICES)]
    got = fused_experts(*shaped, FC1, FC2, None, **SWIGLU)
    expected = fused_experts(X[:tokens], WEIGHTS[:tokens], INDICES[:tokens], FC1, FC2, None, **SWIGLU)
    assert got.shape == (*leading, H)
    np.testing.assert_array_equal(got.reshape(tokens, H), expected)


def test_weights_on_the_input_scale_the_products_before_the_bias() -> None:
    relu: dict[str, Any] = {"activation": "relu", "gated": 0, "weight_on": "input"}
    fc1 = FC1._replace(weights=FC1.weights[:, :I], bias=None)
    fc2 = FC2._replace(bias=None)
    on_input = fused_experts(X, WEIGHTS, INDICES, fc1, fc2, **relu)
    on_output = fused_experts(X, WEIGHTS, INDICES, fc1, fc2, **relu | {"weight_on": "output"})
    np.testing.assert_allclose(on_input, on_output, rtol=1e-12)  # relu(w x) = w relu(x)
    with_bias = fused_experts(X, WEIGHTS, INDICES, fc1, FC2, **relu)
    np.testing.assert_allclose(with_bias, on_input + K, rtol=1e-12)


def test_ids_outside_contribute_nothing_and_equal_ids_are_separate() -> None:
    indices = np.array([[-1, E]] * T, np.int32)
    assert not fused_experts(X, WEIGHTS, indices, FC1, FC2, **SWIGLU).any()
    twice = fused_experts(X, WEIGHTS, np.full((T, K), 1, np.int32), FC1, FC2, **SWIGLU)
    once = fused_experts(X, WEIGHTS.sum(-1, keepdims=True), np.full((T, 1), 1, np.int32), FC1, FC2, **SWIGLU)
    np.testing.assert_allclose(twice, once, rtol=1e-6)


NVFP4 = [nvfp4.quantize(layer.weights) for layer in (FC1, FC2)]
MXFP4 = mxfp4.quantize(np.tile(FC1.weights, 2)), mxfp4.quantize(np.repeat(FC2.weights, 2, axis=1))
INTEGERS = {
    name: [integers.quantize(layer.weights, name, 16, symmetric=symmetric) for layer in (FC1, FC2)]
    for name, symmetric in INTEGER_FORMATS
}
FP8 = [fp8.quantize(layer.weights, 32) for layer in (FC1, FC2)]
PACKED: dict[str, Any] = {
    "nvfp4": ([ExpertLayer(*p) for p in NVFP4], [nvfp4.dequantize(p) for p in NVFP4], 0),
    "mxfp4": ([ExpertLayer(*p) for p in MXFP4], [mxfp4.dequantize(p) for p in MXFP4], 0),
    "fp8": ([ExpertLayer(p.weights, p.scales) for p in FP8], [fp8.dequantize(p) for p in FP8], 32),
    **{
        name: (
            [ExpertLayer(p.weights, p.scales, zero_points=p.zero_points) for p in packed],
            [integers.dequantize(p) for p in packed],
            16,
        )
        for name, packed in INTEGERS.items()
    },
}
"""By format: the two layers, the weights they stand for, and the block size."""


@pytest.mark.parametrize("weight_format", PACKED)
def test_packed_weights_are_what_they_are_dequantised_to(weight_format: str) -> None:
    layers, dense, block_size = PACKED[weight_format]
    x = np.tile(X, 2) if weight_format == "mxfp4" else X
    expected = fused_experts(x, WEIGHTS, INDICES, *map(ExpertLayer, dense), **SWIGLU)
    attributes: dict[str, Any] = SWIGLU | {"weight_format": weight_format, "block_size": block_size}
    got = fused_experts(x, WEIGHTS, INDICES, *layers, **attributes)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_global_scales_of_mxfp4_multiply() -> None:
    layers, _, _ = PACKED["mxfp4"]
    doubled = [layer._replace(global_scale=np.full(E, 2.0, np.float32)) for layer in layers]
    identity: dict[str, Any] = {"activation": "identity", "gated": 1, "weight_format": "mxfp4"}
    once = fused_experts(np.tile(X, 2), WEIGHTS, INDICES, *layers, **identity)
    np.testing.assert_allclose(fused_experts(np.tile(X, 2), WEIGHTS, INDICES, *doubled, **identity), 8 * once)


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({"activation": "silu", "gated": 0}, 2 / (1 + math.exp(-2))),
        ({"activation": "silu", "gated": 0, "alpha": 0.5}, 2 / (1 + math.exp(-1))),
        ({"activation": "gelu", "gated": 0}, 1.9544997361),
        ({"activation": "gelu_tanh", "gated": 0}, 1 + math.tanh(math.sqrt(2 / math.pi) * 2.35772)),
        ({"activation": "relu", "gated": 0}, 2.0),
        ({"activation": "relu2", "gated": 0}, 4.0),
        ({"activation": "identity", "gated": 0}, 2.0),
        ({"activation": "identity", "gated": 1}, 2.0 * -3.0),
        ({"activation": "identity", "gated": 1, "beta": 1.0}, 2.0 * -2.0),
        ({"activation": "identity", "gated": 1, "limit": 1.5}, 1.5 * -1.5),
    ],
)
def test_activations_by_hand(attributes: dict[str, Any], expected: float) -> None:
    config = ExpertsConfig.from_attributes(attributes)
    fc1 = np.array([2.0, -3.0]) if config.gated else np.array([2.0])
    assert activate(config, fc1)[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("changed", "attributes", "message"),
    [
        ({"x": X.astype(np.float64)}, {}, "input 'x' must be float32, float16 or bfloat16, but is float64"),
        ({"weights": WEIGHTS[:4]}, {}, r"input 'weights' must be float32 of shape \(5, 2\)"),
        ({"fc1": FC1._replace(weights=FC1.weights[:, 1:])}, {}, "must have an even second dimension"),
        (
            {"fc2": FC2._replace(weights=FC2.weights[..., 1:])},
            {},
            r"'fc2_weights' must be float32 of shape \(4, 16, 32\)",
        ),
        ({"fc1": FC1._replace(global_scale=np.ones(E, np.float32))}, {}, "'fc1_global_scale' must be left out"),
        ({}, {"weight_format": "nvfp4"}, "'fc1_scales' must be given with weight_format = nvfp4"),
        ({}, {"weight_format": "int4", "block_size": 16}, "'fc1_scales' must be given with weight_format = int4 and"),
        (
            {"fc1": FC1._replace(zero_points=np.zeros((E, 2 * I, 1), np.uint8))},
            {},
            "'fc1_zero_points' must be left out with weight_format = dense",
        ),
        (
            {"fc1": FC1._replace(scales=np.ones((E, 2 * I, 1), np.uint8))},
            {"weight_format": "mxfp4"},
            "H must be a multiple of 32 with weight_format = mxfp4, but is 16",
        ),
        (
            {"fc1": PACKED["int4"][0][0]._replace(zero_points=np.zeros((E, 2 * I, 2), np.uint8))},
            {"weight_format": "int4", "block_size": 16},
            r"'fc1_zero_points' must be uint8 of shape \(4, 64, 1\)",
        ),
        (
            {"fc1": PACKED["fp8"][0][0]},
            {"weight_format": "fp8", "block_size": 16},
            r"'fc1_scales' must be float32 of shape \(4, 4, 1\), but is float32 of shape \(4, 2, 1\)",
        ),
        ({"weights": WEIGHTS[:, :0], "indices": INDICES[:, :0]}, {}, "K must be at least 1, but is 0"),
        ({"fc1": FC1._replace(weights=FC1.weights[:, :0])}, {}, "I must be at least 1, but is 0"),
    ],
)
def test_refusals(changed: dict[str, Any], attributes: dict[str, Any], message: str) -> None:
    arguments = {"x": X, "weights": WEIGHTS, "indices": INDICES, "fc1": FC1, "fc2": FC2} | changed
    with pytest.raises(ValueError, match=f"FusedExperts: .*{message}"):
        fused_experts(**arguments, **(SWIGLU | attributes))

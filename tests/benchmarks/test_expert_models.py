"""The benchmarks' models, small and on the CPU: ours, the contrib ops' and the reference give one answer."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.expert_models import Model, Shape, cycle_model, pack_along_rows, stack_model
from ort_moe.packing import fp8, integers, mxfp4, nvfp4
from ort_moe.reference.fused_experts import ExpertLayer, fused_experts
from ort_moe.reference.fused_router import fused_router
from tests.op_models import ort_value
from tests.qmoe_models import qmoe_runs

SHAPES = {name: Shape(6, 2, 64, 32, name, "float") for name in ("nvfp4", "mxfp4", "dense")}
SHAPES |= {name: Shape(6, 2, 64, 32, name, "float", 32) for name in ("int4", "int8", "fp8")}
TOKENS, LAYERS = 3, 4

Array = npt.NDArray[Any]


def experts_of(shape: Shape) -> dict[str, Array]:
    """The experts' weights by name, in our layout; global scales are powers of two, as the benchmark's are."""
    rng = np.random.default_rng(0)
    result: dict[str, Array] = {}
    for name, n, d in shape.layers():
        dense = rng.normal(0.0, d**-0.5, (shape.experts, n, d)).astype(np.float32)
        if shape.weight_format == "dense":
            result[f"{name}_weights"] = dense
            continue
        parts: dict[str, Any] = {}
        match shape.weight_format:
            case "nvfp4":
                layer = nvfp4.quantize(dense)
                parts = layer._replace(global_scale=np.exp2(np.round(np.log2(layer.global_scale))))._asdict()
            case "mxfp4":
                parts = mxfp4.quantize(dense)._asdict()
            case "fp8":
                parts = fp8.quantize(dense, shape.block_size)._asdict()
            case "int4" | "int8" as weight_format:
                parts = integers.quantize(dense, weight_format, shape.block_size)._asdict()
        names = ("weights", "scales", "global_scale")
        result |= {f"{name}_{part}": value for part, value in parts.items() if part in names}
    return result


def run(model: Model, values: dict[str, Array]) -> dict[str, Array]:
    """The outputs of a model; `values` has its inputs and constants."""
    import onnxruntime

    from ort_moe.installation.library import register

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    register(options)
    model.add_constants(options, {name: values[name].view(_bits(values[name])) for name in model.constants})
    session = onnxruntime.InferenceSession(model.proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {name: ort_value(values[name]) for name in model.inputs}
    return {
        name: value.numpy()
        for name, value in zip(model.outputs, session.run_with_ort_values(list(model.outputs), feeds), strict=True)
    }


def _bits(array: Array) -> npt.DTypeLike:
    return array.dtype if array.dtype in (np.uint8, np.float32) else np.uint8


def contrib_experts(shape: Shape, experts: dict[str, Array]) -> dict[str, Array]:
    """For a QMoE whose `weights_prepacked = 1`."""
    if shape.weight_format != "nvfp4":
        return experts
    declared = shape.weights(packed_for="QMoE")
    return experts | {name: experts[name].reshape(declared[name][1]) for name in ("fc1_weights", "fc2_weights")}


_WITH_QMOE = pytest.mark.skipif(not qmoe_runs(), reason="QMoE runs these on the CPU from ONNX Runtime 1.32 on")
CONTRIB = [*(pytest.param(name, marks=_WITH_QMOE) for name in ("nvfp4", "int4", "int8")), "dense"]


def stack_values(shape: Shape) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    values: dict[str, Array] = {}
    for n in range(LAYERS):
        values[f"logits{n}"] = rng.normal(0.0, 2.0, (TOKENS, shape.experts)).astype(np.float32)
        values[f"x{n}"] = rng.normal(0.0, 1.0, (TOKENS, shape.hidden)).astype(np.float32)
    return values


def cycle_values(shape: Shape) -> dict[str, Array]:
    rng = np.random.default_rng(2)
    values = {"x": rng.normal(0.0, 1.0, (TOKENS, shape.hidden)).astype(np.float32)}
    for n in range(LAYERS):
        gate = rng.normal(0.0, 2.0 * shape.hidden**-0.5, (shape.hidden, shape.experts))
        values[f"gate{n}"] = gate.astype(np.float32)
    return values


def expected_rows(shape: Shape, experts: dict[str, Array], x: Array, logits: Array) -> npt.NDArray[np.float64]:
    weights, indices = fused_router(logits.astype(np.float32), k=shape.k, score="softmax", normalize=1)
    fc1, fc2 = (
        ExpertLayer(experts[f"{layer}_weights"], experts.get(f"{layer}_scales"), experts.get(f"{layer}_global_scale"))
        for layer in ("fc1", "fc2")
    )
    return fused_experts(x.astype(np.float32), weights, indices, fc1, fc2, **shape.attributes)


def assert_close(got: Array, expected: Array, tolerance: float = 1e-5) -> None:
    assert np.linalg.norm(got - expected) < tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_our_stack_computes_every_layer(shape: Shape) -> None:
    experts, values = experts_of(shape), stack_values(shape)
    y = run(stack_model(shape, TOKENS, LAYERS, contrib=False), experts | values)
    for n in range(LAYERS):
        assert_close(y[f"y{n}"], expected_rows(shape, experts, values[f"x{n}"], values[f"logits{n}"]))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_our_cycle_computes_layer_upon_layer(shape: Shape) -> None:
    experts, values = experts_of(shape), cycle_values(shape)
    x = values["x"].astype(np.float64)
    for n in range(LAYERS):
        x = x + expected_rows(shape, experts, x, x @ values[f"gate{n}"])
    assert_close(run(cycle_model(shape, TOKENS, LAYERS, contrib=False), experts | values)["y"], x)


@pytest.mark.parametrize("weight_format", CONTRIB)
def test_contrib_ops_agree(weight_format: str) -> None:
    shape = SHAPES[weight_format]
    experts = experts_of(shape)
    for make, values in ((stack_model, stack_values(shape)), (cycle_model, cycle_values(shape))):
        ours = run(make(shape, TOKENS, LAYERS, contrib=False), experts | values)
        model = make(shape, TOKENS, LAYERS, contrib=True, weights_prepacked=weight_format == "nvfp4")
        theirs = run(model, contrib_experts(shape, experts) | values)
        for name in model.outputs:
            # QMoE's int8 on the CPU has int8 activations.
            assert_close(theirs[name], ours[name], 5e-2 if weight_format == "int8" else 1e-5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_experts_bytes_are_those_of_its_arrays(shape: Shape) -> None:
    assert shape.expert_bytes * shape.experts == sum(array.nbytes for array in experts_of(shape).values())


def test_open_tokens() -> None:
    shape = SHAPES["dense"]
    experts, values = experts_of(shape), stack_values(shape)
    expected = run(stack_model(shape, TOKENS, LAYERS, contrib=True), experts | values)
    got = run(stack_model(shape, "T", LAYERS, contrib=True), experts | values)
    np.testing.assert_array_equal(got["y0"], expected["y0"])


@pytest.mark.parametrize("packed_along", ["K", "N"])
def test_weights_have_the_shapes_that_the_packing_gives(packed_along: Literal["K", "N"]) -> None:
    shape = SHAPES["nvfp4"]
    experts = experts_of(shape)
    declared = shape.weights(packed_for="QMoE")
    for name, n, d in shape.layers():
        layer = nvfp4.Nvfp4(*(experts[f"{name}_{part}"] for part in ("weights", "scales", "global_scale")))
        expected = nvfp4.to_qmoe(layer, packed_along).weights
        assert expected.shape == declared[f"{name}_weights"][1] == (shape.experts, d, n // 2)
        if packed_along == "N":
            out = np.empty_like(expected)
            pack_along_rows(layer.weights, out)
            np.testing.assert_array_equal(out, expected)

"""Packing the dense weights of FusedExperts: what becomes of the graph, and what is left and why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from ort_moe.files.streamed_tensor import StreamedTensor
from ort_moe.files.weights_file import WeightsFile
from ort_moe.packing.pieces import Packing
from ort_moe.rewrites import rewrite
from ort_moe.rewrites.conversion import Conversion, convert_experts
from ort_moe.verification.packed_reference import is_converted, meant
from tests.experts_cases import ExpertsCase
from tests.op_models import op_model
from tests.rewrites.experts.test_subgraphs import INSIDE, with_body

CASE = ExpertsCase(leading=(3,), experts=4, k=2, hidden=64, inner=32, has_bias=True)
PACKINGS = [
    *(Packing.of("nvfp4"), Packing.of("mxfp4"), Packing.of("fp8", 16), Packing.of("int8", 32)),
    Packing.of("int4", 16, zero_points=True),
]


def dense(case: ExpertsCase) -> ir.Model:
    """The case's node with constant weights and biases."""
    proto = op_model("FusedExperts", case.feeds, case.all_attributes)
    fed = [value for value in proto.graph.input if not value.name.startswith("fc")]
    del proto.graph.input[:]
    proto.graph.input.extend(fed)
    proto.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in case.feeds.items() if name.startswith("fc")
    )
    return ir.from_proto(proto)


def converted(
    packing: Packing, folder: Path, case: ExpertsCase = CASE, **others: Any
) -> tuple[ir.Model, tuple[Conversion, ...]]:
    """The case's node with its weights packed."""
    model = dense(case)
    for name, tensor in others.items():
        model.graph.initializers[name].const_value = tensor
    with WeightsFile(folder / "packed.data") as file:
        conversions = convert_experts(model, packing, file)
    return model, conversions


def experts(model: ir.Model) -> ir.Node:
    (node,) = [node for node in model.graph if node.op_type == "FusedExperts"]
    return node


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("onnx_type", ["float", "float16"])
def test_packed(packing: Packing, onnx_type: str, tmp_path: Path) -> None:
    case = replace(CASE, onnx_type=onnx_type)
    model, (conversion,) = converted(packing, tmp_path, case)
    node = experts(model)
    assert {name: node.attributes[name].value for name in packing.attributes} == packing.attributes
    assert is_converted(node)
    assert "fc1_weights" not in model.graph.initializers
    assert conversion.node == node.name
    assert not conversion.why_left
    assert [(layer.layer, layer.shape) for layer in conversion.layers] == [("fc1", (4, 64, 64)), ("fc2", (4, 64, 32))]
    limit = {"int8": 0.01, "fp8": 0.05}.get(packing.weight_format, 0.15)
    assert all(0 < layer.relative_error < limit for layer in conversion.layers)
    assert all(layer.bytes_after < layer.bytes_before for layer in conversion.layers)
    feeds = {name: case.feeds[name] for name in ("x", "weights", "indices")}
    expected, got = meant(experts(dense(case)), feeds), meant(node, feeds)
    assert 0 < np.linalg.norm(got - expected) < 4 * limit * np.linalg.norm(expected)


def test_again(tmp_path: Path) -> None:
    model, _ = converted(PACKINGS[0], tmp_path)
    with WeightsFile(tmp_path / "again.data") as file:
        (conversion,) = convert_experts(model, PACKINGS[1], file)
    assert (conversion.layers, conversion.why_left) == ((), "they are packed already, in nvfp4")
    assert experts(model).attributes["weight_format"].value == "nvfp4"


@pytest.mark.parametrize(
    ("case", "packing", "why"),
    [
        (
            replace(CASE, inner=24),
            Packing.of("mxfp4"),
            "the inner size must be a multiple of 32, but is 24; fp8 takes any size",
        ),
        (
            replace(CASE, hidden=48),
            Packing.of("int4", 64),
            "the hidden size must be a multiple of 64, but is 48; blocks of 16 fit",
        ),
    ],
)
def test_left(case: ExpertsCase, packing: Packing, why: str, tmp_path: Path) -> None:
    model, (conversion,) = converted(packing, tmp_path, case)
    assert (conversion.layers, conversion.why_left) == ((), why)
    assert experts(model).attributes["weight_format"].value == "dense"
    assert not is_converted(experts(model))


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("number", [np.inf, np.nan])
def test_weights_that_are_not_finite(packing: Packing, number: float, tmp_path: Path) -> None:
    weights = np.ones((4, 64, 64), np.float32)
    weights[2, 5, 7] = number
    model, (conversion,) = converted(packing, tmp_path, fc1_weights=ir.tensor(weights, name="fc1_weights"))
    assert conversion.why_left == f"{packing.weight_format}: 'fc1_weights' must be finite, but expert 2 is not"
    assert experts(model).attributes["weight_format"].value == "dense"


def test_weights_that_are_made_when_they_are_written(tmp_path: Path) -> None:
    """Each expert is asked for once, and never all of them."""
    asked: list[int] = []

    def entry(number: int) -> Any:
        asked.append(number)
        return np.full((64, 64), number + 1, np.float32)

    streamed = StreamedTensor(entry, ir.DataType.FLOAT, ir.Shape((4, 64, 64)), "fc1_weights")
    _, (conversion,) = converted(PACKINGS[0], tmp_path, fc1_weights=streamed)
    assert asked == [0, 1, 2, 3]
    assert conversion.layers[0].largest_error < 1e-5


def test_one_stack_for_two_nodes_is_packed_once(tmp_path: Path) -> None:
    model = dense(CASE)
    first = experts(model)
    second = ir.Node(first.domain, first.op_type, first.inputs, first.attributes.values(), num_outputs=1, name="second")
    model.graph.append(second)
    with WeightsFile(tmp_path / "packed.data") as file:
        conversions = convert_experts(model, PACKINGS[0], file)
    assert [bool(each.layers) for each in conversions] == [True, True]
    assert first.inputs == second.inputs


def test_in_a_branch(tmp_path: Path) -> None:
    """The weights lie around the body, and so does what they are packed to."""
    model = with_body(INSIDE["a branch, to be transposed"][0]).model()
    rewrite(model)
    with WeightsFile(tmp_path / "packed.data") as file:
        (conversion,) = convert_experts(model, Packing.of("fp8", 16), file)
    assert len(conversion.layers) == 2
    parts = {name for name in model.graph.initializers if name.startswith("fc")}
    assert parts == {f"{fc}_transposed_fp8_{part}" for fc in ("fc1", "fc2") for part in ("weights", "scales")}
    (node,) = [node for node in model.graph.all_nodes() if node.op_type == "FusedExperts"]
    bodies = [key for key, function in model.functions.items() if function.name == "FusedExperts"]
    assert bodies == [node.op_identifier()]  # that of dense weights is gone

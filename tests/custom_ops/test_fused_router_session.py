"""FusedRouter as a citizen of ONNX Runtime: shapes, optional inputs, and a sentence for whatever does not fit."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ort_moe.ops import FUSED_ROUTER
from ort_moe.reference.fused_router import fused_router
from tests.op_models import op_session
from tests.router_cases import DTYPES
from tests.router_models import router_model, run_router

E = 8
K = 2
SOFTMAX: dict[str, Any] = FUSED_ROUTER.complete({"k": K, "score": "softmax", "normalize": 1})
GROUPED: dict[str, Any] = SOFTMAX | {"num_groups": 4, "topk_groups": 2}
MIXER: dict[str, Any] = FUSED_ROUTER.complete({"k": 2, "score": "sparse_mixer", "mixer_threshold": 0.02})
VECTOR = np.linspace(0.5, 1.5, E, dtype=np.float32)


def some_logits(shape: tuple[int, ...], onnx_type: str = "float") -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(DTYPES[onnx_type])


def refused_at_creation(model: onnx.ModelProto) -> str:
    """What the session says instead of being created."""
    with pytest.raises(Exception, match="Exception during initialization") as refusal:
        op_session(model)
    return str(refusal.value).partition("Exception during initialization: ")[2].strip()


def refused_at_run(model: onnx.ModelProto, logits: np.ndarray) -> str:
    """What the run says, of a session that could be created."""
    session = op_session(model)
    with pytest.raises(Exception, match="Status Message") as refusal:
        run_router(session, logits)
    assert type(refusal.value).__name__ == "InvalidArgument"
    return str(refusal.value).partition("Status Message: ")[2].strip()


def faulty(attributes: dict[str, Any], logits_shape: tuple[int | str, ...] = (3, E), **more: Any) -> onnx.ModelProto:
    return router_model(attributes, logits_shape=logits_shape, complete=False, **more)


# Shapes and inputs


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("onnx_type", DTYPES)
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (2, 1, 3), (0,), (2, 0, 3)])
def test_every_rank_and_no_rows(leading: tuple[int, ...], onnx_type: str, symbolic: bool) -> None:
    logits = some_logits((*leading, E), onnx_type)
    names = tuple(f"d{axis}" for axis in range(len(leading)))
    model = router_model(SOFTMAX, onnx_type=onnx_type, logits_shape=(*(names if symbolic else leading), E))
    weights, indices = run_router(op_session(model), logits)
    assert weights.shape == indices.shape == (*leading, K)
    assert (weights.dtype, indices.dtype) == (np.float32, np.int32)
    expected_weights, expected_indices = fused_router(logits, **SOFTMAX)
    np.testing.assert_array_equal(weights, expected_weights)
    np.testing.assert_array_equal(indices, expected_indices)


@pytest.mark.parametrize("has_scale", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_optional_inputs(has_bias: bool, has_scale: bool) -> None:
    vectors = {
        "selection_bias": VECTOR[::-1].copy() if has_bias else None,
        "expert_scale": VECTOR if has_scale else None,
    }
    logits = some_logits((4, E))
    weights, indices = run_router(op_session(router_model(SOFTMAX, logits_shape=(4, E), **vectors)), logits)
    expected_weights, expected_indices = fused_router(logits, **SOFTMAX, **vectors)
    np.testing.assert_array_equal(weights, expected_weights)
    np.testing.assert_array_equal(indices, expected_indices)


def test_many_rows_are_spread_over_threads() -> None:
    logits = some_logits((5000, E))
    weights, indices = run_router(op_session(router_model(SOFTMAX, logits_shape=("T", E))), logits)
    expected_weights, expected_indices = fused_router(logits, **SOFTMAX)
    np.testing.assert_array_equal(weights, expected_weights)
    np.testing.assert_array_equal(indices, expected_indices)


@pytest.mark.parametrize(
    ("declared", "inferred"),
    [
        (["batch", "sequence", E], ["batch", "sequence", K]),
        ([2, "sequence", "experts"], [2, "sequence", K]),
        ([E], [K]),
    ],
)
def test_shape_inference_keeps_names(declared: list[int | str], inferred: list[int | str]) -> None:
    model = router_model(SOFTMAX, logits_shape=declared)
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    assert [output.shape for output in op_session(model).get_outputs()] == [inferred, inferred]


def test_shape_inference_keeps_unnamed_dimensions_apart() -> None:
    model = router_model(SOFTMAX, logits_shape=("a", "b", E))
    for dimension in model.graph.input[0].type.tensor_type.shape.dim[:2]:
        dimension.Clear()
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    session = op_session(model)
    weights_shape, indices_shape = (output.shape for output in session.get_outputs())
    assert weights_shape == indices_shape
    assert all(isinstance(name, str) for name in weights_shape[:2])
    assert weights_shape[0] != weights_shape[1]
    assert run_router(session, some_logits((2, 3, E)))[0].shape == (2, 3, K)


# Refused when the session is created


@pytest.mark.parametrize("name", sorted(SOFTMAX))
def test_missing_attribute(name: str) -> None:
    attributes = {key: value for key, value in SOFTMAX.items() if key != name}
    kind = FUSED_ROUTER.attribute(name).kind
    assert re.fullmatch(
        f"FusedRouter node 'router': attribute '{name}' must be an? {kind}, but is missing",
        refused_at_creation(faulty(attributes)),
    )


def test_missing_mixer_threshold() -> None:
    attributes = {key: value for key, value in MIXER.items() if key != "mixer_threshold"}
    assert "attribute 'mixer_threshold' must be a float, but is missing" in refused_at_creation(faulty(attributes))


def test_mixer_threshold_elsewhere_is_tolerated() -> None:
    assert op_session(faulty(SOFTMAX | {"mixer_threshold": 0.5})).get_outputs()


@pytest.mark.parametrize(
    ("name", "value", "came"),
    [
        ("k", 2.5, "an int, but is the float 2.5"),
        ("k", "2", "an int, but is the string '2'"),
        ("scale", 1, "a float, but is the int 1"),
        ("scale", [1.0, 2.0], "a float, but is a list of floats"),
        ("num_groups", [1, 2], "an int, but is a list of ints"),
        ("score", 0, "a string, but is the int 0"),
        ("softcap", helper.make_tensor("", TensorProto.FLOAT, [1], [1.0]), "a float, but is of another kind"),
        ("score", ["softmax"], "a string, but is of another kind"),
    ],
)
def test_mistyped_attribute(name: str, value: object, came: str) -> None:
    sentence = refused_at_creation(faulty(SOFTMAX | {name: value}))
    assert sentence == f"FusedRouter node 'router': attribute '{name}' must be {came}"


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        (
            SOFTMAX | {"score": "softmx"},
            "'score' must be 'softmax', 'sigmoid', 'sqrtsoftplus', 'none' or 'sparse_mixer', but is 'softmx'",
        ),
        (SOFTMAX | {"bias_on": "both"}, "'bias_on' must be 'score' or 'logits', but is 'both'"),
        (SOFTMAX | {"weights_from": ""}, "'weights_from' must be 'scores' or 'selection', but is ''"),
        (SOFTMAX | {"normalize": 2}, "'normalize' must be 0 or 1, but is 2"),
        (SOFTMAX | {"score_after_topk": -1}, "'score_after_topk' must be 0 or 1, but is -1"),
        (SOFTMAX | {"group_fill": -1e9}, "'group_fill' must be -inf or 0, but is -1e+09"),
        (SOFTMAX | {"k": 0}, "'k' must be at least 1, but is 0"),
        (SOFTMAX | {"k": E + 1}, "'k' must be at most the number of experts, 8, but is 9"),
        (SOFTMAX | {"num_groups": 0}, "'num_groups' must be at least 1, but is 0"),
        (SOFTMAX | {"num_groups": 3}, "'num_groups' must be a divisor of the number of experts, 8, but is 3"),
        (GROUPED | {"topk_groups": 0}, "'topk_groups' must be between 1 and num_groups = 4, but is 0"),
        (GROUPED | {"topk_groups": 5}, "'topk_groups' must be between 1 and num_groups = 4, but is 5"),
        (GROUPED | {"group_score_top": 0}, "'group_score_top' must be at least 1, but is 0"),
        (GROUPED | {"group_score_top": 3}, "'group_score_top' must be at most the experts per group, 2, but is 3"),
        (GROUPED | {"k": 5}, "'k' must be at most the experts of the kept groups, 4, but is 5"),
        (SOFTMAX | {"bias_on": "logits"}, "'bias_on' must be 'score' unless score_after_topk = 1, but is 'logits'"),
        (SOFTMAX | {"scale": math.nan}, "'scale' must be a number, but is NaN"),
        (SOFTMAX | {"normalize_eps": math.nan}, "'normalize_eps' must be a number, but is NaN"),
        (SOFTMAX | {"normalize_min": math.nan}, "'normalize_min' must be a number, but is NaN"),
        (SOFTMAX | {"softcap": -1.0}, "'softcap' must be finite and at least 0, but is -1"),
        (SOFTMAX | {"softcap": math.inf}, "'softcap' must be finite and at least 0, but is inf"),
        (MIXER | {"k": 3}, "'k' must be 2 with score = sparse_mixer, but is 3"),
        (MIXER | {"mixer_threshold": -0.5}, "'mixer_threshold' must be finite and at least 0, but is -0.5"),
        (MIXER | {"score_after_topk": 1}, "'score_after_topk' must be 0 with score = sparse_mixer, but is 1"),
        (MIXER | {"weights_from": "selection"}, "'weights_from' must be 'scores' with score = sparse_mixer, but is"),
        (
            MIXER | {"num_groups": 4, "topk_groups": 2},
            "'topk_groups' must be equal to num_groups with score = sparse_mixer, but is 2",
        ),
    ],
    ids=lambda value: value.partition(" must")[0].strip("'") if isinstance(value, str) else None,
)
def test_refused_attribute(attributes: dict[str, Any], sentence: str) -> None:
    assert refused_at_creation(faulty(attributes)).startswith(f"FusedRouter node 'router': attribute {sentence}")


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        (
            SOFTMAX | {"weights_from": "selection"},
            "attribute 'weights_from' must be 'scores' with a selection_bias, but is 'selection'",
        ),
        (MIXER, "input 'selection_bias' must be absent with score = sparse_mixer, but is given"),
    ],
)
def test_refused_bias(attributes: dict[str, Any], sentence: str) -> None:
    model = faulty(attributes, selection_bias=VECTOR)
    assert refused_at_creation(model) == f"FusedRouter node 'router': {sentence}"


def test_refused_type_of_logits() -> None:
    sentence = refused_at_creation(faulty(SOFTMAX, onnx_type="double"))
    assert sentence == (
        "FusedRouter node 'router': input 'logits' must have type float, float16 or bfloat16, but has double"
    )


@pytest.mark.parametrize("name", ["selection_bias", "expert_scale"])
@pytest.mark.parametrize(
    ("vector", "expected"),
    [
        (np.zeros(E, np.float16), "must have type float, but has float16"),
        (np.zeros(E - 1, np.float32), "must have shape [8], but has [7]"),
        (np.zeros((1, E), np.float32), "must have shape [8], but has [1, 8]"),
    ],
)
def test_refused_vector(name: str, vector: np.ndarray, expected: str) -> None:
    sentence = refused_at_creation(faulty(SOFTMAX, **{name: vector}))
    assert sentence == f"FusedRouter node 'router': input '{name}' {expected}"


def test_a_node_without_a_name_is_found_by_its_output() -> None:
    sentence = refused_at_creation(faulty(SOFTMAX | {"k": 0}, name=""))
    assert sentence.startswith("FusedRouter node of output 'weights': ")


# Refused when it runs, because the number of experts is not known before


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        (SOFTMAX | {"k": 9}, "'k' must be at most the number of experts, 8, but is 9"),
        (SOFTMAX | {"num_groups": 3}, "'num_groups' must be a divisor of the number of experts, 8, but is 3"),
        (GROUPED | {"k": 5}, "'k' must be at most the experts of the kept groups, 4, but is 5"),
    ],
)
def test_refused_number_of_experts(attributes: dict[str, Any], sentence: str) -> None:
    got = refused_at_run(faulty(attributes, ("T", "E")), some_logits((3, E)))
    assert got == f"FusedRouter node 'router': attribute {sentence}"


def test_refused_vector_of_another_length() -> None:
    model = faulty(SOFTMAX, ("T", "E"), expert_scale=np.ones(6, np.float32))
    got = refused_at_run(model, some_logits((3, E)))
    assert got == "FusedRouter node 'router': input 'expert_scale' must have shape [8], but has [6]"


def test_refused_scalar() -> None:
    got = refused_at_run(faulty(SOFTMAX, ()), some_logits(()))
    assert got == "FusedRouter node 'router': input 'logits' must have rank 1 or more, but is a scalar"

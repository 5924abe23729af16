"""ONNX schemas: registered once, they check nodes and infer types and shapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, defs, shape_inference

from ort_moe.ops import DOMAIN, OPS, ROUTING_MAPS, VERSION, Op
from ort_moe.ops.schemas import register_schemas
from tests.experts_cases import VARIANTS, ExpertsCase
from tests.finalize_cases import FinalizeCase
from tests.gather_finalize_cases import GatherFinalizeCase
from tests.op_models import element_type, op_model
from tests.permute_cases import PermuteCase
from tests.router_cases import DTYPES
from tests.router_models import router_model


@pytest.fixture(autouse=True)
def schemas() -> None:
    register_schemas()


def without_output_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    for output in model.graph.output:
        output.ClearField("type")
    return model


def inferred(model: onnx.ModelProto) -> dict[str, tuple[int, list[int | str] | None]]:
    """Element type and shape of each output by inference."""
    result = shape_inference.infer_shapes(without_output_shapes(model), check_type=True, strict_mode=True)
    outputs: dict[str, tuple[int, list[int | str] | None]] = {}
    for output in result.graph.output:
        tensor = output.type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in tensor.shape.dim]
        outputs[output.name] = (tensor.elem_type, dims if tensor.HasField("shape") else None)
    return outputs


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_a_schema_says_what_the_table_says(op: Op) -> None:
    schema = defs.get_schema(op.name, VERSION, DOMAIN)
    assert schema.since_version == VERSION
    assert [i.name for i in schema.inputs] == [i.name for i in op.inputs]
    assert [o.name for o in schema.outputs] == [o.name for o in op.outputs]
    assert schema.attributes.keys() == {attribute.name for attribute in op.attributes}
    assert schema.min_input == 1 + max(i for i, tensor in enumerate(op.inputs) if not tensor.optional)
    assert {name for name, a in schema.attributes.items() if not a.required} == {
        attribute.name for attribute in op.attributes if attribute.only_with
    }
    assert schema.has_type_and_shape_inference_function


def test_registering_again_changes_nothing() -> None:
    before = defs.get_schema("FusedRouter", VERSION, DOMAIN).doc
    register_schemas()
    assert defs.get_schema("FusedRouter", VERSION, DOMAIN).doc == before


@pytest.mark.parametrize("onnx_type", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("leading", [[], [3], ["batch", "sequence"], ["batch", 7, "d"]])
def test_symbolic_dimensions_are_kept(onnx_type: str, leading: list[int | str]) -> None:
    model = router_model({"k": 2, "score": "softmax"}, onnx_type=onnx_type, logits_shape=[*leading, 8])
    expected = {"weights": (TensorProto.FLOAT, [*leading, 2]), "indices": (TensorProto.INT32, [*leading, 2])}
    assert inferred(model) == expected


def test_an_unknown_number_of_experts_is_no_error() -> None:
    model = router_model({"k": 20, "score": "softmax"}, logits_shape=["tokens", "experts"])
    assert inferred(model)["weights"] == (TensorProto.FLOAT, ["tokens", 20])


def test_an_unknown_shape_stays_unknown() -> None:
    model = router_model({"k": 2, "score": "softmax"}, logits_shape=[8])
    model.graph.input[0].type.tensor_type.ClearField("shape")
    assert inferred(model) == {"weights": (TensorProto.FLOAT, None), "indices": (TensorProto.INT32, None)}


def test_a_whole_model_passes_the_full_check() -> None:
    vectors = {"selection_bias": np.zeros(8, np.float32), "expert_scale": np.ones(8, np.float32)}
    model = router_model({"k": 2, "score": "sigmoid"}, logits_shape=["tokens", 8], **vectors)
    onnx.checker.check_model(model, full_check=True)
    only_scale = router_model({"k": 2, "score": "softmax"}, logits_shape=[8], expert_scale=np.ones(8, np.float32))
    onnx.checker.check_model(only_scale, full_check=True)


@pytest.mark.parametrize(
    ("given", "vectors", "message"),
    [
        ({"k": 9}, {}, "'k' must be at most the number of experts, 8, but is 9"),
        ({"score": "soft"}, {}, "'score' must be 'softmax', .* or 'sparse_mixer', but is 'soft'"),
        ({"normalize": 3}, {}, "'normalize' must be 0 or 1, but is 3"),
        ({"scale": math.nan}, {}, "'scale' must be a number"),
        ({"score": "sparse_mixer", "mixer_threshold": -1.0}, {}, "'mixer_threshold' must be finite and at least 0"),
        ({"weights_from": "selection"}, {"selection_bias": np.zeros(8, np.float32)}, "with a selection_bias"),
        ({}, {"expert_scale": np.ones(7, np.float32)}, r"'expert_scale' must have shape \[8\], but has \[7\]"),
        ({}, {"selection_bias": np.ones((1, 8), np.float32)}, r"must have shape \[8\], but has \[1, 8\]"),
    ],
)
def test_real_errors_are_raised(given: dict[str, Any], vectors: dict[str, Any], message: str) -> None:
    model = router_model({"k": 2, "score": "softmax"} | given, logits_shape=["tokens", 8], **vectors)
    with pytest.raises(shape_inference.InferenceError, match=f"FusedRouter: .*{message}"):
        shape_inference.infer_shapes(without_output_shapes(model))


def test_sparse_mixer_without_its_threshold_is_an_error() -> None:
    model = router_model({"k": 2, "score": "sparse_mixer", "mixer_threshold": 0.1}, logits_shape=[8])
    attributes = model.graph.node[0].attribute
    attributes.remove(next(a for a in attributes if a.name == "mixer_threshold"))
    with pytest.raises(shape_inference.InferenceError, match="'mixer_threshold' must be given"):
        shape_inference.infer_shapes(without_output_shapes(model))


@pytest.mark.parametrize(
    ("given", "message"),
    [({"k": 2, "score": "softmax"}, "Required attribute"), ({"k": 2, "topk": 2}, "Unrecognized attribute: topk")],
)
def test_the_checker_refuses_missing_and_unknown_attributes(given: dict[str, Any], message: str) -> None:
    model = router_model(given, logits_shape=["tokens", 8], complete=False)
    with pytest.raises(onnx.checker.ValidationError, match=message):
        onnx.checker.check_model(model)


def test_a_missing_attribute_leaves_inference_alone() -> None:
    model = router_model({"score": "softmax"}, logits_shape=["tokens", 8], complete=False)
    types = {name: element_type for name, (element_type, _) in inferred(model).items()}
    assert types == {"weights": TensorProto.FLOAT, "indices": TensorProto.INT32}


MAPS = [tensor.name for tensor in ROUTING_MAPS]


def test_maps_have_a_row_for_each_choice() -> None:
    logits = {"logits": np.zeros((2, 3, 8), np.float32)}
    attributes: dict[str, Any] = {"k": 2, "score": "softmax"}
    model = op_model("FusedRouter", logits, attributes, outputs=["weights", "indices", *MAPS])
    outputs = inferred(model)
    assert [outputs[name] for name in MAPS[:3]] == [(TensorProto.INT32, [12])] * 3
    assert outputs[MAPS[3]] == (TensorProto.INT64, [9])
    symbolic = op_model("FusedRouter", logits, attributes, outputs=["weights", "indices", *MAPS], symbolic=True)
    assert [inferred(symbolic)[name] for name in MAPS[:3]] == [(TensorProto.INT32, [f"unk__{i}"]) for i in range(3)]
    some = op_model("FusedRouter", logits, attributes, outputs=["weights", "indices", *MAPS[:2]])
    with pytest.raises(shape_inference.InferenceError, match="output 'permuted_to_expert' must be there, as the other"):
        shape_inference.infer_shapes(some)


@pytest.mark.parametrize("onnx_type", ["float", "float16", "bfloat16"])
def test_finalized_tokens_have_the_type_and_the_columns_of_the_rows(onnx_type: str) -> None:
    case = FinalizeCase((2, 3), 4, 24, 6, onnx_type, has_residual=True)
    expected = element_type(case.feeds["expert_output"].dtype)
    assert inferred(op_model("FinalizeRouting", case.feeds, {})) == {"y": (expected, [2, 3, 24])}
    symbolic = op_model("FinalizeRouting", case.feeds, {}, symbolic=True)
    assert inferred(symbolic) == {"y": (expected, ["weights_0", "weights_1", "expert_output_1"])}


@pytest.mark.parametrize("onnx_type", ["float", "float16", "bfloat16"])
def test_gathered_tokens_have_the_type_of_the_rows_without_their_padding(onnx_type: str) -> None:
    case = GatherFinalizeCase((2, 3), 4, 24, 6, 8, (1, 3), onnx_type=onnx_type, has_residual=True)
    expected = element_type(case.feeds["expert_output"].dtype)
    assert inferred(op_model("GatherFinalize", case.feeds, case.attributes)) == {"y": (expected, [2, 3, 24])}
    symbolic = op_model("GatherFinalize", case.feeds, case.attributes, symbolic=True)
    assert inferred(symbolic) == {"y": (expected, ["weights_0", "weights_1", 24])}
    for wrong, message in (({"local_count": 0}, "at least 1, but is 0"), ({"hidden_size": 33}, "at most .* 32, but")):
        model = op_model("GatherFinalize", case.feeds, case.attributes | wrong)
        with pytest.raises(shape_inference.InferenceError, match=message):
            shape_inference.infer_shapes(without_output_shapes(model))


@pytest.mark.parametrize("onnx_type", ["float", "float16", "bfloat16"])
def test_permuted_tokens_have_a_row_for_each_choice(onnx_type: str) -> None:
    case = PermuteCase((2, 3), 4, 24, 6, onnx_type)
    kind = element_type(case.feeds["x"].dtype)
    outputs = inferred(op_model("PermuteTokens", case.feeds, case.attributes))
    assert outputs["permuted_x"] == (kind, [24, 24])
    assert [outputs[name] for name in MAPS] == [(TensorProto.INT32, [24])] * 3 + [(TensorProto.INT64, [7])]
    symbolic = inferred(op_model("PermuteTokens", case.feeds, case.attributes, symbolic=True))
    assert symbolic["permuted_x"] == (kind, ["unk__0", "x_2"])
    with pytest.raises(shape_inference.InferenceError, match="'num_experts' must be at least 1, but is 0"):
        shape_inference.infer_shapes(without_output_shapes(op_model("PermuteTokens", case.feeds, {"num_experts": 0})))


@pytest.mark.parametrize("variant", VARIANTS)
def test_experts_keep_type_and_shape(variant: str) -> None:
    case = ExpertsCase((2, 3), 4, 2, 32, 32, "float16", **VARIANTS[variant], has_maps=True, has_bias=True)
    model = op_model("FusedExperts", case.feeds, case.all_attributes)
    model.graph.output[0].type.tensor_type.shape.CopyFrom(model.graph.input[0].type.tensor_type.shape)
    onnx.checker.check_model(model, full_check=True)
    assert inferred(model) == {"y": (TensorProto.FLOAT16, [2, 3, 32])}


def test_wrong_experts_are_errors() -> None:
    case = ExpertsCase((2,), 4, 2, 32, 16, "float16", has_maps=True)
    relu = op_model("FusedExperts", case.feeds, {"activation": "relu", "gated": 1, "alpha": 2.0})
    with pytest.raises(shape_inference.InferenceError, match="'alpha' must be 1 unless activation = silu, but is 2"):
        shape_inference.infer_shapes(relu)
    feeds = {name: array for name, array in case.feeds.items() if name != MAPS[0]}
    with pytest.raises(shape_inference.InferenceError, match=f"input '{MAPS[0]}' must be there"):
        shape_inference.infer_shapes(op_model("FusedExperts", feeds, case.all_attributes))


@pytest.mark.parametrize("onnx_type", ["float", "float16", "bfloat16"])
def test_routers_in_training_keep_type_and_shape(onnx_type: str) -> None:
    logits = {"logits": np.zeros((2, 3, 60), DTYPES[onnx_type])}
    kind = element_type(logits["logits"].dtype)
    attributes: dict[str, Any] = {"k": 4, "score": "softmax"}
    probs = inferred(op_model("RouterProbs", logits, attributes, outputs=("probs", "routing_map", "indices")))
    assert probs == {
        "probs": (kind, [2, 3, 60]),
        "routing_map": (TensorProto.BOOL, [2, 3, 60]),
        "indices": (TensorProto.INT32, [2, 3, 4]),
    }
    scores = inferred(op_model("RouterScores", logits, attributes, outputs=("scores", "routing_bitmap")))
    assert scores == {"scores": (kind, [2, 3, 60]), "routing_bitmap": (TensorProto.UINT8, [2, 3, 8])}
    loss = {"probs": logits["logits"], "tokens_per_expert": np.zeros(60, np.int32)}
    assert inferred(op_model("AuxLoss", loss, {"k": 4, "coeff": 0.01})) == {"loss": (TensorProto.FLOAT, [])}


@pytest.mark.parametrize(
    ("op_name", "given", "outputs", "message"),
    [
        ("RouterProbs", {"k": 9}, ("probs", "routing_map"), "'k' must be at most the number of experts, 8, but is 9"),
        ("RouterProbs", {"bias_on": "logits"}, ("probs", "routing_map"), "'bias_on' must be 'score' unless"),
        ("RouterScores", {"softcap": -1.0}, ("scores", "routing_map"), "'softcap' must be finite and at least 0"),
        ("RouterScores", {}, ("scores",), "'routing_map' or 'routing_bitmap' must be there, but neither is"),
        ("RouterProbs", {}, ("probs", "indices"), "'routing_map' or 'routing_bitmap' must be there, but neither is"),
    ],
)
def test_wrong_routers_in_training_are_errors(
    op_name: str, given: dict[str, Any], outputs: tuple[str, ...], message: str
) -> None:
    logits = {"logits": np.zeros((3, 8), np.float32)}
    model = op_model(op_name, logits, {"k": 2, "score": "softmax", **given}, outputs=outputs)
    with pytest.raises(shape_inference.InferenceError, match=f"{op_name}: .*{message}"):
        shape_inference.infer_shapes(without_output_shapes(model))


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, r"'tokens_per_expert' must have shape \[8\]"), ({"coeff": math.inf}, "'coeff' must be finite, but is inf")],
)
def test_wrong_losses_are_errors(given: dict[str, Any], message: str) -> None:
    loss = {"probs": np.zeros((3, 8), np.float32), "tokens_per_expert": np.zeros(7, np.int64)}
    model = op_model("AuxLoss", loss, {"k": 2, "coeff": 0.01, **given})
    with pytest.raises(shape_inference.InferenceError, match=f"AuxLoss: .*{message}"):
        shape_inference.infer_shapes(without_output_shapes(model))

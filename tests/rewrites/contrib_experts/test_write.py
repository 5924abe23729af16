"""For the target `contrib`, blocks become com.microsoft::MoE and QMoE, which ONNX Runtime runs by itself, or stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import compose

import models.fixtures
from ort_moe.ops import FUSED_EXPERTS
from ort_moe.rewrites import RewriteResult, rewrite
from tests.contrib_models import BESIDE_ORT, ContribCase
from tests.rewrites.blocks import HIDDEN, TOKENS, cpu_session
from tests.rewrites.contrib_experts.running import TOLERANCE, difference, run
from tests.rewrites.experts.experts_models import SILU, Experts

SOFTMAX_LATER = """
    best, ids = TopK (logits, k)
    weights = Softmax <axis = -1> (best)"""
UNNORMALISED = """
    scores = Softmax <axis = -1> (logits)
    weights, ids = TopK (scores, k)"""
RELU = """
    active = Relu (made1)"""


def to_contrib(model: ir.Model, **options: Any) -> tuple[list[ir.Node], RewriteResult]:
    """Rewrite in place; the contrib nodes, and what was told."""
    result = rewrite(model, target="contrib", **options)
    return [node for node in model.graph.all_nodes() if node.domain == "com.microsoft"], result


def no_trace_of_ours(model: ir.Model) -> bool:
    domains = {node.domain for node in model.graph.all_nodes()} | set(model.graph.opset_imports)
    return "ort_moe" not in domains and not any(key[0] == "ort_moe" for key in model.functions)


@pytest.mark.parametrize(
    ("experts", "attributes"),
    [
        (Experts(), {"activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 1, "k": 2}),
        (Experts(router=SOFTMAX_LATER), {"normalize_routing_weights": 1}),
        (Experts(router=UNNORMALISED), {"normalize_routing_weights": 0}),
        (Experts(activation=RELU, gated=False), {"activation_type": "relu"}),
        (Experts(dtype="float16"), {"activation_type": "swiglu"}),
        (Experts(opset=18), {}),
    ],
    ids=["plain", "softmax later", "not normalised", "relu", "half", "opset 18"],
)
def test_a_block_becomes_a_contrib_node(experts: Experts, attributes: Mapping[str, Any]) -> None:
    model = experts.model()
    (node,), result = to_contrib(model)
    assert node.op_type == "MoE"
    assert {name: node.attributes[name].value for name in attributes} == attributes
    assert no_trace_of_ours(model)
    assert [(site.status, site.block) for site in result.experts] == [("whole", "whole")]
    assert [site.status for site in result.sites] == ["whole"]
    dtype = "float16" if experts.dtype == "float16" else "float32"
    x = np.random.default_rng(3).standard_normal((TOKENS, HIDDEN)).astype(dtype)
    (expected,), (got,) = (
        cpu_session(each, with_library=False).run(["y"], {"x": x}) for each in (experts.model(), model)
    )
    assert difference(got, expected) <= TOLERANCE[dtype]
    assert not rewrite(model, target="contrib").modified


@BESIDE_ORT
@pytest.mark.parametrize(
    "name",
    [
        "gpt_oss_block_dynamo_fp32",
        "gpt_oss_block_transformers_grouped_fp32",
        "granitemoeshared_block_legacy_fp32",
        "mixtral_block_legacy_fp32_opset13",
        "mixtral_causal_lm_dynamo_fp32_router_logits",
        "olmoe_block_dynamo_fp16",
        "qwen3_next_causal_lm_dynamo_fp32",
    ],
)
def test_exports(name: str) -> None:
    fixture = models.fixtures.get(name)
    model = ir.load(fixture.path)
    nodes, result = to_contrib(model)
    assert nodes
    assert no_trace_of_ours(model)
    assert {site.status for site in (*result.sites, *result.experts)} == {"whole"}
    feeds = fixture.sample_inputs(seed=0, batch=2, tokens=3)
    expected = cpu_session(onnx.load(fixture.path), with_library=False).run(None, feeds)
    got = cpu_session(model, with_library=False).run(None, feeds)
    for a, b in zip(got, expected, strict=True):
        assert difference(a, b) <= 4 * TOLERANCE["float16" if fixture.precision == "fp16" else "float32"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("glm4_moe_block_dynamo_fp32", "its score is sigmoid"),
        ("llama4_text_block_dynamo_fp32", "multiply what the experts take"),
        ("mistral4_block_dynamo_fp32", "among groups"),
        ("phimoe_block_dynamo_fp32", "its score is sparse_mixer"),
    ],
)
def test_other_blocks_stay_and_say_why(name: str, told: str) -> None:
    fixture = models.fixtures.get(name)
    model, original = ir.load(fixture.path), ir.load(fixture.path)
    nodes, result = to_contrib(model)
    assert not nodes
    assert not result.modified
    assert [node.op_type for node in model.graph] == [node.op_type for node in original.graph]
    findings = [finding for site in result.experts for finding in site.findings]
    assert [finding.reason.slug for finding in findings] == ["no-contrib-form"]
    assert told in findings[0].detail
    assert {site.status for site in result.sites} == {"left"}


@pytest.mark.parametrize(
    ("experts", "told"),
    [
        (Experts(activation="\n    active = Erf (made1)", gated=False), ""),
        (
            Experts(activation="\n    opened = Relu (made1)\n    active = Mul (opened, opened)", gated=False),
            "relu2, which not all kernels",
        ),
        (
            Experts(activation=SILU.replace("share = Sigmoid (g)\n    opened = Mul (g, share)", "opened = Relu (g)")),
            "relu",
        ),
    ],
    ids=["unknown", "relu2", "gated relu"],
)
def test_activations_that_not_all_kernels_know(experts: Experts, told: str) -> None:
    model = experts.model()
    nodes, result = to_contrib(model)
    assert not nodes
    assert no_trace_of_ours(model)
    (site,) = result.experts
    assert site.status == "left"
    assert told in site.findings[0].detail


def test_a_choice_that_something_else_reads() -> None:
    model = Experts(outputs=", int64[T, 2] ids").model()
    nodes, result = to_contrib(model)
    assert not nodes
    assert "is also read by" in result.experts[0].findings[0].detail


def test_weights_that_would_be_copied() -> None:
    """Gate and value are interleaved anew, so that nothing else may read them."""
    experts = Experts(outputs=", float mean", weigh=Experts().weigh + "\n    mean = ReduceMean <keepdims = 0> (fc1)")
    nodes, result = to_contrib(experts.model())
    assert not nodes
    assert result.experts[0].findings[0].reason.slug == "expert-weights-shared"


def test_some_blocks_of_a_model() -> None:
    """Router and experts of the other layer stay in the form in which they were exported."""
    first, second = (
        onnx.load(models.fixtures.get(name).path)
        for name in ("glm4_moe_block_dynamo_fp32", "mixtral_block_dynamo_fp32")
    )
    merged = _merged(first, second)
    model = ir.from_proto(merged)
    nodes, result = to_contrib(model)
    assert [node.op_type for node in nodes] == ["MoE"]
    assert no_trace_of_ours(model)
    assert sorted(site.status for site in result.experts) == ["left", "whole"]
    assert sorted(site.status for site in result.sites) == ["left", "whole"]
    feeds = models.fixtures.get("glm4_moe_block_dynamo_fp32").sample_inputs(seed=0, batch=2, tokens=3)
    feeds = {merged.graph.input[0].name: next(iter(feeds.values()))}
    (expected,), (got,) = (cpu_session(each, with_library=False).run(None, feeds) for each in (merged, model))
    assert difference(got, expected) <= 4 * TOLERANCE["float32"]


def test_blocks_one_behind_the_other() -> None:
    """The second reads what the first gives out, which is another value once the first is a contrib node."""
    merged = _merged(*(ir.to_proto(Experts().model()) for _ in range(2)))
    model = ir.from_proto(merged)
    nodes, _ = to_contrib(model)
    assert [node.op_type for node in nodes] == ["MoE", "MoE"]
    feeds = {merged.graph.input[0].name: np.random.default_rng(3).standard_normal((TOKENS, HIDDEN)).astype("float32")}
    (expected,), (got,) = (cpu_session(each, with_library=False).run(None, feeds) for each in (merged, model))
    assert difference(got, expected) <= 4 * TOLERANCE["float32"]


def _merged(first: onnx.ModelProto, second: onnx.ModelProto) -> onnx.ModelProto:
    """The second behind the first."""
    first.ir_version = second.ir_version = max(first.ir_version, second.ir_version)
    a, b = (compose.add_prefix(model, prefix) for model, prefix in ((first, "a_"), (second, "b_")))
    return compose.merge_models(a, b, [(a.graph.output[0].name, b.graph.input[0].name)])


@BESIDE_ORT
@pytest.mark.parametrize("weight_format", ["dense", "int4", "int8"])
@pytest.mark.parametrize("fusion", [1, 2])
def test_what_was_lifted_goes_back(weight_format: str, fusion: int) -> None:
    """QMoE for integers; gate and value that are not interleaved are now."""
    case = ContribCase(fusion=fusion, weight_format=weight_format, zero_points=True, bias=True, rank=3)
    model = ir.from_proto(case.model())
    assert rewrite(model, target="cpu").experts[0].status == "whole"
    (node,), _ = to_contrib(model)
    assert node.op_type == ("MoE" if weight_format == "dense" else "QMoE")
    assert no_trace_of_ours(model)
    got = run(ir.to_proto(model), case.feeds())
    assert difference(got, run(case.dense(), case.feeds())) <= (4e-2 if weight_format == "int8" else 2e-6)


@pytest.mark.parametrize("rank", [2, 3])
def test_a_residual_is_added_behind(rank: int) -> None:
    case = ContribCase(rank=rank)
    model = ir.from_proto(case.model())
    rewrite(model, target="cpu")
    (experts,) = [node for node in model.graph if node.op_type == "FusedExperts"]
    experts.resize_inputs(len(FUSED_EXPERTS.inputs))
    experts.replace_input_with(len(FUSED_EXPERTS.inputs) - 1, experts.inputs[0])
    model.functions.clear()
    experts.overload = ""
    expected = run(ir.to_proto(model), case.feeds(), with_library=True)
    (node,), _ = to_contrib(model)
    assert no_trace_of_ours(model)
    assert difference(run(ir.to_proto(model), case.feeds()), expected) <= TOLERANCE["float32"]
    assert [user.op_type for user in node.outputs[0].consumers()] == ["Add"]


def test_formats_that_versions_read_differently_stay() -> None:
    model = ir.from_proto(ContribCase(weight_format="nvfp4", layout="K").model())
    rewrite(model, target="cpu")
    nodes, result = to_contrib(model)
    assert not nodes
    assert [node.op_type for node in model.graph] == ["FusedRouter", "FusedExperts"]
    assert "nvfp4" in result.experts[0].findings[0].detail


def test_contrib_nodes_stay_for_contrib() -> None:
    model = ir.from_proto(ContribCase().model())
    result = rewrite(model, target="contrib")
    assert not result.modified
    assert not result.experts


def test_a_target_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="target 'tpu' is unknown; there are cuda, cpu, contrib"):
        rewrite(ir.from_proto(ContribCase().model()), target="tpu")

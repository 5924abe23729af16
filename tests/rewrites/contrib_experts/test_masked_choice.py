"""Choices that routers in standard nodes hand to contrib nodes, as onnxruntime-genai's builder writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from ort_moe.rewrites import RewriteResult, rewrite
from tests.contrib_models import BESIDE_ORT, EXPERTS, HIDDEN, ContribCase, K
from tests.op_models import element_type
from tests.rewrites.contrib_experts.running import TOLERANCE, difference, run

NUMBERS = {"floor": -10000.0, "least": 1e-30, "eps": 1e-6, "factor": 2.5, "one": 1.0}

LARGEST_LEAST = 2.0**-24 * float(np.float32(NUMBERS["eps"])) / (2 * K)
"""Where scores may be clipped for weights of K of them not to differ in float32."""


def masked(
    case: ContribCase,
    numbers: Mapping[str, float] | None = None,
    *,
    factor: bool = False,
    bias: bool = True,
    read_again: bool = False,
    share_of: str = "scores",
    scores_of: str = "probabilities",
) -> onnx.ModelProto:
    """The contrib node behind a sigmoid router with a bias, and before what brings its rows to the router's scale.

    Args:
        case: The node, which normalises.
        numbers: In place of NUMBERS.
        factor: Whether the rows are multiplied by a constant, too.
        bias: Whether a bias takes part in the choice.
        read_again: Whether the node's rows are read elsewhere, too.
        share_of: Name of what is summed up.
        scores_of: Name of what the chosen scores are gathered from.
    """
    proto = case.model()
    rows = ["batch", "tokens"] if case.rank == 3 else ["tokens"]
    constants: dict[str, Any] = {
        name: np.array(number, np.float32) for name, number in {**NUMBERS, **(numbers or {})}.items()
    }
    constants |= {"best_k": np.array([case.k]), "last": np.array([-1]), "zero": np.array([0]), "single": np.array([1])}
    constants["bias"] = np.linspace(-0.4, 0.4, EXPERTS, dtype=np.float32)
    floor = numpy_helper.from_array(constants.pop("floor")[None])
    node = helper.make_node
    before = [
        node("Neg", ["gate"], ["minus"]),
        node("Exp", ["minus"], ["power"]),
        node("Add", ["power", "one"], ["denominator"]),
        node("Reciprocal", ["denominator"], ["probabilities"]),
        node("Add", ["probabilities", "bias"], ["ranked"]),
        node("TopK", ["ranked" if bias else "probabilities", "best_k"], ["best", "ids"], "choice", axis=-1),
        node("GatherElements", [scores_of, "ids"], ["scores"], axis=1),
        node("ReduceSum", [share_of, "last"], ["total"], keepdims=1),
        node("Add", ["total", "eps"], ["divisor"]),
        node("Div", ["total", "divisor"], ["quotient"]),
        node("Mul", ["quotient", "factor"], ["scaled"]),
        node("Shape", ["x"], ["x_shape"]),
        node("Slice", ["x_shape", "zero", "last"], ["leading"]),
        node("Concat", ["leading", "single"], ["column"], axis=0),
        node("Reshape", ["scaled" if factor else "quotient", "column"], ["wide_share"]),
        node("Cast", ["wide_share"], ["share"], to=element_type(case.numpy_type)),
        node("Clip", ["scores", "least"], ["clipped"]),
        node("Log", ["clipped"], ["logarithms"]),
        node("Shape", ["probabilities"], ["all"]),
        node("ConstantOfShape", ["all"], ["mask"], value=floor),
        node("ScatterElements", ["mask", "ids", "logarithms"], ["wide_logits"], axis=1),
        node("Cast", ["wide_logits"], ["logits"], to=element_type(case.numpy_type)),
    ]
    contrib = proto.graph.node[0]
    contrib.output[0] = "mixed"
    behind = [node("Mul", ["mixed", "share"], ["shared" if read_again else "y"], "share_of_rows")]
    if read_again:
        behind.append(node("Add", ["shared", "mixed"], ["y"]))
    graph = helper.make_graph(
        [*before, contrib, *behind],
        "masked",
        [
            *[value for value in proto.graph.input if value.name == "x"],
            helper.make_tensor_value_info("gate", TensorProto.FLOAT, ["rows", EXPERTS]),
        ],
        list(proto.graph.output),
        [*proto.graph.initializer, *(numpy_helper.from_array(array, name) for name, array in constants.items())],
        value_info=[helper.make_tensor_value_info("mixed", element_type(case.numpy_type), [*rows, HIDDEN])],
    )
    graph.value_info.append(helper.make_tensor_value_info("share", element_type(case.numpy_type), [*rows, 1]))
    return helper.make_model(graph, opset_imports=proto.opset_import, ir_version=10)


def lifted(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, RewriteResult]:
    model = ir.from_proto(proto)
    result = rewrite(model, target="cpu")
    return ir.to_proto(model), result


def feeds_of(case: ContribCase) -> dict[str, Any]:
    feeds = case.feeds()
    return {"x": feeds["x"], "gate": feeds["logits"].astype(np.float32)}


@BESIDE_ORT
@pytest.mark.parametrize("factor", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        ContribCase(),
        ContribCase(rank=3, bias=True),
        ContribCase(dtype="float16"),
        ContribCase(weight_format="int4", rank=3),
    ],
    ids=str,
)
def test_becomes_one_router(case: ContribCase, bias: bool, factor: bool) -> None:
    proto = masked(case, bias=bias, factor=factor)
    model, result = lifted(proto)
    (site,), (experts,) = result.sites, result.experts
    assert (site.status, experts.block, experts.form) == ("whole", "whole", "contrib-experts"), site.findings
    assert site.attributes is not None
    assert (site.attributes["score"], site.attributes["normalize_eps"]) == ("sigmoid", pytest.approx(1e-6))
    assert site.attributes["scale"] == (2.5 if factor else 1.0)
    assert site.inputs == (("logits", "selection_bias") if bias else ("logits",))
    kinds = [node.op_type for node in model.graph.node]
    assert set(kinds) <= {"FusedRouter", "FusedExperts", "Reshape", "Shape"}
    feeds, allowed = feeds_of(case), TOLERANCE[case.dtype]
    expected = run(proto, feeds)
    assert difference(run(model, feeds, with_library=True), expected) <= allowed
    assert difference(run(model, feeds), expected) <= allowed


@BESIDE_ORT
@pytest.mark.parametrize(
    "options",
    [
        {"numbers": {"floor": -60.0}},  # where a score that is clipped may lie below it
        {"numbers": {"least": 0.0}},
        {"read_again": True},
        {"share_of": "best"},
        {"scores_of": "gate"},  # which may be negative
        {"numbers": {"least": 1e-3}},  # scores of less would be told apart
        {"numbers": {"least": LARGEST_LEAST * (1.0 + 2.0**-22)}},
        {"numbers": {"eps": 0.0}},
        {"numbers": {"eps": -1e-6}},
    ],
    ids=str,
)
def test_what_is_written_otherwise_keeps_its_softmax(options: dict[str, Any]) -> None:
    case = ContribCase()
    proto = masked(case, **options)
    model, result = lifted(proto)
    (router,) = [node for node in model.graph.node if node.op_type == "FusedRouter"]
    attributes = {each.name: helper.get_attribute_value(each) for each in router.attribute}
    assert attributes["score"] == b"softmax"
    assert [site.status for site in result.experts] == ["whole"]
    assert any(node.op_type == "ScatterElements" for node in model.graph.node)
    feeds = feeds_of(case)
    feeds["gate"][:2] -= np.float32(9.0)
    assert difference(run(model, feeds, with_library=True), run(proto, feeds)) <= TOLERANCE["float32"]


@BESIDE_ORT
def test_scores_are_clipped_at_what_is_rounded_away() -> None:
    proto = masked(ContribCase(), {"least": LARGEST_LEAST})
    model, result = lifted(proto)
    assert [site.attributes and site.attributes["score"] for site in result.sites] == ["sigmoid"]
    feeds = feeds_of(ContribCase())
    feeds["gate"][:] = np.linspace(-60.0, 0.0, len(feeds["gate"]), dtype=np.float32)[:, None]
    assert difference(run(model, feeds, with_library=True), run(proto, feeds)) <= TOLERANCE["float32"]


def test_another_number_of_choices_keeps_its_softmax() -> None:
    """The contrib node then chooses among what was chosen."""
    case = ContribCase()
    proto = masked(case)
    (moe,) = [node for node in proto.graph.node if node.op_type == "MoE"]
    next(each for each in moe.attribute if each.name == "k").i = K - 1
    model, _ = lifted(proto)
    assert any(node.op_type == "ScatterElements" for node in model.graph.node)


@BESIDE_ORT
def test_verified_as_one_block(tmp_path: Any) -> None:
    from ort_moe.verification import verify

    proto = masked(ContribCase(rank=3))
    onnx.save(proto, tmp_path / "model.onnx")
    onnx.save(lifted(proto)[0], tmp_path / "out.onnx")
    verification = verify(tmp_path / "model.onnx", tmp_path / "out.onnx")
    assert verification.passed, verification.failure
    assert [(site.what, site.status) for site in verification.sites] == [("contrib block", "passed")]

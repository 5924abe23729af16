"""Contrib nodes become FusedRouter and FusedExperts that return what ONNX Runtime's own kernels do, or stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ort_moe.rewrites import RewriteResult, rewrite
from ort_moe.rewrites.contrib_experts import speed
from ort_moe.rewrites.contrib_experts.speed import LayerSize, Measured
from tests.contrib_models import BESIDE_ORT, EXPERTS, HIDDEN, INNER, ContribCase, K
from tests.pairwise import pairwise
from tests.rewrites.contrib_experts.running import TOLERANCE, difference, run

Array = np.ndarray[Any, np.dtype[Any]]

COARSE = 4e-2
"""The tolerance where ONNX Runtime's kernel rounds activations to 8 bits."""


def lift(case: ContribCase, target: str = "cpu", **options: Any) -> tuple[ir.Model, RewriteResult]:
    model = ir.from_proto(case.model())
    return model, rewrite(model, target=target, **options)


def assert_lifts(case: ContribCase, *, against: str = "itself", tolerance: float | None = None) -> ir.Model:
    """The node becomes two that compute the same, by our kernels and, if they have them, by their bodies.

    Args:
        case: The node.
        against: `itself`, or where ONNX Runtime's CPU kernel does not run it, the `dense` node of the same weights.
        tolerance: What may differ; None: by the type of x.
    """
    model, result = lift(case)
    (site,) = result.experts
    assert (site.status, site.block, site.form) == ("whole", "whole", "contrib-experts"), site.findings
    assert (site.experts, site.k, site.hidden, site.inner) == (EXPERTS, case.k, HIDDEN, INNER)
    assert [node.op_type for node in model.graph if node.domain != ""] == ["FusedRouter", "FusedExperts"]
    assert result.modified
    feeds = case.feeds()
    if against == "itself":
        expected = run(case.model(), feeds)
    else:
        expected = run(case.dense(), {name: value.astype(np.float32) for name, value in feeds.items()})
    lifted = ir.to_proto(model)
    allowed = TOLERANCE[case.dtype] if tolerance is None else tolerance
    assert difference(run(lifted, feeds, with_library=True), expected) <= allowed
    if all(node.op_identifier() in model.functions for node in model.graph if node.domain == "ort_moe"):
        assert difference(run(lifted, feeds), expected) <= allowed
    assert not rewrite(model, target="cpu").modified
    return model


def refusal(case: ContribCase, target: str = "cpu", **options: Any) -> tuple[str, str]:
    """Code and sentence under which a node stays as it was."""
    model, result = lift(case, target, **options)
    (site,) = result.experts
    (finding,) = site.findings
    assert (site.status, site.node, site.router) == ("left", "moe", "moe")
    assert (site.experts, site.k) == (EXPERTS, case.k)
    assert [node.op_type for node in model.graph] == [model.graph[0].op_type]
    assert model.graph[0].domain == "com.microsoft"
    return finding.reason.slug, finding.detail


ACTIVATIONS: tuple[dict[str, Any], ...] = (
    {"activation": "relu", "fusion": None},
    {"activation": "silu", "fusion": None},
    {"activation": "gelu", "fusion": 0},
    {"activation": "identity", "fusion": None},
    {"activation": "swiglu", "fusion": 1},
    {
        "activation": "swiglu",
        "fusion": 1,
        "attributes": {"activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.7},
    },
)
CASES = pairwise(
    {
        "activation": ACTIVATIONS,
        "dtype": ("float32", "float16"),
        "k": (1, K, EXPERTS),
        "normalize": (0, 1),
        "bias": (False, True),
        "rank": (2, 3),
        "opset": (13, 17, 21),
    }
)
QUANTIZED = pairwise(
    {
        "weight_format": ("int4", "int8"),
        "layout": ("blocks", "rows"),
        "zero_points": (False, True),
        "activation": (ACTIVATIONS[0], ACTIVATIONS[5]),
        "dtype": ("float32", "float16"),
        "bias": (False, True),
        "rank": (2, 3),
        "router_weights": (False, True),
        "normalize": (0, 1),
    }
)


def built(fields: dict[str, Any]) -> ContribCase:
    return ContribCase(**{**fields, **fields["activation"]})


def weighed(case: ContribCase, *nodes: onnx.NodeProto) -> onnx.ModelProto:
    """The node behind others, of which the last makes its router weights."""
    proto = case.model()
    inputs = proto.graph.node[0].input
    inputs[list(inputs).index("router_weights")] = nodes[-1].output[0]
    for node in reversed(nodes):
        proto.graph.node.insert(0, node)
    return proto


@BESIDE_ORT
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_moe(fields: dict[str, Any]) -> None:
    assert_lifts(built(fields))


@BESIDE_ORT
@pytest.mark.parametrize("fields", QUANTIZED, ids=str)
def test_integers(fields: dict[str, Any]) -> None:
    case = built(fields)
    if case.router_weights:
        proto = weighed(case, onnx.helper.make_node("Abs", ["router_weights"], ["magnitudes"]))
        model = ir.from_proto(proto)
        (site,) = rewrite(model, target="cpu").experts
        assert site.status == "whole"
        feeds = case.feeds()
        coarse = case.weight_format == "int8" and case.layout == "blocks"  # 8-bit activations
        got = run(ir.to_proto(model), feeds, with_library=True)
        assert difference(got, run(proto, feeds)) <= (COARSE if coarse else TOLERANCE[case.dtype])
    elif not case.normalize:
        assert refusal(case)[0] == "contrib-form"
    elif case.weight_format == "int8" and case.layout == "blocks":
        assert_lifts(case, tolerance=COARSE)
        assert_lifts(case, against="dense")
    else:
        assert_lifts(case)


@BESIDE_ORT
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nvfp4_packed_along_k(dtype: str) -> None:
    case = ContribCase(weight_format="nvfp4", layout="K", dtype=dtype, bias=True)
    assert_lifts(case, tolerance=COARSE)
    assert_lifts(case, against="dense")


@pytest.mark.parametrize(
    ("weight_format", "layout"),
    [("nvfp4", "N"), ("mxfp4", "K"), ("mxfp4", "N"), ("fp8", "blocks"), ("fp8", "experts")],
)
@pytest.mark.parametrize("activation", [ACTIVATIONS[1], ACTIVATIONS[5]], ids=lambda fields: fields["activation"])
def test_formats_that_onnx_runtime_runs_on_cuda_alone(
    weight_format: str, layout: str, activation: dict[str, Any]
) -> None:
    case = ContribCase(weight_format=weight_format, layout=layout, bias=True, **activation)
    assert_lifts(case, against="dense")


@pytest.mark.parametrize("weight_format", ["dense", "int4", "fp8"])
@pytest.mark.parametrize(("activation", "fusion"), [("silu", None), ("swiglu", 0), ("swiglu", 2)])
def test_gate_and_value_that_are_not_interleaved(weight_format: str, activation: str, fusion: int | None) -> None:
    case = ContribCase(
        activation, fusion, separate=fusion != 2, weight_format=weight_format, bias=True, zero_points=True
    )
    model = assert_lifts(case, against="dense")
    (experts,) = [node for node in model.graph if node.op_type == "FusedExperts"]
    assert experts.attributes["gate_layout"].value == "concat"


def test_weights_stay_as_they_lie() -> None:
    for case in (ContribCase(bias=True), ContribCase(weight_format="int4", zero_points=True)):
        model, _ = lift(case)
        (experts,) = [node for node in model.graph if node.op_type == "FusedExperts"]
        stored, _ = case.constants()
        named = {value.name for value in experts.inputs if value is not None and value.const_value is not None}
        assert named == set(stored)


def test_repacked_weights_are_made_when_they_are_written() -> None:
    model, _ = lift(ContribCase(weight_format="nvfp4", layout="N"))
    lazy = [value for value in model.graph.initializers.values() if isinstance(value.const_value, ir.LazyTensor)]
    assert [value.name for value in lazy] == ["fc1_weights_weights", "fc2_weights_weights"]


def test_weights_in_external_data_are_read_where_they_lie(tmp_path: Any) -> None:
    case = ContribCase(weight_format="nvfp4", layout="K")
    proto = case.model()
    onnx.save(proto, tmp_path / "model.onnx", save_as_external_data=True, location="data", size_threshold=0)
    model = ir.load(tmp_path / "model.onnx")
    rewrite(model, target="cpu")
    ir.save(model, tmp_path / "lifted.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "data", "lifted.onnx"}
    loaded = onnx.load(tmp_path / "lifted.onnx")
    got = run(loaded, case.feeds(), with_library=True)
    assert difference(got, run(case.dense(), case.feeds())) <= TOLERANCE["float32"]


@BESIDE_ORT
def test_weights_that_stay_as_they_are() -> None:
    """The CPU's kernel for nvfp4 takes router weights that are not to be normalised as all others do."""
    case = ContribCase(weight_format="nvfp4", layout="K", router_weights=True, normalize=0)
    model, _ = lift(case)
    got = run(ir.to_proto(model), case.feeds(), with_library=True)
    assert difference(got, run(case.model(), case.feeds())) <= COARSE


@BESIDE_ORT
@pytest.mark.parametrize("with_library", [False, True])
def test_no_tokens(with_library: bool) -> None:
    case = ContribCase(rank=3)
    model, _ = lift(case)
    got = run(ir.to_proto(model), case.feeds(0), with_library=with_library)
    assert got.shape == (1, 0, HIDDEN)


@BESIDE_ORT
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("normalize", [0, 1])
def test_tokens_that_a_mask_weighs_with_zeros(normalize: int, dtype: str) -> None:
    """Of a sum of 0, ONNX Runtime's kernel makes weights of 0, too."""
    case = ContribCase(weight_format="int4", router_weights=True, normalize=normalize, dtype=dtype)
    element = onnx.helper.np_dtype_to_tensor_dtype(case.numpy_type)
    proto = weighed(
        case,
        onnx.helper.make_node("Abs", ["router_weights"], ["magnitudes"]),
        onnx.helper.make_node("Cast", ["mask"], ["ones"], to=element),
        onnx.helper.make_node("Mul", ["magnitudes", "ones"], ["masked"]),
    )
    proto.graph.input.append(onnx.helper.make_tensor_value_info("mask", onnx.TensorProto.BOOL, ["rows", 1]))
    model = ir.from_proto(proto)
    assert [site.status for site in rewrite(model, target="cpu").experts] == ["whole"]
    mask = np.array([[True], [False], [True], [True], [False]])
    feeds = {**case.feeds(), "mask": mask}
    got = run(ir.to_proto(model), feeds, with_library=True)
    assert not got[~mask[:, 0]].any()
    assert difference(got, run(proto, feeds)) <= TOLERANCE[dtype]


@BESIDE_ORT
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_router_of_router_weights_grows(dtype: str) -> None:
    """`router_probs` = scores + bias and `router_weights` = scores are a FusedRouter with a bias."""
    case = ContribCase(weight_format="int4", router_weights=True, dtype=dtype)
    element = onnx.helper.np_dtype_to_tensor_dtype(case.numpy_type)
    proto = case.model()
    bias = np.linspace(-0.5, 0.5, EXPERTS).astype(case.numpy_type)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(bias, "selection_bias"))
    nodes = [
        onnx.helper.make_node("Sigmoid", ["scores_in"], ["router_weights"]),
        onnx.helper.make_node("Add", ["router_weights", "selection_bias"], ["logits"]),
    ]
    for node in reversed(nodes):
        proto.graph.node.insert(0, node)
    inputs = [value for value in proto.graph.input if value.name == "x"]
    inputs.append(onnx.helper.make_tensor_value_info("scores_in", element, ["rows", EXPERTS]))
    del proto.graph.input[:]
    proto.graph.input.extend(inputs)
    model = ir.from_proto(proto)
    (site,) = rewrite(model, target="cpu").sites
    assert (site.status, site.attributes and site.attributes["score"], site.inputs) == (
        "whole",
        "sigmoid",
        ("logits", "selection_bias"),
    )
    assert [node.op_type for node in model.graph] == ["FusedRouter", "FusedExperts"]
    assert site.attributes["normalize_min"] == np.finfo(np.float32).smallest_normal
    feeds = {"x": case.feeds()["x"], "scores_in": case.feeds()["logits"]}
    feeds["scores_in"][2] = -200.0  # of which all scores, and their sum, are 0
    for with_library in (False, True):
        got = run(ir.to_proto(model), feeds, with_library=with_library)
        assert not got[2].any()
        assert difference(got, run(proto, feeds)) <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("case", "target", "slug", "told"),
    [
        (ContribCase(weight_format="int4", prepacked=None), "cuda", "contrib-layout", "weights_prepacked = 0"),
        (ContribCase(weight_format="int8", prepacked=1), "cpu", "contrib-layout", "weights_prepacked = 1"),
        (ContribCase(attributes={"rotation": 0}), "cpu", "contrib-form", "'rotation' is none that ONNX Runtime 1.32"),
        (ContribCase(attributes={"use_sparse_mixer": 1}), "cpu", "contrib-form", "use_sparse_mixer"),
        (ContribCase(attributes={"normalize_routing_weights": 2}), "cpu", "contrib-form", "is 2, and neither 0 nor 1"),
        (ContribCase(attributes={"swiglu_limit_after_activation": 1}), "cpu", "contrib-form", "limit_after"),
        (ContribCase(attributes={"swiglu_limit": 0.0}), "cpu", "contrib-form", "swiglu_limit is 0"),
        (ContribCase(fusion=0), "cpu", "contrib-form", "without an fc3"),
        (
            ContribCase(weight_format="nvfp4", layout="K", router_weights=True),
            "cpu",
            "contrib-form",
            "nvfp4 leaves router_weights as they are",
        ),
        (ContribCase(weight_format="int4", router_weights=True), "cpu", "contrib-form", "drops such choices"),
        (ContribCase(weight_format="int8", router_weights=True, normalize=0), "cpu", "contrib-form", "may be negative"),
        (ContribCase(weight_format="fp8", router_weights=True), "cpu", "contrib-form", "their sum"),
        (ContribCase("relu", 1, weight_format="int4"), "cpu", "contrib-form", "relu with swiglu_fusion = 1"),
        (ContribCase("gelu", None, separate=True), "cpu", "contrib-form", "gelu with an fc3"),
        (ContribCase(activation="tanh", fusion=None), "cpu", "contrib-form", "'tanh'"),
        (ContribCase(k=7), "cpu", "contrib-form", "7 of 6"),
        (ContribCase(weight_format="int4", attributes={"expert_weight_bits": 2}), "cpu", "contrib-form", "2 bits"),
        (
            ContribCase(weight_format="int4", attributes={"fc1_expert_weight_bits": 8}),
            "cpu",
            "contrib-form",
            "4 and 8 bits",
        ),
        (ContribCase(weight_format="mxfp4", attributes={"quant_type": "wfp4afp8"}), "cpu", "contrib-form", "wfp4afp8"),
        (ContribCase(weight_format="fp8", dtype="float16"), "cuda", "contrib-is-faster", "fp8, ours were not measured"),
        (
            ContribCase("silu", None, separate=True, weight_format="nvfp4"),
            "cpu",
            "contrib-form",
            "lacks the global scale of fc3",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(case: ContribCase, target: str, slug: str, told: str) -> None:
    assert refusal(case, target)[0] == slug
    assert told in refusal(case, target)[1]


def test_what_onnxruntime_has_no_kernel_for_is_not_left_to_it() -> None:
    (site,) = rewrite(ir.from_proto(ContribCase(weight_format="fp8").model()), target="cuda").experts
    assert site.status == "whole"


@pytest.mark.parametrize(("near_ours", "left"), [(15.0, True), (5.0, False)])
def test_the_layers_sizes_decide_whether_it_is_left(
    near_ours: float, left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = ContribCase(weight_format="int4", dtype="float16")
    near = Measured("near", 8, LayerSize(case.k, HIDDEN, INNER), near_ours, 10.0)
    far = Measured("far", 8, LayerSize(8 * case.k, 64 * HIDDEN, INNER), 20.0 - near_ours, 10.0)
    monkeypatch.setattr(speed, "MEASURED", {("cuda", "int4"): (far, near)})
    (site,) = rewrite(ir.from_proto(case.model()), target="cuda").experts
    assert [finding.reason.slug for finding in site.findings] == (["contrib-is-faster"] if left else [])


@pytest.mark.parametrize("name", ["fc1_scales", "fc2_scales", "fc1_zero_points", "fc2_zero_points"])
@pytest.mark.parametrize("experts", [0, 1])
def test_scales_of_rows_of_fewer_experts_are_refused(experts: int, name: str) -> None:
    proto = ContribCase(weight_format="int4", layout="rows", zero_points=True).model()
    (tensor,) = [tensor for tensor in proto.graph.initializer if tensor.name == name]
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor)[:experts], name))
    (site,) = rewrite(ir.from_proto(proto), target="cpu").experts
    assert [finding.reason.slug for finding in site.findings] == ["experts-mismatch"]


def test_older_shapes_are_refused() -> None:
    case = ContribCase("relu", None)
    proto = case.model()
    for tensor in proto.graph.initializer:
        tensor.dims[1], tensor.dims[2] = tensor.dims[2], tensor.dims[1]
    (site,) = rewrite(ir.from_proto(proto), target="cpu").experts
    assert [finding.reason.slug for finding in site.findings] == ["contrib-layout"]


def test_mxfp4_of_square_layers_is_refused() -> None:
    """Of a layer of as many rows as elements, the shape does not tell along which axis two share a byte."""
    case = ContribCase("relu", None, weight_format="mxfp4", layout="N")
    proto = case.model()
    constants = {tensor.name: tensor for tensor in proto.graph.initializer}
    for layer in ("fc1", "fc2"):
        constants[f"{layer}_weights"].dims[:] = [EXPERTS, INNER, INNER // 2]
        constants[f"{layer}_scales"].dims[:] = [EXPERTS, INNER, INNER // 32]
        for part in ("weights", "scales"):
            tensor = constants[f"{layer}_{part}"]
            tensor.raw_data = bytes(int(np.prod(tensor.dims)))
    for value in (*proto.graph.input, *proto.graph.output):
        if value.name in ("x", "y"):
            value.type.tensor_type.shape.dim[-1].dim_value = INNER
    (site,) = rewrite(ir.from_proto(proto), target="cpu").experts
    (finding,) = site.findings
    assert (finding.reason.slug, "either axis" in finding.detail) == ("contrib-layout", True)


@pytest.mark.parametrize("name", ["fc1_weights", "fc2_bias"])
def test_weights_that_are_fed_are_refused(name: str) -> None:
    case = ContribCase(bias=True)
    proto = case.model()
    (tensor,) = [tensor for tensor in proto.graph.initializer if tensor.name == name]
    proto.graph.initializer.remove(tensor)
    proto.graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    (site,) = rewrite(ir.from_proto(proto), target="cpu").experts
    assert [finding.reason.slug for finding in site.findings] == ["expert-weights-computed"]


def test_a_rule_left_out() -> None:
    assert refusal(ContribCase(), skip=("contrib-experts",))[0] == "rule-left-out"


def test_a_node_in_a_branch_is_refused() -> None:
    proto = ContribCase().model()
    body = onnx.helper.make_graph(
        [proto.graph.node[0]], "branch", [], [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    )
    other = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["same"])],
        "other",
        [],
        [onnx.helper.make_tensor_value_info("same", onnx.TensorProto.FLOAT, None)],
    )
    proto.graph.input.append(onnx.helper.make_tensor_value_info("on", onnx.TensorProto.BOOL, []))
    del proto.graph.node[:]
    proto.graph.node.append(onnx.helper.make_node("If", ["on"], ["y"], then_branch=body, else_branch=other))
    (site,) = rewrite(ir.from_proto(proto), target="cpu").experts
    assert [finding.reason.slug for finding in site.findings] == ["experts-in-subgraph"]


@pytest.mark.parametrize("product", ["MatMul", "MatMulNBits"])
def test_the_bias_of_a_router_is_its_linear_layer_s(product: str) -> None:
    """Of one with packed weights, too."""
    proto = ContribCase().model()
    (logits,) = [value for value in proto.graph.input if value.name == "logits"]
    proto.graph.input.remove(logits)
    packed = {"domain": "com.microsoft", "K": HIDDEN, "N": EXPERTS, "bits": 4, "block_size": 32}
    arrays = {"MatMul": {"w": np.ones((HIDDEN, EXPERTS), np.float32)}}
    arrays["MatMulNBits"] = {"w": np.ones((EXPERTS, 1, 16), np.uint8), "s": np.ones((EXPERTS, 1), np.float32)}
    constants = arrays[product] | {"bias": np.ones(EXPERTS, np.float32)}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in constants.items())
    attributes = packed if product == "MatMulNBits" else {}
    gate = onnx.helper.make_node(product, ["x", *arrays[product]], ["product"], "gate", **attributes)
    proto.graph.node.insert(0, onnx.helper.make_node("Add", ["product", "bias"], ["logits"], "add"))
    proto.graph.node.insert(0, gate)
    (site,) = rewrite(ir.from_proto(proto), target="cpu").sites
    assert site.status == "whole", site.findings

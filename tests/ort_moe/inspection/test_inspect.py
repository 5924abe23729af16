"""The MoE view of a model, and what changed between two."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import models.fixtures
from docs.code_examples import EXAMPLES, Example
from ort_moe.inspection.inspect import Changes, inspect
from ort_moe.ops import DOMAIN, FUSED_EXPERTS, FUSED_ROUTER, ROUTING_MAPS
from ort_moe.optimization.optimize import optimize
from tests.contrib_models import ContribCase, contrib_model
from tests.experts_cases import ExpertsCase
from tests.ort_moe.tiny_models import CHOSEN, EXPERTS, HIDDEN, fused, original, save
from tests.rewrites.experts.unrolled_models import unrolled


def test_tiny_block(tmp_path: Path) -> None:
    inspection = inspect(save(original(np.float16), tmp_path / "model.onnx"))
    (layer,) = inspection.layers
    assert (layer.kind, layer.experts, layer.k, layer.router) == ("router", EXPERTS, CHOSEN, "softmax, top 2")
    assert [str(weight) for weight in layer.weights] == [f"float16 {EXPERTS}x{HIDDEN}x{HIDDEN}"]
    assert layer.bytes_per_token == inspection.bytes_per_token == CHOSEN * HIDDEN * HIDDEN * 2
    assert layer.copied
    assert "copied for every token" in str(inspection)
    assert "after they are copied in 1 of 1 layers" in " ".join(str(inspection).split())
    assert inspection.blockers == ()
    assert inspection.operators["TopK"] == 1


@pytest.mark.parametrize("name", ["mixtral_causal_lm_dynamo_fp32", "deepseek_v3_block_dynamo_fp16"])
def test_fixture(name: str) -> None:
    fixture = models.fixtures.get(name)
    inspection = inspect(fixture.path)
    assert [(layer.experts, layer.k) for layer in inspection.layers] == [(fixture.experts, fixture.k)] * fixture.layers
    assert all(len(layer.weights) == 2 for layer in inspection.layers)
    text = str(inspection)
    assert f"{fixture.layers} MoE layer" in text
    document = inspection.to_dict()
    assert json.loads(json.dumps(document)) is not None


def test_router_that_is_not_recognised(tmp_path: Path) -> None:
    model = original()
    topk = next(node for node in model.graph.node if node.op_type == "TopK")
    topk.attribute.append(helper.make_attribute("largest", 0))  # no FusedRouter chooses the worst
    (layer,) = inspect(save(model, tmp_path / "model.onnx")).layers
    assert (layer.node, layer.experts, layer.k, layer.router) == ("choice", EXPERTS, CHOSEN, "not recognised")
    assert len(layer.weights) == 1


def test_graph_without_a_name(tmp_path: Path) -> None:
    model = original()
    model.graph.ClearField("name")
    (layer,) = inspect(save(model, tmp_path / "model.onnx")).layers
    assert (layer.experts, layer.k, layer.router) == (EXPERTS, CHOSEN, "softmax, top 2")


def test_nodes_without_names(tmp_path: Path) -> None:
    case = ContribCase()
    ours, contrib = our_experts(ExpertsCase((3,), 4, 2, 32, 16)), contrib_model(case, case.constants()[0])
    for model in (ours, contrib):
        for node in model.graph.node:
            node.name = ""
    (layer,) = inspect(save(ours, tmp_path / "ours.onnx")).layers
    assert (layer.node, layer.kind) == ("FusedRouter_weights", "fused router")
    assert layer.optimized_bytes_per_token == layer.bytes_per_token
    (layer,) = inspect(save(contrib, tmp_path / "contrib.onnx")).layers
    assert (layer.node, layer.kind) == ("MoE_y", "contrib MoE")
    assert layer.optimized_bytes_per_token == layer.bytes_per_token


def test_router_with_maps(tmp_path: Path) -> None:
    """The experts are behind its indices, which are not its last output."""
    model = fused()
    router = next(node for node in model.graph.node if node.op_type == "FusedRouter")
    router.output.extend(tensor.name for tensor in ROUTING_MAPS)
    router.overload = ""
    del model.functions[:]
    model.graph.output.append(helper.make_tensor_value_info(ROUTING_MAPS[-1].name, TensorProto.INT64, [EXPERTS + 1]))
    (layer,) = inspect(save(model, tmp_path / "model.onnx")).layers
    assert (layer.kind, layer.experts, layer.k) == ("fused router", EXPERTS, CHOSEN)
    assert [str(weight) for weight in layer.weights] == [f"float {EXPERTS}x{HIDDEN}x{HIDDEN}"]


def test_contrib_nodes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {"w1": (4, 8, 16), "w2": (4, 8, 8)}
    node = helper.make_node(
        "MoE", ["x", "logits", "w1", "", "w2"], ["y"], "moe", domain="com.microsoft", k=2, normalize_routing_weights=1
    )
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8]),
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 4]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(rng.random(shape, np.float32), name) for name, shape in weights.items()],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    path = save(helper.make_model(graph, ir_version=10, opset_imports=opsets), tmp_path / "model.onnx")
    (layer,) = inspect(path).layers
    assert (layer.node, layer.kind, layer.experts, layer.k) == ("moe", "contrib MoE", 4, 2)
    assert layer.router == "softmax, top 2, normalised"
    assert layer.bytes_per_token == 2 * (8 * 16 + 8 * 8) * 4


def our_experts(case: ExpertsCase) -> onnx.ModelProto:
    """A FusedRouter and the FusedExperts of a case, whose weights are constants."""
    constants = {name: array for name, array in case.feeds.items() if name.startswith("fc")}
    maps = [tensor.name for tensor in ROUTING_MAPS] if case.has_maps else []
    router = helper.make_node("FusedRouter", ["logits"], ["weights", "indices", *maps], "router", domain=DOMAIN)
    names = ["x", "weights", "indices", *maps, *constants]
    inputs = [tensor.name if tensor.name in names else "" for tensor in FUSED_EXPERTS.inputs]
    experts = helper.make_node("FusedExperts", inputs, ["y"], "experts", domain=DOMAIN)
    for node, attributes in (
        (router, FUSED_ROUTER.complete({"k": 2, "score": "softmax"})),
        (experts, FUSED_EXPERTS.complete(case.all_attributes)),
    ):
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    graph = helper.make_graph(
        [router, experts],
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", w]) for n, w in (("x", 32), ("logits", 4))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 32])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)


@pytest.mark.parametrize("has_maps", [False, True])
def test_our_experts(tmp_path: Path, has_maps: bool) -> None:
    case = ExpertsCase((3,), 4, 2, 32, 16, weight_format="nvfp4", has_bias=True, has_maps=has_maps)
    path = save(our_experts(case), tmp_path / "model.onnx")
    (layer,) = inspect(path).layers
    assert (layer.node, layer.experts, layer.k, layer.all_experts) == ("router", 4, 2, False)
    assert [weight.shape for weight in layer.weights] == [(4, 32, 16), (4, 32, 2), (4, 32, 8), (4, 32, 1)]
    assert layer.bytes_per_token == 2 * 32 * (16 + 2 + 8 + 1)


def test_zero_points_of_our_experts_are_read_too(tmp_path: Path) -> None:
    case = ExpertsCase((3,), 4, 2, 32, 32, weight_format="int8", has_zero_points=True)
    model = our_experts(case)
    (layer,) = inspect(save(model, tmp_path / "model.onnx")).layers
    assert layer.bytes_per_token == 2 * (64 + 32) * (32 + 2 * 4 + 2)


def test_experts_written_out_one_by_one(tmp_path: Path) -> None:
    """Every token goes through all of them; fused, through its own."""
    path = tmp_path / "model.onnx"
    ir.save(unrolled().model(), path)
    (layer,) = inspect(path).layers
    total = sum(weight.nbytes for weight in layer.weights)
    assert layer.all_experts
    assert [weight.shape[0] for weight in layer.weights] == [layer.experts] * 2
    assert layer.bytes_per_token == total
    assert layer.optimized_bytes_per_token == total * layer.k // layer.experts
    told = " ".join(str(inspect(path)).split())
    assert f"per token: {total / 1024:.1f} KiB; optimised, with the weights as they are: {total * 2 // 8} B" in told


def test_what_is_fused_already_reads_the_same(tmp_path: Path) -> None:
    case = ExpertsCase((3,), 4, 2, 32, 32, weight_format="int8", has_zero_points=True)
    (layer,) = inspect(save(our_experts(case), tmp_path / "model.onnx")).layers
    assert layer.optimized_bytes_per_token == layer.bytes_per_token
    assert not layer.copied


def test_experts_that_stay(tmp_path: Path) -> None:
    inspection = inspect(save(original(), tmp_path / "model.onnx"))
    assert inspection.layers[0].optimized_bytes_per_token is None
    assert inspection.optimized_bytes_per_token == inspection.bytes_per_token
    assert "stays" in str(inspection)


def test_packing_is_a_change_of_what_is_read(tmp_path: Path) -> None:
    dense, packed = tmp_path / "dense.onnx", tmp_path / "packed.onnx"
    case = ExpertsCase((3,), 4, 2, 32, 32)
    save(our_experts(case), dense)
    assert optimize(dense, packed, weights="int8", block_size=32).matched
    before, after = inspect(dense), inspect(packed)
    told = " ".join(str(Changes(before, after)).split())
    assert "24.0 KiB per token" in told
    assert after.bytes_per_token == 2 * 96 * (32 + 4)


def test_blockers_are_named(tmp_path: Path) -> None:
    model = original()
    model.graph.node.append(helper.make_node("NonZero", ["output"], ["where"], "find_nonzero"))
    model.graph.output.append(helper.make_tensor_value_info("where", TensorProto.INT64, None))
    inspection = inspect(save(model, tmp_path / "model.onnx"))
    assert [blocker.node for blocker in inspection.blockers] == ["find_nonzero"]
    assert "NonZero (the size of its output depends on data): find_nonzero" in str(inspection)


def test_inspection_writes_nothing(tmp_path: Path) -> None:
    path = save(original(), tmp_path / "model.onnx")
    before = path.read_bytes()
    inspect(path)
    assert path.read_bytes() == before
    assert onnx.load(path).graph.node[2].op_type == "TopK"


def test_changes(tmp_path: Path) -> None:
    path = save(original(), tmp_path / "model.onnx")
    optimize(path, tmp_path / "out.onnx", verify=False)
    changes = Changes(inspect(path), inspect(tmp_path / "out.onnx"))
    assert changes.operators["ort_moe::FusedRouter"] == (0, 1)
    assert changes.operators["TopK"] == (1, 0)
    ((number, before, after),) = changes.layers
    assert number == 0
    assert before is not None
    assert after is not None
    assert (before.kind, after.kind) == ("router", "fused router")
    assert (before.router, before.weights) == (after.router, after.weights)
    assert "router: 16 experts; softmax, top 2" in " ".join(str(changes).split())
    assert changes.to_dict()["layers"] == [0]
    assert "the same nodes" in str(Changes(inspect(path), inspect(path)))


def test_routers_without_topk(tmp_path: Path) -> None:
    (layer,) = inspect(models.fixtures.get("phimoe_block_dynamo_fp32").path).layers
    assert (layer.experts, layer.k, layer.router, len(layer.weights)) == (8, 2, "sparse mixer, top 2", 2)
    onnx.save(ir.to_proto(EXAMPLES["argmax-form"].model()), tmp_path / "model.onnx")
    (layer,) = inspect(tmp_path / "model.onnx").layers
    assert (layer.experts, layer.k, layer.router, len(layer.weights)) == (8, 1, "not recognised", 1)


def test_layers_in_bodies(tmp_path: Path) -> None:
    body = """
        logits{n} = MatMul (x, gate)
        p{n} = Softmax (logits{n})
        w{n}, ids{n} = TopK (p{n}, k)
        chosen{n} = Gather (experts, ids{n})
        y{n} = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen{n}, w{n})"""
    branches = [f"body{n} () => (float[T, 4] y{n}) {{{body.format(n=n)}}}" for n in (1, 2)]
    text = f"""moe (float[T, 4] x, bool c) => (float[T, 4] y)
        <float[4, 8] gate, float[8, 4, 4] experts, int64[1] k = {{2}}>
        {{ y = If (c) <then_branch = {branches[0]}, else_branch = {branches[1]}> }}"""
    onnx.save(ir.to_proto(Example("", text).model()), tmp_path / "model.onnx")
    inspection = inspect(tmp_path / "model.onnx")
    assert [(layer.router, layer.bytes_per_token) for layer in inspection.layers] == [("softmax, top 2", 128)] * 2
    assert [blocker.operator for blocker in inspection.blockers] == ["If"]

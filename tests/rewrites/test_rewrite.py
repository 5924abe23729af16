"""The public function: what it promises beyond single rules."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import numpy_helper

from ort_moe.errors import ModelError
from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import EXPERTS, EXPERTS_TEXT, STANDARD_CONSTANTS, assert_same, block, run

SOFTMAX = "scores = Softmax <axis = -1> (logits)\n weights, ids = TopK (scores, k)"


def two_routers(second: str) -> ir.Model:
    """Two blocks in a row: the first renormalises a softmax, the second is given."""
    rng = np.random.default_rng(0)
    layer = EXPERTS_TEXT
    for name in ("rows", "chosen", "x4", "products", "outputs", "column", "weighted"):
        layer = (
            layer.replace(f"{name} ", f"{name}_2 ")
            .replace(f"({name},", f"({name}_2,")
            .replace(f" {name})", f" {name}_2)")
        )
    layer = layer.replace("(ids,", "(ids_2,").replace("(weights,", "(weights_2,").replace("(x,", "(y,")
    layer = layer.replace("    y = ", "    z = ")
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
        layers (float[T, 4] x) => (float[T, 4] z) {{
            logits = MatMul (x, gate)
            s = Softmax <axis = -1> (logits)
            raw, ids = TopK (s, k)
            total = ReduceSum <keepdims = 1> (raw, minus1)
            weights = Div (raw, total)
            {EXPERTS_TEXT}
            logits_2 = MatMul (y, gate)
            {second}
            {layer}
        }}"""
    proto = onnx.parser.parse_model(text)
    arrays = {
        **STANDARD_CONSTANTS,
        "gate": rng.standard_normal((4, 8)).astype(np.float32),
        "experts": rng.standard_normal((8, 4, 4)).astype(np.float32),
    }
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return ir.from_proto(proto)


@pytest.mark.parametrize(
    ("second", "overloads"),
    [
        ("s_2 = Sigmoid (logits_2)\n weights_2, ids_2 = TopK (s_2, k)", 2),
        (
            "s_2 = Softmax <axis = 1> (logits_2)\n raw_2, ids_2 = TopK <sorted = 0> (s_2, k)\n"
            "total_2 = ReduceSum <keepdims = 1> (raw_2, minus1)\n weights_2 = Div (raw_2, total_2)",
            1,
        ),
    ],
    ids=["two configurations", "one configuration"],
)
def test_one_function_per_configuration(second: str, overloads: int) -> None:
    original, model = two_routers(second), two_routers(second)
    result = rewrite(model)
    assert [site.status for site in result.sites] == ["whole", "whole"]
    assert len(model.functions) == overloads
    routers = [node for node in model.graph if node.op_type == "FusedRouter"]
    assert all(node.op_identifier() in model.functions for node in routers)
    assert [list(node.attributes) for node in routers] == [sorted(routers[0].attributes)] * 2
    names = {value.name for node in model.graph for value in node.outputs}
    assert names >= {"logits", "weights", "ids", "logits_2", "weights_2", "ids_2"}
    onnx.checker.check_model(ir.to_proto(model))
    x = np.random.default_rng(2).standard_normal((9, 4)).astype(np.float32)
    was, now = (
        onnxruntime.InferenceSession(ir.to_proto(m).SerializeToString(), providers=["CPUExecutionProvider"]).run(
            None, {"x": x}
        )[0]
        for m in (original, model)
    )
    np.testing.assert_allclose(now, was, rtol=0, atol=1e-5 * np.abs(was).max())


def test_same_router_written_twice_becomes_the_same_node() -> None:
    plain = "s = Softmax <axis = -1> (logits)\n raw, ids = TopK (s, k)\n t = ReduceSum <keepdims = 1> (raw, minus1)\n"
    limit = "weights = Div (raw, t)", "limited = Max (t, zero)\n weights = Div (raw, limited)"
    first, second = (rewrite(block(plain + line, {"zero": 0.0})).sites[0].attributes for line in limit)
    assert first == second


def test_opset_import_and_metadata() -> None:
    model = block(SOFTMAX)
    rewrite(model)
    assert model.graph.opset_imports == {"": 20, "ort_moe": 1}
    (node,) = [node for node in model.graph if node.op_type == "FusedRouter"]
    assert node.name == "topk_2"
    assert node.metadata_props == {"ort_moe.topk": "topk_2", "ort_moe.absorbed": "softmax"}


def test_second_run_sees_the_same_sites() -> None:
    model = block(SOFTMAX)
    first = rewrite(model)
    second = rewrite(model)
    assert first.modified
    assert not second.modified
    assert first.sites == second.sites


def test_survives_saving() -> None:
    model = block(SOFTMAX)
    rewrite(model)
    loaded = ir.from_proto(onnx.ModelProto.FromString(ir.to_proto(model).SerializeToString()))
    assert not rewrite(loaded).modified
    assert_same(block(SOFTMAX), loaded)


def test_refuses_another_version_of_the_domain() -> None:
    model = block(SOFTMAX)
    model.graph.opset_imports["ort_moe"] = 2
    with pytest.raises(ModelError, match="the model imports version 2 of the domain 'ort_moe', expected 1"):
        rewrite(model)


def test_takes_the_version_that_onnxruntime_writes() -> None:
    """It saves custom domains as of version 1000."""
    model = block(SOFTMAX)
    model.graph.opset_imports["ort_moe"] = 1000
    rewrite(model)
    assert model.graph.opset_imports["ort_moe"] == 1
    assert_same(block(SOFTMAX), model)


@pytest.mark.parametrize("opset", [11, 12])
def test_refuses_an_old_operator_set(opset: int) -> None:
    model = block(SOFTMAX)
    model.graph.opset_imports[""] = opset
    with pytest.raises(ModelError, match=f"the model imports standard operator set {opset}, expected 13 or newer"):
        rewrite(model)


GROUPS = """
    scores = Sigmoid (logits)
    keys = Add (scores, bias)
    grouped = Reshape (keys, by_group)
    best, unused_1 = TopK (grouped, two)
    group_scores = ReduceSum <keepdims = 0> (best, minus1)
    unused_2, kept = TopK <sorted = 0> (group_scores, two)
    full = Shape (group_scores)
    none = ConstantOfShape <value = float[1] {0}> (full)
    few = Shape (kept)
    ones = ConstantOfShape <value = float[1] {1}> (few)
    groups = ScatterElements <axis = 1> (none, kept, ones)
    bits = Unsqueeze (groups, minus1)
    repeated = Expand (bits, spread)
    mask = Reshape (repeated, flat)
    keep = Cast <to = 9> (mask)
    masked = Where (keep, keys, minus_infinity)
    unused_3, ids = TopK (masked, k)
    raw = GatherElements <axis = 1> (scores, ids)
    total = ReduceSum <keepdims = 1> (raw, minus1)
    shares = Div (raw, total)
    weights = Mul (shares, scale)"""

GROUP_CONSTANTS = {
    "bias": np.linspace(0, 0.5, EXPERTS, dtype=np.float32),
    "by_group": np.array([-1, 4, EXPERTS // 4]),
    "spread": np.array([1, 1, EXPERTS // 4]),
    "flat": np.array([-1, EXPERTS]),
    "minus_infinity": -np.inf,
    "scale": 2.5,
}


@pytest.mark.parametrize("opset", [*range(13, 27)])
@pytest.mark.parametrize(("router", "score"), [(SOFTMAX, "softmax"), (GROUPS, "sigmoid")], ids=["softmax", "groups"])
def test_operator_sets(router: str, score: str, opset: int) -> None:
    original, model = (block(router, GROUP_CONSTANTS, opset=opset) for _ in range(2))
    site = rewrite(model).sites[-1]
    assert (site.status, site.attributes and site.attributes["score"]) == ("whole", score)
    assert_same(original, model)


def test_shapes_by_shape_in_the_oldest_operator_set() -> None:
    """ONNX follows the numbers that Shape returns from operator set 15 on."""
    router = """
        shape = Shape (x)
        last = Gather (shape, one)
        shape_of_rows = Concat <axis = 0> (minus1, last)
        tokens = Reshape (x, shape_of_rows)
        again = MatMul (tokens, gate)
        scores = Sigmoid (again)
        weights, ids = TopK <axis = 1> (scores, k)"""
    original, model = block(router, opset=13), block(router, opset=13)
    (site,) = rewrite(model).sites
    assert (site.status, site.absorbed) == ("whole", ("sigmoid",))
    assert model.graph.opset_imports[""] == 13
    assert_same(original, model)


def test_standard_domain_by_its_long_name() -> None:
    model = block(SOFTMAX)
    model.graph.opset_imports["ai.onnx"] = model.graph.opset_imports.pop("")
    for node in model.graph:
        node.domain = "ai.onnx"
    (site,) = rewrite(model).sites
    assert site.status == "whole"
    assert_same(block(SOFTMAX), model)


def test_a_model_without_routers_is_left_alone() -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[T, 4] x) => (float[T, 4] y) { y = Relu (x) }'
    model = ir.from_proto(onnx.parser.parse_model(text))
    result = rewrite(model)
    assert not result.modified
    assert result.sites == ()
    assert model.graph.opset_imports == {"": 20}


def test_names_of_logits_weights_and_indices_survive() -> None:
    model = block(SOFTMAX, outputs=", float[T, 8] logits")
    rewrite(model)
    (node,) = [node for node in model.graph if node.op_type == "FusedRouter"]
    assert node.inputs[0] is not None
    assert node.inputs[0].name == "logits"
    assert node.outputs[0].name == "weights"
    outputs = run(model, np.zeros((3, 4)), with_library=True)
    assert outputs["ids"].tolist() == [[0, 1]] * 3


def test_raises_the_ir_version_for_overloads_alone() -> None:
    model, other = block(SOFTMAX), block("weights, ids = TopK (logits, k)")
    model.ir_version = other.ir_version = 8
    rewrite(model)
    rewrite(other)
    assert (model.ir_version, other.ir_version) == (10, 8)


def test_nodes_without_names_are_named_after_their_outputs() -> None:
    model = block(SOFTMAX)
    for node in model.graph:
        node.name = ""
    (site,) = rewrite(model).sites
    assert site.node == "TopK_weights"


def test_a_model_without_a_topk_is_not_even_canonicalised() -> None:
    model = block("weights = Softmax (logits)\n same = Identity (weights)", experts_text="y = MatMul (same, back)")
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    result = rewrite(model)
    assert (result.modified, result.sites) == (False, ())
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_a_topk_whose_indices_pick_nothing_is_not_even_canonicalised() -> None:
    """A sampler at the end of a model without experts."""
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
        g (float[T, {EXPERTS}] x) => (float[T, 2] weights, int64[T, 2] tokens) {{
            same = Identity (x)
            weights, ids = TopK (same, k)
            tokens = Squeeze (ids)
        }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([2]), "k"))
    result = rewrite(model := ir.from_proto(proto))
    (site,) = result.sites
    assert not result.modified
    assert "Identity" in {node.op_type for node in model.graph}
    assert (site.node, site.status) == ("TopK_weights", "left")
    (finding,) = site.findings
    assert finding.reason.slug == "topk-not-a-router"
    assert "its indices go to output 'tokens', where they tell no experts apart" in finding.detail


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("double = Mul (ids, k)\n other = Mod (ids, k)", "its indices go to Mul 'Mul_double', Mod 'Mod_other', where"),
        ("", "nothing reads its indices"),
    ],
    ids=["arithmetic", "none"],
)
def test_where_the_indices_go(lines: str, sentence: str) -> None:
    outputs = ", int64[T, 2] double, int64[T, 2] other" if lines else ""
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
        g (float[T, {EXPERTS}] x) => (float[T, 2] best{outputs}) {{ best, ids = TopK (x, k)\n {lines} }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(numpy_helper.from_array(np.array([2]), "k"))
    (site,) = rewrite(ir.from_proto(proto)).sites
    assert sentence in site.findings[0].detail


CUSTOM = """
    shared = vendor.Norm (x)
    logits_2 = MatMul (shared, gate)
    scores = Softmax <axis = -1> (logits_2)
    raw, ids = TopK (scores, k)
    total = ReduceSum <keepdims = 1> (raw, minus1)
    weights = Div (raw, total)
    y = vendor.Experts (x, weights, ids, experts)"""


def custom(shape: str) -> ir.Model:
    """A router between two operators of an unknown domain."""
    text = f"""<ir_version: 10, opset_import: ["" : 20, "vendor" : 1]>
        g (float[T, 4] x) => (float[T, 4] y) {shape} {{ {CUSTOM} }}"""
    proto = onnx.parser.parse_model(text)
    arrays = {
        **STANDARD_CONSTANTS,
        "gate": np.ones((4, EXPERTS), np.float32),
        "experts": np.ones((EXPERTS, 4, 4), np.float32),
    }
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return ir.from_proto(proto)


def test_operators_of_unknown_domains_around_a_router() -> None:
    model = custom("<float[T, 4] shared>")
    (site,) = rewrite(model).sites
    assert (site.status, site.experts, set(site.absorbed)) == ("whole", EXPERTS, {"softmax", "normalize"})
    assert [node.op_type for node in model.graph] == ["Norm", "MatMul", "FusedRouter", "Cast", "Experts"]
    assert not rewrite(model).modified


def test_an_operator_of_an_unknown_domain_hides_shapes() -> None:
    (site,) = rewrite(custom("")).sites
    assert site.status == "left"
    assert [finding.reason.slug for finding in site.findings] == ["expert-count-unknown"]


FLOAT, FLOAT16, INT64 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.INT64
BROKEN = {
    "wider than it is": ("logits", FLOAT, ["T", 9]),
    "of another rank": ("logits", FLOAT, ["T", 2, 4]),
    "a scalar": ("logits", FLOAT, []),
    "of another number of choices": ("ids", INT64, ["T", 3]),
    "not of these dimensions at all": ("scores", FLOAT, [-5, "T"]),
}


def annotated(annotation: tuple[str, int, list[int | str]], complete: bool) -> ir.Model:
    """A block whose file says this of one value, and the truth of all others or nothing."""
    proto = ir.to_proto(block(SOFTMAX))
    if complete:
        proto = onnx.shape_inference.infer_shapes(proto)
    others = [value for value in proto.graph.value_info if value.name != annotation[0]]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend([*others, onnx.helper.make_tensor_value_info(*annotation)])
    return ir.from_proto(proto)


@pytest.mark.parametrize("annotation", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("complete", [False, True], ids=["the rest inferred", "the rest as it is"])
def test_broken_shapes(annotation: tuple[str, int, list[int | str]], complete: bool) -> None:
    """Whatever a file says of its shapes: no crash, and never another answer."""
    model = annotated(annotation, complete)
    result = rewrite(model)
    assert len(result.sites) == 1
    rewritten = ir.to_proto(model)
    del rewritten.graph.value_info[:]  # the runtime refuses what contradicts it, in the original too
    assert_same(block(SOFTMAX), ir.from_proto(rewritten))


@pytest.mark.parametrize("complete", [False, True], ids=["the rest inferred", "the rest as it is"])
def test_broken_types(complete: bool) -> None:
    """No runtime loads such a file; that is for it to say, and none of the rules trips over it."""
    result = rewrite(annotated(("logits", FLOAT16, ["T", EXPERTS]), complete))
    assert [site.node for site in result.sites] == ["topk_2"]

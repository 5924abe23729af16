"""Routers in model-local functions: the functions are inlined, or left alone with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from ort_moe.inspection.inspect import inspect
from ort_moe.optimization.optimize import optimize
from ort_moe.rewrites import rewrite
from tests.contrib_models import ContribCase
from tests.rewrites.blocks import EXPERTS, HIDDEN, cpu_session

IMPORTS = '["" : 20, "layers" : 1, "parts" : 1]'

ROUTE = """
<domain: "parts", opset_import: ["" : 20]>
route <k, axis: int = -1> (logits) => (weights, ids) {
    scores = Softmax <axis: int = @axis> (logits)
    chosen = Constant <value_ints: ints = @k> ()
    last = Constant <value_ints = [-1]> ()
    raw, ids = TopK (scores, chosen)
    total = ReduceSum <keepdims = 1> (raw, last)
    weights = Div (raw, total)
}"""

MOE = """
<domain: "layers", opset_import: ["" : 20, "parts" : 1]>
moe (x, gate, experts) => (y) {
    logits = MatMul (x, gate)
    weights, ids = parts.route <k = [2]> (logits)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}"""

PLAIN = """
<domain: "parts", opset_import: ["" : 20]>
double (x) => (y) { y = Add (x, x) }"""


def parse(nodes: str, functions: str, imports: str = IMPORTS, inputs: str = "") -> ir.Model:
    proto = onnx.parser.parse_model(
        f"<ir_version: 10, opset_import: {imports}> main (float[T, {HIDDEN}] x{inputs}) => (float[T, {HIDDEN}] y) "
        f"{{ {nodes} }}{functions}"
    )
    rng = np.random.default_rng(0)
    for layer in "ab":
        gate, experts = rng.standard_normal((HIDDEN, EXPERTS)), rng.standard_normal((EXPERTS, HIDDEN, HIDDEN)) / 2
        for name, array in ((f"gate_{layer}", gate), (f"experts_{layer}", experts)):
            proto.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    return ir.from_proto(proto)


def two_layers() -> ir.Model:
    nodes = "h = layers.moe (x, gate_a, experts_a)\n d = parts.double (h)\n y = layers.moe (d, gate_b, experts_b)"
    return parse(nodes, MOE + ROUTE + PLAIN)


def in_a_loop() -> ir.Model:
    """The body's own value is called as one in the function."""
    nodes = f"""y = Loop (steps, flag, x) <body = step (int64 i, bool go, float[T, {HIDDEN}] logits) =>
            (bool go_on, float[T, {HIDDEN}] next) {{
        go_on = Identity (go)
        weights = Neg (logits)
        next = layers.moe (weights, gate_a, experts_a)
    }}>"""
    return parse(nodes, MOE + ROUTE, inputs=", bool flag, int64 steps")


def around_a_body() -> ir.Model:
    """A body after the call has values that are called as those in the function."""
    nodes = f"""h = layers.moe (x, gate_a, experts_a)
        y = If (flag) <
            then_branch = yes () => (float[T, {HIDDEN}] weights) {{ weights = Neg (h) }},
            else_branch = no () => (float[T, {HIDDEN}] chosen) {{ logits = Abs (h)\n chosen = Add (logits, h) }}
        >"""
    return parse(nodes, MOE + ROUTE, inputs=", bool flag")


def run(model: ir.Model, *, with_library: bool = False) -> Any:
    feeds = {
        "x": np.random.default_rng(3).standard_normal((7, HIDDEN)).astype(np.float32),
        "flag": np.array(True),
        "steps": np.array(2),
    }
    session = cpu_session(model, with_library=with_library)
    return session.run(["y"], {value.name: feeds[value.name] for value in session.get_inputs()})[0]


@pytest.mark.parametrize(
    ("build", "graphs", "left"),
    [(two_layers, ["main", "main"], {"double"}), (in_a_loop, ["step"], set()), (around_a_body, ["main"], set())],
)
def test_routers_in_functions_are_whole(build: Any, graphs: list[str], left: set[str]) -> None:
    original, model = build(), build()
    result = rewrite(model)
    assert [(site.graph, site.status, site.experts, site.k) for site in result.sites] == [
        (graph, "whole", EXPERTS, 2) for graph in graphs
    ]
    assert {function.name for function in model.functions.values() if function.domain != "ort_moe"} == left
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    was = run(original)
    for with_library in (False, True):
        now = run(model, with_library=with_library)
        np.testing.assert_allclose(now, was, rtol=0, atol=1e-5 * np.abs(was).max())
    assert not rewrite(model).modified


@pytest.mark.parametrize(
    ("nodes", "functions", "sentence"),
    [
        (
            "y = layers.moe (x, gate_a, experts_a)",
            MOE + ROUTE.replace('"" : 20', '"" : 18'),
            "'parts::route': it imports version 18 of the operator set 'ai.onnx', the model version 20",
        ),
        (
            "y = layers.moe (x, gate_a, experts_a)",
            MOE.replace('"" : 20', '"" : 18') + ROUTE,
            "'parts::route': what calls it cannot be inlined",
        ),
        ("y = Neg (x)", MOE + ROUTE, "'parts::route': what calls it cannot be inlined"),
        ("y = Neg (x)", ROUTE, "'parts::route': nothing calls it"),
    ],
    ids=["other operator set", "caller's operator set", "caller unused", "unused"],
)
def test_what_cannot_be_inlined_stays(nodes: str, functions: str, sentence: str) -> None:
    model, original = parse(nodes, functions), parse(nodes, functions)
    result = rewrite(model)
    (site,) = result.sites
    assert (site.graph, site.status) == ("parts::route", "left")
    (finding,) = site.findings
    assert finding.reason.slug == "topk-in-subgraph"
    assert sentence in finding.detail
    assert model.functions.keys() >= original.functions.keys() - {("layers", "moe", "")}
    np.testing.assert_array_equal(run(model), run(original))


def test_functions_without_routers_stay() -> None:
    functions = PLAIN + ROUTE.replace("TopK (scores, chosen)", "Split <axis = -1, num_outputs = 2> (scores)")
    model = parse("h = parts.double (x)\n s, y = parts.route <k = [2]> (h)", functions)
    result = rewrite(model)
    assert (result.modified, result.sites) == (False, ())
    assert len(model.functions) == 2


def test_the_long_name_of_the_standard_domain_in_a_function() -> None:
    functions = ROUTE.replace('"" : 20', '"ai.onnx" : 20')
    nodes = """logits = MatMul (x, gate_a)
        weights, ids = parts.route <k = [2]> (logits)
        chosen = Gather (experts_a, ids)
        y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)"""
    model = parse(nodes, functions)
    for function in model.functions.values():
        for node in function:
            node.domain = "ai.onnx"
    (site,) = rewrite(model).sites
    assert site.status == "whole"


def test_many_functions_are_not_each_looked_for_in_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    number, walks, walk = 40, 0, ir.Function.all_nodes
    functions = "".join(
        f"""
        <domain: "parts", opset_import: ["" : 20]>
        best_{n} (x) => (y) {{
            k = Constant <value_ints = [{HIDDEN}]> ()
            y, unused = TopK (x, k)
        }}"""
        for n in range(number)
    )
    calls = "\n".join(f"h_{n + 1} = parts.best_{n} (h_{n})" for n in range(number))
    model = parse(f"h_0 = Neg (x)\n {calls}\n y = Neg (h_{number})", functions)

    def counted(function: ir.Function) -> Any:
        nonlocal walks
        walks += 1
        return walk(function)

    monkeypatch.setattr(ir.Function, "all_nodes", counted)
    rewrite(model)
    assert not model.functions
    assert walks < 10 * number


def contrib_in_a_function(opset: int = 20) -> onnx.ModelProto:
    """A contrib node in a function that takes its weights, and its k as an attribute."""
    proto = ContribCase().model()
    (node,) = proto.graph.node
    call = onnx.NodeProto()
    call.CopyFrom(node)
    node.name = "moe"
    (k,) = [attribute for attribute in node.attribute if attribute.name == "k"]
    del call.attribute[:], call.input[:]
    given = [name for name in node.input if name]
    call.domain, call.op_type, call.name = "layers", "Block", "call"
    call.input.extend(given)
    call.attribute.append(helper.make_attribute("choices", k.i))
    k.ClearField("i")
    k.ref_attr_name = "choices"
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    proto.functions.append(
        helper.make_function("layers", "Block", given, node.output, [node], imports, attributes=["choices"])
    )
    del proto.graph.node[:]
    proto.graph.node.append(call)
    proto.opset_import.append(helper.make_opsetid("layers", 1))
    return proto


def test_contrib_nodes_in_functions(tmp_path: Path) -> None:
    onnx.save(contrib_in_a_function(), tmp_path / "model.onnx")
    report = optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", target="cpu")
    assert [site.status for site in (*report.sites, *report.experts)] == ["whole"] * 2
    assert report.verification is not None
    assert report.verification.passed
    (layer,) = inspect(tmp_path / "model.onnx").layers
    assert (layer.kind, layer.k) == ("contrib MoE", ContribCase().k)


def test_contrib_nodes_in_functions_that_cannot_be_inlined(tmp_path: Path) -> None:
    model = ir.from_proto(contrib_in_a_function(opset=18))
    result = rewrite(model, target="cpu")
    (site,) = result.experts
    assert (site.node, site.graph, site.status, site.block) == ("moe", "layers::Block", "left", "left")
    (finding,) = site.findings
    assert finding.reason.slug == "experts-in-subgraph"
    assert finding.detail == (
        "MoE 'moe' is in the function 'layers::Block': it imports version 18 of the operator set 'ai.onnx', "
        "the model version 20"
    )
    assert not result.modified
    assert not rewrite(model, target="contrib").experts  # whose nodes they are

"""Routers in the bodies of If, Loop and Scan are fused like those of the main graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import EXPERTS, HIDDEN, STANDARD_CONSTANTS, cpu_session

CONSTANTS: Mapping[str, Any] = {
    **STANDARD_CONSTANTS,
    "no_minimum": np.array(1e-12, np.float32),
    "bias": np.linspace(0, 0.5, EXPERTS, dtype=np.float32),
    "by_group": np.array([-1, 4, EXPERTS // 4]),
    "flat": np.array([-1, EXPERTS]),
    "spread": np.array([1, 1, EXPERTS // 4]),
    "minus_infinity": np.array(-np.inf, np.float32),
}

SOFTMAX = """
    p_scores = Softmax <axis = -1> (p_logits)
    p_raw, p_ids = TopK (p_scores, k)
    p_total = ReduceSum <keepdims = 1> (p_raw, minus1)
    p_weights = Div (p_raw, p_total)"""

WRITTEN_OUT = """
    p_most = ReduceMax <keepdims = 1> (p_logits, minus1)
    p_below = Sub (p_logits, p_most)
    p_grown = Exp (p_below)
    p_sum = ReduceSum <keepdims = 1> (p_grown, minus1)
    p_inverse = Reciprocal (p_sum)
    p_scores = Mul (p_grown, p_inverse)
    p_raw, p_ids = TopK (p_scores, k)
    p_lone = ReduceSum <keepdims = 0> (p_raw, minus1)
    p_total = Unsqueeze (p_lone, minus1)
    p_share = Reciprocal (p_total)
    p_weights = Mul (p_raw, p_share)"""
"""SOFTMAX in another spelling."""

GROUPS = """
    p_scores = Sigmoid (p_logits)
    p_keys = Add (p_scores, bias)
    p_grouped = Reshape (p_keys, by_group)
    p_best, p_unused = TopK (p_grouped, two)
    p_group_scores = ReduceSum <keepdims = 0> (p_best, minus1)
    p_group_values, p_groups = TopK <sorted = 0> (p_group_scores, two)
    p_shape_of_none = Shape (p_group_scores)
    p_none = ConstantOfShape <value = float[1] {0}> (p_shape_of_none)
    p_shape = Shape (p_groups)
    p_one = ConstantOfShape <value = float[1] {1}> (p_shape)
    p_kept = ScatterElements <axis = 1> (p_none, p_groups, p_one)
    p_column = Unsqueeze (p_kept, minus1)
    p_repeated = Expand (p_column, spread)
    p_mask = Reshape (p_repeated, flat)
    p_keep = Cast <to = 9> (p_mask)
    p_masked = Where (p_keep, p_keys, minus_infinity)
    p_ranked, p_ids = TopK (p_masked, k)
    p_raw = GatherElements <axis = 1> (p_scores, p_ids)
    p_total = ReduceSum <keepdims = 1> (p_raw, minus1)
    p_limited = Clip (p_total, no_minimum)
    p_weights = Div (p_raw, p_limited)"""

EXPERTS_OF = """
    p_rows = Unsqueeze (p_ids, minus1)
    p_chosen = GatherND (experts, p_rows)
    p_x4 = Unsqueeze (INPUT, one_two)
    p_products = MatMul (p_x4, p_chosen)
    p_outputs = Squeeze (p_products, two)
    p_weight_column = Unsqueeze (p_weights, minus1)
    p_weighted = Mul (p_outputs, p_weight_column)
    OUTPUT = ReduceSum <keepdims = 0> (p_weighted, one)"""


def layer(router: str, prefix: str, source: str, result: str) -> str:
    """The nodes of a block: values of their own begin with the prefix."""
    text = f"    p_logits = MatMul (INPUT, gate){router}{EXPERTS_OF}\n"
    return text.replace("p_", prefix).replace("INPUT", source).replace("OUTPUT", result)


def parse(nodes: str, inputs: str = "") -> ir.Model:
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 20]> main (float[T, {HIDDEN}] x{inputs}) => (float[T, {HIDDEN}] y) '
        f"{{\n{nodes}\n}}"
    )
    rng = np.random.default_rng(0)
    arrays = {
        "gate": rng.standard_normal((HIDDEN, EXPERTS)).astype(np.float32),
        "experts": rng.standard_normal((EXPERTS, HIDDEN, HIDDEN)).astype(np.float32) / 2,
        **CONSTANTS,
    }
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return ir.from_proto(proto)


def branches(router: str) -> ir.Model:
    first, second = layer(router, "a_", "x", "first"), layer(router, "a_", "x", "second")
    return parse(
        f"""y = If (flag) <
            then_branch = yes () => (float[T, {HIDDEN}] first) {{ {first} }},
            else_branch = no () => (float[T, {HIDDEN}] second) {{ {second} }}
        >""",
        ", bool flag",
    )


def loop(router: str) -> ir.Model:
    body = layer(router, "a_", "h", "next")
    return parse(
        f"""y = Loop (steps, flag, x) <body = step (int64 i, bool go, float[T, {HIDDEN}] h) =>
                (bool go_on, float[T, {HIDDEN}] next) {{
            go_on = Identity (go)
            {body}
        }}>""",
        ", bool flag, int64 steps",
    )


def scan(router: str) -> ir.Model:
    body = layer(router, "a_", "h", "next")
    return parse(
        f"""y, rows = Scan <num_scan_inputs = 1, body = step (float[T, {HIDDEN}] h, float[T, {HIDDEN}] row) =>
                (float[T, {HIDDEN}] next, float[T, {HIDDEN}] kept) {{
            kept = Identity (row)
            {body}
        }}> (x, sequence)""",
        f", float[S, T, {HIDDEN}] sequence",
    )


def nested(router: str) -> ir.Model:
    """A block before a loop, in it, and in a branch in it."""
    before, inside, deep = (
        layer(router, prefix, source, result)
        for prefix, source, result in (("a_", "x", "start"), ("b_", "h", "middle"), ("c_", "middle", "first"))
    )
    return parse(
        f"""{before}
        y = Loop (steps, flag, start) <body = step (int64 i, bool go, float[T, {HIDDEN}] h) =>
                (bool go_on, float[T, {HIDDEN}] next) {{
            go_on = Identity (go)
            {inside}
            next = If (flag) <
                then_branch = yes () => (float[T, {HIDDEN}] first) {{ {deep} }},
                else_branch = no () => (float[T, {HIDDEN}] second) {{ second = Neg (middle) }}
            >
        }}>""",
        ", bool flag, int64 steps",
    )


def run(model: ir.Model, *, flag: bool, with_library: bool = False) -> Any:
    rng = np.random.default_rng(3)
    feeds = {
        "x": rng.standard_normal((7, HIDDEN)).astype(np.float32),
        "flag": np.array(flag),
        "steps": np.array(3),
        "sequence": rng.standard_normal((2, 7, HIDDEN)).astype(np.float32),
    }
    session = cpu_session(model, with_library=with_library)
    return session.run(["y"], {value.name: feeds[value.name] for value in session.get_inputs()})[0]


BUILDS = [(branches, ["yes", "no"]), (loop, ["step"]), (scan, ["step"]), (nested, ["main", "step", "yes"])]


@pytest.mark.parametrize("router", [SOFTMAX, WRITTEN_OUT, GROUPS], ids=["softmax", "written out", "groups"])
@pytest.mark.parametrize(("build", "graphs"), BUILDS)
def test_routers_in_bodies_are_whole(build: Any, graphs: list[str], router: str) -> None:
    original, model = build(router), build(router)
    result = rewrite(model)
    routers = [site for site in result.sites if site.experts == EXPERTS]
    assert [(site.graph, site.status) for site in routers] == [(graph, "whole") for graph in graphs], result.sites
    assert routers[0].attributes is not None
    assert all(site.attributes == routers[0].attributes for site in routers)
    assert len(model.functions) == 1
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    names = [value.name for graph in model.graphs() for node in graph for value in node.outputs]
    assert build is branches or len(names) == len(set(names))
    for flag in (True, False):
        was = run(original, flag=flag)
        for with_library in (False, True):
            now = run(model, flag=flag, with_library=with_library)
            np.testing.assert_allclose(now, was, rtol=0, atol=1e-5 * np.abs(was).max())
    assert not rewrite(model).modified


@pytest.mark.parametrize(("build", "graphs"), BUILDS)
def test_another_spelling_in_a_body_is_the_same_router(build: Any, graphs: list[str]) -> None:
    attributes = [[site.attributes for site in rewrite(build(router)).sites] for router in (SOFTMAX, WRITTEN_OUT)]
    assert attributes[0] == attributes[1]
    assert len(attributes[0]) == len(graphs)


def test_a_topk_in_a_body_comes_back() -> None:
    router = "\n    p_weights, p_ids = TopK (p_logits, k)"
    original, model = branches(router), branches(router)
    result = rewrite(model)
    assert [(site.graph, site.status) for site in result.sites] == [("yes", "left"), ("no", "left")]
    assert {site.findings[0].reason.slug for site in result.sites} == {"router-did-not-grow"}
    assert not model.functions
    assert "ort_moe" not in model.graph.opset_imports
    for flag in (True, False):
        np.testing.assert_array_equal(run(model, flag=flag), run(original, flag=flag))


def test_what_is_outside_a_body_is_not_taken_in() -> None:
    """The choice is made once, and only one branch normalises: the router stays outside, as far as it goes."""
    text = """
        logits = MatMul (x, gate)
        scores = Softmax <axis = -1> (logits)
        raw, ids = TopK (scores, k)
        weights = If (flag) <
            then_branch = yes () => (float[T, 2] quotient) {
                total = ReduceSum <keepdims = 1> (raw, minus1)
                quotient = Div (raw, total)
            },
            else_branch = no () => (float[T, 2] same) { same = Identity (raw) }
        >""" + EXPERTS_OF.replace("p_", "").replace("INPUT", "x").replace("OUTPUT", "y")
    original, model = parse(text, ", bool flag"), parse(text, ", bool flag")
    (site,) = rewrite(model).sites
    assert (site.graph, site.status, site.absorbed) == ("main", "partly", ("softmax",))
    for flag in (True, False):
        was = run(original, flag=flag)
        np.testing.assert_allclose(run(model, flag=flag, with_library=True), was, rtol=0, atol=1e-5 * np.abs(was).max())

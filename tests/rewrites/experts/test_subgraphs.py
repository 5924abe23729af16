"""Experts in the bodies of If and Loop, and in model-local functions."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import EXPERTS, HIDDEN
from tests.rewrites.experts.experts_models import INNER, ROUTER, Experts, assert_same
from tests.rewrites.experts.texts import FC1_TRANSPOSED, FC2_TRANSPOSED, TRANSPOSED

PIECES = Experts()
PLAIN = "".join((PIECES.repeat, PIECES.list, PIECES.fc1, PIECES.activation, PIECES.fc2, PIECES.weigh, PIECES.sum))
TURNED = "".join(
    (PIECES.repeat, PIECES.list, FC1_TRANSPOSED, PIECES.activation, FC2_TRANSPOSED, PIECES.weigh, PIECES.sum)
)
ROWS = f"float[T, {HIDDEN}]"


def renamed(text: str, prefix: str) -> str:
    """The nodes with other names for what they make, but `y`."""
    made = set(re.findall(r"(?m)^\s*([a-z]\w*)(?=(?:, \w+)* = )", text)) | {"u"}
    return re.sub(r"\b([a-z]\w*)\b", lambda found: prefix * (found[1] in made - {"y"}) + found[1], text)


def branches(then: str, otherwise: str) -> str:
    return f"""
        y = If (flag) <
            then_branch = then () => ({ROWS} then_y) {{ {then.replace("y =", "then_y =")} }},
            else_branch = otherwise () => ({ROWS} else_y) {{ {otherwise.replace("y =", "else_y =")} }}
        >"""


LOOP = f"""
    y = Loop (trips, flag, x) <body = layer (int64 i, bool on, {ROWS} h) => (bool still_on, {ROWS} next_h) {{
        still_on = Identity (on)
        own_logits = MatMul (h, gate)
        {ROUTER.replace("(logits)", "(own_logits)")}
        {TURNED.replace("(x,", "(h,").replace("y =", "added =")}
        next_h = Add (h, added)
    }}>"""

NEG = "\n y = Neg (x)"

# The nodes of all graphs, and the weights; a router in front of each.
INSIDE: dict[str, tuple[str, list[str], set[str]]] = {
    "a branch": (branches(PLAIN, NEG), ["If", "FusedExperts", "Neg"], {"fc1", "fc2"}),
    "a branch, to be transposed": (
        branches(TURNED, NEG), ["If", "FusedExperts", "Neg"], {"fc1_transposed", "fc2_transposed"},
    ),
    "both branches": (
        branches(TURNED, renamed(TURNED, "e_")),
        ["If", "FusedExperts", "FusedExperts"],
        {"fc1_transposed", "fc2_transposed"},
    ),
    "a branch, with a residual": (
        branches(TURNED.replace("y =", "routed =") + "\n y = Add (x, routed)", NEG),
        ["If", "FusedExperts", "Neg"],
        {"fc1_transposed", "fc2_transposed"},
    ),
}  # fmt: skip


def with_body(text: str, **changes: Any) -> Experts:
    constants = {"flag": True, "trips": np.array(3), **(TRANSPOSED if "column1, " in text else {})}
    empty = dict.fromkeys(("repeat", "list", "fc1", "activation", "fc2", "weigh"), "")
    return Experts(**{**empty, "sum": text, "constants": constants, **changes})


@pytest.mark.parametrize("case", INSIDE)
def test_inside(case: str) -> None:
    text, ops, weights = INSIDE[case]
    original, model = with_body(text).model(), with_body(text).model()
    assert {site.block for site in rewrite(model).experts} == {"whole"}
    assert [node.op_type for graph in model.graphs() for node in graph] == ["MatMul", "FusedRouter", *ops]
    assert {name for name in model.graph.initializers if name.startswith("fc")} == weights
    assert_same(original, model)
    assert not rewrite(model).modified


def test_no_contrib_nodes_inside() -> None:
    model = with_body(INSIDE["a branch"][0]).model()
    (site,) = rewrite(model, target="contrib").experts
    assert [(finding.reason.slug, finding.detail) for finding in site.findings] == [
        ("no-contrib-form", "it is in a body of If, Loop or Scan, where no contrib nodes are written")
    ]
    assert {node.op_type for node in model.graph.all_nodes()} >= {"TopK", "Gather"}


def test_a_loop_over_layers() -> None:
    """Router and experts are in the body, and what it begins with is added there."""
    experts = replace(with_body(LOOP), router="\n unread = Identity (logits)")
    original, model = experts.model(), experts.model()
    (site,) = rewrite(model).experts
    assert (site.block, site.residual) == ("whole", "other")
    ops = [node.op_type for graph in model.graphs() for node in graph]
    assert ops == ["Loop", "Identity", "MatMul", "FusedRouter", "FusedExperts"]
    assert_same(original, model)
    assert not rewrite(model).modified


@pytest.mark.parametrize("layers", [1, 2])
def test_a_function_that_takes_the_choice(layers: int) -> None:
    """The router is in the graph, the experts in a function that calls another for what stands between."""
    calls = ["y0 = layers.experts (x, weights, ids, fc1, fc2)", "y1 = layers.experts (y0, weights, ids, fc1, fc2)"]
    text = f"""
        <ir_version: 10, opset_import: ["" : 20, "layers" : 1]>
        main ({ROWS} x) => ({ROWS} y) {{
            logits = MatMul (x, gate)
            scores = Softmax <axis = -1> (logits)
            k = Constant <value_ints = [2]> ()
            weights, ids = TopK (scores, k)
            {"".join(calls[:layers])}
            y = Identity (y{layers - 1})
        }}
        <domain: "layers", opset_import: ["" : 20, "layers" : 1]>
        experts (x, weights, ids, fc1, fc2) => (y) {{
            last = Constant <value_ints = [-1]> ()
            outer = Constant <value_ints = [1, -1]> ()
            one = Constant <value_ints = [1]> ()
            chosen1 = Gather (fc1, ids)
            column1 = Unsqueeze (x, outer)
            product1 = MatMul (chosen1, column1)
            made1 = Squeeze (product1, last)
            active = layers.between (made1)
            chosen2 = Gather (fc2, ids)
            column2 = Unsqueeze (active, last)
            product2 = MatMul (chosen2, column2)
            made2 = Squeeze (product2, last)
            column = Unsqueeze (weights, last)
            weighted = Mul (made2, column)
            y = ReduceSum <keepdims = 0> (weighted, one)
        }}
        <domain: "layers", opset_import: ["" : 20]>
        between (x) => (y) {{ y = Relu (x) }}"""
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in (
        ("gate", (HIDDEN, EXPERTS)),
        ("fc1", (EXPERTS, INNER, HIDDEN)),
        ("fc2", (EXPERTS, HIDDEN, INNER)),
    ):
        proto.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name))
    original, model = ir.from_proto(proto), ir.from_proto(proto)
    sites = rewrite(model).experts
    assert [site.block for site in sites] == ["whole"] * layers
    assert not [key for key in model.functions if key[0] == "layers"]
    assert_same(original, model)
    assert not rewrite(model).modified

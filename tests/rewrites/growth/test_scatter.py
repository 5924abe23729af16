"""f(ScatterElements(-inf, ids, w)) -> ScatterElements(0, ids, f(w)), for f the sigmoid and the softmax."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import DTYPES, EXPERTS, HIDDEN, assert_fuses, assert_same, block

DENSE = """
    by_expert = Transpose <perm = [1, 0]> (dense)
    column = Unsqueeze (by_expert, minus1)
    scaled = Mul (column, x)
    all = MatMul (scaled, experts)
    y = ReduceSum <keepdims = 0> (all, zero)"""

ROUTER = "raw, ids = TopK (logits, k)\n"
EXPANDED = "shape = Shape (logits)\n full = Expand (fill, shape)\n"
SCATTER = "hot = ScatterElements <axis = 1> (full, ids, raw)\n"


def dense(router: str, *, dtype: str = "float", **constants: Any) -> ir.Model:
    return block(
        ROUTER + router, {"fill": -math.inf, "zero": np.array([0]), **constants}, dtype=dtype, experts_text=DENSE
    )


def outputs(model: ir.Model, dtype: str) -> np.ndarray:
    x = np.random.default_rng(1).standard_normal((7, HIDDEN)).astype(DTYPES[dtype])
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0], np.float64)


FORMS = {
    "expand": ("float", EXPANDED + SCATTER + "dense = Sigmoid (hot)"),
    "constant of shape": (
        "float",
        "shape = Shape (logits)\n full = ConstantOfShape <value = float[1] {-inf}> (shape)\n"
        + SCATTER
        + "dense = Sigmoid (hot)",
    ),
    "half": ("float16", EXPANDED + SCATTER + "dense = Sigmoid (hot)"),
    "half, cast": (
        "float16",
        EXPANDED + SCATTER + "wide = Cast <to = 1> (hot)\n s = Sigmoid (wide)\n dense = Cast <to = 10> (s)",
    ),
}


@pytest.mark.parametrize("score", ["Sigmoid", "Softmax <axis = -1>"], ids=["sigmoid", "softmax"])
@pytest.mark.parametrize("name", FORMS)
def test_score_moves_before_the_scatter(name: str, score: str) -> None:
    dtype, router = FORMS[name]
    router = router.replace("Sigmoid", score)
    op_type = score.split()[0]
    original, model = dense(router, dtype=dtype), dense(router, dtype=dtype)
    (site,) = rewrite(model).sites
    assert site.status == "whole", site.findings
    assert site.absorbed == (f"{op_type.lower()}-after-topk",)
    assert [node.op_type for node in model.graph].count(op_type) == 0
    was, now = outputs(original, dtype), outputs(model, dtype)
    np.testing.assert_allclose(now, was, rtol=0, atol=(1e-5 if dtype == "float" else 3e-3) * np.abs(was).max())
    assert not rewrite(model).modified


def test_scatter_rules_say_nothing_where_nothing_is_scattered() -> None:
    text = "raw, ids = TopK (logits, k)\n half = Mul (raw, scale)\n weights = Softmax <axis = -1> (half)"
    (site,) = rewrite(block(text, {"scale": -0.5})).sites
    assert site.status == "partly"
    assert "scatter" not in " ".join(finding.detail for finding in site.findings)


REFUSALS = {
    "other fill": (EXPANDED + SCATTER + "dense = Sigmoid (hot)", {"fill": -1.0}),
    "accumulated": (
        EXPANDED + SCATTER.replace("axis = 1", 'axis = 1, reduction = "max"') + "dense = Sigmoid (hot)",
        {},
    ),
    "expanded twice": (
        "shape = Shape (logits)\n half = Expand (fill, row_shape)\n full = Expand (half, shape)\n"
        + SCATTER
        + "dense = Sigmoid (hot)",
        {"row_shape": np.array([EXPERTS])},
    ),
    "truncated": (
        EXPANDED
        + SCATTER.replace("ids, raw", "ids, bit")
        .replace("hot", "bit = Cast <to = 1> (sign)\n hot")
        .replace("bit =", "sign = Cast <to = 6> (raw)\n bit =")
        + "dense = Sigmoid (hot)",
        {},
    ),
    "into logits": (SCATTER.replace("full", "logits") + "dense = Sigmoid (hot)", {}),
    "softmax over the tokens": (EXPANDED + SCATTER + "dense = Softmax <axis = 0> (hot)", {}),
    "softmax, other indices": (
        EXPANDED
        + SCATTER.replace("hot", "kept = Mul (ids, nought)\n hot").replace("ids, raw", "kept, raw")
        # The true indices are used, too, so that this is a router at all.
        + "gates = Softmax <axis = 1> (hot)\n"
        + SCATTER.replace("hot", "true").replace("full", "zeros")
        + "dense = Add (gates, true)",
        {"nought": np.array([0]), "zeros": np.zeros((7, EXPERTS), np.float32)},
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_other_scatters_stay(name: str) -> None:
    router, constants = REFUSALS[name]
    original, model = dense(router, **constants), dense(router, **constants)
    (site,) = rewrite(model).sites
    assert (site.status, site.experts) == ("left", EXPERTS)
    np.testing.assert_array_equal(outputs(model, "float"), outputs(original, "float"))


GATHERED = {
    "softmax": ("float", EXPANDED + SCATTER + "all = Softmax <axis = -1> (hot)", ("softmax-after-topk",)),
    "sigmoid": ("float", EXPANDED + SCATTER + "all = Sigmoid (hot)", ("sigmoid-after-topk",)),
    "half": ("float16", EXPANDED + SCATTER + "all = Softmax <axis = -1> (hot)", ("softmax-after-topk",)),
    "half, cast": (
        "float16",
        EXPANDED
        + SCATTER
        + "wide = Cast <to = 1> (hot)\n soft = Softmax <axis = -1> (wide)\n all = Cast <to = 10> (soft)",
        ("softmax-after-topk",),
    ),
}


@pytest.mark.parametrize("name", GATHERED)
def test_what_is_gathered_again_was_never_scattered(name: str) -> None:
    dtype, router, absorbed = GATHERED[name]
    text = ROUTER + router + "\n weights = GatherElements <axis = 1> (all, ids)"
    build = partial(block, text, {"fill": -math.inf}, dtype=dtype)
    rtol = 1e-5 if dtype == "float" else 3e-3
    assert_fuses(build, {"score_after_topk": 1}, absorbed=absorbed, rtol=rtol)


@pytest.mark.parametrize(
    ("was", "becomes", "status"),
    [
        ("GatherElements <axis = 1> (all, ids)", "GatherElements <axis = 0> (all, ids)", "partly"),
        ("(all, ids)", "(all, others)", "whole"),
        ("ScatterElements <", 'ScatterElements <reduction = "add", ', "left"),
    ],
    ids=["another axis", "other indices", "accumulated"],
)
def test_other_gathers_stay(was: str, becomes: str, status: str) -> None:
    text = ROUTER + EXPANDED + SCATTER + "all = Softmax <axis = -1> (hot)\n others = Sub (seven, ids)\n"
    text = (text + "weights = GatherElements <axis = 1> (all, ids)").replace(was, becomes)
    build = partial(block, text, {"fill": -1e9 if "add" in text else -math.inf, "seven": np.array(EXPERTS - 1)})
    original, model = build(), build()
    (site,) = rewrite(model).sites
    assert site.status == status
    assert any(node.op_type == "GatherElements" for node in model.graph)
    assert_same(original, model)

"""Which TopK is a router: what consumes the indices decides, not what surrounds the values."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import EXPERTS, EXPERTS_TEXT, HIDDEN, block

RNG = np.random.default_rng(3)


def parse(text: str, constants: dict[str, Any]) -> ir.Model:
    """A graph in ONNX's text form, with initializers."""
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> {text}')
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), name) for name, a in constants.items())
    return ir.from_proto(proto)


def weights(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


K5 = {"k": np.array([5], np.int64)}

NOT_ROUTERS = {
    "sampling": (
        """sampling (float[T, 16] hidden) => (float[T, 5] p, int64[T, 5] token) {
            logits = MatMul (hidden, head)
            best, token = TopK (logits, k)
            p = Softmax <axis = -1> (best)
        }""",
        {**K5, "head": weights(16, 32)},
    ),
    "sampling, looked up in the embedding": (
        """sampling (float[T, 16] hidden) => (float[T, 16] y) {
            logits = MatMul (hidden, head)
            best, token = TopK (logits, k)
            p = Softmax <axis = -1> (best)
            column = Unsqueeze (p, minus1)
            row = Gather <axis = 0> (embedding, token)
            weighted = Mul (row, column)
            y = ReduceSum <keepdims = 0> (weighted, one)
        }""",
        {**K5, "head": weights(16, 32), "embedding": weights(32, 16), "minus1": np.array([-1]), "one": np.array([1])},
    ),
    "top-5 of a classifier": (
        """classifier (float[B, 16] features) => (float[B, 5] p, int64[B, 5] label) {
            logits = Gemm (features, head, bias)
            scores = Softmax <axis = -1> (logits)
            p, label = TopK (scores, k)
        }""",
        {**K5, "head": weights(16, 10), "bias": weights(10)},
    ),
    "multi-hot labels of a classifier": (
        """classifier (float[B, 16] features) => (float[B, 10] hot) {
            logits = Gemm (features, head, bias)
            p, label = TopK (logits, k)
            each = OneHot (label, ten, values)
            hot = ReduceSum <keepdims = 0> (each, one)
        }""",
        {
            **K5,
            "head": weights(16, 10),
            "bias": weights(10),
            "ten": np.array(10),
            "values": np.array([0, 1], np.float32),
            "one": np.array([1]),
        },
    ),
    "detection": (
        """detection (float[1, 100] objectness, float[100, 2, 2] boxes) => (float[1, 5] score, float[1, 5, 2, 2] kept) {
            p = Sigmoid (objectness)
            score, anchor = TopK (p, k)
            kept = Gather <axis = 0> (boxes, anchor)
        }""",
        K5,
    ),
    "codebook": (
        """codebook (float[T, 16] x) => (float[T, 5, 16] y) {
            near = MatMul (x, codes)
            best, code = TopK (near, k)
            y = Gather <axis = 0> (table, code)
        }""",
        {**K5, "codes": weights(16, 64), "table": weights(64, 16)},
    ),
    "codebook of matrices that meet no product": (
        """codebook (float[T, 16] x) => (float[T, 5, 4, 4] y) {
            near = MatMul (x, codes)
            best, code = TopK (near, k)
            y = Gather <axis = 0> (table, code)
        }""",
        {**K5, "codes": weights(16, 64), "table": weights(64, 4, 4)},
    ),
    "sparse attention": (
        """attention (float[8, 16] q, float[8, 16] keys, float[8, 16, 4] values) => (float[8, 5, 1, 4] y) {
            kt = Transpose <perm = [1, 0]> (keys)
            scores = MatMul (q, kt)
            best, position = TopK (scores, k)
            p = Softmax <axis = -1> (best)
            v = Gather <axis = 0> (values, position)
            pr = Unsqueeze (p, two_three)
            qq = Unsqueeze (q, one_two)
            picked = MatMul (qq, v)
            y = Mul (picked, pr)
        }""",
        {**K5, "two_three": np.array([2, 3]), "one_two": np.array([1, 2])},
    ),
}


@pytest.mark.parametrize("name", NOT_ROUTERS)
def test_other_topk_stays(name: str) -> None:
    model = parse(*NOT_ROUTERS[name])
    (site,) = rewrite(model).sites
    assert site.status == "left"
    assert [finding.reason.slug for finding in site.findings] == ["topk-not-a-router"]
    assert "ort_moe" not in model.graph.opset_imports
    assert not model.functions
    assert any(node.op_type == "TopK" for node in model.graph)


def test_a_router_is_told_by_its_gathered_experts() -> None:
    model = block("scores = Softmax <axis = -1> (logits)\n weights, ids = TopK (scores, k)")
    (site,) = rewrite(model).sites
    assert (site.status, site.experts, site.k) == ("whole", EXPERTS, 2)


DENSE = """
    {mask}
    x1 = Unsqueeze (x, minus1)
    xt = Transpose <perm = [2, 0, 1]> (x1)
    all = MatMul (x, experts)
    by_token = Transpose <perm = [1, 0, 2]> (all)
    row = Unsqueeze (dense, one)
    mixed = MatMul (row, by_token)
    y = Squeeze (mixed, one)
"""


@pytest.mark.parametrize("linear", [True, False], ids=["of a linear layer", "of something else"])
@pytest.mark.parametrize("form", ["one-hot", "equal"])
def test_masks_count_only_behind_a_linear_layer(form: str, linear: bool) -> None:
    """A one-hot or comparisons with every index are weak evidence."""
    if form == "one-hot":
        mask = "hot = OneHot (ids, eight, values)"
    else:
        mask = "col = Unsqueeze (ids, minus1)\n same = Equal (col, range)\n hot = Cast <to = 1> (same)"
    mask += "\n w = Unsqueeze (weights, minus1)\n each = Mul (hot, w)\n dense = ReduceSum <keepdims = 0> (each, one)"
    router = "scores = Softmax <axis = -1> (logits)\n weights, ids = TopK (scores, k)"
    if not linear:
        router = router.replace("(logits)", "(sorted)").replace("scores =", "sorted = Cos (logits)\n scores =", 1)
    constants = {
        "eight": np.array(EXPERTS),
        "range": np.arange(EXPERTS),
        "values": np.array([0, 1], np.float32),
    }
    model = block(router, constants, experts_text=DENSE.format(mask=mask))
    (site,) = rewrite(model).sites
    assert site.status == ("whole" if linear else "left")


SCATTER = """
    shape = Shape (logits)
    zeros = Expand (nought, shape)
    dense = ScatterElements <axis = 1> (zeros, ids, weights)"""
ROWS = {
    "one product of all results": """
    all = Einsum <equation = "th,ehd->ted"> (x, experts)
    y = Einsum <equation = "te,ted->td"> (dense, all)""",
    "results scaled": """
    all = Einsum <equation = "th,ehd->ted"> (x, experts)
    bent = Relu (all)
    column = Unsqueeze (dense, minus1)
    weighted = Mul (bent, column)
    y = ReduceSum <keepdims = 0> (weighted, one)""",
    "results joined": f"""
    row = Unsqueeze (x, one)
    all = Concat <axis = 1> ({", ".join(["row"] * EXPERTS)})
    column = Unsqueeze (dense, minus1)
    weighted = Mul (all, column)
    y = ReduceSum <keepdims = 0> (weighted, one)""",
    "a column for each": "\n".join(
        f"""
    c{e} = Slice (dense, from{e}, to{e}, one)
    y{e + 1} = Mul (c{e}, x)
    """
        for e in range(EXPERTS)
    )
    + f"\n y = Sum ({', '.join(f'y{e + 1}' for e in range(EXPERTS))})",
}


@pytest.mark.parametrize("linear", [True, False], ids=["of a linear layer", "of something else"])
@pytest.mark.parametrize("name", ROWS)
def test_rows_over_all_experts_count_only_behind_a_linear_layer(name: str, linear: bool) -> None:
    """Every expert sees every token, and the row of weights scales the results."""
    router = "scores = Softmax <axis = -1> (logits)\n weights, ids = TopK (scores, k)" + SCATTER
    if not linear:
        router = router.replace("(logits)\n", "(sorted)\n").replace("scores =", "sorted = Cos (logits)\n scores =", 1)
    columns = {f"{name}{e}": np.array([e + i]) for e in range(EXPERTS) for i, name in enumerate(("from", "to"))}
    (site,) = rewrite(block(router, {"nought": 0.0, **columns}, experts_text=ROWS[name])).sites
    assert site.status == ("whole" if linear else "left"), site.findings


def test_some_columns_are_no_evidence() -> None:
    text = "\n".join(f"c{e} = Slice (dense, from{e}, to{e}, one)\n y{e} = Mul (c{e}, x)" for e in (0, 1))
    router = "weights, ids = TopK (logits, k)" + SCATTER
    constants = {"nought": 0.0, "from0": np.array([0]), "to0": np.array([1]), "from1": np.array([1])}
    model = block(router, {**constants, "to1": np.array([2])}, experts_text=text + "\n y = Sum (y0, y1)")
    (site,) = rewrite(model).sites
    assert [finding.reason.slug for finding in site.findings] == ["topk-not-a-router"]


@pytest.mark.parametrize(
    "score",
    [
        "soft = Softplus (logits)\n big = Greater (logits, twenty)\n raw = Where (big, logits, soft)\n s = Sqrt (raw)",
        "most = ReduceMax <keepdims = 1> (logits, minus1)\n less = Sub (logits, most)\n s = Exp (less)",
        "s = Relu (logits)",
    ],
    ids=["where", "difference", "relu"],
)
def test_element_wise_steps_behind_the_linear_layer(score: str) -> None:
    router = score + "\n weights, ids = TopK (s, k)" + SCATTER
    model = block(router, {"nought": 0.0, "twenty": 20.0}, experts_text=ROWS["results scaled"])
    (site,) = rewrite(model).sites
    assert site.experts == EXPERTS
    assert "topk-not-a-router" not in [finding.reason.slug for finding in site.findings]


FORMS = {
    "smallest": ("weights, ids = TopK <largest = 0> (scores, k)", {}, "it takes the smallest"),
    "axis": ("weights, ids = TopK <axis = 0> (scores, k)", {}, "axis 0 is not the last one"),
    "k": (
        "kk = Shape (two)\n k2 = Add (kk, kk)\n weights, ids = TopK (scores, k2)",
        {},
        "k is not a constant from 1 to 8",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_refused_forms(name: str) -> None:
    line, constants, sentence = FORMS[name]
    model = block("scores = Softmax <axis = -1> (logits)\n" + line, constants)
    if name == "k":  # not folded: a shape is no constant
        assert any(node.op_type == "Shape" for node in model.graph)
    (site,) = rewrite(model).sites
    assert site.status == "left"
    (finding,) = site.findings
    assert finding.reason.slug == "topk-form"
    assert sentence in finding.detail


def test_expert_count_must_be_fixed() -> None:
    text = f"""unknown (float[T, {HIDDEN}] x, float[T, E] logits) => (float[T, {HIDDEN}] y) {{
        weights, ids = TopK (logits, k) {EXPERTS_TEXT} }}"""
    constants = {
        "k": np.array([2]),
        "minus1": np.array([-1]),
        "one": np.array([1]),
        "two": np.array([2]),
        "one_two": np.array([1, 2]),
        "experts": weights(EXPERTS, HIDDEN, HIDDEN),
    }
    (site,) = rewrite(parse(text, constants)).sites
    assert [finding.reason.slug for finding in site.findings] == ["expert-count-unknown"]


def test_expert_weights_from_outside_are_no_evidence() -> None:
    model = block("scores = Softmax <axis = -1> (logits)\n weights, ids = TopK (scores, k)")
    model.graph.inputs.append(model.graph.initializers["experts"])
    (site,) = rewrite(model).sites
    assert [finding.reason.slug for finding in site.findings] == ["weights-as-inputs"]
    assert "gather from 'experts'" in site.findings[0].detail


@pytest.mark.parametrize("line", ["Squeeze (wide, one)", "Gather <axis = 1> (logits, nought)"], ids=["one", "a column"])
def test_tokens_with_one_score_each(line: str) -> None:
    """As where a model leaves out some tokens in some layers."""
    text = """
        one_score = ReduceSum <keepdims = 1> (logits, minus1)
        wide = MatMul (one_score, single)
        scores = LINE
        best, ids = TopK <axis = 0> (scores, k)
        y = Gather (x, ids)"""
    constants = {"single": np.ones((1, 1), np.float32), "nought": np.array(0)}
    (site,) = rewrite(block(text.replace("LINE", line), constants, experts_text="")).sites
    (finding,) = site.findings
    assert finding.reason.slug == "topk-not-a-router"
    assert "are the tokens, each with one score" in finding.detail


@pytest.mark.parametrize(
    "choice",
    [
        "turned = Transpose <perm = [1, 0]> (scores)\n weights, ids = TopK (turned, k)",
        "weights, ids = TopK <axis = 0> (scores, k)",
    ],
    ids=["transposed", "axis 0"],
)
def test_experts_that_choose_their_tokens(choice: str) -> None:
    experts = """
        rows = Gather (x, ids)
        made = MatMul (rows, experts)
        y = ReduceSum <keepdims = 0> (made, one)"""
    build = partial(block, "scores = Softmax <axis = -1> (logits)\n" + choice)
    (site,) = rewrite(build(experts_text=experts)).sites
    (finding,) = site.findings
    assert (site.status, finding.reason.slug) == ("left", "topk-form")
    assert "each of 8 experts chooses its tokens" in finding.detail
    assert finding.remedy.startswith("Nothing")
    (other,) = rewrite(build(experts_text="y = Gather (x, ids)")).sites  # such as the best places of each class
    assert other.findings[0].reason.slug == "expert-count-unknown"


def test_experts_on_the_first_axis() -> None:
    choice = """
        scores = Softmax <axis = -1> (logits)
        turned = Transpose <perm = [1, 0]> (scores)
        weights_t, ids_t = TopK <axis = 0> (turned, k)
        weights = Transpose <perm = [1, 0]> (weights_t)
        ids = Transpose <perm = [1, 0]> (ids_t)"""
    (site,) = rewrite(block(choice)).sites
    (finding,) = site.findings
    assert (finding.reason.slug, finding.detail) == ("topk-form", "TopK 'topk_3': axis 0 is not the last one")

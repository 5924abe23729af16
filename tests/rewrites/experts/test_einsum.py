"""Einsums of experts are spelled as the forms know them, and no others."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import EXPERTS, HIDDEN, block
from tests.rewrites.experts.experts_models import INNER, ROUTER, assert_same

GATHERED = """
    matrices1 = Gather <axis = 0> (fc1, ids)
    made1 = Einsum <equation = "td,tknd->tkn"> (x, matrices1)
    active = Relu (made1)
    matrices2 = Gather <axis = 0> (fc2, ids)
    made2 = Einsum <equation = "tknd,tkd->tkn"> (matrices2, active)
    y = Einsum <equation = "tkn,tk->tn"> (made2, weights)"""


def model(text: str, outputs: str = "") -> ir.Model:
    rng = np.random.default_rng(3)
    constants = {
        "fc1": rng.standard_normal((EXPERTS, INNER, HIDDEN)).astype(np.float32),
        "fc2": rng.standard_normal((EXPERTS, HIDDEN, INNER)).astype(np.float32),
        "square": rng.standard_normal((HIDDEN, HIDDEN)).astype(np.float32),
    }
    return block(ROUTER, constants, experts_text=text, outputs=outputs)


def test_whole() -> None:
    original, rewritten = model(GATHERED), model(GATHERED)
    (site,) = rewrite(rewritten).experts
    assert (site.block, site.form) == ("whole", "experts-batched-mm")
    assert [node.op_type for node in rewritten.graph] == ["MatMul", "FusedRouter", "FusedExperts"]
    assert_same(original, rewritten)


def test_others_stay_as_they_are() -> None:
    text = (
        GATHERED.replace("y =", "routed =")
        + """
        turned = Einsum <equation = "td,dn->tn"> (x, square)
        y = Add (routed, turned)"""
    )
    original, rewritten = model(text), model(text)
    assert [site.residual for site in rewrite(rewritten).experts] == ["shared"]
    assert [node.op_type for node in rewritten.graph].count("Einsum") == 1
    assert_same(original, rewritten)


@pytest.mark.parametrize("equation", ["sd,tknd->tkn", "td,tknd->tnk"])
def test_other_equations_are_no_experts(equation: str) -> None:
    """Rows of all tokens added up; choices behind the elements."""
    text = GATHERED.replace("td,tknd->tkn", equation)
    if equation.endswith("nk"):
        text = text.replace("active = Relu (made1)", "odd = Relu (made1)\n active = Transpose <perm = [0, 2, 1]> (odd)")
    original, rewritten = model(text), model(text)
    (site,) = rewrite(rewritten).experts
    assert site.status == "left"
    assert_same(original, rewritten)
    assert not rewrite(rewritten).modified

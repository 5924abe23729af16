"""New values have names of their own, in the graph and in what it contains."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ort_moe.rewrites import rewrite
from ort_moe.rewrites.names import Names
from tests.rewrites.blocks import EXPERTS, assert_same, block

BRANCHES = """
    weights = If (flag) <
        then_branch = then () => (float[T, 2] then_weights) {
            val_0 = Neg (chosen_weights)
            val = Neg (val_0)
            topk_2_k = Neg (val)
            then_weights = Neg (topk_2_k)
        },
        else_branch = otherwise () => (float[T, 2] else_weights) { else_weights = Identity (chosen_weights) }
    >"""
ROUTERS = {
    "fused": "scores = Softmax (logits)\n raw, ids = TopK (scores, k)\n chosen_weights = Mul (raw, factor)",
    "put back": "scores = Exp (logits)\n chosen_weights, ids = TopK (scores, k)",
}


def test_unused() -> None:
    names = Names(block("weights, ids = TopK (logits, k)").graph)
    assert [names.unused("x"), names.unused("x"), names.unused("k"), names.unused("new")] == [
        "x_1",
        "x_2",
        "k_1",
        "new",
    ]


@pytest.mark.parametrize("name", ROUTERS)
def test_names_in_branches_are_not_taken_again(name: str) -> None:
    def build() -> ir.Model:
        return block(ROUTERS[name] + BRANCHES, {"flag": True, "factor": 2.0})

    original, model = build(), build()
    rewrite(model)
    onnx.checker.check_model(ir.to_proto(model))
    assert_same(original, model)


def test_initializers_do_not_take_names_of_values() -> None:
    text = """
        scores = Sigmoid (logits)
        row_float32 = Neg (scores)
        keys = Add (scores, row)
        unused, ids = TopK (keys, k)
        raw = GatherElements <axis = 1> (scores, ids)
        other = GatherElements <axis = 1> (row_float32, ids)
        weights = Sub (raw, other)"""

    def build() -> ir.Model:
        return block(text, {"row": np.arange(EXPERTS, dtype=np.float32).reshape(1, -1) / 8})

    original, model = build(), build()
    rewrite(model)
    onnx.checker.check_model(ir.to_proto(model))
    assert_same(original, model)

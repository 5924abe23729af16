"""A bias for the choice where nothing reads the weights."""

from __future__ import annotations

from functools import partial

import numpy as np

from ort_moe.rewrites import rewrite
from ort_moe.rewrites.router_node import is_router
from tests.rewrites.blocks import EXPERTS, K, assert_fuses, assert_stays, block

CHOOSE = """
    keys = Add (scores, bias)
    unused, ids = TopK (keys, k)
    weights = Slice (x, zero, two, one)"""
CONSTANTS = {"bias": np.random.default_rng(5).standard_normal(EXPERTS).astype(np.float32), "zero": np.array([0])}


def test_a_bias_for_the_choice() -> None:
    """The chosen are weighed by something else, here by the first columns of x."""
    build = partial(block, "scores = Sigmoid (logits)" + CHOOSE, CONSTANTS)
    assert_fuses(build, {"score": "sigmoid", "bias_on": "score"}, absorbed=("bias-for-choice", "sigmoid"))


def test_unread_weights_do_not_take_the_name_of_the_values_that_were_ranked() -> None:
    """They are without the bias: `verify` would compare the two."""
    text = "scores = Sigmoid (logits)" + CHOOSE
    was, model = block(text, CONSTANTS), block(text, CONSTANTS)
    rewrite(model)
    (router,) = (node for node in model.graph if is_router(node))
    assert router.outputs[0].name not in {value.name for node in was.graph for value in node.outputs}


def test_a_bias_that_is_wider_than_the_scores_stays() -> None:
    text = "sum = ReduceSum <keepdims = 1> (logits, minus1)\n scores = Sigmoid (sum)" + CHOOSE
    assert_stays(partial(block, text, CONSTANTS), status="left", sentence="stands before the choice, behind Sigmoid")


def test_weights_that_are_gathered_behind_a_view_are_left_over() -> None:
    """The bias is the choice's alone, so it is absorbed, but the router is not whole."""
    text = """
        scores = Sigmoid (logits)
        keys = Add (scores, bias)
        unused, ids = TopK (keys, k)
        deep = Reshape (scores, deep_scores)
        places = Reshape (ids, deep_ids)
        gathered = GatherElements <axis = 2> (deep, places)
        sum = ReduceSum <keepdims = 1> (gathered, two)
        share = Div (gathered, sum)
        weights = Squeeze (share, zero)"""
    constants = {**CONSTANTS, "deep_scores": np.array([1, -1, EXPERTS]), "deep_ids": np.array([1, -1, K])}
    assert_stays(partial(block, text, constants), status="partly", sentence="gathers values of the chosen experts")

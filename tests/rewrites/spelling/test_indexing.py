"""p[arange(T)[:, None], ids], by coordinates and by places."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import EXPERTS, HIDDEN, TOKENS, K, assert_fuses, assert_same, block

BIAS = np.random.default_rng(5).standard_normal(EXPERTS).astype(np.float32)
CONSTANTS = {"zero": np.array(0), "delta": np.array(1), "flat": np.array([-1]), "pair": np.array([1, K])}
COUNT = """
    scores = Sigmoid (logits)
    keys = Add (scores, bias)
    unused, ids = TopK (keys, k)
    shape = Shape (OF)
    tokens = Gather (shape, zero)
    counter = Range (zero, tokens, delta)
    numbers = Unsqueeze (counter, one)
"""
COORDINATES = """
    wide = Max (numbers, ids)
    both = Shape (wide)
    repeated = Expand (numbers, both)
    row = Unsqueeze (repeated, minus1)
    place = Unsqueeze (ids, minus1)
    at = Concat <axis = -1> (row, place)
    raw = GatherND (scores, at)
"""
PLACES = """
    widths = Shape <start = 1> (scores)
    firsts = Mul (numbers, widths)
    places = Add (ids, firsts)
    line = Flatten <axis = 2> (scores)
    tall = Gather (line, places)
    one_line = Reshape (tall, flat)
    as_ids = Shape (places)
    raw = Reshape (one_line, as_ids)
"""
NORMALISE = "total = ReduceSum <keepdims = 1> (raw, minus1)\n weights = Div (raw, total)"


@pytest.mark.parametrize("index", [COORDINATES, PLACES], ids=["coordinates", "places"])
def test_scores_by_an_index(index: str) -> None:
    text = COUNT.replace("OF", "x") + index + NORMALISE
    build = partial(block, text, {**CONSTANTS, "bias": BIAS})
    assert_fuses(build, {"score": "sigmoid", "normalize": 1}, absorbed=("gather-scores", "normalize", "sigmoid"))


@pytest.mark.parametrize("form", ["coordinates", "places"])
def test_rows_by_constants(form: str) -> None:
    """Where the number of tokens is fixed, so are the rows."""
    rows = np.arange(TOKENS)[:, None]
    if form == "coordinates":
        constants = {"row": np.repeat(rows, K, 1)[..., None]}
        index = "".join(
            line + "\n" for line in COORDINATES.splitlines() if not line.strip().startswith(("wide", "both"))
        )
        index = index.replace("repeated = Expand (numbers, both)", "").replace("row = Unsqueeze (repeated, minus1)", "")
    else:
        constants = {"firsts": rows * EXPERTS}
        index = PLACES.replace("firsts = Mul (numbers, widths)", "")
    head = "\n".join(COUNT.splitlines()[:4])

    def build(of: int = 0) -> ir.Model:
        fixed = {name: array + of for name, array in constants.items()}
        model = block(head + index + NORMALISE, {**CONSTANTS, **fixed, "bias": BIAS})
        for value in (model.graph.inputs[0], model.graph.outputs[0]):
            value.shape = ir.Shape([TOKENS, HIDDEN])
        return model

    assert_fuses(build, {"score": "sigmoid"}, absorbed=("gather-scores", "normalize", "sigmoid"))
    (site,) = rewrite(build(of=-1)).sites  # the rows before
    assert "gather-scores" not in site.absorbed


@pytest.mark.parametrize("index", [COORDINATES, PLACES], ids=["coordinates", "places"])
@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("counter = Range", "all = Range (zero, tokens, delta)\n counter = Mul (all, zero)\n spare = Range"),
        ("Range (zero, tokens, delta)", "Range (start, tokens, step)"),
    ],
    ids=["the first row alone", "backwards"],
)
def test_other_rows_stay(index: str, was: str, becomes: str) -> None:
    text = COUNT.replace("OF", "x").replace(was, becomes) + index + NORMALISE
    if "start" in becomes:  # T - 1, ..., 0
        text = text.replace("tokens, step", "before, step").replace(
            "counter =", "start = Sub (tokens, delta)\n before = Neg (delta)\n step = Neg (delta)\n counter ="
        )
    build = partial(block, text, {**CONSTANTS, "bias": BIAS})
    original, model = build(), build()
    (site,) = rewrite(model).sites
    assert site.status != "whole"
    assert any("gathers values of the chosen experts" in finding.detail for finding in site.findings)
    assert_same(original, model)


def test_rows_of_something_else_stay() -> None:
    """As many as another input has: were there one, it would be repeated."""
    text = COUNT.replace("OF", "other") + COORDINATES + NORMALISE
    model = block(
        "other = NonZero (x)\n turned = Transpose (other)\n" + text.replace("(other)", "(turned)"),
        {**CONSTANTS, "bias": BIAS},
    )
    (site,) = rewrite(model).sites
    assert "gather-scores" not in site.absorbed

"""ArgMax(x) -> indices(FusedRouter(x, k = 1)) and ReduceMax(x) -> its weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import EXPERTS, EXPERTS_TEXT, assert_fuses, assert_same, block

SCORES = "scores = Softmax <axis = -1> (logits)\n"
GATHERED = SCORES + "ids = ArgMax <axis = -1> (scores)\n weights = GatherElements <axis = -1> (scores, ids)"
LARGEST = SCORES + "weights = ReduceMax (scores, minus1)\n ids = ArgMax <axis = 1> (scores)"
DROPPED = (
    SCORES
    + "place = ArgMax <axis = -1, keepdims = 0> (scores)\n best = ReduceMax <keepdims = 0> (scores, minus1)\n"
    + "weights = Unsqueeze (best, minus1)\n ids = Unsqueeze (place, minus1)"
)
OF_LOGITS = (
    "ids = ArgMax <axis = -1> (logits)\n raw = GatherElements <axis = -1> (logits, ids)\n weights = Sigmoid (raw)"
)


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize(
    ("text", "expected", "absorbed"),
    [
        (GATHERED, {"score": "softmax"}, ("gather-scores", "softmax")),
        (LARGEST, {"score": "softmax"}, ("softmax",)),
        (DROPPED, {"score": "softmax"}, ("softmax",)),
        (OF_LOGITS, {"score": "sigmoid"}, ("gather-scores", "sigmoid-after-topk")),
    ],
    ids=["gathered", "largest", "without the last dimension", "of the chosen logit"],
)
def test_choice_of_one(text: str, expected: dict[str, Any], absorbed: tuple[str, ...], dtype: str) -> None:
    build = partial(block, text, dtype=dtype)
    assert_fuses(build, {"k": 1, **expected}, absorbed=absorbed, rtol=1e-5 if dtype == "float" else 3e-3)


def test_bfloat16() -> None:
    (site,) = rewrite(block(DROPPED, dtype="bfloat16")).sites
    assert (site.status, site.absorbed) == ("whole", ("softmax",))


def test_opset_with_axes_as_an_attribute() -> None:
    text = LARGEST.replace("ReduceMax (scores, minus1)", "ReduceMax <axes = [-1]> (scores)")
    build = partial(block, text, opset=17)
    assert_fuses(build, {"k": 1, "score": "softmax"}, absorbed=("softmax",))


SWITCH = """
    scores = Softmax <axis = -1> (logits)
    place = ArgMax <axis = -1, keepdims = 0> (scores)
    hot = OneHot (place, count, zero_one)
    so_far = CumSum (hot, zero)
    fits = LessOrEqual (so_far, capacity)
    number = Cast <to = 7> (fits)
    kept = Mul (hot, number)
    weights = ReduceMax (scores, minus1)
    ids = Unsqueeze (place, minus1)"""
SWITCH_EXPERTS = """
    x3 = Unsqueeze (x, zero_d)
    each = MatMul (x3, experts)
    outputs = Transpose <perm = [1, 0, 2]> (each)
    mask = Cast <to = 1> (kept)
    column = Unsqueeze (mask, minus1)
    masked = Mul (outputs, column)
    total = ReduceSum <keepdims = 0> (masked, one)
    y = Mul (total, weights)"""


def test_capacity_is_the_experts_affair() -> None:
    constants = {
        "count": np.array([EXPERTS]),
        "zero_one": np.array([0, 1]),
        "zero": np.array(0),
        "zero_d": np.array([0]),
        "capacity": np.array(6),
    }
    build = partial(block, SWITCH, constants, experts_text=SWITCH_EXPERTS, outputs=", int64[T, 1] ids")
    assert_fuses(build, {"k": 1, "score": "softmax"}, absorbed=("softmax",))


REFUSALS = {
    "last of equals": (
        GATHERED.replace("ArgMax <", "ArgMax <select_last_index = 1, "),
        "of equal scores it takes the last",
    ),
    "no score": (
        "ids = ArgMax <axis = -1> (logits)\n weights = ReduceMax (logits, minus1)",
        "neither is what it ranks a score, nor is one gathered by its choice",
    ),
    "first of two": (
        SCORES
        + "first = ArgMax <axis = -1> (scores)\n none = Identity (ninf)\n rest = ScatterElements <axis = -1> "
        + "(scores, first, nones)\n second = ArgMax <axis = -1> (rest)\n ids = Concat <axis = -1> (first, second)\n"
        + "weights = GatherElements <axis = -1> (scores, ids)",
        "makes its choice one of several",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    text, sentence = REFUSALS[name]
    text = text.replace("none = Identity (ninf)", "shape = Shape (first)\n nones = Expand (ninf, shape)")
    build = partial(block, text, {"ninf": -np.inf})
    model = build()
    result = rewrite(model)
    (site,) = result.sites
    assert (site.status, site.k, site.node) == ("left", 1, next(n.name for n in model.graph if n.op_type == "ArgMax"))
    (finding,) = site.findings
    assert finding.reason.slug == "argmax-form"
    assert sentence in finding.detail
    assert not result.modified
    assert_same(build(), model)


def test_no_expert_no_site() -> None:
    text = "token = ArgMax <axis = -1> (logits)\n" + SCORES + "weights, ids = TopK (scores, k)"
    sites = rewrite(block(text, outputs=", int64[T, 1] token")).sites
    assert [site.k for site in sites] == [2]


def test_switched_off() -> None:
    (site,) = rewrite(block(GATHERED), skip=["seed-argmax"]).sites
    assert site.status == "left"
    assert [finding.reason.slug for finding in site.findings] == ["rule-left-out"]


@pytest.mark.parametrize("text", [GATHERED, LARGEST, DROPPED], ids=["gathered", "largest", "dropped"])
def test_what_did_not_grow_is_a_choice_again(text: str) -> None:
    build = partial(block, text)
    model = build()
    (site,) = rewrite(model, skip=["softmax"]).sites
    assert site.status == "left"
    assert not any(node.op_type == "FusedRouter" for node in model.graph)
    assert_same(build(), model)
    assert not rewrite(model, skip=["softmax"]).modified


def test_a_choice_in_a_branch_gives_nothing_to_the_graph_around_it() -> None:
    choice = EXPERTS_TEXT.replace("ids", "place").replace("weights", "largest").replace("y =", "branch =")
    ends = f"""
        chooses = Cast <to = 9> (one_element)
        from_branch = If (chooses) <
            then_branch = chosen () => (float[T, 4] branch) {{
                place = ArgMax <axis = -1> (scores)
                {choice}
            }},
            else_branch = otherwise () => (float[T, 4] plain) {{ plain = Mul (x, largest) }}
        >
        weights = Mul (largest, largest)
        ids = ArgMax <axis = -1> (logits)
        places = Cast <to = 1> (ids)
        weighed = Mul (weights, places)
        y = Add (from_branch, weighed)"""
    # The constants are read outside, too: the block takes up no others.
    read = "\n".join(f"read_{name} = Identity ({name})" for name in ("experts", "minus1", "one_two", "two", "one"))
    text = f"{read}\n one_element = Squeeze (one)\n {SCORES} largest = ReduceMax (scores, minus1)"
    build = partial(block, text, experts_text=ends)
    original, model = build(), build()
    rewrite(model)
    assert_same(original, model)

"""f(weights(FusedRouter(x))) -> score = f, score_after_topk."""

from __future__ import annotations

from functools import partial

import pytest

from tests.rewrites.blocks import assert_fuses, assert_stays, block

CHOOSE = "raw, ids = TopK (logits, k)\n"


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize(
    ("line", "score"),
    [("Softmax <axis = 1> (raw)", "softmax"), ("Sigmoid (raw)", "sigmoid")],
    ids=["softmax", "sigmoid"],
)
def test_score_of_the_chosen(line: str, score: str, dtype: str) -> None:
    build = partial(block, CHOOSE + f"weights = {line}", dtype=dtype)
    expected = {"score": score, "score_after_topk": 1, "bias_on": "score"}
    assert_fuses(build, expected, absorbed=(f"{score}-after-topk",), rtol=1e-5 if dtype == "float" else 2e-3)


def test_sigmoid_then_renormalised() -> None:
    text = CHOOSE + "s = Sigmoid (raw)\n total = ReduceSum <keepdims = 1> (s, minus1)\n weights = Div (s, total)"
    expected = {"score": "sigmoid", "score_after_topk": 1, "normalize": 1, "normalize_min": 0.0}
    assert_fuses(partial(block, text), expected, absorbed=("sigmoid-after-topk", "normalize"))


def test_refuses_softmax_over_tokens() -> None:
    build = partial(block, CHOOSE + "s = Softmax <axis = 0> (raw)\n weights = Mul (s, half)", {"half": 0.5})
    assert_stays(build, status="left", sentence="still works on the weights", reason="left-over-after")


def test_refuses_a_second_score() -> None:
    build = partial(block, CHOOSE + "s = Softmax <axis = -1> (raw)\n weights = Sigmoid (s)")
    site = assert_stays(
        build, status="partly", sentence="the weights already have a score, or are normalised or scaled"
    )
    assert site.absorbed == ("softmax-after-topk",)

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


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("line", ["Div (raw, c)", "Mul (raw, c)"])
@pytest.mark.parametrize("score", ["Softmax <axis = -1>", "Sigmoid"])
def test_a_temperature_of_the_chosen(score: str, line: str, dtype: str) -> None:
    """It goes before the choice."""
    text = CHOOSE + f"cooled = {line}\n weights = {score} (cooled)"
    name = score.split()[0].lower()
    absorbed = ("scale", f"{name}-after-topk")
    expected = {"score": name, "score_after_topk": 1, "scale": 1.0}
    assert_fuses(
        partial(block, text, {"c": 0.5}, dtype=dtype),
        expected,
        absorbed=absorbed,
        rtol=1e-5 if dtype == "float" else 3e-3,
    )


@pytest.mark.parametrize("factor", [-0.5, 0.0])
def test_a_temperature_that_turns_the_ranking_stays(factor: float) -> None:
    text = CHOOSE + "cooled = Mul (raw, c)\n weights = Softmax <axis = -1> (cooled)"
    build = partial(block, text, {"c": factor})
    assert_stays(build, status="partly", sentence="the weights already have a score, or are normalised or scaled")


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

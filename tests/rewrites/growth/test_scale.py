"""weights(FusedRouter(x)) * c -> scale."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.rewrites.blocks import EXPERTS, K, assert_fuses, assert_stays, block

CHOOSE = "scores = Softmax <axis = -1> (logits)\n raw, ids = TopK (scores, k)\n"


@pytest.mark.parametrize(
    ("line", "scale"),
    [("Mul (raw, c)", 2.5), ("Mul (c, raw)", 2.5), ("Div (raw, c)", float(np.float32(0.4)))],
    ids=["w * c", "c * w", "w / c"],
)
def test_one_factor(line: str, scale: float) -> None:
    build = partial(block, CHOOSE + f"weights = {line}", {"c": 2.5})
    assert_fuses(build, {"scale": scale}, absorbed=("scale", "softmax"))


def test_factors_multiply() -> None:
    build = partial(block, CHOOSE + "more = Mul (raw, c)\n weights = Mul (more, d)", {"c": 2.5, "d": 4.0})
    assert_fuses(build, {"scale": 10.0}, absorbed=("scale", "softmax"))


@pytest.mark.parametrize(
    ("line", "score", "after", "expected"),
    [
        ("Mul (scores, c)", "Softmax <axis = -1>", "", {"scale": 2.5}),
        ("Mul (c, scores)", "Sigmoid", "", {"scale": 2.5}),
        ("Div (scores, c)", "Sigmoid", "", {"scale": float(np.float32(0.4))}),
        ("Mul (scores, c)", "Sigmoid", "weights = Div (raw, total)", {"scale": 1.0, "normalize_eps": 0.0}),
        ("Mul (scores, c)", "Sigmoid", "t = Add (total, eps)\n weights = Div (raw, t)", {"normalize_eps": 0.25}),
        ("Mul (scores, c)", "Sigmoid", "t = Max (total, eps)\n weights = Div (raw, t)", {"normalize_min": 0.25}),
    ],
    ids=["softmax", "sigmoid", "quotient", "normalised", "with an epsilon", "with a least sum"],
)
def test_a_factor_of_the_scores(line: str, score: str, after: str, expected: dict[str, float]) -> None:
    text = f"scores = {score} (logits)\n keys = {line}\n raw, ids = TopK (keys, k)\n"
    normalised = "total" in after
    if normalised:
        text += "total = ReduceSum <keepdims = 1> (raw, minus1)\n"
    absorbed = ("scale", score.split()[0].lower(), *(("normalize",) if normalised else ()))
    text = text + after if after else text.replace("raw", "weights")
    build = partial(block, text, {"c": 2.5, "eps": 0.625})
    assert_fuses(build, {"normalize": int(normalised), **expected}, absorbed=absorbed)


@pytest.mark.parametrize("factor", [-2.5, 0.0, np.inf, 1e-40], ids=str)
def test_a_factor_that_may_change_the_ranking_stays(factor: float) -> None:
    text = "scores = Sigmoid (logits)\n keys = Mul (scores, c)\n raw, ids = TopK (keys, k)\n weights = Mul (raw, d)"
    from ort_moe.rewrites import rewrite

    (site,) = rewrite(block(text, {"c": factor, "d": 2.0})).sites
    assert (site.status, site.absorbed) == ("partly", ("scale",))
    assert "Mul 'mul_2' stands before the choice" in site.findings[0].detail


def test_a_factor_of_scores_that_get_a_bias_stays() -> None:
    text = """
        scores = Sigmoid (logits)
        scaled = Mul (scores, c)
        keys = Add (scaled, bias)
        unused, ids = TopK (keys, k)
        weights = GatherElements <axis = 1> (scaled, ids)"""
    build = partial(block, text, {"c": 2.5, "bias": np.arange(EXPERTS, dtype=np.float32)})
    assert_stays(build, status="partly", sentence="also scales the score to which a bias is added")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (np.float32(np.inf), "is not one finite constant"),
        (np.ones(K, np.float32) / 2, "is not one finite constant"),
        (np.ones((1, 1, 1), np.float32) / 2, "is not one finite constant"),
    ],
    ids=["infinite", "one per rank", "raises the rank"],
)
def test_refuses_other_factors(value: np.ndarray, sentence: str) -> None:
    from ort_moe.rewrites import rewrite

    text = CHOOSE + "weights = Mul (raw, c)"
    if value.ndim == 3:
        text += "\n unused = Shape (weights)"
    model = block(text, {"c": value})
    (site,) = rewrite(model).sites
    assert site.status == "partly"
    assert any(sentence in finding.detail for finding in site.findings)


@pytest.mark.parametrize(
    "line",
    ["more = Mul (raw, big)\n weights = Mul (more, big)", "weights = Div (raw, tiny)"],
    ids=["overflows", "divided by a subnormal"],
)
def test_refuses_a_scale_that_float32_cannot_hold(line: str) -> None:
    from ort_moe.rewrites import rewrite

    (site,) = rewrite(block(CHOOSE + line, {"big": 1e30, "tiny": 1e-40})).sites
    assert site.status == "partly"
    assert any("which float32 cannot hold" in finding.detail for finding in site.findings)


def test_one_factor_behind_factors_per_expert() -> None:
    text = CHOOSE + "each = Gather (per_expert, ids)\n more = Mul (raw, each)\n weights = Mul (more, c)"
    constants = {"per_expert": np.linspace(0.5, 2.0, EXPERTS, dtype=np.float32), "c": 2.5}
    assert_fuses(partial(block, text, constants), {"scale": 2.5}, absorbed=("expert-scale", "scale", "softmax"))

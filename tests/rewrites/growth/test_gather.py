"""GatherElements(s, indices(FusedRouter(s + bias))) -> weights(FusedRouter(s, bias))."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.rewrites.blocks import EXPERTS, K, assert_fuses, assert_stays, block

BIAS = np.random.default_rng(5).standard_normal(EXPERTS).astype(np.float32)
GATHER = """
    unused, ids = TopK (keys, k)
    weights = GatherElements <axis = 1> (scores, ids)"""


@pytest.mark.parametrize(
    ("score", "name"),
    [("Sigmoid (logits)", "sigmoid"), ("Softmax <axis = -1> (logits)", "softmax")],
    ids=["sigmoid", "softmax"],
)
@pytest.mark.parametrize("line", ["Add (scores, bias)", "Add (bias, scores)"])
@pytest.mark.parametrize("shape", [(EXPERTS,), (1, EXPERTS)], ids=str)
def test_bias_for_the_choice(score: str, name: str, line: str, shape: tuple[int, ...]) -> None:
    build = partial(block, f"scores = {score}\n keys = {line}" + GATHER, {"bias": BIAS.reshape(shape)})
    expected = {"score": name, "bias_on": "score", "weights_from": "scores"}
    assert_fuses(build, expected, absorbed=("gather-scores", name))


def test_bias_behind_a_cast_and_an_unsqueeze() -> None:
    text = """
        scores = Sigmoid (logits)
        wide = Cast <to = 1> (bias16)
        row = Unsqueeze (wide, zero)
        keys = Add (scores, row)"""
    build = partial(block, text + GATHER, {"bias16": BIAS.astype(np.float16), "zero": np.array([0])})
    assert_fuses(build, {"score": "sigmoid"}, absorbed=("gather-scores", "sigmoid"))


def test_renormalised_and_scaled_in_half_precision() -> None:
    text = """
        scores = Sigmoid (logits)
        keys = Add (scores, bias)
        unused, ids = TopK <sorted = 0> (keys, k)
        raw = GatherElements <axis = 1> (scores, ids)
        wide = Cast <to = 1> (raw)
        sum = ReduceSum <keepdims = 1> (wide, minus1)
        total = Cast <to = 10> (sum)
        divisor = Add (total, eps)
        shares = Div (raw, divisor)
        weights = Mul (shares, factor)"""
    constants = {"bias": BIAS.astype(np.float16), "eps": 1e-3, "factor": 2.5}
    build = partial(block, text, constants, dtype="float16")
    expected = {"normalize": 1, "normalize_eps": float(np.float16(1e-3)), "scale": 2.5}
    assert_fuses(build, expected, absorbed=("gather-scores", "normalize", "scale", "sigmoid"), rtol=3e-3)


def test_scores_rounded_for_the_gather_alone() -> None:
    text = """
        wide = Cast <to = 1> (logits)
        scores = Sigmoid (wide)
        keys = Add (scores, bias)
        rounded = Cast <to = 10> (scores)
        unused, ids = TopK (keys, k)
        weights = GatherElements <axis = 1> (rounded, ids)"""
    build = partial(block, text, {"bias": BIAS}, dtype="float16")
    expected = {"score": "sigmoid", "bias_on": "score", "weights_from": "scores"}
    assert_fuses(build, expected, absorbed=("gather-scores", "sigmoid", "input-cast"), rtol=1e-3)


def test_refuses_scores_rounded_and_widened_for_the_gather() -> None:
    """All is float32 but for the rounding, which the weights would show."""
    text = """
        scores = Sigmoid (logits)
        keys = Add (scores, bias)
        unused, ids = TopK (keys, k)
        rounded = Cast <to = 10> (scores)
        widened = Cast <to = 1> (rounded)
        weights = GatherElements <axis = 1> (widened, ids)"""
    build = partial(block, text, {"bias": BIAS})
    assert_stays(build, status="partly", sentence="gathers values of the chosen experts")


def test_gather_without_a_bias() -> None:
    build = partial(block, "scores = Sigmoid (logits)\n keys = Identity (scores)" + GATHER)
    assert_fuses(build, {"score": "sigmoid"}, absorbed=("gather-scores", "sigmoid"))


SOFTMAX_GATHERED = """
    unused, ids = TopK (logits, k)
    scores = Softmax <axis = -1> (logits)
    raw = GatherElements <axis = 1> (scores, ids)
    total = ReduceSum <keepdims = 1> (raw, minus1)
    weights = Div (raw, total)"""


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_softmax_gathered_where_the_logits_are_ranked(dtype: str) -> None:
    build = partial(block, SOFTMAX_GATHERED, dtype=dtype)
    expected = {"score": "softmax", "score_after_topk": 0, "normalize": 1}
    assert_fuses(build, expected, absorbed=("gather-softmax", "normalize"), rtol=1e-5 if dtype == "float" else 3e-3)


@pytest.mark.parametrize(
    ("was", "becomes", "sentence"),
    [
        ("axis = -1> (logits)", "axis = 0> (logits)", "the softmax does not run over the experts"),
        ("axis = 1> (scores", "axis = 0> (scores", "not gathered along the last axis"),
        ("(logits)\n", "(other)\n", "neither the ranked keys nor those before an Add"),
        ("raw = Gather", "spare = Add (unused, unused)\n raw = Gather", "'unused' is also read by"),
    ],
    ids=["other softmax", "other gather", "other scores", "weights in use"],
)
def test_refuses_other_gathered_softmaxes(was: str, becomes: str, sentence: str) -> None:
    text = SOFTMAX_GATHERED.replace(was, becomes).replace("scores =", "other = Neg (logits)\n scores =")
    outputs = f", float[T, {K}] spare" if "spare" in text else ""
    assert_stays(partial(block, text, outputs=outputs), status="left", sentence=sentence)


def test_bias_on_logits_then_softmax_of_the_chosen() -> None:
    text = """
        keys = Add (logits, bias)
        unused, ids = TopK (keys, k)
        raw = GatherElements <axis = 1> (logits, ids)
        weights = Softmax <axis = -1> (raw)"""
    expected = {"score": "softmax", "score_after_topk": 1, "bias_on": "logits"}
    assert_fuses(partial(block, text, {"bias": BIAS}), expected, absorbed=("gather-scores", "softmax-after-topk"))


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize(
    ("keys", "bias_on"), [("Identity (logits)", "score"), ("Add (logits, bias)", "logits")], ids=["logits", "bias"]
)
def test_sigmoid_gathered_where_the_logits_are_ranked(keys: str, bias_on: str, dtype: str) -> None:
    text = f"""
        scores = Sigmoid (logits)
        keys = {keys}
        unused, ids = TopK (keys, k)
        raw = GatherElements <axis = 1> (scores, ids)
        total = ReduceSum <keepdims = 1> (raw, minus1)
        weights = Div (raw, total)"""
    bias = BIAS if dtype == "float" else BIAS.astype(np.float16)
    expected = {"score": "sigmoid", "score_after_topk": 1, "bias_on": bias_on, "normalize": 1}
    absorbed = ("gather-scores", "sigmoid-after-topk", "normalize")
    build = partial(block, text, {"bias": bias}, dtype=dtype)
    assert_fuses(build, expected, absorbed=absorbed, rtol=1e-5 if dtype == "float" else 3e-3)


def test_a_sigmoid_of_something_else_stays() -> None:
    text = "other = Neg (logits)\n keys = Identity (logits)\n scores = Sigmoid (other)" + GATHER
    assert_stays(partial(block, text), status="left", sentence="neither the ranked keys nor those before an Add")


@pytest.mark.parametrize(
    ("lines", "constants", "sentence"),
    [
        ("keys = Mul (scores, bias)" + GATHER, {"bias": BIAS}, "neither the ranked keys nor those before an Add"),
        ("other = Neg (logits)\n keys = Add (other, bias)" + GATHER, {"bias": BIAS}, "not what the bias was added to"),
        ("keys = Add (scores, bias)" + GATHER, {"bias": np.float32(1)}, "not a constant of one number per expert"),
    ],
    ids=["no add", "other scores", "scalar"],
)
def test_refusals(lines: str, constants: dict[str, Any], sentence: str) -> None:
    build = partial(block, "scores = Sigmoid (logits)\n" + lines, constants)
    assert_stays(build, status="left", sentence=sentence, reason="left-over-after")


def test_refuses_when_the_biased_keys_weigh_too() -> None:
    text = "scores = Sigmoid (logits)\n keys = Add (scores, bias)\n raw, ids = TopK (keys, k)"
    text += "\n pure = GatherElements <axis = 1> (scores, ids)\n weights = Mul (raw, pure)"
    site = assert_stays(partial(block, text, {"bias": BIAS}), status="left", sentence="'raw' is also read by Mul")
    assert site.attributes is None


def test_a_linear_bias_is_no_selection_bias() -> None:
    text = "biased = Add (logits, bias)\n scores = Softmax <axis = -1> (biased)\n weights, ids = TopK (scores, k)"
    assert_fuses(partial(block, text, {"bias": BIAS}), {"score": "softmax", "bias_on": "score"}, absorbed=("softmax",))


def test_bias_of_nan_stays() -> None:
    bias = np.where(np.arange(EXPERTS) < 2, np.float32(np.nan), BIAS)
    build = partial(block, "scores = Sigmoid (logits)\n keys = Add (scores, bias)" + GATHER, {"bias": bias})
    from ort_moe.rewrites import rewrite

    (site,) = rewrite(build()).sites
    assert site.status == "left"
    assert any("'bias' holds NaN" in finding.detail for finding in site.findings)

"""FusedRouter(c * Tanh(x / c)) -> softcap = c."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.rewrites.blocks import assert_fuses, assert_stays, block

CHOOSE = "\n scores = Sigmoid (capped)\n weights, ids = TopK (scores, k)"


@pytest.mark.parametrize(
    "text",
    [
        "inner = Div (logits, c)\n t = Tanh (inner)\n capped = Mul (t, c)",
        "inner = Mul (logits, inverse)\n t = Tanh (inner)\n capped = Mul (c, t)",
    ],
    ids=["quotient", "product"],
)
def test_soft_cap(text: str) -> None:
    build = partial(block, text + CHOOSE, {"c": 4.0, "inverse": 0.25})
    assert_fuses(build, {"softcap": 4.0, "score": "sigmoid"}, absorbed=("sigmoid", "softcap"))


def test_soft_cap_before_a_score_of_the_chosen() -> None:
    text = "inner = Div (logits, c)\n t = Tanh (inner)\n capped = Mul (t, c)\n raw, ids = TopK (capped, k)"
    build = partial(block, text + "\n weights = Softmax <axis = -1> (raw)", {"c": 4.0})
    assert_fuses(build, {"softcap": 4.0, "score_after_topk": 1}, absorbed=("softmax-after-topk", "softcap"))


@pytest.mark.parametrize(
    ("inner", "cap", "sentence"),
    [
        ("Div (logits, c)", "d", "the tanh's input is scaled by 0.25, not by the cap"),
        ("Identity (logits)", "c", "the tanh's input is not divided by a constant"),
        ("Div (logits, minus)", "minus", "is not one positive constant"),
    ],
)
def test_refusals(inner: str, cap: str, sentence: str) -> None:
    build = partial(
        block,
        f"inner = {inner}\n t = Tanh (inner)\n capped = Mul (t, {cap})" + CHOOSE,
        {"c": 4.0, "d": 3.0, "minus": -4.0},
    )
    assert_stays(build, status="partly", sentence=sentence, reason="left-over-before")


@pytest.mark.parametrize("inner", ["Div (X, c)", "Mul (X, inverse)"])
@pytest.mark.parametrize("wide", [False, True], ids=["in half", "in float"])
def test_half_precision(inner: str, wide: bool) -> None:
    x = "wide" if wide else "logits"
    text = f"""
        wide = Cast <to = 1> (logits)
        inner = {inner.replace("X", x)}
        bent = Tanh (inner)
        capped = Mul (bent, c)
        scores = Sigmoid (capped)
        raw, ids = TopK (scores, k)
        weights = Cast <to = 10> (raw)"""
    constants = {"c": np.array(4, np.float32 if wide else np.float16), "inverse": np.array(0.25, np.float16)}
    constants["inverse"] = constants["inverse"].astype(constants["c"].dtype)
    build = partial(block, text, constants, dtype="float16")
    absorbed = ("sigmoid", "softcap", "input-cast") if wide else ("sigmoid", "softcap")
    assert_fuses(build, {"score": "sigmoid", "softcap": 4.0}, absorbed=absorbed, rtol=3e-3)

"""weights(FusedRouter(x)) * c -> scale or expert_scale."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.rewrites.blocks import EXPERTS, K, assert_fuses, assert_stays, block

CHOOSE = "scores = Softmax <axis = -1> (logits)\n raw, ids = TopK (scores, k)\n"
PER_EXPERT = np.linspace(0.5, 2.0, EXPERTS, dtype=np.float32)


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


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_factor_per_expert(dtype: str) -> None:
    per_expert = PER_EXPERT.astype(np.float32 if dtype == "float" else np.float16)
    text = CHOOSE + "factors = Gather <axis = 0> (per_expert, ids)\n weights = Mul (raw, factors)"
    build = partial(block, text, {"per_expert": per_expert}, dtype=dtype)
    rtol = 1e-5 if dtype == "float" else 3e-3
    assert_fuses(build, {"scale": 1.0}, absorbed=("expert-scale", "softmax"), rtol=rtol)


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


def test_refuses_factors_gathered_by_other_ids() -> None:
    text = (
        CHOOSE
        + "other = Sub (seven, ids)\n factors = Gather <axis = 0> (per_expert, other)\n weights = Mul (raw, factors)"
    )
    build = partial(block, text, {"per_expert": PER_EXPERT, "seven": np.array(EXPERTS - 1)})
    original, model = build(), build()
    from ort_moe.rewrites import rewrite
    from tests.rewrites.blocks import assert_same

    (site,) = rewrite(model).sites
    assert site.absorbed == ("softmax",)
    assert_same(original, model)


def test_refuses_normalising_what_was_scaled() -> None:
    text = CHOOSE + "s = Mul (raw, c)\n t = ReduceSum <keepdims = 1> (s, minus1)\n weights = Div (s, t)"
    sentence = "the weights have already been normalised or scaled"
    assert_stays(partial(block, text, {"c": 2.0}), status="partly", sentence=sentence)


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


@pytest.mark.parametrize(
    "lines",
    [
        "factors = Gather (per_expert, ids)\n whole = Cast <to = 7> (factors)\n used = Cast <to = 1> (whole)",
        "factors = Gather (per_expert, ids)\n half = Cast <to = 10> (factors)\n used = Cast <to = 1> (half)",
        "bits = Cast <to = 9> (ids)\n other = Cast <to = 7> (bits)\n used = Gather <axis = 0> (per_expert, other)",
    ],
    ids=["factors truncated", "factors rounded", "indices truncated"],
)
def test_refuses_casts_that_change_the_numbers(lines: str) -> None:
    text = CHOOSE + lines + "\n weights = Mul (raw, used)"
    build = partial(block, text, {"per_expert": 3 * PER_EXPERT})
    original, model = build(), build()
    from ort_moe.rewrites import rewrite
    from tests.rewrites.blocks import assert_same

    (site,) = rewrite(model).sites
    assert site.absorbed == ("softmax",)
    assert_same(original, model)

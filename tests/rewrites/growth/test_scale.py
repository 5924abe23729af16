"""weights(FusedRouter(x)) * c -> scale."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.rewrites.blocks import EXPERTS, K, assert_fuses, block

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

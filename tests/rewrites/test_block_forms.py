"""What stands in front of a router and behind its experts is not the router's: it stays, and the router is whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import DTYPES, EXPERTS, EXPERTS_TEXT, HIDDEN, assert_fuses, assert_same, block

RNG = np.random.default_rng(11)
NORMALISED = "scores = Softmax <axis = -1> (X)\n raw, ids = TopK (scores, k)\n"
NORMALISED += "total = ReduceSum (raw, minus1)\n weights = Div (raw, total)"

BEFORE: dict[str, tuple[str, dict[str, Any]]] = {
    "a temperature": ("own = Div (logits, t)", {"t": np.array(0.7)}),
    "a multiplier": ("own = Mul (logits, t)", {"t": np.array(1.5)}),
    "a bias and a temperature": (
        "shifted = Add (logits, bias)\n own = Div (shifted, t)",
        {"t": np.array(0.7), "bias": RNG.standard_normal(EXPERTS)},
    ),
    "a factor per column": ("own = Mul (logits, columns)", {"columns": RNG.uniform(0.5, 2, EXPERTS)}),
    "an MLP": (
        "down = MatMul (x, first)\n bent = Gelu (down)\n up = MatMul (bent, second)\n own = Add (up, bias)",
        {
            "first": RNG.standard_normal((HIDDEN, 6)),
            "second": RNG.standard_normal((6, EXPERTS)),
            "bias": RNG.standard_normal(EXPERTS),
        },
    ),
    "a norm": (
        "normed = LayerNormalization (x, gain)\n scaled = Mul (normed, t)\n own = MatMul (scaled, second)",
        {"gain": RNG.uniform(0.5, 2, HIDDEN), "t": np.array(0.5), "second": RNG.standard_normal((HIDDEN, EXPERTS))},
    ),
}


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("name", BEFORE)
def test_in_front_of_the_router(name: str, dtype: str) -> None:
    lines, constants = BEFORE[name]
    arrays = {key: array.astype(DTYPES[dtype]) for key, array in constants.items()}
    build = partial(block, lines + "\n" + NORMALISED.replace("X", "own"), arrays, dtype=dtype)
    rtol = 1e-5 if dtype == "float" else 3e-3
    assert_fuses(build, {"score": "softmax", "normalize": 1}, absorbed=("normalize", "softmax"), rtol=rtol)


def test_a_constant_over_the_logits_is_no_linear_step() -> None:
    build = partial(block, "own = Div (t, logits)\n" + NORMALISED.replace("X", "own"), {"t": 1.0})
    (site,) = rewrite(build()).sites
    assert site.status == "partly"
    assert [finding.reason.slug for finding in site.findings] == ["left-over-before"]


BEHIND = {
    "scaled": "y = Mul (sum, t)",
    "cast": "wide = Cast <to = 1> (sum)\n more = Mul (wide, two_f)\n y = Cast <to = DTYPE> (more)",
    "a shared expert": "shared = MatMul (x, own)\n y = Add (sum, shared)",
    "a gated shared expert": (
        "shared = MatMul (x, own)\n g = MatMul (x, column_of)\n gate_of = Sigmoid (g)\n part = Mul (gate_of, shared)\n"
        "y = Add (sum, part)"
    ),
}


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("name", BEHIND)
def test_behind_the_experts(name: str, dtype: str) -> None:
    lines = BEHIND[name].replace("DTYPE", "1" if dtype == "float" else "10")
    experts_text = EXPERTS_TEXT.replace("y = ", "sum = ") + lines
    constants = {"t": np.array(2.5), "own": RNG.standard_normal((HIDDEN, HIDDEN)), "column_of": np.ones((HIDDEN, 1))}
    arrays = {key: array.astype(DTYPES[dtype]) for key, array in constants.items()} | {"two_f": np.float32(2)}
    build = partial(block, NORMALISED.replace("X", "logits"), arrays, dtype=dtype, experts_text=experts_text)
    original, model = build(), build()
    (site,) = rewrite(model).sites
    assert (site.status, set(site.absorbed)) == ("whole", {"normalize", "softmax"})
    assert_same(original, model, rtol=1e-5 if dtype == "float" else 5e-3)

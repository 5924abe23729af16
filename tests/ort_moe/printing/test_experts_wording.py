"""FusedExperts in words."""

from __future__ import annotations

import pytest

from ort_moe.ops import FUSED_EXPERTS, AttributeValue
from ort_moe.printing.experts_wording import phrase

PHRASES: dict[str, dict[str, AttributeValue]] = {
    "gated silu": {"activation": "silu", "gated": 1},
    "relu2": {"activation": "relu2", "gated": 0},
    "gated no activation, weighed before the first layer": {
        "activation": "identity",
        "gated": 1,
        "weight_on": "input",
    },
    "gated silu, slope 1.702, limit 7, value + 1, gate and value in turn": {
        "activation": "silu",
        "gated": 1,
        "gate_layout": "interleaved",
        "alpha": 1.702,
        "beta": 1.0,
        "limit": 7.0,
    },
    "gelu, weights in nvfp4": {"activation": "gelu", "gated": 0, "weight_format": "nvfp4"},
}


@pytest.mark.parametrize("expected", PHRASES)
def test_phrase(expected: str) -> None:
    assert phrase(FUSED_EXPERTS.complete(PHRASES[expected])) == expected

"""A router in a phrase, and step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ort_moe.ops import FUSED_ROUTER
from ort_moe.printing.router_wording import phrase, sentence

GROUPS = {"num_groups": 4, "topk_groups": 2, "group_fill": -math.inf}


@pytest.mark.parametrize(
    ("given", "inputs", "short", "long"),
    [
        (
            {"score": "softmax", "normalize": 1},
            (),
            "softmax, top 2, normalised",
            "softmax, the best 2 of 8 experts, division by their sum",
        ),
        (
            {"score": "softmax", "score_after_topk": 1},
            (),
            "top 2, softmax",
            "the best 2 of 8 experts, softmax of the chosen",
        ),
        (
            {"score": "none", "softcap": 30.0},
            (),
            "softcap 30, top 2",
            "soft cap of the logits at 30, the best 2 of 8 experts",
        ),
        (
            {"score": "sigmoid", "scale": 2.5, **GROUPS},
            ("selection_bias",),
            "sigmoid + bias, top 2 in the best 2 of 4 groups, times 2.5",
            "sigmoid, a bias per expert for the choice alone, the best 2 of 4 groups (a group's score: its largest "
            "value), the best 2 of 8 experts, times 2.5",
        ),
        (
            {"score": "sqrtsoftplus", "normalize": 1, "normalize_eps": 1e-20, "normalize_min": 1e-12},
            ("expert_scale",),
            "sqrtsoftplus, top 2, normalised, times a scale per expert",
            "square root of softplus, the best 2 of 8 experts, division by their sum + 1e-20, at least 1e-12, "
            "times a scale per expert",
        ),
        (
            {"score": "none"},
            ("selection_bias",),
            "input + bias, top 2",
            "a bias per expert for the choice alone, the best 2 of 8 experts",
        ),
        (
            {"score": "sparse_mixer", "mixer_threshold": 0.02},
            (),
            "sparse mixer, top 2",
            "sparse mixer with threshold 0.02, the best 2 of 8 experts",
        ),
    ],
)
def test_wording(given: dict[str, Any], inputs: tuple[str, ...], short: str, long: str) -> None:
    attributes = FUSED_ROUTER.complete({"k": 2, **given})
    assert phrase(attributes, inputs) == short
    assert sentence(attributes, inputs, 8) == long


def test_experts_not_known() -> None:
    assert sentence(FUSED_ROUTER.complete({"k": 2, "score": "none"}), (), None) == "the best 2 of all experts"

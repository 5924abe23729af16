"""The training ops' configurations mirror the op table and refuse what does not go together."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from ort_moe.ops import AUX_LOSS, FUSED_ROUTER, ROUTER_PROBS, ROUTER_SCORES
from ort_moe.ops.training_config import AuxLossConfig, RouterScoresConfig, check_router_probs, router_probs_config


def test_fields_are_the_attributes_of_the_table_in_its_order() -> None:
    assert [field.name for field in fields(RouterScoresConfig)] == [a.name for a in ROUTER_SCORES.attributes]
    assert [field.name for field in fields(AuxLossConfig)] == [a.name for a in AUX_LOSS.attributes]


def test_router_probs_has_the_attributes_of_a_router() -> None:
    others = {"mixer_threshold", "weights_from"}
    assert [a.name for a in ROUTER_PROBS.attributes] == [
        a.name for a in FUSED_ROUTER.attributes if a.name not in others
    ]
    config = router_probs_config({"k": 2, "score": "sigmoid", "scale": 2.5})
    assert (config.k, config.score, config.scale, config.weights_from) == (2, "sigmoid", 2.5, "scores")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"score": "sparse_mixer"}, "'score' must be 'softmax', 'sigmoid', 'sqrtsoftplus' or 'none'"),
        ({"weights_from": "scores"}, "no attribute 'weights_from'"),
        ({"k": 9}, "attribute 'k' must be at most the number of experts, 8, but is 9"),
        ({"num_groups": 3}, "attribute 'num_groups' must be a divisor"),
    ],
)
def test_wrong_attributes_of_router_probs_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^RouterProbs: .*{message}"):
        check_router_probs(router_probs_config({"k": 2, "score": "softmax"} | given), 8, False)


def test_too_many_experts_are_refused() -> None:
    config = router_probs_config({"k": 2, "score": "softmax"})
    check_router_probs(config, 8192, True)
    with pytest.raises(ValueError, match="RouterProbs: input 'logits' must have at most 8192 experts, but has 8193"):
        check_router_probs(config, 8193, True)


@pytest.mark.parametrize(
    ("config", "experts", "message"),
    [
        (RouterScoresConfig(0, "softmax", False, 0.0, 0.0), None, "RouterScores: attribute 'k' must be at least 1"),
        (
            RouterScoresConfig(9, "softmax", False, 0.0, 0.0),
            8,
            "'k' must be at most the number of experts, 8, but is 9",
        ),
        (RouterScoresConfig(1, "softmax", False, 0.0, -1.0), 8, "'softcap' must be finite and at least 0, but is -1"),
        (AuxLossConfig(9, 0.1, 0), 8, "AuxLoss: attribute 'k' must be at most the number of experts, 8, but is 9"),
        (AuxLossConfig(1, float("inf"), 0), 8, "'coeff' must be finite, but is inf"),
        (AuxLossConfig(1, 0.1, -1), 8, "'total_tokens' must be at least 0, but is -1"),
        (AuxLossConfig(1, 0.1, 1), 9000, "input 'probs' must have at most 8192 experts, but has 9000"),
    ],
)
def test_what_does_not_go_together_is_refused(config: Any, experts: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config.check(experts)

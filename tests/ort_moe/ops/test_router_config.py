"""RouterConfig: it mirrors the op table and refuses what does not go together."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ort_moe.ops import FUSED_ROUTER
from ort_moe.ops.router_config import RouterConfig
from tests.router_cases import router_attributes


def test_fields_are_the_attributes_of_the_table_in_its_order() -> None:
    assert [field.name for field in fields(RouterConfig)] == [a.name for a in FUSED_ROUTER.attributes]


@given(st.data())
def test_attributes_survive_a_round_trip(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 64))
    has_bias = data.draw(st.booleans())
    config = RouterConfig.from_attributes(data.draw(router_attributes(experts, has_selection_bias=has_bias)))
    config.check(experts, has_bias)
    config.check(None, has_bias)
    assert RouterConfig.from_attributes(config.attributes()) == config


def test_floats_are_rounded_to_float32() -> None:
    config = RouterConfig.from_attributes({"k": 1, "score": "softmax", "scale": 0.1, "normalize_eps": 1e-60})
    assert config.scale == float(np.float32(0.1))
    assert config.normalize_eps == 0.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scor": "softmax"}, "no attribute 'scor'; the attributes are k, score, "),
        ({"score": "soft"}, "'score' must be 'softmax', 'sigmoid', .* or 'sparse_mixer', but is 'soft'"),
        ({"k": 2.0}, r"'k' must be an int, but is 2\.0"),
        ({"normalize": 2}, "'normalize' must be 0 or 1, but is 2"),
        ({"group_fill": 1.0}, r"'group_fill' must be -inf or 0, but is 1\.0"),
        ({"scale": math.nan}, "'scale' must be a number, but is nan"),
        ({"score": "sparse_mixer"}, "'mixer_threshold' must be given"),
    ],
)
def test_wrong_values_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^FusedRouter: .*{message}"):
        RouterConfig.from_attributes({"k": 2, "score": "softmax"} | given)


MIXER = {"score": "sparse_mixer", "mixer_threshold": 0.1}


@pytest.mark.parametrize(
    ("given", "experts", "has_bias", "message"),
    [
        ({"k": 0}, None, False, "'k' must be at least 1, but is 0"),
        ({"k": 9}, 8, False, "'k' must be at most the number of experts, 8, but is 9"),
        ({"num_groups": 0}, None, False, "'num_groups' must be at least 1, but is 0"),
        ({"num_groups": 3}, 8, False, "'num_groups' must be a divisor of the number of experts, 8, but is 3"),
        (
            {"num_groups": 2, "topk_groups": 3},
            None,
            False,
            "'topk_groups' must be between 1 and num_groups = 2, but",
        ),
        ({"topk_groups": 0}, None, False, "'topk_groups' must be between 1 and num_groups = 1, but is 0"),
        ({"group_score_top": 0}, None, False, "'group_score_top' must be at least 1, but is 0"),
        ({"num_groups": 4, "group_score_top": 3}, 8, False, "'group_score_top' must be at most .* group, 2, but is 3"),
        ({"k": 3, "num_groups": 4}, 8, False, "'k' must be at most the experts of the kept groups, 2, but is 3"),
        ({"softcap": -1.0}, None, False, r"'softcap' must be finite and at least 0, but is -1\.0"),
        ({"softcap": math.inf}, None, False, "'softcap' must be finite and at least 0, but is inf"),
        ({"bias_on": "logits"}, None, True, "'bias_on' must be 'score' unless score_after_topk = 1, but is 'logits'"),
        ({"weights_from": "selection"}, None, True, "'weights_from' must be 'scores' with a selection_bias"),
        (MIXER | {"k": 3}, None, False, "'k' must be 2 with score = sparse_mixer, but is 3"),
        (MIXER | {"mixer_threshold": -0.1}, None, False, "'mixer_threshold' must be finite and at least 0"),
        (MIXER | {"score_after_topk": 1}, None, False, "'score_after_topk' must be 0 with score = sparse_mixer"),
        (MIXER | {"num_groups": 2}, None, False, "'topk_groups' must be equal to num_groups with score = sparse_mixer"),
        (
            MIXER | {"weights_from": "selection"},
            None,
            False,
            "'weights_from' must be 'scores' with score",
        ),
        (MIXER, None, True, "'selection_bias' must be absent with score = sparse_mixer"),
    ],
)
def test_what_does_not_go_together_is_refused(
    given: dict[str, Any], experts: int | None, has_bias: bool, message: str
) -> None:
    config = RouterConfig.from_attributes({"k": 2, "score": "softmax"} | given)
    with pytest.raises(ValueError, match=f"^FusedRouter: .*{message}"):
        config.check(experts, has_bias)


@pytest.mark.parametrize(
    ("given", "has_bias", "expected"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"num_groups": 2}, False, False),
        ({"num_groups": 2, "topk_groups": 2}, False, True),
        ({"score": "sigmoid"}, False, False),
        ({"score": "sigmoid", "score_after_topk": 1}, True, True),
        ({"score": "none"}, True, True),
        (MIXER, False, True),
    ],
)
def test_which_routers_rank_logits(given: dict[str, Any], has_bias: bool, expected: bool) -> None:
    config = RouterConfig.from_attributes({"k": 2, "score": "softmax"} | given)
    assert config.ranks_logits(has_bias) is expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, True),
        ({"num_groups": 2}, True),
        ({"normalize": 0}, False),
        ({"normalize_eps": 1e-20}, False),
        ({"normalize_min": 1e-12}, False),
        ({"normalize_min": -math.inf}, False),
        ({"score_after_topk": 1}, False),
        ({"weights_from": "selection"}, False),
        ({"score": "sigmoid"}, False),
    ],
)
def test_which_routers_are_a_softmax_over_the_chosen(given: dict[str, Any], expected: bool) -> None:
    config = RouterConfig.from_attributes({"k": 2, "score": "softmax", "normalize": 1} | given)
    assert config.chosen_softmax is expected

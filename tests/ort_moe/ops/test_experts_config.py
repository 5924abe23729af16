"""The attributes of a FusedExperts as one value."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from ort_moe.ops import FUSED_EXPERTS
from ort_moe.ops.experts_config import ExpertsConfig


def test_the_fields_are_the_attributes() -> None:
    assert [field.name for field in fields(ExpertsConfig)] == [a.name for a in FUSED_EXPERTS.attributes]


def test_neutral_values_fill_in() -> None:
    config = ExpertsConfig.from_attributes({"activation": "silu", "gated": 1, "limit": 0.1})
    assert config.weight_format == "dense"
    assert config.gated is True
    assert config.limit == pytest.approx(0.1)
    assert config.limit != 0.1  # rounded to float32
    assert config.fc1_rows(24) == 48
    assert ExpertsConfig.from_attributes({"activation": "relu", "gated": 0}).fc1_rows(24) == 24


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alhpa": 1.0}, "no attribute 'alhpa'; the attributes are weight_format, "),
        ({"gated": 2}, "attribute 'gated' must be 0 or 1, but is 2"),
        ({"weight_format": "int3"}, "attribute 'weight_format' must be 'dense', .* or 'fp8', but is 'int3'"),
        ({"weight_format": "int4"}, "'block_size' must be 16, 32, 64 or 128 with weight_format = int4, but is 0"),
        (
            {"weight_format": "int4", "block_size": 256},
            "attribute 'block_size' must be 0, 16, 32, 64 or 128, but is 256",
        ),
        ({"block_size": 32}, "attribute 'block_size' must be 0 with weight_format = dense, but is 32"),
        (
            {"weight_format": "mxfp4", "block_size": 32},
            "attribute 'block_size' must be 0 with weight_format = mxfp4, but is 32",
        ),
        ({"alpha": math.inf}, "attribute 'alpha' must be finite, but is inf"),
        ({"activation": "gelu", "alpha": 2.0}, "attribute 'alpha' must be 1 unless activation = silu, but is 2"),
        ({"limit": -1.0}, "attribute 'limit' must be finite and at least 0, but is -1"),
        ({"gated": 0, "beta": 1.0}, "attribute 'beta' must be 0 with gated = 0, but is 1"),
        ({"gated": 0, "limit": 1.0}, "attribute 'limit' must be 0 with gated = 0, but is 1"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"FusedExperts: .*{message}"):
        ExpertsConfig.from_attributes({"activation": "silu", "gated": 1} | given)

"""FusedRouter's emulation: against the float64 reference, and the properties that its contract states."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_moe.reference.float_math import ordered_key
from ort_moe.reference.fused_router import fused_router, fused_router_float64, router_keys_float64
from tests.router_cases import RouterCase, router_cases

# The routers of real models, by what they need from the op.
ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral": {"k": 2, "score": "softmax", "normalize": 1},
    "softmax unnormalised": {"k": 6, "score": "softmax"},
    "softmax after top-k": {"k": 4, "score": "softmax", "score_after_topk": 1},
    "sigmoid after top-k": {"k": 1, "score": "sigmoid", "score_after_topk": 1},
    "sigmoid": {"k": 8, "score": "sigmoid", "normalize": 1, "normalize_eps": 1e-20, "scale": 2.5},
    "sqrtsoftplus": {"k": 6, "score": "sqrtsoftplus", "normalize": 1, "normalize_eps": 1e-20, "scale": 1.5},
    "grouped sigmoid": {
        "k": 8,
        "score": "sigmoid",
        "num_groups": 8,
        "topk_groups": 4,
        "group_score_top": 2,
        "group_fill": 0.0,
        "normalize": 1,
        "normalize_eps": 1e-20,
        "scale": 2.5,
    },
    "grouped softmax": {"k": 6, "score": "softmax", "num_groups": 8, "topk_groups": 3, "scale": 16.0},
    "grouped softmax, kept keys": {
        "k": 6,
        "score": "softmax",
        "num_groups": 8,
        "topk_groups": 3,
        "weights_from": "selection",
        "normalize": 1,
    },
    "soft cap": {"k": 4, "score": "softmax", "softcap": 30.0, "normalize": 1},
    "logits": {"k": 4, "score": "none"},
    "sparse mixer": {"k": 2, "score": "sparse_mixer", "mixer_threshold": 0.02},
    "sparse mixer, wide": {"k": 2, "score": "sparse_mixer", "mixer_threshold": 1.5, "normalize": 1},
}


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_real_routers_agree_with_float64(router: str, with_bias: bool, dtype: Any) -> None:
    attributes = ROUTERS[router]
    if with_bias and (attributes["score"] == "sparse_mixer" or attributes.get("weights_from") == "selection"):
        return
    rng = np.random.default_rng(5)
    logits = rng.normal(0.0, 2.0, (40, 64)).astype(dtype)
    bias = rng.normal(0.0, 0.3, 64).astype(np.float32) if with_bias else None
    scale = rng.uniform(0.5, 2.0, 64).astype(np.float32)
    weights, indices = fused_router(logits, bias, scale, **attributes)
    expected_weights, expected_indices = fused_router_float64(logits, bias, scale, **attributes)
    assert weights.dtype == np.float32
    assert indices.dtype == expected_indices.dtype == np.int32
    np.testing.assert_array_equal(indices, expected_indices)
    np.testing.assert_allclose(weights, expected_weights, rtol=3e-6)


def key_tolerance(case: RouterCase) -> np.ndarray | None:
    """Four float32 ulps of the greatest number that enters each key, (T, E); None where no such bound holds.

    A soft cap's rounding is magnified by a score's slope, a softmax's by the distance from its maximum, and a group's
    choice depends on other keys.
    """
    attributes = case.attributes
    if attributes["softcap"] or attributes["topk_groups"] != attributes["num_groups"]:
        return None
    if attributes["score"] == "softmax" and case.has_selection_bias and not attributes["score_after_topk"]:
        return None
    # Without its bias, softmax ranks by x, as every other score ranks by its key.
    largest = np.abs(router_keys_float64(case.logits, None, **attributes)).reshape(-1, case.experts)
    if case.selection_bias is not None:
        largest = np.maximum(largest, np.abs(case.selection_bias))
    with np.errstate(invalid="ignore"):
        return 4.0 * np.spacing(largest.astype(np.float32)).astype(np.float64)


@settings(max_examples=150)
@given(router_cases(max_experts=300, textures=("normal", "wide", "close", "ties", "saturated")))
def test_ranking_is_exact_where_keys_are_further_apart_than_four_ulp(case: RouterCase) -> None:
    tolerance = key_tolerance(case)
    if tolerance is None:
        return
    keys = router_keys_float64(case.logits, case.selection_bias, **case.attributes).reshape(-1, case.experts)
    _, indices = case.emulate()
    for row, (row_keys, row_tolerance) in enumerate(zip(keys, tolerance, strict=True)):
        remaining = np.ones(case.experts, np.bool_)
        for chosen in indices.reshape(-1, case.k)[row]:
            remaining[chosen] = False
            lead = row_keys[remaining] - row_keys[chosen]
            assert (lead <= np.maximum(row_tolerance[remaining], row_tolerance[chosen])).all()


@settings(max_examples=150)
@given(router_cases(max_experts=300, textures=("normal", "close", "ties")))
def test_weights_are_close_to_float64_where_the_choice_is_the_same(case: RouterCase) -> None:
    if case.attributes["score"] == "none" and case.attributes["normalize"]:
        return  # a sum of both signs may cancel
    weights, indices = case.emulate()
    expected_weights, expected_indices = fused_router_float64(
        case.logits, case.selection_bias, case.expert_scale, **case.attributes
    )
    same = (indices == expected_indices).all(axis=-1)
    if case.attributes["score"] == "sparse_mixer":
        same &= case.texture == "normal"  # ties lie on the threshold
    np.testing.assert_allclose(weights[same], expected_weights[same], rtol=2e-5)


@given(router_cases(max_experts=300))
def test_indices_are_distinct_and_in_range(case: RouterCase) -> None:
    weights, indices = case.emulate()
    assert weights.shape == indices.shape == (*case.shape[:-1], case.k)
    for row in indices.reshape(-1, case.k):
        assert len(set(row.tolist())) == case.k
        assert row.min() >= 0
        assert row.max() < case.experts


@given(router_cases(max_experts=300, scores=("none", "softmax")))
def test_rank_order_is_the_total_order_with_the_lower_index_first(case: RouterCase) -> None:
    attributes = case.attributes | {"softcap": 0.0, "topk_groups": case.attributes["num_groups"]}
    attributes["k"] = min(case.k, case.experts)
    _, indices = fused_router(case.logits, None, None, **attributes)
    keys = ordered_key(case.logits.astype(np.float32)).reshape(-1, case.experts)
    for row, row_indices in zip(keys.tolist(), indices.reshape(-1, attributes["k"]).tolist(), strict=True):
        in_order = sorted(range(case.experts), key=lambda e: (-row[e], e))
        assert row_indices == in_order[: attributes["k"]]


@given(router_cases(max_experts=300, textures=("normal", "ties"), scores=("softmax", "sigmoid", "sqrtsoftplus")))
def test_normalised_weights_sum_to_the_scale(case: RouterCase) -> None:
    attributes = case.attributes | {
        "normalize": 1,
        "weights_from": "scores",
        "normalize_eps": 0.0,
        "normalize_min": 0.0,
    }
    weights, _ = fused_router(case.logits, case.selection_bias, None, **attributes)
    np.testing.assert_allclose(weights.sum(axis=-1, dtype=np.float64), attributes["scale"], rtol=1e-5)


@given(
    router_cases(max_experts=100, textures=("normal",), onnx_types=("float",), scores=("sigmoid", "none")), st.data()
)
def test_the_order_of_experts_does_not_matter_where_keys_differ(case: RouterCase, data: st.DataObject) -> None:
    attributes = case.attributes | {"topk_groups": case.attributes["num_groups"]}
    keys = router_keys_float64(case.logits, case.selection_bias, **attributes).reshape(-1, case.experts)
    ranked = np.sort(keys, axis=-1)
    apart = (np.diff(ranked) > 1e-5).all(axis=-1)
    order = np.array(data.draw(st.permutations(range(case.experts))), np.intp)
    bias = None if case.selection_bias is None else case.selection_bias[order]
    scale = None if case.expert_scale is None else case.expert_scale[order]
    weights, indices = fused_router(case.logits, case.selection_bias, case.expert_scale, **attributes)
    moved_weights, moved_indices = fused_router(case.logits[..., order], bias, scale, **attributes)
    k = attributes["k"]
    np.testing.assert_array_equal(order[moved_indices].reshape(-1, k)[apart], indices.reshape(-1, k)[apart])
    if case.attributes["score"] == "sigmoid":
        close = moved_weights.reshape(-1, k)[apart], weights.reshape(-1, k)[apart]
        np.testing.assert_allclose(*close, rtol=1e-5)


@given(
    router_cases(max_experts=300, textures=("normal", "ties"), scores=("softmax", "sigmoid", "sqrtsoftplus", "none"))
)
def test_only_experts_of_the_kept_groups_are_chosen(case: RouterCase) -> None:
    attributes = case.attributes | {"group_fill": -math.inf}
    _, indices = fused_router(case.logits, case.selection_bias, case.expert_scale, **attributes)
    groups = indices.reshape(-1, case.k) // (case.experts // int(attributes["num_groups"]))
    assert all(len(set(row.tolist())) <= int(attributes["topk_groups"]) for row in groups)


def test_group_ties_go_to_the_lower_group_and_its_lower_experts() -> None:
    _, indices = fused_router(np.zeros((1, 8), np.float32), k=3, score="sigmoid", num_groups=4, topk_groups=2)
    np.testing.assert_array_equal(indices, [[0, 1, 2]])


def test_group_score_is_the_sum_of_the_best_keys() -> None:
    logits = np.array([[5.0, -9.0, 3.0, 3.0]], np.float32)
    one = fused_router(logits, k=1, score="none", num_groups=2, topk_groups=1, group_score_top=1)
    two = fused_router(logits, k=1, score="none", num_groups=2, topk_groups=1, group_score_top=2)
    assert (one[1].item(), two[1].item()) == (0, 2)


def test_a_fill_of_zero_beats_negative_keys() -> None:
    logits = np.array([[-1.0, -2.0, -3.0, -4.0]], np.float32)
    weights, indices = fused_router(
        logits, k=2, score="none", num_groups=2, topk_groups=1, group_fill=0.0, weights_from="selection"
    )
    np.testing.assert_array_equal(indices, [[2, 3]])
    np.testing.assert_array_equal(weights, [[0.0, 0.0]])


@given(router_cases(max_experts=300, textures=("nan",)))
def test_a_nan_logit_makes_all_weights_of_its_row_nan_and_no_others(case: RouterCase) -> None:
    weights, _ = case.emulate()
    has_nan = np.isnan(case.logits.astype(np.float32)).any(axis=-1)
    assert np.isnan(weights[has_nan]).all()
    assert not np.isnan(weights[~has_nan]).any()


def test_nan_ranks_last() -> None:
    logits = np.array([[math.nan, -math.inf, math.nan, 1.0]], np.float32)
    _, indices = fused_router(logits, k=4, score="softmax")
    np.testing.assert_array_equal(indices, [[3, 1, 0, 2]])


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_softmax_of_a_row_of_infinities_is_nan(value: float) -> None:
    weights, indices = fused_router(np.full((1, 4), value, np.float32), k=2, score="softmax", normalize=1)
    assert np.isnan(weights).all()
    np.testing.assert_array_equal(indices, [[0, 1]])


@given(router_cases(max_experts=300))
def test_rows_do_not_depend_on_each_other(case: RouterCase) -> None:
    weights, indices = case.emulate()
    rows = case.logits.reshape(-1, case.experts)
    for row in range(len(rows)):
        alone = fused_router(rows[row], case.selection_bias, case.expert_scale, **case.attributes)
        np.testing.assert_array_equal(alone[0], weights.reshape(-1, case.k)[row])
        np.testing.assert_array_equal(alone[1], indices.reshape(-1, case.k)[row])


def test_all_experts_chosen_and_a_single_expert() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 9)).astype(np.float32)
    weights, indices = fused_router(logits, k=9, score="softmax")
    np.testing.assert_array_equal(np.sort(indices), np.tile(np.arange(9), (3, 1)))
    np.testing.assert_allclose(weights.sum(axis=-1), 1.0, rtol=1e-6)
    weights, indices = fused_router(logits[:, :1], k=1, score="softmax")
    np.testing.assert_array_equal(weights, np.ones((3, 1), np.float32))
    np.testing.assert_array_equal(indices, np.zeros((3, 1), np.int32))


@pytest.mark.parametrize("leading", [(), (0,), (4,), (2, 0), (2, 3), (1, 2, 3)])
def test_leading_dimensions_are_kept(leading: tuple[int, ...]) -> None:
    logits = np.random.default_rng(0).normal(size=(*leading, 16)).astype(np.float32)
    for router in (fused_router, fused_router_float64):
        weights, indices = router(logits, k=3, score="sigmoid")
        assert weights.shape == indices.shape == (*leading, 3)


def test_sparse_mixer_by_hand() -> None:
    # 2.0 is best; 1.99 shares with it at a threshold of 0.01, 1.9 does not. Without 2.0, 1.99 is best and 1.9 too far.
    logits = np.array([[1.9, 2.0, 1.99, -5.0]], np.float32)
    weights, indices = fused_router(logits, k=2, score="sparse_mixer", mixer_threshold=0.01)
    np.testing.assert_array_equal(indices, [[1, 2]])
    np.testing.assert_allclose(weights, [[1.0 / (1.0 + math.exp(-0.01)), 1.0]], rtol=1e-6)


LOGITS = np.zeros((2, 8), np.float32)


@pytest.mark.parametrize("router", [fused_router, fused_router_float64])
@pytest.mark.parametrize(
    ("logits", "bias", "scale", "message"),
    [
        (LOGITS.astype(np.float64), None, None, "'logits' must be float32, float16 or bfloat16, but is float64"),
        (np.float32(1.0).reshape(()), None, None, "'logits' must have rank 1 or more"),
        (LOGITS, np.zeros(7, np.float32), None, r"'selection_bias' must be float32 of shape \(8,\)"),
        (LOGITS, np.zeros(8, np.float16), None, "'selection_bias' must be float32 .* but is float16"),
        (LOGITS, None, np.zeros((1, 8), np.float32), r"'expert_scale' .* but is float32 of shape \(1, 8\)"),
        (LOGITS[:, :1], None, None, "'k' must be at most the number of experts, 1, but is 2"),
    ],
)
def test_wrong_arguments_are_refused(router: Any, logits: Any, bias: Any, scale: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^FusedRouter: .*{message}"):
        router(logits, bias, scale, k=2, score="softmax")

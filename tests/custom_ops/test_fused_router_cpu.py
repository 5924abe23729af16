"""The CPU kernel of FusedRouter in an ORT session returns the emulation's bits, and refuses what does not fit."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from ort_moe.ops import FUSED_ROUTER
from tests.op_models import op_session
from tests.router_cases import DTYPES, TEXTURES, RouterCase, router_cases
from tests.router_models import case_model, router_model, run_router


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit for bit, where every NaN is the same."""
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    same = (got.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(got) & np.isnan(expected))
    if not same.all():
        where = tuple(int(axis[0]) for axis in np.nonzero(~same))
        count = int((~same).sum())
        pytest.fail(f"{count} of {same.size} differ, first at {where}: {got[where]!r}, expected {expected[where]!r}")


def check(case: RouterCase, *, symbolic: bool = False) -> None:
    weights, indices = run_router(op_session(case_model(case, symbolic=symbolic)), case.logits)
    expected_weights, expected_indices = case.emulate()
    np.testing.assert_array_equal(indices, expected_indices)
    assert indices.dtype == np.int32
    assert_same_bits(weights, expected_weights)


GROUPED = {"k": 8, "num_groups": 8, "topk_groups": 4, "group_score_top": 2}


@settings(max_examples=400)
@given(router_cases())
def test_every_configuration_has_the_emulations_bits(case: RouterCase) -> None:
    check(case)


@pytest.mark.parametrize("texture", TEXTURES)
@pytest.mark.parametrize("onnx_type", DTYPES)
@pytest.mark.parametrize(
    ("attributes", "has_bias"),
    [
        ({"k": 8, "score": "softmax", "normalize": 1}, False),
        ({"k": 8, "score": "softmax", "softcap": 30.0}, True),
        ({"k": 8, "score": "softmax", "score_after_topk": 1}, False),
        (GROUPED | {"score": "sigmoid", "group_fill": 0.0, "normalize": 1, "normalize_eps": 1e-20, "scale": 2.5}, True),
        (GROUPED | {"score": "softmax", "weights_from": "selection"}, False),
        ({"k": 8, "score": "sqrtsoftplus", "normalize": 1}, True),
        ({"k": 2, "score": "sparse_mixer", "mixer_threshold": 0.02}, False),
    ],
    ids=lambda value: f"{value['score']}" if isinstance(value, dict) else None,
)
def test_every_kind_of_logits_has_the_emulations_bits(
    texture: str, onnx_type: str, attributes: dict[str, Any], has_bias: bool
) -> None:
    complete = FUSED_ROUTER.complete(attributes)
    check(RouterCase(complete, (33, 256), onnx_type, texture, 1, has_bias, has_expert_scale=has_bias))


@pytest.mark.parametrize("leading", [(), (0,), (5,), (0, 3), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_leading_dimensions(leading: tuple[int, ...], symbolic: bool) -> None:
    attributes = FUSED_ROUTER.complete({"k": 3, "score": "softmax", "normalize": 1})
    check(RouterCase(attributes, (*leading, 24)), symbolic=symbolic)


def test_one_session_serves_any_number_of_rows_and_threads() -> None:
    attributes = FUSED_ROUTER.complete(GROUPED | {"score": "sigmoid", "normalize": 1})
    cases = [RouterCase(attributes, (tokens, 128), seed=tokens) for tokens in (1, 700, 0, 64, 1300, 2)]
    session = op_session(case_model(cases[0], symbolic=True))
    results: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def serve(case: RouterCase) -> None:
        results[case.seed] = run_router(session, case.logits)

    threads = [threading.Thread(target=serve, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for case in cases:
        weights, indices = results[case.seed]
        expected_weights, expected_indices = case.emulate()
        np.testing.assert_array_equal(indices, expected_indices)
        assert_same_bits(weights, expected_weights)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"k": 0}, "attribute 'k' must be at least 1, but is 0"),
        ({"k": 9}, "attribute 'k' must be at most the number of experts, 8, but is 9"),
        ({"score": "soft"}, "attribute 'score' must be 'softmax', .* or 'sparse_mixer', but is 'soft'"),
        ({"normalize": 2}, "attribute 'normalize' must be 0 or 1, but is 2"),
        ({"scale": math.nan}, "attribute 'scale' must be a number, but is NaN"),
        ({"softcap": math.inf}, "attribute 'softcap' must be finite and at least 0, but is inf"),
        ({"num_groups": 3}, "attribute 'num_groups' must be a divisor of the number of experts, 8, but is 3"),
        ({"group_fill": 1.0}, "attribute 'group_fill' must be -inf or 0, but is 1"),
        ({"bias_on": "logits"}, "attribute 'bias_on' must be 'score' unless score_after_topk = 1"),
        (
            {"score": "sparse_mixer", "mixer_threshold": -1.0},
            "attribute 'mixer_threshold' must be finite",
        ),
    ],
)
def test_a_session_refuses_wrong_attributes(given: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=f"FusedRouter node 'router': {message}"):
        op_session(router_model({"k": 2, "score": "softmax"} | given, logits_shape=["tokens", 8]))


def test_a_session_refuses_missing_and_mistyped_attributes() -> None:
    with pytest.raises(Exception, match=r"attribute '.*' must be an int, but is missing"):
        op_session(router_model({"k": 2, "score": "softmax"}, logits_shape=["tokens", 8], complete=False))
    with pytest.raises(Exception, match=r"attribute 'k' must be an int, but is the float 2"):
        op_session(router_model({"k": 2.0, "score": "softmax"}, logits_shape=["tokens", 8]))


def test_a_session_refuses_wrong_inputs() -> None:
    attributes = {"k": 2, "score": "sigmoid"}
    with pytest.raises(Exception, match="input 'logits' must have type float, float16 or bfloat16, but has double"):
        op_session(router_model(attributes, onnx_type="double", logits_shape=["tokens", 8]))
    with pytest.raises(Exception, match=r"input 'expert_scale' must have shape \[8\], but has \[7\]"):
        op_session(router_model(attributes, logits_shape=["tokens", 8], expert_scale=np.ones(7, np.float32)))
    half = np.zeros(8, np.float16)
    with pytest.raises(Exception, match="input 'selection_bias' must have type float, but has float16"):
        op_session(router_model(attributes, logits_shape=["tokens", 8], selection_bias=half))


@pytest.mark.parametrize(
    ("shape", "scale", "message"),
    [
        ((3, 1), None, "attribute 'k' must be at most the number of experts, 1, but is 2"),
        ((3, 8), np.ones(7, np.float32), r"input 'expert_scale' must have shape \[8\], but has \[7\]"),
        ((3, 0), None, "attribute 'k' must be at most the number of experts, 0, but is 2"),
    ],
)
def test_a_run_refuses_what_only_then_is_known(shape: tuple[int, ...], scale: Any, message: str) -> None:
    model = router_model({"k": 2, "score": "softmax"}, logits_shape=["tokens", "experts"], expert_scale=scale)
    session = op_session(model)
    with pytest.raises(Exception, match=f"FusedRouter node 'router': {message}"):
        run_router(session, np.zeros(shape, np.float32))

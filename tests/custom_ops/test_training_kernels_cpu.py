"""The CPU kernels of the training ops, called by address, return the emulation's bits forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ort_moe.kernels import training
from ort_moe.ops import ROUTER_PROBS
from ort_moe.ops.training_config import AuxLossConfig, RouterScoresConfig, router_probs_config
from ort_moe.reference.router_probs import bitmap, router_probs
from tests.op_models import assert_same_bits
from tests.training_cases import (
    ON_HOST,
    SCORINGS,
    AuxLossCase,
    TrainingCase,
    aux_loss_cases,
    expected_aux_loss,
    expected_probs,
    expected_probs_grad,
    expected_scores,
    probs_cases,
    run_aux_loss,
    run_probs,
    run_probs_grad,
    run_scores,
    scores_cases,
)

THREADED = replace(ON_HOST, where={"cpu_threads": 3})


def assert_same_gradient(got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
    """Equal bits, where a zero has any sign."""
    assert_same_bits(got + got.dtype.type(0), expected + expected.dtype.type(0))


def test_probs_and_their_gradients_have_the_emulations_bits() -> None:
    for case in probs_cases():
        for got, expected in zip(run_probs(case), expected_probs(case), strict=True):
            assert_same_bits(got, expected)
        routing_map = router_probs(case.logits, case.selection_bias, **case.attributes).routing_map
        assert_same_gradient(run_probs_grad(case, routing_map), expected_probs_grad(case, routing_map))


def test_a_gradient_takes_any_map() -> None:
    rng = np.random.default_rng(0)
    for scoring in SCORINGS.values():
        case = TrainingCase(ROUTER_PROBS.complete({"k": 4, **scoring}), 9, 60, has_expert_scale=True)
        routing_map = rng.random(case.shape) < np.linspace(0.0, 1.0, case.tokens)[:, None]  # from none to all
        assert_same_gradient(run_probs_grad(case, routing_map), expected_probs_grad(case, routing_map))


def test_scores_and_their_gradients_have_the_emulations_bits() -> None:
    for case in scores_cases():
        scores, routing_map, grad = run_scores(case)
        expected = expected_scores(case)
        assert_same_bits(scores, expected[0])
        assert_same_bits(routing_map, expected[1])
        assert_same_gradient(grad, expected[2])


def test_losses_and_their_gradients_have_the_emulations_bits() -> None:
    for case in aux_loss_cases():
        for got, expected in zip(run_aux_loss(case), expected_aux_loss(case), strict=True):
            assert_same_gradient(got, expected)


@pytest.mark.parametrize("tokens", [0, 1, 65])
@pytest.mark.parametrize("experts", [1, 7, 64])
def test_all_experts_chosen_and_any_number_of_tokens(tokens: int, experts: int) -> None:
    case = TrainingCase(ROUTER_PROBS.complete({"k": experts, "score": "softmax"}), tokens, experts)
    probs, routing_map, indices = run_probs(case)
    assert routing_map.all()
    assert (np.sort(indices) == np.arange(experts)).all()
    assert_same_bits(probs, expected_probs(case)[0])
    assert_same_gradient(
        run_probs_grad(case, routing_map.view(np.bool_)), expected_probs_grad(case, routing_map.view(np.bool_))
    )
    run_scores(replace(case, attributes={"k": experts, "score": "sigmoid"}))
    loss, grad = run_aux_loss(AuxLossCase(tokens, experts))
    assert np.isfinite(loss).all()
    assert grad.shape == case.shape
    assert tokens or loss == 0.0


def test_maps_and_indices_agree() -> None:
    case = TrainingCase(ROUTER_PROBS.complete({"k": 5, "score": "sigmoid"}), 33, 67, texture="ties")
    _, bytes_, indices = run_probs(case)
    _, bits, _ = run_probs(replace(case, map_format="bit"))
    np.testing.assert_array_equal(bitmap(bytes_.view(np.bool_)), bits)
    assert (bytes_.sum(-1) == 5).all()
    assert np.take_along_axis(bytes_, indices.astype(np.intp), -1).all()


def test_threads_change_no_bit() -> None:
    case = TrainingCase(ROUTER_PROBS.complete({"k": 8, "score": "softmax", "normalize": 1}), 1100, 128)
    for one, several in zip(run_probs(case), run_probs(case, THREADED), strict=True):
        assert_same_bits(several, one)
    routing_map = run_probs(case)[1].view(np.bool_)
    assert_same_bits(run_probs_grad(case, routing_map, THREADED), run_probs_grad(case, routing_map))
    scores = replace(case, attributes={"k": 8, "score": "softmax"})
    losses = AuxLossCase(1100, 128)
    for _ in range(20):  # no order of threads matters
        for one, several in zip(run_scores(scores), run_scores(scores, THREADED), strict=True):
            assert_same_bits(several, one)
        for one, several in zip(run_aux_loss(losses), run_aux_loss(losses, THREADED), strict=True):
            assert_same_bits(several, one)


SIZES: dict[str, Any] = {"rows": 1, "dtype": "float", "cpu_threads": 1}


def test_wrong_calls_are_refused() -> None:
    probs = router_probs_config({"k": 2, "score": "softmax"})
    scores = RouterScoresConfig.from_attributes({"k": 2, "score": "softmax"})
    loss = AuxLossConfig.from_attributes({"k": 2, "coeff": 0.01})
    on_probs = {"logits": 0, "probs": 0, "routing_map": 0}
    on_scores = {"logits": 0, "scores": 0, "routing_map": 0}
    on_loss = {"probs": 0, "tokens_per_expert": 0, "loss": 0}
    with pytest.raises(RuntimeError, match="RouterProbs: attribute 'k' must be at most the number of experts, 1"):
        training.router_probs(probs, experts=1, **on_probs, **SIZES)
    with pytest.raises(RuntimeError, match="RouterScores: input 'logits' must have at most 8192 experts, but has 8193"):
        training.router_scores(scores, experts=8193, **on_scores, **SIZES)
    with pytest.raises(RuntimeError, match="AuxLoss: attribute 'k' must be at most the number of experts, 1, but is 2"):
        training.aux_loss(loss, experts=1, **on_loss, **SIZES)
    with pytest.raises(ValueError, match="map_format must be one of byte, bit, but is 'nibble'"):
        training.router_probs(probs, experts=8, map_format="nibble", **on_probs, **SIZES)
    with pytest.raises(ValueError, match="count_type must be one of int32, int64, float, but is 'double'"):
        training.aux_loss(loss, experts=8, count_type="double", **on_loss, **SIZES)

"""The emulated gradients of the training ops against finite differences of float64 references."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from ort_moe.ops import ROUTER_PROBS, AttributeValue
from ort_moe.reference.aux_loss import aux_loss, aux_loss_grad
from ort_moe.reference.fused_router import fused_router_float64
from ort_moe.reference.router_probs import router_probs, router_probs_grad
from ort_moe.reference.router_scores import router_scores, router_scores_grad
from tests.training_cases import SCORINGS

Float64Array = npt.NDArray[np.float64]
STEP = 2.0**-10
TOKENS, EXPERTS = 5, 16


def differences(
    function: Callable[[npt.NDArray[np.float32]], Float64Array], x: npt.NDArray[np.float32]
) -> Float64Array:
    """Central differences of a function (T, E) to (T) whose rows are independent: (T, E)."""
    result = np.empty(x.shape)
    for e in range(x.shape[-1]):
        above, below = x.copy(), x.copy()
        above[:, e] += np.float32(STEP)
        below[:, e] -= np.float32(STEP)
        width = above[:, e].astype(np.float64) - below[:, e]
        result[:, e] = (function(above) - function(below)) / width
    return result


def separate_logits() -> npt.NDArray[np.float32]:
    """Logits far enough apart that a step changes no choice."""
    rng = np.random.default_rng(0)
    return np.stack([rng.permutation(np.linspace(-2.0, 2.5, EXPERTS)) for _ in range(TOKENS)]).astype(np.float32)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_router_probs(scoring: str) -> None:
    attributes: dict[str, AttributeValue] = {"k": 3, **SCORINGS[scoring]}
    if ROUTER_PROBS.complete(attributes)["score"] == "none":
        attributes["normalize_min"] = 0.0
    rng = np.random.default_rng(1)
    logits = separate_logits()
    grad = rng.normal(size=logits.shape).astype(np.float32)
    scale = rng.uniform(0.5, 2.0, EXPERTS).astype(np.float32)

    def weighted(x: npt.NDArray[np.float32]) -> Float64Array:
        weights, indices = fused_router_float64(x, None, scale, **attributes)
        return np.asarray((weights * np.take_along_axis(grad, indices.astype(np.intp), -1)).sum(-1))

    routing_map = router_probs(logits, **attributes).routing_map
    got = router_probs_grad(logits, routing_map, grad, scale, **attributes)
    np.testing.assert_allclose(got, differences(weighted, logits), rtol=0, atol=2e-6 * np.abs(got).max() + 1e-6)
    assert np.abs(got).max() > 1e-3


def scores_float64(x: npt.NDArray[np.float32], score: str, normalize: bool) -> Float64Array:
    wide = x.astype(np.float64)
    if score == "softmax":
        terms = np.exp(wide)
        return np.asarray(terms / terms.sum(-1, keepdims=True))
    v = 1.0 / (1.0 + np.exp(-wide)) if score == "sigmoid" else np.sqrt(np.log1p(np.exp(wide)))
    return np.asarray(v / v.sum(-1, keepdims=True) if normalize else v)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("normalize", [False, True])
def test_router_scores(score: str, normalize: bool) -> None:
    logits = separate_logits()
    grad = np.random.default_rng(1).normal(size=logits.shape).astype(np.float32)
    attributes: dict[str, AttributeValue] = {"k": 3, "score": score, "normalize": int(normalize)}
    scores, routing_map = router_scores(logits, **attributes)
    np.testing.assert_allclose(scores, scores_float64(logits, score, normalize), rtol=1e-6)
    assert (routing_map == (logits >= np.sort(logits, -1)[:, -3:-2])).all()
    expected = differences(lambda x: np.asarray((scores_float64(x, score, normalize) * grad).sum(-1)), logits)
    got = router_scores_grad(logits, grad, **attributes)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("total", [None, 4000])
def test_aux_loss(total: int | None) -> None:
    rng = np.random.default_rng(0)
    probs = rng.random((700, 12), np.float32)
    counts = rng.integers(0, 300, 12)
    given = None if total is None else np.array(total)
    factor = 12 * float(np.float32(0.01)) / (2 * (total or 700) ** 2)
    expected = factor * (probs.astype(np.float64).sum(0) * counts).sum()
    assert aux_loss(probs, counts, given, k=2, coeff=0.01) == pytest.approx(expected, rel=1e-6)
    grad = aux_loss_grad(probs.shape, probs.dtype, counts, np.float32(3.0), given, k=2, coeff=0.01)
    np.testing.assert_allclose(grad, np.broadcast_to(3.0 * factor * counts, probs.shape), rtol=1e-6)

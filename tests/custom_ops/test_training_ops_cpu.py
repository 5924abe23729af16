"""RouterProbs, RouterScores and AuxLoss in an ORT session return the emulations' bits, and refuse what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ort_moe.ops import OPS, ROUTER_PROBS
from ort_moe.reference.aux_loss import aux_loss
from ort_moe.reference.router_probs import bitmap, router_probs
from ort_moe.reference.router_scores import router_scores
from tests.op_models import assert_same_bits, op_model, op_session, run_op, run_session
from tests.router_cases import DTYPES, random_logits

PROBS = ("probs", "routing_map", "indices")
SIGMOID: dict[str, Any] = {"k": 4, "score": "sigmoid", "normalize": 1, "normalize_eps": 1e-20, "scale": 2.5}
GROUPED: dict[str, Any] = SIGMOID | {"num_groups": 4, "topk_groups": 2, "group_score_top": 2}
SOFTMAX: dict[str, Any] = {"k": 4, "score": "softmax"}


def logits_of(leading: tuple[int, ...], onnx_type: str = "float", experts: int = 60) -> npt.NDArray[Any]:
    return random_logits("normal", (*leading, experts), DTYPES[onnx_type], np.random.default_rng(len(leading)))


def vector(seed: int, experts: int = 60) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(0.5, 2.0, experts).astype(np.float32)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("onnx_type", list(DTYPES))
@pytest.mark.parametrize("leading", [(), (0,), (1,), (65,), (2, 3)])
def test_router_probs(leading: tuple[int, ...], onnx_type: str, symbolic: bool) -> None:
    feeds = {"logits": logits_of(leading, onnx_type), "selection_bias": vector(0), "expert_scale": vector(1)}
    got = run_op("RouterProbs", feeds, GROUPED, outputs=PROBS, symbolic=symbolic)
    for name, expected in router_probs(**feeds, **GROUPED)._asdict().items():
        assert_same_bits(got[name], expected)
    bits = run_op("RouterProbs", feeds, GROUPED, outputs=("probs", "routing_bitmap"), symbolic=symbolic)
    assert_same_bits(bits["probs"], got["probs"])
    assert_same_bits(bits["routing_bitmap"], bitmap(got["routing_map"]))
    both = run_op("RouterProbs", feeds, GROUPED, outputs=(*PROBS, "routing_bitmap"), symbolic=symbolic)
    for name, expected in (got | bits).items():
        assert_same_bits(both[name], expected)


@pytest.mark.parametrize("onnx_type", list(DTYPES))
@pytest.mark.parametrize("attributes", [SIGMOID, SOFTMAX, SOFTMAX | {"normalize": 1}])
def test_a_model_is_served_with_the_weights_it_was_trained_with(attributes: dict[str, Any], onnx_type: str) -> None:
    logits = {"logits": logits_of((65,), onnx_type)}
    trained = run_op("RouterProbs", logits, attributes, outputs=PROBS)
    served = run_op("FusedRouter", logits, attributes)
    np.testing.assert_array_equal(trained["indices"], served["indices"])
    weights = np.take_along_axis(trained["probs"], served["indices"].astype(np.intp), -1)
    assert_same_bits(weights, served["weights"].astype(DTYPES[onnx_type]))
    np.put_along_axis(trained["probs"], served["indices"].astype(np.intp), 0, -1)
    assert not trained["probs"].any()


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("onnx_type", list(DTYPES))
@pytest.mark.parametrize("leading", [(), (0,), (65,), (2, 3)])
def test_router_scores(leading: tuple[int, ...], onnx_type: str, symbolic: bool) -> None:
    attributes: dict[str, Any] = {"k": 4, "score": "sqrtsoftplus", "normalize": 1, "softcap": 10.0}
    feeds = {"logits": logits_of(leading, onnx_type)}
    expected = router_scores(feeds["logits"], **attributes)
    got = run_op("RouterScores", feeds, attributes, outputs=("scores", "routing_map"), symbolic=symbolic)
    assert_same_bits(got["scores"], expected.scores)
    assert_same_bits(got["routing_map"], expected.routing_map)
    bits = run_op("RouterScores", feeds, attributes, outputs=("scores", "routing_bitmap"), symbolic=symbolic)
    assert_same_bits(bits["routing_bitmap"], bitmap(expected.routing_map))


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("total", [None, np.array(700), np.array([700.0], np.float32), np.array(0, np.int32)])
@pytest.mark.parametrize("leading", [(), (0,), (2, 300)])
def test_aux_loss(leading: tuple[int, ...], total: npt.NDArray[Any] | None, symbolic: bool) -> None:
    feeds = {"probs": np.abs(logits_of(leading, "bfloat16")), "tokens_per_expert": np.arange(60, dtype=np.int64)}
    if total is not None:
        feeds["total"] = total
    attributes: dict[str, Any] = {"k": 4, "coeff": 0.01}
    got = run_op("AuxLoss", feeds, attributes, symbolic=symbolic)["loss"]
    assert_same_bits(got, np.array(aux_loss(**feeds, **attributes)))


def test_one_session_serves_any_number_of_rows() -> None:
    logits = [{"logits": logits_of((tokens,))} for tokens in (3, 0, 700, 1)]
    session = op_session(op_model("RouterProbs", logits[0], SIGMOID, outputs=PROBS, symbolic=True))
    for feeds in logits:
        assert_same_bits(run_session(session, feeds)["probs"], router_probs(**feeds, **SIGMOID).probs)


LOGITS = {"logits": np.zeros((3, 8), np.float32)}
LOSS: dict[str, Any] = {"probs": np.zeros((3, 8), np.float32), "tokens_per_expert": np.zeros(8, np.int64)}


@pytest.mark.parametrize(
    ("op_name", "feeds", "given", "outputs", "message"),
    [
        ("RouterProbs", LOGITS, SOFTMAX | {"k": 9}, PROBS, "attribute 'k' must be at most the number of experts, 8"),
        ("RouterProbs", LOGITS, SOFTMAX | {"score": "sparse_mixer"}, PROBS, "attribute 'score' must be 'softmax', "),
        (
            "RouterProbs",
            LOGITS | {"expert_scale": np.ones(7, np.float32)},
            SOFTMAX,
            PROBS,
            r"input 'expert_scale' must have shape \[8\], but has \[7\]",
        ),
        (
            "RouterProbs",
            LOGITS,
            SOFTMAX,
            ("probs", "indices"),
            "output 'routing_map' or 'routing_bitmap' must be there, but neither is",
        ),
        (
            "RouterScores",
            {"logits": np.zeros((1, 8193), np.float32)},
            SOFTMAX,
            ("scores", "routing_map"),
            "input 'logits' must have at most 8192 experts, but has 8193",
        ),
        (
            "RouterScores",
            LOGITS,
            SOFTMAX | {"score": "none"},
            ("scores", "routing_map"),
            "attribute 'score' must be 'softmax', 'sigmoid' or 'sqrtsoftplus', but is 'none'",
        ),
        (
            "AuxLoss",
            LOSS | {"tokens_per_expert": np.zeros(7, np.int64)},
            {"k": 2, "coeff": 0.01},
            None,
            r"input 'tokens_per_expert' must have shape \[8\], but has \[7\]",
        ),
        (
            "AuxLoss",
            LOSS | {"tokens_per_expert": np.zeros(8, np.float64)},
            {"k": 2, "coeff": 0.01},
            None,
            "input 'tokens_per_expert' must have type int32, int64 or float, but has double",
        ),
        (
            "AuxLoss",
            LOSS | {"total": np.zeros(2, np.int64)},
            {"k": 2, "coeff": 0.01},
            None,
            r"input 'total' must have shape \[1\], but has \[2\]",
        ),
        ("AuxLoss", LOSS, {"k": 2, "coeff": float("inf")}, None, "attribute 'coeff' must be finite, but is inf"),
    ],
)
def test_a_session_refuses_what_does_not_fit(
    op_name: str, feeds: dict[str, Any], given: dict[str, Any], outputs: tuple[str, ...] | None, message: str
) -> None:
    with pytest.raises(Exception, match=f"{op_name} node 'node': {message}"):
        op_session(op_model(op_name, feeds, given, outputs=outputs))


@pytest.mark.parametrize(
    ("op_name", "feeds", "given", "outputs", "message"),
    [
        ("RouterProbs", LOGITS, SOFTMAX | {"k": 9}, PROBS, "attribute 'k' must be at most the number of experts, 8"),
        (
            "RouterScores",
            {"logits": np.zeros(8193, np.float32)},
            SOFTMAX,
            ("scores", "routing_map"),
            "input 'logits' must have at most 8192 experts, but has 8193",
        ),
        (
            "AuxLoss",
            LOSS | {"total": np.zeros(2, np.int64)},
            {"k": 2, "coeff": 0.01},
            None,
            r"input 'total' must have shape \[1\], but has \[2\]",
        ),
    ],
)
def test_a_run_refuses_what_only_then_is_known(
    op_name: str, feeds: dict[str, Any], given: dict[str, Any], outputs: tuple[str, ...] | None, message: str
) -> None:
    with pytest.raises(Exception, match=f"{op_name} node 'node': {message}"):
        run_op(op_name, feeds, given, outputs=outputs, symbolic=True)


@pytest.mark.parametrize("attribute", [attribute.name for attribute in ROUTER_PROBS.attributes])
def test_every_attribute_is_required(attribute: str) -> None:
    complete = OPS["RouterProbs"].complete(SOFTMAX)
    del complete[attribute]
    with pytest.raises(Exception, match=f"attribute '{attribute}' must be an? .*, but is missing"):
        op_session(op_model("RouterProbs", LOGITS, complete, outputs=PROBS, complete=False))

"""RouterProbs, RouterScores and AuxLoss on CUDA in an ORT session return the emulations' bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ort_moe.reference.aux_loss import aux_loss
from ort_moe.reference.router_probs import bitmap, router_probs
from ort_moe.reference.router_scores import router_scores
from tests.op_models import assert_same_bits, run_op
from tests.router_cases import DTYPES, random_logits

pytestmark = pytest.mark.gpu

CUDA: dict[str, Any] = {"providers": ["CUDAExecutionProvider"]}
SIGMOID: dict[str, Any] = {"k": 4, "score": "sigmoid", "normalize": 1, "normalize_eps": 1e-20, "scale": 2.5}


@pytest.mark.parametrize("onnx_type", list(DTYPES))
@pytest.mark.parametrize("tokens", [0, 1, 65])
def test_sessions(tokens: int, onnx_type: str) -> None:
    logits = {"logits": random_logits("normal", (tokens, 60), DTYPES[onnx_type], np.random.default_rng(tokens))}
    bias = {"selection_bias": np.linspace(-0.5, 0.5, 60, dtype=np.float32)}
    expected = router_probs(**logits, **bias, **SIGMOID)
    got = run_op("RouterProbs", logits | bias, SIGMOID, outputs=expected._fields, **CUDA)
    for name, values in expected._asdict().items():
        assert_same_bits(got[name], values)
    bits = run_op("RouterProbs", logits | bias, SIGMOID, outputs=("probs", "routing_bitmap"), **CUDA)
    assert_same_bits(bits["routing_bitmap"], bitmap(expected.routing_map))

    softmax: dict[str, Any] = {"k": 4, "score": "softmax"}
    scores = router_scores(**logits, **softmax)
    got = run_op("RouterScores", logits, softmax, outputs=scores._fields, **CUDA)
    for name, values in scores._asdict().items():
        assert_same_bits(got[name], values)

    loss = {"probs": scores.scores, "tokens_per_expert": np.arange(60), "total": np.array(100)}
    attributes: dict[str, Any] = {"k": 4, "coeff": 0.01}
    assert_same_bits(run_op("AuxLoss", loss, attributes, **CUDA)["loss"], np.array(aux_loss(**loss, **attributes)))

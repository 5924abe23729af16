"""Explanations name a stable code, the node, its other consumers and a way out."""

from __future__ import annotations

import json
import math

import pytest

import models.fixtures
from ort_moe.explanation import Explanation, describe_router, explain
from ort_moe.ops import FUSED_ROUTER
from ort_moe.reasons import REASONS
from ort_moe.rewrites import Finding, Site

REASON = REASONS["left-over-after"]
SITE = Site(
    node="topk_1",
    graph="main",
    status="partly",
    experts=8,
    k=2,
    attributes=FUSED_ROUTER.complete({"k": 2, "score": "softmax"}),
    absorbed=("softmax",),
    findings=(Finding(REASON, "div_1", "Div works on the weights", tuple(f"reader_{i}" for i in range(8))),),
)


def test_tells_all_there_is() -> None:
    text = str(Explanation((SITE,)))
    for expected in (
        "site 0: topk_1",
        "fused partly; 8 experts; softmax, top 2",
        "absorbed: softmax",
        f"{REASON.code} {REASON.slug}: {REASON.sentence}",
        "at div_1: Div works on the weights",
        "also used by: reader_0, reader_1, reader_2, reader_3, reader_4, reader_5 and 2 more",
    ):
        assert expected in text
    assert REASON.remedy.split(".")[0] in " ".join(text.split())


def test_what_concerns_the_whole_model() -> None:
    finding = Finding(REASONS["shape-inference-failed"], "", "node 'x' has no type")
    explanation = Explanation((), (finding,))
    assert "the model\n  OM009 shape-inference-failed" in str(explanation)
    assert "node 'x' has no type" in str(explanation)
    assert explanation.to_dict()["findings"][0]["code"] == "OM009"


def test_document() -> None:
    (site,) = Explanation((SITE,)).to_dict()["sites"]
    assert json.loads(json.dumps(site, allow_nan=False)) == site
    assert set(site) == {"node", "graph", "status", "experts", "k", "attributes", "absorbed", "findings"}
    assert site["findings"][0]["code"] == REASON.code
    assert set(site["findings"][0]) == {"code", "slug", "node", "detail", "consumers"}


def test_layer() -> None:
    explanation = explain(models.fixtures.get("mixtral_causal_lm_dynamo_fp32").path)
    assert len(explanation.sites) == 2
    assert explanation.layer(1).sites == explanation.sites[1:]
    with pytest.raises(IndexError, match="there is no site 2: there are 2, numbered from 0"):
        explanation.layer(2)


def test_nothing_to_explain() -> None:
    assert "No TopK: there is no site to fuse" in str(Explanation(()))


@pytest.mark.parametrize(
    ("given", "phrase"),
    [
        ({"score": "softmax", "normalize": 1}, "softmax, top 2, normalised"),
        ({"score": "softmax", "score_after_topk": 1}, "top 2, softmax"),
        ({"score": "none", "softcap": 30.0}, "softcap 30, top 2"),
        (
            {"score": "sigmoid", "num_groups": 4, "topk_groups": 2, "scale": 2.5, "group_fill": -math.inf},
            "sigmoid, top 2 in the best 2 of 4 groups, times 2.5",
        ),
    ],
)
def test_router_in_a_phrase(given: dict[str, int | float | str], phrase: str) -> None:
    assert describe_router(FUSED_ROUTER.complete({"k": 2, **given})) == phrase

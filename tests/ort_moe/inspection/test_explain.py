"""Explanations tell how far fusion went, what stopped it, who else is concerned, and what to do."""

from __future__ import annotations

import pytest

import models.fixtures
from docs.code_examples import EXAMPLES, Example
from ort_moe.inspection.explain import Explanation, explain
from ort_moe.ops import FUSED_ROUTER
from ort_moe.reasons import REASONS
from ort_moe.rewrites import Finding, Site, rewrite

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
    inputs=("logits",),
    surroundings=("[div_1] y = Div (w, s)",),
)

ROUTER = """\
moe (float[T, 4] x) => (float[T, 4] y{outputs})
<float[4, 8] gate, float[8, 4, 4] experts, int64[1] k = {{2}}, int64[1] last = {{-1}}>
{{
    logits = MatMul (x, gate)
    {router}
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}}"""


def explained(router: str, outputs: str = "") -> str:
    result = rewrite(Example("", ROUTER.format(router=router, outputs=outputs)).model())
    return str(Explanation(result.sites, result.findings))


def test_tells_all_there_is() -> None:
    assert str(Explanation((SITE,))).splitlines() == [
        "site 0: topk_1: fused partly",
        "  fused: softmax, the best 2 of 8 experts",
        "  by the rules: softmax",
        f"  {REASON.code} {REASON.slug}: {REASON.sentence}",
        "    div_1: Div works on the weights",
        "    also read by: reader_0, reader_1, reader_2, reader_3, reader_4, reader_5 and 2 more",
        f"    what to do: {REASON.remedy}",
    ]


def test_what_concerns_the_whole_model() -> None:
    finding = Finding(REASONS["shape-inference-failed"], "", "node 'x' has no type")
    explanation = Explanation((), (finding,))
    assert "the model\n  OM009 shape-inference-failed" in str(explanation)
    assert "node 'x' has no type" in str(explanation)
    assert explanation.to_dict()["findings"][0]["code"] == "OM009"


def test_document() -> None:
    (site,) = Explanation((SITE,)).to_dict()["sites"]
    assert site["surroundings"] == ["[div_1] y = Div (w, s)"]
    assert site["findings"][0]["remedy"] == REASON.remedy


def test_layer() -> None:
    explanation = explain(models.fixtures.get("mixtral_causal_lm_dynamo_fp32").path)
    assert len(explanation.sites) == 2
    assert explanation.layer(1).sites == explanation.sites[1:]
    assert str(explanation.layer(1)).startswith("site 1: ")
    with pytest.raises(IndexError, match="there is no site 2: there are 2, numbered from 0"):
        explanation.layer(2)


def test_nothing_to_explain() -> None:
    assert "nothing to fuse" in str(Explanation(()))


@pytest.mark.parametrize("slug", EXAMPLES)
def test_every_finding_tells_what_to_do(slug: str) -> None:
    result = rewrite(EXAMPLES[slug].model(), skip=EXAMPLES[slug].skip, target=EXAMPLES[slug].target)
    text = str(Explanation(result.sites, result.findings))
    findings = [*result.findings, *(finding for site in result.sites for finding in site.findings)]
    assert text.count("what to do: ") == len(findings)
    assert all(finding.detail in text and finding.remedy in text for finding in findings)
    assert all(site.surroundings for site in result.sites if site.findings)


@pytest.mark.parametrize(
    ("router", "outputs", "sentences"),
    [
        pytest.param(
            "s = Softmax (logits)\n raw, ids = TopK (s, k)\n t = ReduceSum (raw, last)\n weights = Div (raw, t)",
            ", float[T, 2] raw",
            [
                "fused: softmax, the best 2 of 8 experts",
                "OM010 read-by-others",
                "ReduceSum 'reducesum_t' still works on the weights",
                "'raw' is also read by output 'raw' of the model",
                "what to do: Export without what else reads it: output 'raw' of the model.",
            ],
            id="an output of the model",
        ),
        pytest.param(
            "s = Softmax (logits)\n raw, ids = TopK (s, k)\n t = ReduceSum (raw, last)\n weights = Div (raw, t)\n"
            "entropy = Log (raw)",
            ", float[T, 2] entropy",
            ["OM010 read-by-others", "what to do: Export without what else reads it: Log 'log_entropy'."],
            id="another node",
        ),
        pytest.param(
            "s = Selu (logits)\n weights, ids = TopK (s, k)",
            "",
            ["OM005 router-did-not-grow", "its input is from Selu 'selu_s', its weights go to Einsum 'einsum_y'"],
            id="a score that is not known",
        ),
        pytest.param(
            "s = Softmax <axis = 0> (logits)\n weights, ids = TopK (s, k)",
            "",
            ["OM006 left-over-before", "Softmax 'softmax_s'", "the softmax does not run over the experts"],
            id="a softmax over the tokens",
        ),
        pytest.param(
            "mean = ReduceMean <keepdims = 1> (x, last)\n c = Div (logits, mean)\n s = Exp (c)\n q = Sqrt (s)\n"
            "raw, ids = TopK (q, k)\n t = ReduceSum (raw, last)\n weights = Div (raw, t)",
            "",
            ["OM006 left-over-before", "Sqrt 'sqrt_q' stands before the choice, behind Exp 'exp_s', Div 'div_c'"],
            id="several steps before the choice",
        ),
        pytest.param(
            "s = Softmax (logits)\n weights, ids = TopK <largest = 0> (s, k)",
            "",
            [
                "OM004 topk-form",
                "TopK 'topk_weights': it takes the smallest",
                "what to do: Export the router with a TopK of the largest scores.",
            ],
            id="the smallest",
        ),
        pytest.param(
            "s = Softmax (logits)\n weights, ids = TopK (s, many)\n n = Shape (x)\n one = Gather (n, last)\n"
            "many = Div (one, k)",
            "",
            [
                "OM004 topk-form",
                "k is not a constant from 1 to 8: it is computed by Div 'div_many'",
                "what to do: Export with a fixed number of experts per token.",
            ],
            id="a computed k",
        ),
        pytest.param(
            "s = Softmax (logits)\n weights, ids = TopK <axis = 0> (s, k)",
            "",
            ["OM004 topk-form", "axis 0 is not the last one", "Export the router with the experts on the last axis."],
            id="experts on another axis",
        ),
        pytest.param(
            "s = Sigmoid (logits)\n bias = ReduceMean <keepdims = 1> (logits, last)\n keys = Add (s, bias)\n"
            "raw, ids = TopK (keys, k)\n weights = GatherElements <axis = -1> (s, ids)",
            "",
            ["OM007 left-over-after", "GatherElements 'gatherelements_weights'", "is not a constant"],
            id="a computed bias",
        ),
    ],
)
def test_partial_sites(router: str, outputs: str, sentences: list[str]) -> None:
    text = explained(router, outputs)
    for sentence in sentences:
        assert sentence in text, text


def test_tells_of_the_experts_behind_a_router() -> None:
    text = str(explain(models.fixtures.get("mixtral_block_dynamo_fp32").path))
    assert "  its experts: fused whole\n    fused: gated silu, 8 inner elements (experts-batched-mm)" in text


def test_tells_why_experts_are_left() -> None:
    result = rewrite(EXAMPLES["experts-activation"].model())
    explanation = Explanation(result.sites, experts=result.experts)
    text = str(explanation)
    assert "  its experts: left as it is\n  OM016 experts-activation: " in text
    assert "is among its factors" in text
    (experts,) = explanation.to_dict()["experts"]
    assert (experts["status"], experts["block"], experts["router"]) == ("left", "partly", "topk_weights")
    assert any("ReduceSum" in line for line in experts["surroundings"])


def test_one_layer_is_told_with_its_own_experts() -> None:
    explanation = explain(models.fixtures.get("mixtral_causal_lm_dynamo_fp32").path)
    assert len(explanation.experts) == 2
    for number in (0, 1):
        layer = explanation.layer(number)
        assert [each.router for each in layer.experts] == [layer.sites[0].node]


def test_experts_of_no_known_choice() -> None:
    result = rewrite(EXAMPLES["experts-mismatch"].model())
    (experts,) = result.experts
    assert experts.router == ""
    assert "reducesum_y of no known choice\n  its experts: left as it is" in str(
        Explanation(result.sites, experts=result.experts)
    )

"""What `ort-moe explain` prints, and what reports hold of it: sites, experts and findings."""

from __future__ import annotations

from ort_moe.inspection.explain import SCHEMA
from ort_moe.json_schemas.form import array, attribute_value, count, document, one_of, or_null, record, reference, text
from ort_moe.ops import FUSED_EXPERTS, FUSED_ROUTER

FINDING = record(
    "Something that stands in the way.",
    {
        "code": text("Its stable code.", pattern="^OM[0-9]{3}$"),
        "slug": text("The code in words."),
        "node": text("Name of the node it is about; empty where there is none."),
        "detail": text("What was expected and what is there."),
        "consumers": array("The other consumers of the value in question.", text("By operator and name.")),
        "remedy": text("What the user can do about it."),
    },
)

SITE = record(
    "A router, or another node that chooses the largest.",
    {
        "node": text("Name of the node, which is that of the original's TopK."),
        "graph": text("Name of the graph or function it is in."),
        "status": one_of(
            "`whole`: nothing of the router is left beside the fused node; `partly`: something is; `left`: not fused.",
            *("whole", "partly", "left"),
        ),
        "experts": or_null(count("Number of experts."), "not known"),
        "k": or_null(count("Experts chosen per token."), "not known"),
        "attributes": or_null(
            record(
                "Attributes of the FusedRouter; infinities are strings.",
                {a.name: attribute_value(a) for a in FUSED_ROUTER.attributes if a.only_with is None},
                {a.name: attribute_value(a) for a in FUSED_ROUTER.attributes if a.only_with is not None},
            ),
            "not fused",
        ),
        "inputs": array(
            "Inputs that the FusedRouter has.",
            one_of("Its name in the op reference.", *(t.name for t in FUSED_ROUTER.inputs)),
        ),
        "absorbed": array("What it absorbed, in order.", text("Name of a rule.")),
        "findings": array("Why it is not whole.", reference("finding", "A finding.")),
        "surroundings": array(
            "Of a site that is not whole, the nodes around it, without weights.",
            text("A node in the manner of ONNX's text form."),
        ),
    },
)

EXPERTS = record(
    "The experts behind a choice.",
    {
        "node": text("Name of the FusedExperts, or of the node that makes the choice."),
        "graph": text("Name of the graph it is in."),
        "status": one_of("`whole`: one FusedExperts computes them; `left`: not fused.", *("whole", "left")),
        "block": one_of(
            "`whole`: router and experts are fused whole; `partly`: something is left; `left`: neither is fused.",
            *("whole", "partly", "left"),
        ),
        "router": text("Name of the site that makes the choice; empty where it is not known."),
        "form": text("Name of the rule that read them; empty where none did."),
        "experts": or_null(count("Number of experts."), "not known"),
        "k": or_null(count("Experts chosen per token."), "not known"),
        "hidden": or_null(count("Elements of a token's row."), "not known"),
        "inner": or_null(count("Elements between the layers."), "not known"),
        "attributes": or_null(
            record("Attributes of the FusedExperts.", {a.name: attribute_value(a) for a in FUSED_EXPERTS.attributes}),
            "not fused",
        ),
        "residual": one_of(
            "What the FusedExperts adds to their results: `shared` experts, shared ones behind a sigmoid gate of their "
            "own (`gated`), or any `other` value.",
            *("none", "shared", "gated", "other"),
        ),
        "findings": array("Why they are left.", reference("finding", "A finding.")),
        "surroundings": array(
            "Of experts that are left, the nodes around where they end, without weights.",
            text("A node in the manner of ONNX's text form."),
        ),
    },
)

ALL_EXPERTS = array("The experts behind the choices, in graph order.", reference("experts", "The experts of a layer."))

SITES = array("In graph order.", reference("site", "A site."))

FINDINGS = array("What concerns the model as a whole.", reference("finding", "A finding."))

EXPLAIN = document(
    "explain",
    SCHEMA,
    "What `ort-moe explain MODEL --json` prints.",
    {"sites": SITES, "experts": ALL_EXPERTS, "findings": FINDINGS},
    site=SITE,
    experts=EXPERTS,
    finding=FINDING,
)

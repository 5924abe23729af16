"""What `ort-moe inspect` prints, of one model and of two."""

from __future__ import annotations

from ort_moe.inspection.inspect import SCHEMA
from ort_moe.json_schemas.form import (
    BEFORE_AFTER,
    array,
    count,
    document,
    flag,
    mapping,
    or_null,
    record,
    reference,
    text,
    version,
)

INSPECTION_KEYS = {
    "model": text("Path of the model."),
    "weight_bytes": count("Bytes of all weights."),
    "expert_bytes_per_token": or_null(
        count("Bytes of experts' weights that one token reads, in the layers of which they are known."),
        "known of no layer",
    ),
    "optimized_expert_bytes_per_token": or_null(
        count("The same of the model that `optimize` makes of it, with the weights as they are."), "known of no layer"
    ),
    "operators": mapping("Number of nodes by operator.", count("Nodes.")),
    "layers": array("MoE layers in graph order.", reference("layer", "A layer.")),
    "cuda_graph_blockers": array(
        "Nodes that keep the model out of a CUDA graph.",
        record(
            "A node.",
            {"node": text("Its name."), "operator": text("Its type."), "why": text("Why, in a few words.")},
        ),
    ),
}

LAYER = record(
    "An MoE layer.",
    {
        "node": text("Name of the router's node, or of the contrib node."),
        "kind": text("`router`, `fused router`, or `contrib` and the operator."),
        "experts": or_null(count("Number of experts."), "not known"),
        "k": or_null(count("Experts chosen per token."), "not known"),
        "router": text("Its arithmetic in a phrase."),
        "weights": array(
            "Stacks of experts' weights behind the choice.",
            record(
                "A stack.",
                {
                    "shape": array("Its shape; the experts come first.", count("A length.")),
                    "dtype": text("Element type, as ONNX names it."),
                    "nbytes": count("Bytes of the whole."),
                },
            ),
        ),
        "all_experts": flag("Whether every token goes through all experts."),
        "copied": flag("Whether the weights of each choice of each token are copied before they are multiplied."),
        "bytes_per_token": or_null(count("Bytes of experts' weights that one token reads."), "not known"),
        "optimized_bytes_per_token": or_null(
            count("The same of what `optimize` makes of the layer, with the weights as they are."), "the experts stay"
        ),
    },
)

INSPECTION = record("One model.", {"schema": version(SCHEMA), **INSPECTION_KEYS})

INSPECT = document("inspect", SCHEMA, "What `ort-moe inspect MODEL --json` prints.", INSPECTION_KEYS, layer=LAYER)

CHANGES = document(
    "changes",
    SCHEMA,
    "What `ort-moe inspect MODEL OTHER --json` prints.",
    {
        "before": reference("inspection", "The first model."),
        "after": reference("inspection", "The second model."),
        "operators": mapping("Operators of which the number of nodes changed.", BEFORE_AFTER),
        "layers": array("Layers that changed.", count("Number of the layer, from 0.")),
    },
    inspection=INSPECTION,
    layer=LAYER,
)

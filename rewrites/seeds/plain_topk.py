"""TopK(x, k) -> Cast(FusedRouter(x, k)), where the indices select experts."""

from __future__ import annotations

import json
from typing import Any

import onnx_ir as ir

from ort_moe.ops import AttributeValue
from ort_moe.rewrites.router_node import TOPK, TOPK_ATTRIBUTES, TOPK_DTYPE, build, take_width
from ort_moe.rewrites.routing import router_width
from ort_moe.rewrites.rule import RouterRule
from ort_moe.rewrites.values import integers


class SeedTopK(RouterRule):
    """TopK(x, k) -> Cast(FusedRouter(x, k)).

    The FusedRouter has no score and no normalisation: its weights are the k largest x in float32, so casting them back
    to x's type is exact. Only a TopK whose indices select experts is seeded.
    """

    title = "seed-topk"
    root = "TopK"

    def pattern(self, op: Any, x: Any, k: Any) -> Any:
        values, ids = op.TopK(x, k, _allow_other_attributes=True, _outputs=["values", "ids"])
        return values, ids

    def read(self, values: ir.Value, **_: Any) -> None:
        topk = values.producer()
        assert topk is not None
        router_width(topk)

    def rewrite(self, op: Any, x: ir.Value, values: ir.Value, **_: Any) -> tuple[ir.Value, ir.Value]:
        topk = values.producer()
        assert topk is not None
        return seed(op, topk, x, {})


def seed(op: Any, topk: ir.Node, logits: ir.Value, attributes: dict[str, AttributeValue]) -> tuple[ir.Value, ir.Value]:
    """Build the FusedRouter for a TopK and return what takes the place of its two outputs."""
    chosen = integers(topk.inputs[1])
    assert chosen is not None
    ranked = topk.inputs[0]
    assert ranked is not None
    take_width(logits, ranked)
    weights, indices = build(op, logits, None, None, {"k": chosen[0], "score": "none", **attributes})
    values, ids = topk.outputs
    weights.shape, indices.shape = values.shape, ids.shape
    node = weights.producer()
    assert node is not None
    node.name = topk.name
    node.metadata_props.update(topk.metadata_props)
    node.metadata_props[TOPK] = topk.name or ""
    node.metadata_props[TOPK_ATTRIBUTES] = json.dumps({name: a.as_int() for name, a in topk.attributes.items()})
    node.metadata_props[TOPK_DTYPE] = str(values.dtype)
    if logits.dtype not in (None, ir.DataType.FLOAT):
        weights = op.Cast(weights, to=logits.dtype)
    return weights, op.Cast(indices, to=ir.DataType.INT64)


PLAIN_TOPK_RULES = (SeedTopK(),)

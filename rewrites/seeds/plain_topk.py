"""TopK(x, k) -> Cast(FusedRouter(x, k)), where the indices select experts."""

from __future__ import annotations

import json
from typing import Any

import onnx_ir as ir

from ort_moe.ops import AttributeValue
from ort_moe.rewrites.choice import chosen_count
from ort_moe.rewrites.router_node import TOPK, TOPK_ATTRIBUTES, TOPK_DTYPE, build, take_width
from ort_moe.rewrites.routing import router_width
from ort_moe.rewrites.rule import RouterRule


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


def seed(
    op: Any, choice: ir.Node, logits: ir.Value, attributes: dict[str, AttributeValue]
) -> tuple[ir.Value, ir.Value]:
    """Build the FusedRouter for a TopK or an ArgMax; return what it chose, in the types it had."""
    k, ranked = chosen_count(choice), choice.inputs[0]
    assert k is not None
    assert ranked is not None
    take_width(logits, ranked)
    weights, indices = build(op, logits, None, None, {"k": k, "score": "none", **attributes})
    weights.shape = indices.shape = None if ranked.shape is None else ir.Shape([*ranked.shape[:-1], k])
    node = weights.producer()
    assert node is not None
    node.name = choice.name
    node.metadata_props.update(choice.metadata_props)
    node.metadata_props[TOPK] = choice.name or ""
    kept = choice.attributes.items() if choice.op_type == "TopK" else ()
    node.metadata_props[TOPK_ATTRIBUTES] = json.dumps({name: attribute.as_int() for name, attribute in kept})
    node.metadata_props[TOPK_DTYPE] = str(ranked.dtype)
    values = weights if logits.dtype in (None, ir.DataType.FLOAT) else _cast(op, weights, logits.dtype)
    return values, _cast(op, indices, ir.DataType.INT64)


def _cast(op: Any, value: ir.Value, dtype: ir.DataType | None) -> ir.Value:
    cast: ir.Value = op.Cast(value, to=dtype)
    cast.type = None if dtype is None else ir.TensorType(dtype)
    cast.shape = value.shape
    return cast


PLAIN_TOPK_RULES = (SeedTopK(),)

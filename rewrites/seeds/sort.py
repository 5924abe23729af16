"""Slice(TopK(x, n), 0, k) -> TopK(x, k): a sort of which only the first few are taken is no sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites.choice import ranked_count, taken_first
from ort_moe.rewrites.routing import router_width
from ort_moe.rewrites.rule import Mismatch, RouterRule, stand_in
from ort_moe.rewrites.values import consumers, integer, is_op, producer


class ShortenSort(RouterRule):
    """Slice(TopK(x, n), 0, k) -> TopK(x, k).

    For a sort by descending scores of a router, of whose values and indices every reader takes the first k.
    """

    title = "shorten-sort"
    root = "Slice"
    anchor = "TopK"

    def pattern(self, op: Any, whole: Any) -> Any:
        return op.Slice(whole, _allow_other_attributes=True, _allow_other_inputs=True, _outputs=["part"])

    def read(self, whole: ir.Value, part: ir.Value, **_: Any) -> int:
        topk, node = producer(whole, "TopK"), part.producer()
        assert node is not None
        count = None if topk is None else ranked_count(topk)
        taken = taken_first(whole, node)
        if topk is None or count is None or taken is None or taken >= count:
            raise Mismatch
        if any(taken_first(value, user) != taken for value in topk.outputs for user in consumers(value)):
            raise Mismatch
        if any(value.is_graph_output() for value in topk.outputs) or not integer(topk, "sorted", 1):
            raise Mismatch
        router_width(topk)
        return taken

    def rewrite(self, op: Any, whole: ir.Value, part: ir.Value, **_: Any) -> ir.Value:
        taken, topk = self.read(whole=whole, part=part), producer(whole, "TopK")
        assert topk is not None
        assert topk.inputs[0] is not None
        attributes = {name: attribute.value for name, attribute in topk.attributes.items()}
        position = whole.index()
        assert position is not None
        for user in consumers(topk.inputs[0]):  # of values and indices, the first that was sliced has left it
            if user.name == topk.name and is_op(user, "TopK") and ranked_count(user) == taken:
                return stand_in(op, user.outputs[position], part)
        k = op.initializer(ir.tensor(np.array([taken], np.int64)), name=f"{topk.name}_k")
        results = op.TopK(topk.inputs[0], k, **attributes, _outputs=2)
        shape = topk.inputs[0].shape
        for result, old in zip(results, topk.outputs, strict=True):
            result.type = old.type
            result.shape = None if shape is None else ir.Shape([*shape[:-1], taken])
        node = results[0].producer()
        node.name = topk.name
        node.metadata_props.update(topk.metadata_props)
        chosen: ir.Value = results[position]
        return chosen


SORT_RULES = (ShortenSort(),)

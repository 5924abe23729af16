"""FusedRouter(Slice(f(x))) -> FusedRouter(f(Slice(x))): the score of those alone among whom is chosen.

How a gate that also scores shared experts, which every token has, is written: their columns are cut off before the
choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ort_moe.rewrites.router_node import Router
from ort_moe.rewrites.rule import Mismatch, RouterRule, require, router
from ort_moe.rewrites.values import integer, is_last_axis, producer, scalar

_ELEMENTWISE = ("Sigmoid", "Sqrt", "Softplus", "Cast", "Where", "Greater")


@dataclass(frozen=True)
class _Score:
    """A score over all columns: its nodes, each behind those it reads, and what it is a score of."""

    nodes: tuple[ir.Node, ...]
    x: ir.Value


class SliceOfScore(RouterRule):
    """FusedRouter(Slice(f(x))) -> FusedRouter(f(Slice(x))).

    For f of one element at a time and the last axis. Also for a softmax, if its weights are divided by their sum and by
    nothing more: the sum over those that are cut off cancels.
    """

    title = "slice-of-score"
    root = "FusedRouter"

    def pattern(self, op: Any, scored: Any) -> Any:
        part = op.Slice(scored, _allow_other_inputs=True, _allow_other_attributes=True, _outputs=["part"])
        return router(op, part)

    def read(self, weights: ir.Value, scored: ir.Value, **_: Any) -> _Score:
        found, node = Router.producing(weights), producer(scored, *_ELEMENTWISE, "Softmax")
        if node is None or not found.ranks_its_input:
            raise Mismatch
        if node.op_type == "Softmax":
            given, x = found.attributes, node.inputs[0]
            assert x is not None
            require(is_last_axis(integer(node, "axis", -1), scored), "the softmax does not run over the experts")
            require(
                found.selection_bias is None
                and not found.has_groups
                and given["weights_from"] == "scores"
                and given["normalize"] == 1
                and given["normalize_eps"] == 0.0
                and float(given["normalize_min"]) <= 0.0,
                "the softmax is also over experts that are not chosen among, and its weights are not normalised",
            )
            return _Score((node,), x)
        nodes: list[ir.Node] = []
        sources = _collect(scored, nodes)
        if len(sources) != 1:
            raise Mismatch
        return _Score(tuple(nodes), sources.pop())

    def rewrite(
        self, op: Any, weights: ir.Value, scored: ir.Value, part: ir.Value, **_: Any
    ) -> tuple[ir.Value, ir.Value]:
        score, cut = self.read(weights=weights, scored=scored), part.producer()
        assert cut is not None
        sliced = op.Slice(score.x, *cut.inputs[1:], **dict(cut.attributes))
        sliced.type, sliced.shape = score.x.type, part.shape
        done: dict[ir.Value | None, ir.Value] = {score.x: sliced}
        for node in score.nodes:
            inputs = [done.get(value, value) for value in node.inputs]
            result = getattr(op, node.op_type)(*inputs, **dict(node.attributes))
            result.type, result.shape = node.outputs[0].type, part.shape
            done[node.outputs[0]] = result
        return Router.producing(weights).grow(op, self.title, logits=done[scored])


def _collect(value: ir.Value | None, nodes: list[ir.Node]) -> set[ir.Value]:
    """What the elementwise nodes behind a value start from; the nodes are added in their order."""
    node = producer(value, *_ELEMENTWISE)
    if value is None or scalar(value) is not None:
        return set()
    if node is None:
        return {value}
    if node in nodes:
        return set()
    sources = {source for operand in node.inputs for source in _collect(operand, nodes)}
    nodes.append(node)
    return sources


SLICE_RULES = (SliceOfScore(),)

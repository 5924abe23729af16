"""TopK(Where(group_mask(x), x, fill), k) -> Cast(FusedRouter(x, k, num_groups, topk_groups)).

The mask that exporters write: the experts in neighbouring groups, a score per group (the largest key, or the sum of the
largest few), TopK over the groups, ones scattered to the groups kept, repeated for the experts of each group, and a
fill value for the keys of all others. What is spelt in many ways is read by walkers, from the mask backwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ort_moe.ops import AttributeValue
from ort_moe.rewrites.routing import router_width
from ort_moe.rewrites.rule import Refusal, RouterRule, require
from ort_moe.rewrites.seeds.plain_topk import seed
from ort_moe.rewrites.values import (
    FLOATS,
    INDICES,
    dim,
    filling,
    integer,
    integers,
    is_last_axis,
    producer,
    rank,
    reduces_last_axis,
    scalar,
    through,
    through_casts,
)


@dataclass(frozen=True)
class _Mask:
    """A group mask: the keys it masks and how."""

    keys: ir.Value
    num_groups: int
    topk_groups: int
    group_score_top: int
    fill: float

    def attributes(self) -> dict[str, AttributeValue]:
        return {
            "num_groups": self.num_groups,
            "topk_groups": self.topk_groups,
            "group_score_top": self.group_score_top,
            "group_fill": self.fill,
            "weights_from": "selection",
        }


class SeedGroupMask(RouterRule):
    """TopK(Where(group_mask(x), x, fill), k) -> Cast(FusedRouter(x, k, num_groups, topk_groups)).

    The weights are the ranked, masked keys (`weights_from = selection`) until a gather says otherwise. A mask that
    keeps all groups is dropped.
    """

    title = "seed-group-mask"
    root = "TopK"

    def pattern(self, op: Any, condition: Any, a: Any, b: Any, k: Any) -> Any:
        masked = op.Where(condition, a, b)
        values, ids = op.TopK(masked, k, _allow_other_attributes=True, _outputs=["values", "ids"])
        return values, ids

    def read(self, condition: ir.Value, a: ir.Value, b: ir.Value, values: ir.Value, **_: Any) -> _Mask:
        topk = values.producer()
        assert topk is not None
        experts = router_width(topk)
        inverted, mask = _peel_booleans(condition)
        keys, filler = (b, a) if inverted else (a, b)
        fill = scalar(filler)
        require(fill in (-math.inf, 0.0), f"the masked keys become {fill}, expected -inf or 0")
        assert fill is not None
        require(rank(keys) is not None and rank(keys) == rank(topk.inputs[0]), "the mask adds dimensions to the keys")
        groups, kept = _kept_groups(mask, experts)
        read = _Mask(keys, groups, kept, _group_score_top(mask, keys, groups, experts), fill)
        chosen = integers(topk.inputs[1])
        assert chosen is not None
        require(
            kept * (experts // groups) >= chosen[0],
            f"{kept} groups of {experts // groups} experts are fewer than the {chosen[0]} to choose",
        )
        return read

    def rewrite(self, op: Any, values: ir.Value, **matched: Any) -> tuple[ir.Value, ir.Value]:
        mask = self.read(values=values, **matched)
        topk = values.producer()
        assert topk is not None
        return seed(op, topk, mask.keys, mask.attributes())


def _peel_booleans(condition: ir.Value) -> tuple[bool, ir.Value]:
    """Whether the condition marks the experts to mask, and the 0/1 tensor it was made from."""
    inverted = False
    while (node := producer(condition, "Not", "Cast", "Equal", "Greater")) is not None:
        source = node.inputs[0]
        assert source is not None
        if node.op_type == "Not":
            inverted = not inverted
        elif node.op_type == "Equal":
            require(scalar(node.inputs[1]) == 0.0, "the group mask is compared with something other than 0")
            inverted = not inverted
        elif node.op_type == "Greater":
            require(scalar(node.inputs[1]) in (0.0, 0.5), "the group mask is compared with something other than 0")
        condition = source
    return inverted, condition


def _scatter(mask: ir.Value) -> ir.Node:
    node = producer(through(mask, {"Reshape", "Expand", "Unsqueeze", "Tile", "Cast"}), "ScatterElements")
    if node is None:
        raise Refusal("the mask before the TopK is not made by scattering ones to the groups kept")
    return node


def _kept_groups(mask: ir.Value, experts: int) -> tuple[int, int]:
    """Number of groups and of groups kept, of a mask of ones scattered to the groups and repeated for their experts."""
    scatter = _scatter(mask)
    zeros, ids, ones = scatter.inputs[:3]
    assert zeros is not None
    require(
        is_last_axis(integer(scatter, "axis", 0), zeros)
        and scatter.attributes.get_string("reduction", "none") == "none",
        "the group mask is not scattered along its last axis",
    )
    require(filling(zeros) == 0.0 and filling(ones) == 1.0, "the group mask is not made of ones among zeros")
    groups, kept = dim(zeros, -1), dim(ids, -1)
    if groups is None or kept is None:
        raise Refusal("the number of groups is not fixed")
    require(experts % groups == 0, f"{groups} groups do not divide {experts} experts")
    # (..., G) -> (..., G, 1) -> (..., G, E/G) -> (..., E): each group's bit for all of its experts.
    value, shapes = mask, []
    while (node := value.producer()) is not scatter:
        assert node is not None
        shapes.append((dim(value, -2), dim(value, -1)))
        source = node.inputs[0]
        assert source is not None
        value = source
    require(
        dim(mask, -1) == experts and (groups, 1) in shapes and (groups, experts // groups) in shapes[:-1],
        "the group mask is not repeated for the neighbouring experts of each group",
    )
    return groups, kept


def _group_score_top(mask: ir.Value, keys: ir.Value, groups: int, experts: int) -> int:
    """How many of a group's best keys add up to its score; checks that the groups are made of these keys."""
    ids = _scatter(mask).inputs[1]
    assert ids is not None
    ids = through_casts(ids, INDICES)
    ranking = producer(ids, "TopK")
    if ranking is None or integer(ranking, "largest", 1) != 1 or ids is not ranking.outputs[1]:
        raise Refusal("the groups kept are not chosen by a TopK of largest scores")
    scores = ranking.inputs[0]
    assert scores is not None
    require(is_last_axis(integer(ranking, "axis", -1), scores), "the groups are not ranked along the last axis")
    top, grouped = 1, scores
    reduction = producer(scores, "ReduceSum", "ReduceMax", "Squeeze")
    if reduction is None:
        raise Refusal("the score of a group is neither the largest key nor the sum of the largest")
    best = producer(reduction.inputs[0], "TopK")
    if reduction.op_type == "ReduceMax":
        require(reduces_last_axis(reduction, keepdims=False), "the score of a group is not taken over its experts")
        grouped = reduction.inputs[0] or scores
    else:
        if best is None or reduction.inputs[0] is not best.outputs[0] or integer(best, "largest", 1) != 1:
            raise Refusal("the score of a group is not made of its largest keys")
        source, count = best.inputs[0], integers(best.inputs[1])
        assert source is not None
        require(is_last_axis(integer(best, "axis", -1), source), "a group's best keys are not taken over its experts")
        if count is None or len(count) != 1 or (reduction.op_type == "Squeeze" and count != [1]):
            raise Refusal("the number of keys in the score of a group is not fixed")
        require(1 <= count[0] <= experts // groups, f"the score of a group is made of {count[0]} keys")
        if reduction.op_type == "ReduceSum":
            require(reduces_last_axis(reduction, keepdims=False), "the score of a group is not summed over its best")
        top, grouped = count[0], source
    require(
        (dim(grouped, -2), dim(grouped, -1)) == (groups, experts // groups)
        and through_casts(grouped, FLOATS, {"Reshape"}) is through_casts(keys, FLOATS, {"Reshape"}),
        "the scores of the groups are not made of the masked keys",
    )
    return top


GROUP_MASK_RULES = (SeedGroupMask(),)

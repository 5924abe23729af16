"""TopK(mask(x), k) -> Cast(FusedRouter(x, k, num_groups, topk_groups)), for a mask of all but the best groups.

The mask that exporters write: the experts in neighbouring groups, a score per group (the largest key, or the sum of the
largest few), TopK over the groups, ones scattered to the groups kept, repeated for the experts of each group, and a
fill value for the keys of all others. What is spelt in many ways is read by walkers, from the masked keys backwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.graphs.operators import RESHAPING
from ort_moe.ops import AttributeValue
from ort_moe.rewrites.choice import chosen_count
from ort_moe.rewrites.routing import router_width
from ort_moe.rewrites.rule import Mismatch, Refusal, RouterRule, require
from ort_moe.rewrites.seeds.group_bits import GroupBits, read_bits
from ort_moe.rewrites.seeds.plain_topk import seed
from ort_moe.rewrites.values import (
    FLOATS,
    INDICES,
    constant,
    dim,
    filling,
    has_same_shape,
    integer,
    integers,
    is_last_axis,
    producer,
    rank,
    reduces_last_axis,
    scalar,
    scalar_beside,
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


@dataclass(frozen=True)
class _Masking:
    """The step that masks: which keys, by which bits, and what the masked ones become."""

    keys: ir.Value
    bits: GroupBits
    fill: float


class SeedGroupMask(RouterRule):
    """TopK(Where(group_mask(x), x, fill), k) -> Cast(FusedRouter(x, k, num_groups, topk_groups)).

    The weights are the ranked, masked keys (`weights_from = selection`) until a gather says otherwise. The fill is -inf
    or 0; keys multiplied with a mask of ones become 0, too. A fill below all that the keys can be, as the least number
    of their type is below a sigmoid with its bias, is never chosen and serves as -inf. A mask that keeps all groups is
    dropped.
    """

    title = "seed-group-mask"
    root = "TopK"

    def pattern(self, op: Any, masked: Any, k: Any) -> Any:
        values, ids = op.TopK(masked, k, _allow_other_attributes=True, _outputs=["values", "ids"])
        return values, ids

    def read(self, masked: ir.Value, values: ir.Value, **_: Any) -> _Mask:
        node = producer(through_casts(masked, FLOATS, RESHAPING), "Where", "Mul")
        if node is None:
            raise Mismatch
        topk = values.producer()
        assert topk is not None
        experts = router_width(topk)
        masking = _read_where(node) if node.op_type == "Where" else _read_product(node)
        bits, groups, kept = masking.bits, masking.bits.groups, masking.bits.kept
        require(experts % groups == 0, f"{groups} groups do not divide {experts} experts")
        members = experts // groups
        in_groups = (dim(masking.keys, -2), dim(masking.keys, -1)) == (groups, members)
        require(
            bits.are_repeated(experts) or (in_groups and bits.are_for_groups(members)),
            "the group mask is not repeated for the neighbouring experts of each group",
        )
        keys = _flat(masking.keys, masked)
        top = _group_score_top(bits.ids, keys, groups, experts)
        chosen = chosen_count(topk)
        require(
            chosen is not None and kept * members >= chosen,
            f"{kept} groups of {members} experts are fewer than the {chosen} to choose",
        )
        return _Mask(keys, groups, kept, top, masking.fill)

    def rewrite(self, op: Any, values: ir.Value, **matched: Any) -> tuple[ir.Value, ir.Value]:
        mask = self.read(values=values, **matched)
        topk = values.producer()
        assert topk is not None
        return seed(op, topk, mask.keys, mask.attributes())


def _read_where(node: ir.Node) -> _Masking:
    condition, first, second = node.inputs[:3]
    assert condition is not None
    bits = read_bits(condition)
    keys, filler = (second, first) if bits.inverted else (first, second)
    assert keys is not None
    fill = scalar_beside(filler, keys)
    if fill is None and filler is not None and has_same_shape(filler, keys):
        fill = filling(filler)
    least = _lower_bound(keys)
    if fill is not None and fill not in (-math.inf, 0.0) and least is not None and fill < least:
        fill = -math.inf
    require(fill in (-math.inf, 0.0), f"the masked keys become {fill}, expected -inf or 0, or less than any key can be")
    assert fill is not None
    known = rank(keys)
    require(known is not None and known == rank(node.outputs[0]), "the mask adds dimensions to the keys")
    return _Masking(keys, bits, fill)


def _read_product(node: ir.Node) -> _Masking:
    """Keys times a mask of zeros and ones: 0 where the mask is, if the keys are finite."""
    for position in (0, 1):
        keys, mask = node.inputs[position], node.inputs[1 - position]
        assert keys is not None
        assert mask is not None
        try:
            bits = read_bits(mask)
        except Refusal:
            continue
        require(not bits.inverted, "the keys are multiplied with a mask of the groups to drop")
        require(_lower_bound(keys) is not None, "the keys that a mask is multiplied with may be infinite")
        require(rank(keys) == rank(node.outputs[0]), "the mask adds dimensions to the keys")
        return _Masking(keys, bits, 0.0)
    raise Mismatch


def _flat(keys: ir.Value, ranked: ir.Value) -> ir.Value:
    """The keys in the shape in which they are ranked: masked in groups, they were reshaped before."""
    value: ir.Value | None = keys
    while value is not None:
        if rank(value) == rank(ranked) and dim(value, -1) == (dim(ranked, -1) or dim(value, -1)):
            return value
        view = producer(value, *RESHAPING)
        value = None if view is None else view.inputs[0]
    raise Refusal("the mask adds dimensions to the keys")


def _lower_bound(keys: ir.Value | None) -> float | None:
    """What the keys are never below, if they are finite; None where that is not known."""
    if keys is None:
        return None
    node = producer(through_casts(keys, FLOATS, RESHAPING), "Softmax", "Sigmoid", "Sqrt", "Add")
    if node is None:
        return None
    if node.op_type != "Add":
        return 0.0
    for position in (0, 1):
        array = constant(node.inputs[position])
        least = None if array is None or array.size == 0 else _lower_bound(node.inputs[1 - position])
        if least is not None and array is not None:
            summands = array.astype(np.float64)
            return least + float(summands.min()) if np.isfinite(summands).all() else None
    return None


def _group_score_top(ids: ir.Value, keys: ir.Value, groups: int, experts: int) -> int:
    """How many of a group's best keys add up to its score; checks that the groups are made of these keys."""
    ids = through_casts(ids, INDICES)
    ranking = producer(ids, "TopK")
    if ranking is None or integer(ranking, "largest", 1) != 1 or ids is not ranking.outputs[1]:
        raise Refusal("the groups kept are not chosen by a TopK of largest scores")
    scores = ranking.inputs[0]
    assert scores is not None
    require(is_last_axis(integer(ranking, "axis", -1), scores), "the groups are not ranked along the last axis")
    grouped, top = _best_of_group(scores, experts // groups)
    require(
        (dim(grouped, -2), dim(grouped, -1)) == (groups, experts // groups)
        and through_casts(grouped, FLOATS, RESHAPING) is through_casts(keys, FLOATS, RESHAPING),
        "the scores of the groups are not made of the masked keys",
    )
    return top


def _best_of_group(scores: ir.Value, members: int) -> tuple[ir.Value, int]:
    """The keys in groups, (..., groups, members), and how many of a group's best are summed up."""
    value = through_casts(scores, FLOATS)
    dropped = producer(value, "Squeeze", "Reshape", "Gather")  # a dimension of length 1
    if dropped is not None:
        require(_drops_last_axis(dropped), "the score of a group is neither the largest key nor the sum of the largest")
        assert dropped.inputs[0] is not None
        value = through_casts(dropped.inputs[0], FLOATS)
    reduction = producer(value, "ReduceSum", "ReduceMax")
    if reduction is not None:
        require(
            reduces_last_axis(reduction, keepdims=dropped is not None), "the score of a group is not over its experts"
        )
        assert reduction.inputs[0] is not None
        value = through_casts(reduction.inputs[0], FLOATS)
    best = producer(value, "TopK")
    if best is None or value is not best.outputs[0]:
        if reduction is None:
            raise Refusal("the score of a group is neither the largest key nor the sum of the largest")
        return value, 1 if reduction.op_type == "ReduceMax" else members
    source, count = best.inputs[0], integers(best.inputs[1])
    assert source is not None
    require(integer(best, "largest", 1) == 1, "the score of a group is not made of its largest keys")
    require(is_last_axis(integer(best, "axis", -1), source), "a group's best keys are not taken over its experts")
    if count is None or len(count) != 1 or (reduction is None and count != [1]):
        raise Refusal("the number of keys in the score of a group is not fixed")
    require(1 <= count[0] <= members, f"the score of a group is made of {count[0]} keys")
    return source, 1 if reduction is not None and reduction.op_type == "ReduceMax" else count[0]


def _drops_last_axis(node: ir.Node) -> bool:
    """Whether the node drops a last axis of length 1 and nothing else."""
    source, result = node.inputs[0], node.outputs[0]
    if source is None or dim(source, -1) != 1 or (rank(source) or 0) - 1 != rank(result):
        return False
    if node.op_type == "Gather":
        return is_last_axis(integer(node, "axis", 0), source) and scalar(node.inputs[1]) in (0.0, -1.0)
    return dim(source, -2) == dim(result, -1)


GROUP_MASK_RULES = (SeedGroupMask(),)

"""Two choices by ArgMax, each weighed by its softmax over the experts near it -> FusedRouter(x, score = sparse_mixer).

    m1, i1 = max(x), argmax(x)
    w1 = softmax(x without those for which (m1 - x) / max(|x|, m1) > threshold)[i1]
    x2 = x without i1
    m2, i2 = max(x2), argmax(x2)
    w2 = softmax(x2 without those for which (m2 - x) / max(|x|, m2) > threshold)[i2]

The sparse mixer of Liu et al., "GRIN: GRadient-INformed MoE" (2024), as it is when it does not train: Phi-3.5-MoE's
router. Weights and indices are joined by one Concat each; the rule ends in either, and leaves the FusedRouter to the
other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ort_moe.ops import AttributeValue
from ort_moe.rewrites.choice import ranked_axis
from ort_moe.rewrites.router_node import ABSORBED, TOPK, Router, build, is_router
from ort_moe.rewrites.routing import router_width
from ort_moe.rewrites.rule import Mismatch, Refusal, RouterRule, require, stand_in
from ort_moe.rewrites.values import (
    FLOATS,
    INDICES,
    consumers,
    filling,
    integer,
    is_last_axis,
    is_op,
    producer,
    reduces_last_axis,
    scalar,
    through_casts,
)


@dataclass(frozen=True)
class _Mixer:
    """What the two choices are made of.

    Attributes:
        first: The ArgMax of the first choice.
        logits: What it ranks.
        threshold: The distance, relative to the best, up to which an expert shares in the softmax.
    """

    first: ir.Node
    logits: ir.Value
    threshold: float


class SeedSparseMixer(RouterRule):
    """Concat(w1, w2), Concat(i1, i2) -> FusedRouter(x, score = sparse_mixer).

    For two choices of a sparse mixer with one threshold, both of whose weights and indices are joined. In half
    precision the roundings of the distances are dropped.
    """

    title = "seed-sparse-mixer"
    root = "Concat"
    anchor = "ArgMax"

    def pattern(self, op: Any, first: Any, second: Any) -> Any:
        return op.Concat(first, second, _allow_other_attributes=True, _outputs=["joined"])

    def read(self, first: ir.Value, second: ir.Value, joined: ir.Value, **_: Any) -> _Mixer:
        one, two = _choice(first), _choice(second)
        if one is None or two is None or one is two:
            raise Mismatch
        logits, rest = one.inputs[0], two.inputs[0]
        assert logits is not None
        assert rest is not None
        require(_joins(joined.producer(), [first, second]), "two choices are not joined along the last axis")
        left = _left_by_other(one)
        if left is None:
            router_width(one)
        require(
            is_last_axis(ranked_axis(two), rest) and not integer(two, "select_last_index", 0),
            "the second choice is not the first of the largest over the experts",
        )
        _require_without(rest, one.outputs[0], logits)
        joins_indices = [first, second] == [one.outputs[0], two.outputs[0]]
        threshold = None if left is None else float(Router.read(left).attributes["mixer_threshold"])
        if threshold is not None and joins_indices:  # the weights have been read, and may be gone
            return _Mixer(one, logits, threshold)
        weights = [_weight(choice) for choice in (one, two)]
        if not joins_indices and [first, second] != [node.outputs[0] for node in weights]:
            raise Mismatch  # something else that is gathered by the choices
        thresholds = [_threshold(weight, choice, logits) for weight, choice in zip(weights, (one, two), strict=True)]
        require(thresholds[0] == thresholds[1], f"the choices have the thresholds {thresholds[0]} and {thresholds[1]}")
        require(threshold in (None, thresholds[0]), f"another mixer of these logits has the threshold {threshold}")
        require(0.0 <= thresholds[0] < math.inf, f"the threshold is {thresholds[0]}")
        for pair in (weights, [one, two]) if left is None else ():
            values = [node.outputs[0] for node in pair]
            require(
                any(_joins(user, values) for user in consumers(values[0])),
                "the weights and the indices of the two choices are not each joined along the last axis",
            )
        return _Mixer(one, logits, thresholds[0])

    def rewrite(self, op: Any, joined: ir.Value, **matched: Any) -> ir.Value:
        mixer = self.read(joined=joined, **matched)
        left = _left_by_other(mixer.first)
        if left is not None:
            weights, indices = left.outputs[:2]
        else:
            attributes: dict[str, AttributeValue] = {"score": "sparse_mixer", "mixer_threshold": mixer.threshold}
            weights, indices = build(op, mixer.logits, None, None, {"k": 2, **attributes})
            weights.shape = indices.shape = joined.shape
            node, concat = weights.producer(), joined.producer()
            assert node is not None
            assert concat is not None
            node.name = concat.name  # something else may read the first index, so that its ArgMax stays
            node.metadata_props.update({TOPK: mixer.first.name or "", ABSORBED: self.title})
        wanted = indices if joined.dtype in INDICES else weights
        if joined.dtype == wanted.dtype:
            return wanted if left is None else stand_in(op, wanted, joined)
        cast: ir.Value = op.Cast(wanted, to=joined.dtype)
        return cast


def _left_by_other(first: ir.Node) -> ir.Node | None:
    """The FusedRouter that has taken the place of the Concat that came before, of this choice and the next."""
    logits = first.inputs[0]
    assert logits is not None
    routers = [
        user
        for user in consumers(logits)
        if is_router(user) and user.graph is first.graph and user.metadata_props.get(TOPK) == first.name
    ]
    return next((each for each in routers if Router.read(each).attributes["score"] == "sparse_mixer"), None)


def _choice(value: ir.Value) -> ir.Node | None:
    """The ArgMax whose index this is, or by whose index this was gathered."""
    gather = producer(value, "GatherElements")
    index = value if gather is None else gather.inputs[1]
    choice = producer(index, "ArgMax")
    return choice if choice is not None and integer(choice, "keepdims", 1) else None


def _require_without(rest: ir.Value, index: ir.Value, logits: ir.Value) -> None:
    """Refuse unless `rest` is the logits with -inf at the index."""
    scatter = producer(through_casts(rest, FLOATS), "ScatterElements")
    require(
        scatter is not None
        and _is_same(scatter.inputs[0], logits)
        and scatter.inputs[1] is index
        and filling(scatter.inputs[2]) == -math.inf
        and is_last_axis(integer(scatter, "axis", 0), logits)
        and scatter.attributes.get_string("reduction", "none") == "none",
        "the second choice is not made among the logits without the first",
    )


def _weight(choice: ir.Node) -> ir.Node:
    """The gather of the choice's weight."""
    index = choice.outputs[0]
    for user in consumers(index):
        probabilities = user.inputs[0] if is_op(user, "GatherElements") and user.inputs[1] is index else None
        if probabilities is None or producer(through_casts(probabilities, FLOATS), "Softmax") is None:
            continue
        require(
            is_last_axis(integer(user, "axis", 0), probabilities),
            "the weight of a choice is not gathered along the last axis",
        )
        return user
    raise Refusal("a choice is not weighed by a softmax that is gathered by its index")


def _threshold(weight: ir.Node, choice: ir.Node, logits: ir.Value) -> float:
    """The threshold of the softmax of which the weight of this choice is a part."""
    scores = choice.inputs[0]
    assert scores is not None
    softmax = producer(through_casts(weight.inputs[0], FLOATS), "Softmax") if weight.inputs[0] else None
    if softmax is None or softmax.inputs[0] is None or not is_last_axis(integer(softmax, "axis", -1), scores):
        raise Refusal("the softmax of a choice does not run over the experts")
    mask = producer(through_casts(softmax.inputs[0], FLOATS), "Where")
    if mask is None:
        raise Refusal("no expert is kept from sharing in the softmax of a choice")
    distance, threshold, far = _comparison(mask.inputs[0])
    near = mask.inputs[2] if far else mask.inputs[1]
    require(
        scalar(mask.inputs[1] if far else mask.inputs[2]) == -math.inf and _is_same(near, scores),
        "those that do not share in the softmax of a choice do not become -inf",
    )
    require(_is_distance(distance, scores, choice, logits), "what is compared with the threshold is no distance")
    return threshold


def _comparison(condition: ir.Value | None) -> tuple[ir.Value, float, bool]:
    """What is compared, with which number, and whether the condition holds where it is greater."""
    greater = True
    while (node := producer(condition, "Not", "Cast")) is not None:
        greater ^= node.op_type == "Not"
        condition = node.inputs[0]
    # Not "less or equal" for the contrary: the distance 0 / 0 is NaN, and such an expert shares.
    node = producer(condition, "Greater", "Less")
    if node is None:
        raise Refusal("what shares in the softmax of a choice is not told by a distance greater than a threshold")
    distance, threshold = node.inputs if node.op_type == "Greater" else reversed(node.inputs)
    number = scalar(threshold)
    if distance is None or number is None:
        raise Refusal("the threshold of a choice is not one constant")
    return distance, number, greater


def _is_distance(value: ir.Value, scores: ir.Value, choice: ir.Node, logits: ir.Value) -> bool:
    """Whether the value is (m - x) / max(|x|, m), for m the largest of the scores that the choice is made among."""
    division = producer(through_casts(value, FLOATS), "Div")
    if division is None or division.inputs[0] is None or division.inputs[1] is None:
        return False
    difference = producer(through_casts(division.inputs[0], FLOATS), "Sub")
    factor = producer(through_casts(division.inputs[1], FLOATS), "Max")
    if difference is None or factor is None or len(factor.inputs) != 2:
        return False
    if not _is_largest(difference.inputs[0], scores, choice) or not _is_same(difference.inputs[1], logits):
        return False
    return any(
        _is_largest(factor.inputs[position], scores, choice) and _is_absolute(factor.inputs[1 - position], logits)
        for position in (0, 1)
    )


def _is_largest(value: ir.Value | None, scores: ir.Value, choice: ir.Node) -> bool:
    node = None if value is None else producer(through_casts(value, FLOATS), "ReduceMax", "GatherElements")
    if node is None or not _is_same(node.inputs[0], scores):
        return False
    if node.op_type == "ReduceMax":
        return reduces_last_axis(node, keepdims=True)
    return node.inputs[1] is choice.outputs[0] and is_last_axis(integer(node, "axis", 0), scores)


def _is_absolute(value: ir.Value | None, logits: ir.Value) -> bool:
    node = None if value is None else producer(through_casts(value, FLOATS), "Abs")
    return node is not None and _is_same(node.inputs[0], logits)


def _is_same(value: ir.Value | None, other: ir.Value) -> bool:
    """Whether the values are one up to casts among floating-point types."""
    return value is not None and through_casts(value, FLOATS) is through_casts(other, FLOATS)


def _joins(node: ir.Node | None, pair: list[ir.Value]) -> bool:
    """Whether the node joins the two values along the last axis."""
    if node is None or not is_op(node, "Concat") or list(node.inputs) != pair:
        return False
    return is_last_axis(integer(node, "axis", 0), node.outputs[0])


SPARSE_MIXER_RULES = (SeedSparseMixer(),)

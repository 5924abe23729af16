"""GatherElements(s, indices(FusedRouter(s + bias))) -> weights(FusedRouter(s, bias)).

How "bias for the choice, not for the weight" is written: the biased keys are ranked, the weights are gathered from the
scores before the bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites.router_node import Router, float32_initializer
from ort_moe.rewrites.rule import Mismatch, Refusal, RouterRule, require, require_only_consumers, router
from ort_moe.rewrites.values import (
    FLOATS,
    HALF,
    Array,
    integer,
    is_last_axis,
    producer,
    through_casts,
    through_widening,
    vector,
)


@dataclass(frozen=True)
class _Bias:
    """Where the bias came from, its values, and the scores it was added to."""

    source: ir.Value
    array: Array
    scores: ir.Value


def _gathered(op: Any, scores: Any, keys: Any) -> tuple[Any, Any, Any]:
    """The pattern of scores gathered by the indices of a FusedRouter; binds `gathered` and `ids`."""
    _, indices = router(op, keys)
    ids = op.Cast(indices, _allow_other_attributes=True, _outputs=["ids"])
    return op.GatherElements(scores, ids, _allow_other_attributes=True, _outputs=["gathered"]), indices, ids


def _as_gathered(
    op: Any, gathered: ir.Value, weights: ir.Value, indices: ir.Value
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """What takes the place of that pattern's outputs: the weights in the type of what was gathered, and the indices."""
    result = weights if gathered.dtype == ir.DataType.FLOAT else op.Cast(weights, to=gathered.dtype)
    return result, indices, op.Cast(indices, to=ir.DataType.INT64)


def _require_along_last_axis(gathered: ir.Value, scores: ir.Value) -> None:
    gather = gathered.producer()
    assert gather is not None
    require(is_last_axis(integer(gather, "axis", 0), scores), "the scores are not gathered along the last axis")


class GatherScores(RouterRule):
    """GatherElements(s, indices(FusedRouter(s + bias))) -> weights(FusedRouter(s, bias)).

    Holds also without a bias, and behind a group mask, whose masked keys then serve the choice alone. The bias must be
    a constant over the experts. Of scores that are rounded to half precision for the gather alone, the rounding is
    dropped. Without the gather an added constant may as well be the bias of the router's linear layer, and stays.
    """

    title = "gather-scores"
    root = "GatherElements"

    def pattern(self, op: Any, scores: Any, keys: Any) -> Any:
        return _gathered(op, scores, keys)

    def read(self, scores: ir.Value, keys: ir.Value, weights: ir.Value, gathered: ir.Value, **_: Any) -> _Bias | None:
        found = Router.producing(weights)
        _require_along_last_axis(gathered, scores)
        require(scores.dtype in FLOATS, f"the scores are {scores.dtype}")
        require(
            found.ranks_its_input and found.has_raw_weights and found.selection_bias is None,
            "the FusedRouter has already absorbed something that acts before the gather",
        )
        require_only_consumers(weights)
        if through_widening(scores) is through_widening(keys):
            return None
        return _added_bias(keys, scores, found.experts)

    def rewrite(
        self, op: Any, scores: ir.Value, weights: ir.Value, gathered: ir.Value, **matched: Any
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        bias = self.read(scores=scores, weights=weights, gathered=gathered, **matched)
        vector_value = None if bias is None else float32_initializer(op, f"{bias.source.name}_float32", bias.array)
        if bias is not None and _is_plain_float32(bias.source):
            vector_value = bias.source
        logits = scores if bias is None else bias.scores
        new_weights, indices = Router.producing(weights).grow(
            op, self.title, logits=logits, selection_bias=vector_value, weights_from="scores"
        )
        return _as_gathered(op, gathered, new_weights, indices)


class GatherSoftmax(RouterRule):
    """GatherElements(Softmax(x), indices(FusedRouter(x))) -> weights(FusedRouter(x, score = softmax)).

    Where x itself is ranked, without a bias and groups: the softmax does not change the ranking, and a FusedRouter with
    that score ranks x, too.
    """

    title = "gather-softmax"
    root = "GatherElements"

    def pattern(self, op: Any, scored: Any, keys: Any) -> Any:
        return _gathered(op, op.Softmax(scored, _allow_other_attributes=True, _outputs=["scores"]), keys)

    def read(
        self, scored: ir.Value, keys: ir.Value, scores: ir.Value, weights: ir.Value, gathered: ir.Value, **_: Any
    ) -> None:
        found = Router.producing(weights)
        softmax = scores.producer()
        assert softmax is not None
        if through_widening(scored) is not through_widening(keys):
            raise Mismatch  # scores with a bias, which GatherScores reads
        _require_along_last_axis(gathered, scores)
        require(is_last_axis(integer(softmax, "axis", -1), scores), "the softmax does not run over the experts")
        require(scores.dtype in FLOATS, f"the scores are {scores.dtype}")
        require(found.is_bare, "the FusedRouter has already absorbed something that acts before the gather")
        require_only_consumers(weights)

    def rewrite(
        self, op: Any, weights: ir.Value, gathered: ir.Value, **matched: Any
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        self.read(weights=weights, gathered=gathered, **matched)
        new_weights, indices = Router.producing(weights).grow(op, self.title, score="softmax")
        return _as_gathered(op, gathered, new_weights, indices)


class GatherSigmoid(RouterRule):
    """GatherElements(Sigmoid(x), ids) -> Sigmoid(GatherElements(x, ids)).

    For ids the indices of a FusedRouter, and x what it ranks, before a bias if there is one: the sigmoid is for the
    weights alone.
    """

    title = "gather-sigmoid"
    root = "GatherElements"

    def pattern(self, op: Any, x: Any, keys: Any) -> Any:
        return _gathered(op, op.Sigmoid(x), keys)[0]

    def read(self, x: ir.Value, keys: ir.Value, gathered: ir.Value, **_: Any) -> None:
        if not _is_ranked(x, keys):
            raise Mismatch
        _require_along_last_axis(gathered, x)

    def rewrite(self, op: Any, x: ir.Value, ids: ir.Value, gathered: ir.Value, **matched: Any) -> ir.Value:
        self.read(x=x, gathered=gathered, **matched)
        chosen = op.GatherElements(x, ids, axis=-1)
        chosen.type, chosen.shape = x.type, gathered.shape
        scores: ir.Value = op.Sigmoid(chosen)
        return scores


class GatherProduct(RouterRule):
    """GatherElements(Mul(s, c), ids) -> Mul(GatherElements(s, ids), Gather(c, ids)).

    For ids the indices of a FusedRouter, s the scores that it ranks, before a bias if there is one, and c a constant of
    one number per expert.
    """

    title = "gather-product"
    root = "GatherElements"
    commutes = True

    def pattern(self, op: Any, scores: Any, factors: Any, keys: Any) -> Any:
        return _gathered(op, op.Mul(scores, factors), keys)[0]

    def read(
        self, scores: ir.Value, factors: ir.Value, keys: ir.Value, weights: ir.Value, gathered: ir.Value, **_: Any
    ) -> Array:
        array = vector(factors, Router.producing(weights).experts)
        if array is None or not _is_ranked(scores, keys):
            raise Mismatch
        _require_along_last_axis(gathered, scores)
        return array

    def rewrite(self, op: Any, scores: ir.Value, ids: ir.Value, gathered: ir.Value, **matched: Any) -> ir.Value:
        array = self.read(scores=scores, gathered=gathered, **matched)
        dtype = gathered.dtype
        assert dtype is not None
        table = op.initializer(ir.tensor(array.astype(dtype.numpy())), name=f"{gathered.name}_per_expert")
        chosen, factors = op.GatherElements(scores, ids, axis=-1), op.Gather(table, ids, axis=0)
        for value in (chosen, factors):
            value.type, value.shape = gathered.type, gathered.shape
        product: ir.Value = op.Mul(chosen, factors)
        return product


def _is_ranked(scores: ir.Value, keys: ir.Value) -> bool:
    """Whether the scores are the keys, or what the keys are before an addition."""
    add = producer(through_widening(keys), "Add")
    ranked = [keys] if add is None else [keys, *(value for value in add.inputs if value is not None)]
    return through_widening(scores) in [through_widening(value) for value in ranked]


def _added_bias(keys: ir.Value, scores: ir.Value, experts: int | None) -> _Bias:
    add = producer(through_widening(keys), "Add")
    if add is None:
        raise Refusal("the gathered scores are neither the ranked keys nor those before an Add")
    for position in (0, 1):
        summand, other = add.inputs[position], add.inputs[1 - position]
        if summand is None or other is None:
            continue
        unrounded = through_widening(summand)
        is_same = unrounded is through_widening(scores)
        if is_same or unrounded is through_casts(scores, FLOATS):
            require(
                is_same or scores.dtype in HALF,
                f"'{scores.name}' is rounded to half precision and then widened again before the gather",
            )
            array = vector(other, experts)
            if array is None:
                raise Refusal(f"the added '{other.name}' is not a constant of one number per expert")
            require(not np.isnan(array).any(), f"the added '{other.name}' holds NaN, which runtimes rank as they like")
            return _Bias(other, array, scores if is_same else summand)
    raise Refusal("the gathered scores are not what the bias was added to")


def _is_plain_float32(value: ir.Value) -> bool:
    return (
        value.is_initializer()
        and value.dtype == ir.DataType.FLOAT
        and value.shape is not None
        and len(value.shape) == 1
    )


GATHER_RULES = (GatherProduct(), GatherSigmoid(), GatherScores(), GatherSoftmax())

"""The rows of the ops that routers need in training: dense weights, the auxiliary loss and its scores."""

from __future__ import annotations

from dataclasses import replace

from ort_moe.ops.row import ACTIVATION_TYPES, Attribute, Op, Tensor

MAX_EXPERTS = 8192
"""The most experts that these ops take."""

_ROUTING_MAP = Tensor("routing_map", ("bool",), "(..., E)", "Whether an expert is chosen.", True)
_ROUTING_BITMAP = Tensor(
    "routing_bitmap",
    ("uint8",),
    "(..., ceil(E / 8))",
    "The same as bits: expert e is bit e mod 8 of byte e / 8; bits past the last expert are 0.",
    True,
)
_COUNT_TYPES = ("int32", "int64", "float")


def router_probs(router: Op) -> Op:
    """The row of RouterProbs: attributes are FusedRouter's, but those that have no gradient here."""
    attributes = {attribute.name: attribute for attribute in router.attributes}
    del attributes["mixer_threshold"], attributes["weights_from"]
    scores = tuple(choice for choice in attributes["score"].choices if choice != "sparse_mixer")
    attributes["score"] = replace(attributes["score"], choices=scores)
    return Op(
        name="RouterProbs",
        doc="""\
Routes as FusedRouter does and returns the mixing weights at the places of their experts, for training.

`probs` holds FusedRouter's weight of each chosen expert (`weights_from = "scores"`), rounded once to the type of the
logits, and zero elsewhere; the map tells which are chosen, as bytes or as bits: a node has one of the two, or both at
twice the cost. A model is so served with the choice, and up to that rounding with the weights, that it was trained
with. A row with a NaN logit has NaN at the places of its chosen.

`softmax` before the choice is `score_after_topk = 0`, without or with `normalize`; after it `score_after_topk = 1`, or
`normalize` with both limits 0, which is the same. Megatron's and DeepSeek's sigmoid routers are `sigmoid` with
`normalize`, `normalize_eps` 1e-20, a `scale`, a bias and groups.

Gradients come from [`ort_moe.torch`](training.md): of the logits and of `expert_scale`, the choice held fixed; none of
`selection_bias`. They are recomputed from logits and map, in float32 with the sums of FusedRouter, and have the same
bits on every device.

Limits: FusedRouter's, and E is at most 8192. T * E may be beyond 2^31.""",
        inputs=router.inputs,
        outputs=(
            Tensor("probs", ACTIVATION_TYPES, "(..., E)", "Mixing weights, zero of the experts not chosen."),
            _ROUTING_MAP,
            Tensor("indices", ("int32",), "(..., K)", "Chosen experts in rank order.", True),
            _ROUTING_BITMAP,
        ),
        attributes=tuple(attributes.values()),
    )


ROUTER_SCORES = Op(
    name="RouterScores",
    doc="""\
The scores of all experts that an auxiliary loss balances, and the map of the best `k` of each row, for training.

`x` = logits in float32, soft-capped as FusedRouter does; `v` = FusedRouter's `score` of each expert; with `normalize`
divided by the sum of v over all experts + `normalize_eps`; then one rounding to the type of the logits. Sums have
FusedRouter's order. The map is RouterProbs' of the same score without bias and groups: `softmax` is ranked by x, the
others by v before the division. A node has it as bytes or as bits, or both at twice the cost. NaN follows IEEE 754: it
reaches the whole row through a sum, else its own place.

Gradients of the logits come from [`ort_moe.torch`](training.md). Limits: 1 <= k <= E <= 8192. T * E may be beyond
2^31.""",
    inputs=(Tensor("logits", ACTIVATION_TYPES, "(..., E)", "Router logits, rank 1 or more."),),
    outputs=(
        Tensor("scores", ACTIVATION_TYPES, "(..., E)", "The score of each expert."),
        _ROUTING_MAP,
        _ROUTING_BITMAP,
    ),
    attributes=(
        Attribute("k", "int", "Experts marked per row."),
        Attribute("score", "string", "The score of an expert.", choices=("softmax", "sigmoid", "sqrtsoftplus")),
        Attribute("normalize", "int", "1: divide the scores by their sum.", 0, (0, 1)),
        Attribute("normalize_eps", "float", "Added to the sum before the division.", 0.0),
        Attribute("softcap", "float", "Soft cap of the logits; 0: none.", 0.0),
    ),
)

AUX_LOSS = Op(
    name="AuxLoss",
    doc="""\
The auxiliary loss that balances the load of experts: one number.

`loss = C * sum over e of (sum over t of probs[t, e]) * tokens_per_expert[e]` with `C = E * coeff / (k * total^2)`. The
total is the input `total`, else the attribute `total_tokens`, or where that is 0 the rows of probs; C is 0 where it
is 0. Counts and total may come from all ranks of a training.

C is computed in float64 and rounded to float32 once; the rest is float32 without contraction, in one order on every
device, so that the loss has the same bits from run to run:

1. `p[l, e]`, l < 512: the sum, from +0, of `probs[t, e]` over t = l, l + 512, l + 1024 and so on.
2. `c[i, e]`, i < 128: `(p[i, e] + p[i + 256, e]) + (p[i + 128, e] + p[i + 384, e])`.
3. `s[i]`: the sum over e of `c[i, e] * tokens_per_expert[e]`, in FusedRouter's order.
4. `loss`: C times the sum of the s, added by a butterfly with strides 64, 32, 16, 8, 4, 2, 1.

The gradient of probs, from [`ort_moe.torch`](training.md), is `C * tokens_per_expert[e]` times that of the loss,
rounded once. Limits: 1 <= k <= E <= 8192. T * E may be beyond 2^31.""",
    inputs=(
        Tensor("probs", ACTIVATION_TYPES, "(..., E)", "Scores of the experts, rank 1 or more."),
        Tensor("tokens_per_expert", _COUNT_TYPES, "(E)", "Tokens that chose each expert; rounded to float32."),
        Tensor("total", _COUNT_TYPES, "()", "Tokens in all: a scalar, or of shape (1).", True),
    ),
    outputs=(Tensor("loss", ("float",), "()", "The loss."),),
    attributes=(
        Attribute("k", "int", "Experts chosen per token."),
        Attribute("coeff", "float", "Weight of the loss."),
        Attribute("total_tokens", "int", "Tokens in all where there is no input total; 0: the rows of probs.", 0),
    ),
)

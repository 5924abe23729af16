"""The table of ops: one row an op, and everything else is derived from it.

The ONNX schemas, the op reference in the docs, the checks of attributes, the rewriter's complete attribute sets and the
test that compares the library's own description with Python's all read this table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ort_moe.choices import BLOCK_SIZES, PACKED
from ort_moe.ops.row import ACTIVATION_TYPES, ROUTING_MAPS, Attribute, Op, Tensor
from ort_moe.ops.training_rows import AUX_LOSS, ROUTER_SCORES, router_probs

DOMAIN = "ort_moe"
"""Operator domain of every op."""

VERSION = 1
"""Version of the domain; a model imports `ort_moe` with exactly this."""

RUNTIME_VERSION = 1000
"""Version that ONNX Runtime writes for each domain of custom ops it knows, used or not, into a model that it saves."""

SCALED = f"{DOMAIN}.scaled"
"""Key in the `metadata_props` of a FusedRouter whose scale holds a factor of what its experts returned: the factor, a
space, and the name that its weights had without it."""

FUSED_ROUTER = Op(
    name="FusedRouter",
    doc="""\
Scores the experts, ranks them and returns the weights and indices of the best `k` of each row.

1. `x` = logits in float32; with a `softcap` above 0: `softcap * tanh(x / softcap)`.
2. The key that ranks an expert. With `score_after_topk`, or with score `none` or `sparse_mixer`: `x`. For `softmax`
   without bias and groups: `x`. Otherwise the float32 score. `selection_bias` is added in float32 to whichever it is
   (`bias_on = "logits"` says so of `x` and needs `score_after_topk`). Then, where `topk_groups < num_groups`, the group
   mask: a group's score is the sum of its `group_score_top` best keys; the `topk_groups` best groups stay (ranked like
   keys; equal scores: the lower group), the keys of the others become `group_fill`, and all are ranked together.
3. Ranking: +inf > finite > -inf > NaN, -0 equals +0, equal keys: the lower expert index. Always `k` distinct indices,
   best first.
4. `v` = the unbiased, unmasked score of the chosen (`weights_from = "scores"`), or their ranked key (`"selection"`,
   refused with a bias). With `score_after_topk` the score is taken over the `k` chosen only.
5. With `normalize`: `v / max(sum(v) + normalize_eps, normalize_min)`. Then times `scale`, then times
   `expert_scale[index]`. `softmax` with `normalize`, both limits 0, is the softmax over the chosen and computed so.
6. Every sum over experts has one order on every path and device, so the results are the same bits on CPU and CUDA: 128
   partial sums that start at +0, element e in number (e / 8) mod 128, each in ascending e, then added by a butterfly
   with strides 64, 32, 16, 8, 4, 2, 1. In a sum over the chosen, or over the best of a group, the other experts count
   as +0.
7. A NaN logit makes all `k` weights of its row NaN, while its indices stay distinct and ranked as above; infinities
   follow IEEE 754.

Scores: `softmax`; `sigmoid`; `sqrtsoftplus` = sqrt(log(1 + e^x)), linear above 20; `none` = x; `sparse_mixer` (k = 2):
the weight of each choice is its softmax over the experts within `mixer_threshold` of it, where the distance of expert e
from the best m is (m - x[e]) / max(|x[e]|, m), and the second choice is made without the first.

All arithmetic is float32 without contraction; exp, log1p and tanh are within 3 units in the last place. The float64
answer has the same indices wherever the keys are further apart than that rounding.

A softmax that is ranked as numbers makes ties of its own: the probabilities of logits more than about 88 below the
row's largest (in float16: 17) underflow to 0, and a TopK of them takes the lower index. `softmax` ranks by the
logits, so where fewer than `k` probabilities are above 0 the further indices can be others than such a TopK's: the
larger logits. Their weights are next to 0 in either.

Limits: 1 <= k <= E; `num_groups` divides E; `group_score_top` is at most the experts per group; with a group mask the
kept groups hold at least k experts. sparse_mixer takes neither `score_after_topk`, groups, a bias nor `"selection"`.
`k` up to 64 and E up to 4096 are tuned for, more is correct.

The four maps are the choices in the order of the experts, for FusedExperts and FinalizeRouting: all of them or none.
With T tokens (the product of the leading dimensions) there are R = T * k expanded rows; number j * T + t is choice j of
token t. The permuted order lists them by expert ascending, then token ascending.""",
    inputs=(
        Tensor("logits", ACTIVATION_TYPES, "(..., E)", "Router logits, rank 1 or more."),
        Tensor("selection_bias", ("float",), "(E)", "Added to the keys for the choice, never to the weights.", True),
        Tensor("expert_scale", ("float",), "(E)", "Multiplies the weight of each chosen expert.", True),
    ),
    outputs=(
        Tensor("weights", ("float",), "(..., K)", "Mixing weights in rank order."),
        Tensor("indices", ("int32",), "(..., K)", "Chosen experts in rank order."),
        *ROUTING_MAPS,
    ),
    attributes=(
        Attribute("k", "int", "Experts chosen per row."),
        Attribute(
            "score",
            "string",
            "The score of an expert.",
            choices=("softmax", "sigmoid", "sqrtsoftplus", "none", "sparse_mixer"),
        ),
        Attribute(
            "mixer_threshold",
            "float",
            "sparse_mixer: the relative distance from the best up to which an expert shares in the softmax.",
            only_with=("score", "sparse_mixer"),
        ),
        Attribute("score_after_topk", "int", "1: rank the logits, then score the chosen alone.", 0, (0, 1)),
        Attribute("bias_on", "string", "What selection_bias is added to.", "score", ("score", "logits")),
        Attribute("num_groups", "int", "Groups of neighbouring experts; divides E.", 1),
        Attribute("topk_groups", "int", "Groups kept; equal to num_groups: no mask.", 1),
        Attribute("group_score_top", "int", "Best keys whose sum is the group's score; 1: the maximum.", 1),
        Attribute("group_fill", "float", "Key of the experts outside the kept groups.", -math.inf, (-math.inf, 0.0)),
        Attribute("weights_from", "string", "What the weights are taken from.", "scores", ("scores", "selection")),
        Attribute("normalize", "int", "1: divide the weights by their sum.", 0, (0, 1)),
        Attribute("normalize_eps", "float", "Added to the sum before the division.", 0.0),
        Attribute("normalize_min", "float", "Least divisor.", 0.0),
        Attribute("scale", "float", "Multiplies every weight.", 1.0),
        Attribute("softcap", "float", "Soft cap of the logits; 0: none.", 0.0),
    ),
)

ROUTER_PROBS = router_probs(FUSED_ROUTER)


SHARED_GATE_ROUTER = Op(
    name="SharedGateRouter",
    doc="""\
A FusedRouter, and the gates of S shared experts that every token has, in one node.

The first K columns of `weights` and `indices` are FusedRouter's for the same logits, bias, scale and attributes, bit
for bit. Column K + s, for shared expert s of token t, holds the weight
`sigmoid(hidden[t] . gate_weight[s]) * shared_scale` and the index `shared_base + s`.

The product is float32: 128 partial sums that start at +0, element e in number (e / 8) mod 128 by one fused
multiply-add, in ascending e, then added by a butterfly with strides 64, 32, 16, 8, 4, 2, 1. So the results are the same
bits on CPU and CUDA. NaN in a hidden row reaches the weights of its shared experts alone, NaN in the logits those of
the others.

The maps are of all K + S columns over E + S experts, as PermuteTokens makes them for the same indices: with
`shared_base` = E, shared experts follow the others in a stack of E + S. Indices outside [0, E + S) name no expert.

H and S are at least 1. On CUDA weights and indices are one launch with up to 512 experts and k up to 32, else two; maps
have a launch of their own.""",
    inputs=(
        Tensor("logits", ACTIVATION_TYPES, "(..., E)", "Router logits, rank 1 or more."),
        Tensor("hidden", ACTIVATION_TYPES, "(..., H)", "What the gates see; of the type of the logits."),
        Tensor("gate_weight", ACTIVATION_TYPES, "(S, H)", "A row for each shared expert; of the type of the logits."),
        *FUSED_ROUTER.inputs[1:],
    ),
    outputs=(
        Tensor("weights", ("float",), "(..., K + S)", "Mixing weights in rank order, then the shared experts'."),
        Tensor("indices", ("int32",), "(..., K + S)", "Chosen experts in rank order, then the shared ones."),
        *ROUTING_MAPS,
    ),
    attributes=(
        *FUSED_ROUTER.attributes,
        Attribute("shared_scale", "float", "Multiplies the weights of shared experts.", 1.0),
        Attribute("shared_base", "int", "Index of the first shared expert, at least 0."),
    ),
)


def _expert_layer(layer: str, rows: str) -> tuple[Tensor, ...]:
    """The inputs of one of an expert's two layers."""
    return (
        Tensor(
            f"{layer}_weights",
            (*ACTIVATION_TYPES, "uint8", "float8e4m3fn"),
            "(E, N, D)",
            f"N = {rows}; packed: see the formats.",
        ),
        Tensor(
            f"{layer}_scales",
            ("float8e4m3fn", "uint8", *ACTIVATION_TYPES),
            "(E, N, D / block)",
            "The scales of the blocks; type and shape: see the formats.",
            True,
        ),
        Tensor(f"{layer}_global_scale", ("float",), "(E)", "nvfp4, mxfp4: multiplies all weights of an expert.", True),
        Tensor(
            f"{layer}_zero_points",
            ("uint8",),
            "(E, N, D / block)",
            "int4, int8: the zero points of the blocks; int4: two a byte.",
            True,
        ),
        Tensor(f"{layer}_bias", ACTIVATION_TYPES, "(E, N)", "Of the type of x.", True),
    )


PERMUTE_TOKENS = Op(
    name="PermuteTokens",
    doc="""\
Copies each token's row to the places of its choices, so that the rows of an expert are neighbours, and gives the maps.

With T tokens and K choices there are R = T * K rows. The permuted order lists the choices by expert ascending, then
token ascending, then k ascending; those whose index lies outside [0, `num_experts`) come last. For each permuted
position p: `permuted_x[p] = x[permuted_to_unpermuted[p] mod T]`, and zero where the choice has no expert.

The maps are a FusedRouter's for the same indices. FinalizeRouting brings rows in this order back to their tokens. Rows
are copied as they are, NaN and all.""",
    inputs=(
        Tensor("x", ACTIVATION_TYPES, "(..., H)", "One row a token, rank 1 or more."),
        Tensor("indices", ("int32",), "(..., K)", "Chosen experts; the leading dimensions of x."),
    ),
    outputs=(
        Tensor("permuted_x", ACTIVATION_TYPES, "(R, H)", "The rows in permuted order; the type of x."),
        *(replace(tensor, optional=False) for tensor in ROUTING_MAPS),
    ),
    attributes=(Attribute("num_experts", "int", "E, at least 1."),),
)

FINALIZE_ROUTING = Op(
    name="FinalizeRouting",
    doc="""\
Gathers the rows that the experts computed and returns each token's weighted sum.

With T tokens and K choices, `p = unpermuted_to_permuted[k * T + t]` is the row of choice k of token t. For each token
and column, in float32:

1. `sum` starts at +0. For k = 0 .. K-1, in this order: `v = expert_output[p]`, plus `bias[indices[t, k]]` in one add
   where there is a bias; `sum = fma(weights[t, k], v, sum)`, one rounding.
2. A choice contributes nothing and is not read where p lies outside [0, R) or, with a bias, where its index lies
   outside [0, E).
3. `residual` is added in one add, and the result is rounded once to the type of the rows.

The results are the same bits on CPU and CUDA.""",
    inputs=(
        Tensor("expert_output", ACTIVATION_TYPES, "(R, H)", "Rows of the experts in permuted order, R = T * K."),
        Tensor("weights", ("float",), "(..., K)", "Mixing weights in rank order."),
        Tensor("indices", ("int32",), "(..., K)", "Chosen experts in rank order."),
        Tensor("unpermuted_to_permuted", ("int32",), "(R)", "The row of each choice; any other value: none."),
        Tensor("bias", ACTIVATION_TYPES, "(E, H)", "Added to each expert's rows; of their type.", True),
        Tensor("residual", ACTIVATION_TYPES, "(..., H)", "Added to the result; of the rows' type.", True),
    ),
    outputs=(Tensor("y", ACTIVATION_TYPES, "(..., H)", "The leading dimensions of weights; the type of the rows."),),
    attributes=(),
)

GATHER_FINALIZE = Op(
    name="GatherFinalize",
    doc="""\
FinalizeRouting from rows that lie in a masked layout: each of the `local_count` experts of this device has room for M
rows of `expert_output`, and its tokens' rows come first. No permuted copy of them is made.

Choice k of token t names expert `e = indices[t, k]`; with `p = unpermuted_to_permuted[k * T + t]` its row is
`c = p - expert_first_token_offset[e]` of that expert, `expert_output[e - local_begin, c]`, of which the first
`hidden_size` elements count and the others are padding.

A choice contributes nothing, and its row is not read, where e lies outside
[`local_begin`, `local_begin` + `local_count`) or c outside [0, M). All else is FinalizeRouting's, of which this returns
the bits: the choices in the order k = 0 .. K-1, `sum = fma(weights[t, k], row (+ bias[e]), sum)` in float32 from +0,
one add of the residual, one rounding.""",
    inputs=(
        Tensor("expert_output", ACTIVATION_TYPES, "(E_local, M, H_padded)", "Rows of the local experts."),
        Tensor("weights", ("float",), "(..., K)", "Mixing weights in rank order."),
        Tensor("indices", ("int32",), "(..., K)", "Chosen experts in rank order, of all devices."),
        Tensor("unpermuted_to_permuted", ("int32",), "(R)", "The permuted position of each choice, R = T * K."),
        Tensor("expert_first_token_offset", ("int64",), "(E + 1)", "The first permuted position of each expert."),
        Tensor("bias", ACTIVATION_TYPES, "(E, H)", "Added to each expert's rows; of their type.", True),
        Tensor("residual", ACTIVATION_TYPES, "(..., H)", "Added to the result; of the rows' type.", True),
    ),
    outputs=(Tensor("y", ACTIVATION_TYPES, "(..., H)", "The leading dimensions of weights; the type of the rows."),),
    attributes=(
        Attribute("hidden_size", "int", "H, at least 1 and at most H_padded."),
        Attribute("local_begin", "int", "The first local expert.", 0),
        Attribute("local_count", "int", "E_local, at least 1; local_begin + local_count is at most E."),
    ),
)

FUSED_EXPERTS = Op(
    name="FusedExperts",
    doc="""\
Runs the chosen experts of each token, two layers with an activation between, and returns their weighted sum.

`y = residual + sum over k of weights[k] * fc2(act(fc1(x)))` with the layers of expert `indices[k]`. Sums along D, the
reduction axis, are accumulated in float32, and "rounded" means to the type of `x`:

1. `fc1` = rounded(weights of the expert . x + bias). D is H; there are N = 2 I rows with `gated`, else I. With
   `weight_on = "input"` the mixing weight multiplies the product here, before the bias, and not in step 4.
2. Gated: a gate g and a value u for each of the I elements (`gate_layout`); with `limit` above 0: `g = min(g, limit)`
   and `u = min(max(u, -limit), limit)`; `a = rounded(act(g) * (u + beta))`. Not gated: `a = rounded(act(fc1))`.
3. `fc2` = rounded(weights of the expert . a + bias). D is I and N is H.
4. The sum over k in rank order by float32 fused multiply-adds from +0, one add of the residual, one rounding.

Activations: `silu` = x * sigmoid(alpha * x); `gelu` with the error function; `gelu_tanh`, its tanh approximation;
`relu`; `relu2` = max(x, 0)^2; `identity`. NaN stays NaN.

Formats of the weights:

* `dense`: (E, N, D) in the type of x.
* `nvfp4`: uint8 (E, N, D / 2), two e2m1 values a byte along D, the even element in the low bits; scales (E, N, D / 16),
  one for 16 neighbours along D, and optionally a global scale (E) that counts as 1 where it is left out. A weight is
  e2m1 * scale * global scale. D is a multiple of 16.
* `mxfp4`: like nvfp4, but with e8m0 scales, the biased exponents of powers of two, as uint8 (E, N, D / 32). A weight is
  e2m1 * 2^(scale - 127) * global scale; the scale 255 is NaN. D is a multiple of 32.
* `int4`, `int8`: unsigned codes as uint8, int4 (E, N, D / 2), two a byte along D, the even element in the low bits,
  int8 (E, N, D); scales of the type of x (E, N, D / `block_size`), and optionally zero points, packed like the codes
  along D / `block_size`, an odd one out in the low bits; left out, they are 8 or 128. A weight is
  (code - zero point) * scale. D is a multiple of `block_size`.
* `fp8`: float8e4m3fn (E, N, D); float32 scales (E, ceil(N / `block_size`), ceil(D / `block_size`)), one for a square of
  rows and neighbours along D; the last ones may be cut off. A weight is float8 * scale.

Weights are float32 numbers before they are multiplied with x: those beyond its range are infinite. Global scales
multiply the finished sums, so it is without them that weights and sums must be within that range. On CUDA, x in
float16 or bfloat16 runs on tensor cores: on Hopper in every format and elsewhere in `dense` and `nvfp4`, and up to 128
choices, as far as their rows fit into a multiprocessor's shared memory, in every format everywhere. All else runs
there too, without them: float32; sizes that are no multiples of what 16-byte copies and whole blocks need; `int4` and
`fp8` with blocks of 16; and, of more choices, `int8` with blocks of 16. On tensor cores rows of bfloat16 meet packed
weights of few tokens as float16 times a power of two, where elements 2^29 times smaller than their row's largest are
rounded. On Hopper, where experts have more than 16 tokens in the mean, with `int4` more than 20, the weights of `int4`,
`int8` and `fp8` are rounded to the type of x behind their scale, except for `int8` and `fp8` with relu2 in bfloat16: in
bfloat16 that adds up to two fifths to the error of the result, and in float16 weights beyond 65504 are infinite.

E, H, I and K are at least 1. Indices outside [0, E) contribute nothing, and equal indices of a token are separate
choices. The maps are a FusedRouter's for the same indices, all or none; without them they are built inside. The order
of the sums along D is fixed for each device and shape, whatever the other rows hold.""",
    inputs=(
        Tensor("x", ACTIVATION_TYPES, "(..., H)", "One row a token, rank 1 or more."),
        Tensor("weights", ("float",), "(..., K)", "Mixing weights in rank order."),
        Tensor("indices", ("int32",), "(..., K)", "Chosen experts in rank order."),
        *ROUTING_MAPS,
        *_expert_layer("fc1", "2 I or I"),
        *_expert_layer("fc2", "H"),
        Tensor("residual", ACTIVATION_TYPES, "(..., H)", "Added to the result; of the type of x.", True),
    ),
    outputs=(Tensor("y", ACTIVATION_TYPES, "(..., H)", "Of the shape and type of x."),),
    attributes=(
        Attribute(
            "weight_format",
            "string",
            "How the weights are stored.",
            "dense",
            ("dense", *PACKED),
        ),
        Attribute(
            "block_size",
            "int",
            "int4, int8, fp8: weights along D that share a scale; 0 with the other formats.",
            0,
            (0, *BLOCK_SIZES),
        ),
        Attribute(
            "activation",
            "string",
            "Between the layers.",
            choices=("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity"),
        ),
        Attribute("gated", "int", "1: fc1 has a gate and a value for each inner element.", choices=(0, 1)),
        Attribute(
            "gate_layout",
            "string",
            "Rows of a gated fc1: all gates first, or gate and value in turn.",
            "concat",
            ("concat", "interleaved"),
        ),
        Attribute("alpha", "float", "Factor inside the sigmoid of silu; 1 with the other activations.", 1.0),
        Attribute("beta", "float", "Added to the value; 0 unless gated.", 0.0),
        Attribute("limit", "float", "Bound of gate and value; 0: none; 0 unless gated.", 0.0),
        Attribute("weight_on", "string", "What the mixing weights multiply.", "output", ("output", "input")),
    ),
)

CONVERTED_FROM = f"{DOMAIN}.converted_from"
"""Key in the `metadata_props` of a FusedExperts whose weights were packed by `optimize`: their type before."""

OPS: Mapping[str, Op] = {
    op.name: op
    for op in (
        FUSED_ROUTER,
        SHARED_GATE_ROUTER,
        PERMUTE_TOKENS,
        FINALIZE_ROUTING,
        GATHER_FINALIZE,
        FUSED_EXPERTS,
        ROUTER_PROBS,
        ROUTER_SCORES,
        AUX_LOSS,
    )
}
"""Every op by name."""

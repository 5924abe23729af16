"""A small model for each reason code: the page of codes shows it, and a test produces the code with exactly it.

The models are in ONNX's text form. What is declared between `<` and `>` without a number is a weight; it is filled with
random numbers, which change nothing about the code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

HEADER = '<ir_version: 10, opset_import: ["" : 20, "local" : 1, "com.microsoft" : 1]>'


@dataclass(frozen=True)
class Example:
    """A model that produces a reason code.

    Attributes:
        about: What in it produces the code.
        text: Its graph, and functions if any.
        skip: Rules that are switched off.
        target: What it is rewritten for.
    """

    about: str
    text: str
    skip: Collection[str] = ()
    target: str = "cuda"

    def model(self) -> ir.Model:
        """The model, with random weights, its nodes named after their outputs."""
        proto = onnx.parser.parse_model(f"{HEADER}\n{self.text}")
        graph, rng = proto.graph, np.random.default_rng(0)
        made = {name for node in graph.node for name in node.output}
        for value in [value for value in graph.value_info if value.name not in made]:
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype(dtype), value.name))
            graph.value_info.remove(value)
        for node in graph.node:
            node.name = f"{node.op_type.lower()}_{node.output[0]}"
        return ir.from_proto(proto)


EXAMPLES: Mapping[str, Example] = {
    "topk-not-a-router": Example(
        "A sampler: the indices are tokens, and no expert's weights are gathered by them.",
        """\
sampler (float[T, 8] logits) => (float[T, 2] probabilities, int64[T, 2] tokens)
<int64[1] k = {2}>
{
    best, tokens = TopK (logits, k)
    probabilities = Softmax (best)
}""",
    ),
    "topk-in-subgraph": Example(
        "The router is in a function that imports another operator set than the model.",
        """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[8, 4, 4] experts>
{
    weights, ids = local.route (x, gate)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}
<domain: "local", opset_import: ["" : 18]>
route (x, gate) => (weights, ids)
{
    k = Constant <value_ints = [2]> ()
    logits = MatMul (x, gate)
    probabilities = Softmax (logits)
    weights, ids = TopK (probabilities, k)
}""",
    ),
    "expert-count-unknown": Example(
        "The gate's matrix is an input, and its width is not fixed.",
        """\
moe (float[T, 4] x, float[4, E] gate) => (float[T, 4] y)
<float[8, 4, 4] experts, int64[1] k = {2}>
{
    logits = MatMul (x, gate)
    probabilities = Softmax (logits)
    weights, ids = TopK (probabilities, k)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}""",
    ),
    "topk-form": Example(
        "The number of experts per token is an input of the model.",
        """\
moe (float[T, 4] x, int64[1] k) => (float[T, 4] y)
<float[4, 8] gate, float[8, 4, 4] experts>
{
    logits = MatMul (x, gate)
    probabilities = Softmax (logits)
    weights, ids = TopK (probabilities, k)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}""",
    ),
    "router-did-not-grow": Example(
        "The logits themselves weigh the experts: besides the choice there is nothing to fuse.",
        """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[8, 4, 4] experts, int64[1] k = {2}>
{
    logits = MatMul (x, gate)
    weights, ids = TopK (logits, k)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}""",
    ),
    "left-over-before": Example(
        "The softmax is fused with the choice; the temperature that each token brings with it is not.",
        """\
moe (float[T, 4] x, float[T, 1] temperature) => (float[T, 4] y)
<float[4, 8] gate, float[8, 4, 4] experts, int64[1] k = {2}>
{
    logits = MatMul (x, gate)
    cooled = Div (logits, temperature)
    probabilities = Softmax (cooled)
    weights, ids = TopK (probabilities, k)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}""",
    ),
    "left-over-after": Example(
        "The softmax is fused with the choice; the square root of the weights is not.",
        """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[8, 4, 4] experts, int64[1] k = {2}>
{
    logits = MatMul (x, gate)
    probabilities = Softmax (logits)
    best, ids = TopK (probabilities, k)
    weights = Sqrt (best)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}""",
    ),
    "rule-left-out": Example(
        "A router that is fused whole, but for `--skip seed-topk`.",
        """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[8, 4, 4] experts, int64[1] k = {2}>
{
    logits = MatMul (x, gate)
    probabilities = Softmax (logits)
    weights, ids = TopK (probabilities, k)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}""",
        skip=("seed-topk",),
    ),
    "shape-inference-failed": Example(
        "The file imports no version of the domain that the gate's operator is from.",
        """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[8, 4, 4] experts, int64[1] k = {2}>
{
    logits = vendor.Linear (x, gate)
    probabilities = Softmax (logits)
    weights, ids = TopK (probabilities, k)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}""",
    ),
    "read-by-others": Example(
        "The division by the sum cannot be fused, for the weights before it are an output of the model, too.",
        """\
moe (float[T, 4] x) => (float[T, 4] y, float[T, 2] best)
<float[4, 8] gate, float[8, 4, 4] experts, int64[1] k = {2}, int64[1] last = {-1}>
{
    logits = MatMul (x, gate)
    probabilities = Softmax (logits)
    best, ids = TopK (probabilities, k)
    total = ReduceSum (best, last)
    weights = Div (best, total)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}""",
    ),
    "argmax-form": Example(
        "The ArgMax takes the last of equal scores, a FusedRouter the first.",
        """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[8, 4, 4] experts>
{
    logits = MatMul (x, gate)
    probabilities = Softmax (logits)
    ids = ArgMax <axis = -1, select_last_index = 1> (probabilities)
    weights = GatherElements <axis = -1> (probabilities, ids)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}""",
    ),
    "shared-normaliser": Example(
        "The gate's last column is a shared expert's, whose score is in the sum that divides all.",
        """\
moe (float[T, 4] x) => (float[T, 4] y, float[T, 1] shared)
<float[4, 9] gate, float[8, 4, 4] experts, int64[1] k = {2},
 int64[1] zero = {0}, int64[1] routed = {8}, int64[1] all = {9}, int64[1] last = {-1}, int64[1] end = {3}>
{
    logits = MatMul (x, gate)
    scores = Sigmoid (logits)
    of_routed = Slice (scores, zero, routed, last)
    of_shared = Slice (scores, routed, all, last)
    best, ids = TopK (of_routed, k)
    both = Concat <axis = -1> (best, of_shared)
    total = ReduceSum (both, last)
    shares = Div (both, total)
    weights = Slice (shares, zero, k, last)
    shared = Slice (shares, k, end, last)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}""",
    ),
    "expert-loop-baked-in": Example(
        "The example chose the experts 1 and 3, and the loop over the experts was written down for these.",
        """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[4, 4] expert_1, float[4, 4] expert_3, int64[1] k = {2}, int64[1] last = {-1},
 int64 one = {1}, int64 three = {3}>
{
    logits = MatMul (x, gate)
    probabilities = Softmax (logits)
    weights, ids = TopK (probabilities, k)
    is_1 = Equal (ids, one)
    mask_1 = Cast <to = 1> (is_1)
    masked_1 = Mul (weights, mask_1)
    weight_1 = ReduceSum (masked_1, last)
    made_1 = MatMul (x, expert_1)
    y_1 = Mul (made_1, weight_1)
    is_3 = Equal (ids, three)
    mask_3 = Cast <to = 1> (is_3)
    masked_3 = Mul (weights, mask_3)
    weight_3 = ReduceSum (masked_3, last)
    made_3 = MatMul (x, expert_3)
    y_3 = Mul (made_3, weight_3)
    y = Add (y_1, y_3)
}""",
    ),
    "weights-as-inputs": Example(
        "The experts' matrices have values in the file, but are an input, too.",
        """\
moe (float[T, 4] x, float[2, 4, 1] experts = {1, 2, 3, 4, 5, 6, 7, 8}) => (float[T, 1] y)
<float[4, 2] gate, int64[1] k = {1}>
{
    logits = MatMul (x, gate)
    probabilities = Softmax (logits)
    weights, ids = TopK (probabilities, k)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}""",
    ),
    "experts-form": Example(
        "The router is fused; the experts are one matrix each, where FusedExperts has two layers.",
        """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[8, 4, 4] experts, int64[1] k = {2}>
{
    logits = MatMul (x, gate)
    probabilities = Softmax (logits)
    weights, ids = TopK (probabilities, k)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}""",
    ),
    "experts-activation": Example(
        "The activation is Mish, which FusedExperts has not.",
        """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[8, 6, 4] fc1, float[8, 4, 6] fc2, int64[1] k = {2},
 int64[1] one = {1}, int64[1] last = {-1}, int64[2] outer = {1, -1}>
{
    logits = MatMul (x, gate)
    probabilities = Softmax (logits)
    weights, ids = TopK (probabilities, k)
    chosen1 = Gather (fc1, ids)
    column1 = Unsqueeze (x, outer)
    made1 = MatMul (chosen1, column1)
    rows1 = Squeeze (made1, last)
    soft = Softplus (rows1)
    bent = Tanh (soft)
    active = Mul (rows1, bent)
    column2 = Unsqueeze (active, last)
    chosen2 = Gather (fc2, ids)
    made2 = MatMul (chosen2, column2)
    rows2 = Squeeze (made2, last)
    column = Unsqueeze (weights, last)
    weighted = Mul (rows2, column)
    y = ReduceSum <keepdims = 0> (weighted, one)
}""",
    ),
    "expert-weights-computed": Example(
        "The first layer's weights are scaled while the model runs.",
        """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[8, 6, 4] fc1, float[8, 4, 6] fc2, int64[1] k = {2},
 int64[1] one = {1}, int64[1] last = {-1}, int64[2] outer = {1, -1}, float factor = {2.0}>
{
    logits = MatMul (x, gate)
    probabilities = Softmax (logits)
    weights, ids = TopK (probabilities, k)
    scaled = Mul (fc1, factor)
    chosen1 = Gather (scaled, ids)
    column1 = Unsqueeze (x, outer)
    made1 = MatMul (chosen1, column1)
    rows1 = Squeeze (made1, last)
    active = Relu (rows1)
    column2 = Unsqueeze (active, last)
    chosen2 = Gather (fc2, ids)
    made2 = MatMul (chosen2, column2)
    rows2 = Squeeze (made2, last)
    column = Unsqueeze (weights, last)
    weighted = Mul (rows2, column)
    y = ReduceSum <keepdims = 0> (weighted, one)
}""",
    ),
    "expert-weights-shared": Example(
        "The weights lie the other way round in the file, and something else reads them so.",
        """\
moe (float[T, 4] x) => (float[T, 4] y, float[4, 6] mean)
<float[4, 8] gate, float[8, 4, 6] fc1, float[8, 4, 6] fc2, int64[1] k = {2},
 int64[1] one = {1}, int64[1] last = {-1}, int64[2] outer = {1, -1}, int64[1] zero = {0},
 int64[2] inner = {1, 2}, int64[1] two = {2}>
{
    logits = MatMul (x, gate)
    probabilities = Softmax (logits)
    weights, ids = TopK (probabilities, k)
    chosen1 = Gather (fc1, ids)
    row1 = Unsqueeze (x, inner)
    made1 = MatMul (row1, chosen1)
    rows1 = Squeeze (made1, two)
    active = Relu (rows1)
    column2 = Unsqueeze (active, last)
    chosen2 = Gather (fc2, ids)
    made2 = MatMul (chosen2, column2)
    rows2 = Squeeze (made2, last)
    column = Unsqueeze (weights, last)
    weighted = Mul (rows2, column)
    y = ReduceSum <keepdims = 0> (weighted, one)
    mean = ReduceMean <keepdims = 0> (fc1, zero)
}""",
    ),
    "experts-mismatch": Example(
        "The router chooses among 8 experts, and there are 7.",
        """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[7, 6, 4] fc1, float[7, 4, 6] fc2, int64[1] k = {2},
 int64[1] one = {1}, int64[1] last = {-1}, int64[2] outer = {1, -1}>
{
    logits = MatMul (x, gate)
    probabilities = Softmax (logits)
    weights, ids = TopK (probabilities, k)
    chosen1 = Gather (fc1, ids)
    column1 = Unsqueeze (x, outer)
    made1 = MatMul (chosen1, column1)
    rows1 = Squeeze (made1, last)
    active = Relu (rows1)
    column2 = Unsqueeze (active, last)
    chosen2 = Gather (fc2, ids)
    made2 = MatMul (chosen2, column2)
    rows2 = Squeeze (made2, last)
    column = Unsqueeze (weights, last)
    weighted = Mul (rows2, column)
    y = ReduceSum <keepdims = 0> (weighted, one)
}""",
    ),
    "experts-in-subgraph": Example(
        "A contrib node in a branch.",
        """\
moe (float[T, 4] x, bool run) => (float[T, 4] y)
<float[4, 8] gate, float[8, 6, 4] fc1, float[8, 4, 6] fc2>
{
    logits = MatMul (x, gate)
    y = If (run) <
        then_branch = then () => (float[T, 4] then_y) {
            then_y = com.microsoft.MoE <k = 2, activation_type = "silu"> (x, logits, fc1, "", fc2)
        },
        else_branch = otherwise () => (float[T, 4] else_y) { else_y = Identity (x) }
    >
}""",
    ),
    "contrib-layout": Example(
        "The integers of a QMoE lie as they are where weights_prepacked is 0; by default that depends on the device.",
        """\
moe (float[T, 32] x) => (float[T, 32] y)
<float[32, 8] gate, uint8[8, 32, 16] fc1, float[8, 32, 1] scales1, uint8[8, 32, 16] fc2, float[8, 32, 1] scales2>
{
    logits = MatMul (x, gate)
    y = com.microsoft.QMoE <k = 2, activation_type = "relu", normalize_routing_weights = 1, expert_weight_bits = 4,
        block_size = 32> (x, logits, fc1, scales1, "", fc2, scales2)
}""",
    ),
    "contrib-form": Example(
        "The sparse mixer, which ONNX Runtime's kernel for CUDA honours, and the one for the CPU does not.",
        """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[8, 6, 4] fc1, float[8, 4, 6] fc2>
{
    logits = MatMul (x, gate)
    y = com.microsoft.MoE <k = 2, activation_type = "silu", use_sparse_mixer = 1> (x, logits, fc1, "", fc2)
}""",
    ),
    "contrib-is-faster": Example(
        "A QMoE of float8 weights, for CUDA.",
        """\
moe (float16[T, 32] x) => (float16[T, 32] y)
<float16[32, 8] gate, float8e4m3fn[8, 32, 32] fc1, float[8, 1, 1] scales1, float8e4m3fn[8, 32, 32] fc2,
 float[8, 1, 1] scales2>
{
    logits = MatMul (x, gate)
    y = com.microsoft.QMoE <k = 2, activation_type = "relu", normalize_routing_weights = 1, quant_type = "fp8",
        expert_weight_bits = 8, block_size = 32> (x, logits, fc1, scales1, "", fc2, scales2)
}""",
    ),
    "no-contrib-form": Example(
        "With `--target contrib`: the contrib nodes know softmax routers alone.",
        """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[8, 6, 4] fc1, float[8, 4, 6] fc2, int64[1] k = {2},
 int64[1] one = {1}, int64[1] last = {-1}, int64[2] outer = {1, -1}>
{
    logits = MatMul (x, gate)
    scores = Sigmoid (logits)
    weights, ids = TopK (scores, k)
    chosen1 = Gather (fc1, ids)
    column1 = Unsqueeze (x, outer)
    made1 = MatMul (chosen1, column1)
    rows1 = Squeeze (made1, last)
    active = Relu (rows1)
    column2 = Unsqueeze (active, last)
    chosen2 = Gather (fc2, ids)
    made2 = MatMul (chosen2, column2)
    rows2 = Squeeze (made2, last)
    column = Unsqueeze (weights, last)
    weighted = Mul (rows2, column)
    y = ReduceSum <keepdims = 0> (weighted, one)
}""",
        target="contrib",
    ),
}
"""By the slug of the reason."""
